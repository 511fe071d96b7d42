"""What adapters that take turns cost: `python -m benchmarks.adapters`.

Adapters of all linear layers are exchanged in a random Llama. Beside it, rows that share a history are read: by one
adapter, by several in turn, and one by one with PEFT's layers beside the model. Processor seconds, one thread, the
median of interleaved rounds. A table and one line of JSON go to stdout.
"""

from __future__ import annotations

import json
import logging
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, cast

import torch
import typer
from peft import LoraConfig, PeftModel, get_peft_model
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel

from benchmarks.models import random_llama
from prefillcli.features.adapters.merging import AdapterVariants, ExchangedAdapters, open_adapters
from prefillcli.models.find import read_model_files
from prefillcli.models.load import load_model
from prefillcli.models.open import Opened
from prefillcli.plan.pack import Limits
from prefillcli.plan.plan import make_plan
from prefillcli.plan.trie import TokenArray
from prefillcli.prefill.walk import LayerWalk
from prefillcli.profile.children import prompts_with_histories

CPU = torch.device("cpu")


def main(
    size: Annotated[str, typer.Option(help="Size of the model.")] = "25M",
    adapters: Annotated[int, typer.Option(help="Adapters that take turns.")] = 4,
    rank: Annotated[int, typer.Option(help="Rank of each.")] = 16,
    rows: Annotated[int, typer.Option(help="Rows of 150 tokens behind a history of 1,000.")] = 64,
    rounds: Annotated[int, typer.Option(help="Rounds; the median counts.")] = 3,
) -> None:
    """Measure on one thread."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    with TemporaryDirectory() as name:
        folder = Path(name)
        names = _save(folder, size, adapters, rank)
        files = read_model_files(folder)
        begun = time.process_time()
        folders = {each: str(folder / each) for each in names}
        opened = open_adapters(Opened(files, CPU, None, (), 1 << 17), folders, "who")
        variants = cast("AdapterVariants", opened.variants)
        checked = time.process_time() - begun
        model = load_model(files, CPU)
        exchanged = ExchangedAdapters(model, variants.files)
        prompts = prompts_with_histories(1, rows, 1000, 150, int(model.config.vocab_size))
        ways = _ways(model, exchanged, names, prompts)
        ways["one by one, beside the model"] = _one_by_one(load_model(files, CPU), folder / names[0], prompts)
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(rounds):
            for way, run in ways.items():
                begun = time.process_time()
                run()
                seconds[way].append(time.process_time() - begun)
    found = {way: statistics.median(own) for way, own in seconds.items()}
    found["check one adapter"] = checked / adapters
    own = variants.files[0]
    table = Table("", "seconds")
    for way, value in found.items():
        table.add_row(way, f"{value:.3f}")
    Console().print(table)
    print(json.dumps(found | {"adapter_bytes": own.bytes, "merged_bytes": own.merged_bytes}))


def _ways(
    model: PreTrainedModel, exchanged: ExchangedAdapters, names: Sequence[str], prompts: Sequence[TokenArray]
) -> dict[str, Callable[[], Any]]:
    def exchange() -> None:
        exchanged.use(None)
        exchanged.use(names[0])

    def one() -> None:
        exchanged.use(names[0])
        _walk(model, prompts, lambda adapter: None, [None] * len(prompts))

    def several() -> None:
        _walk(model, prompts, exchanged.use, [names[at % len(names)] for at in range(len(prompts))])

    def by_prefix() -> None:
        _walk(model, prompts, exchanged.use, [names[at * len(names) // len(prompts)] for at in range(len(prompts))])

    return {
        "put one adapter in": exchange,
        "rows of one adapter": one,
        f"rows of {len(names)} adapters, in turn": several,
        f"rows of {len(names)} adapters, sorted": by_prefix,
    }


@torch.inference_mode()
def _walk(
    model: PreTrainedModel,
    prompts: Sequence[TokenArray],
    use: Callable[[str | None], None],
    adapters: Sequence[str | None],
) -> None:
    with closing(LayerWalk(model, chunk_tokens=2048)) as walk:
        for pack in make_plan(list(prompts), Limits(1 << 30, 1 << 30), variants=adapters).packs:
            use(pack.variant)
            for _ in walk.read_logits(pack):
                pass


def _one_by_one(model: PreTrainedModel, adapter: Path, prompts: Sequence[TokenArray]) -> Callable[[], None]:
    model.set_attn_implementation("sdpa")
    wrapped = PeftModel.from_pretrained(model, adapter)

    @torch.inference_mode()
    def run() -> None:
        for prompt in prompts:
            ids = torch.as_tensor(prompt, dtype=torch.long)[None]
            wrapped(input_ids=ids, use_cache=False, logits_to_keep=1)

    return run


def _save(folder: Path, size: str, count: int, rank: int) -> list[str]:
    """A model and adapters of all its linear layers; the names of these."""
    random_llama(size, torch.float32).save_pretrained(folder)
    names = [f"adapter{number}" for number in range(count)]
    for name in names:
        config = LoraConfig(r=rank, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
        get_peft_model(random_llama(size, torch.float32), config).save_pretrained(folder / name)  # type: ignore[arg-type]
    return names


if __name__ == "__main__":
    typer.run(main)
