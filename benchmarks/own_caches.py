"""What walking with a model's own cache costs: `python -m benchmarks.own_caches`.

One model is walked over the forest and with its own attention and cache; transformers reads the prompts one by one
beside. Processor seconds, one thread, the median of interleaved rounds. A table and one line of JSON go to stdout.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from contextlib import closing
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel

from benchmarks.console import log
from benchmarks.models import random_llama
from benchmarks.workloads import prompts_with_histories
from prefillcli.plan.pack import Limits
from prefillcli.plan.plan import make_plan
from prefillcli.plan.trie import TokenArray
from prefillcli.prefill.forest import ATTENTION
from prefillcli.prefill.own_cache import set_own_attention
from prefillcli.prefill.walk import LayerWalk

#: Prefixes, rows behind each, tokens of a prefix, tokens of a row.
PACKS = {"reviews": (1, 32, 300, 120), "long prefix": (1, 20, 2000, 150), "short rows": (1, 128, 40, 24)}
WAYS = ("forest", "own cache", "one by one")


def main(
    rounds: Annotated[int, typer.Option(help="Rounds; the median counts.")] = 3,
    chunk: Annotated[int, typer.Option(help="Tokens of a chunk.")] = 2048,
) -> None:
    """Measure on one thread."""
    torch.set_num_threads(1)
    model = random_llama("25M", torch.float32)
    vocabulary = int(model.config.vocab_size)
    table, found = Table("rows", *WAYS), {}
    for name, shape in PACKS.items():
        prompts = prompts_with_histories(*shape, vocabulary)
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(rounds):
            for way in WAYS:
                seconds[way].append(_seconds(model, way, prompts, chunk))
        found[name] = {way: statistics.median(own) for way, own in seconds.items()}
        log(name)
        table.add_row(name, *(f"{each:.2f} s" for each in found[name].values()))
    Console().print(table)
    print(json.dumps(found))


@torch.inference_mode()
def _seconds(model: PreTrainedModel, way: str, prompts: Sequence[TokenArray], chunk: int) -> float:
    if way == "forest":
        model.set_attn_implementation(ATTENTION)
    else:
        set_own_attention(model)
    if way == "one by one":
        begun = time.process_time()
        for prompt in prompts:
            model(input_ids=torch.as_tensor(prompt, dtype=torch.long)[None], use_cache=False, logits_to_keep=1)
        return time.process_time() - begun
    with closing(LayerWalk(model, chunk_tokens=chunk)) as walk:
        begun = time.process_time()
        for pack in make_plan(list(prompts), Limits(1 << 30, 1 << 30)).packs:
            for _ in walk.read_logits(pack):
                pass
        return time.process_time() - begun


if __name__ == "__main__":
    typer.run(main)
