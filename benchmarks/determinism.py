"""What `--deterministic` costs: the same packs with and without it, in turn.

python -m benchmarks.determinism
python -m benchmarks.determinism --real --dtype bfloat16

Random Llamas score short rows, rows behind shared prefixes and one long prompt; with --real, SmolLM2-135M scores
reviews behind two examples. Progress goes to stderr, a table and one line of JSON to stdout. The time is the
processor's, of all threads: on a machine that others use too, the clock on the wall says little.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from copy import deepcopy
from functools import partial
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel

from benchmarks.console import log, log_run
from benchmarks.models import random_llama
from benchmarks.reviews import review_prompts
from benchmarks.spread import Spread
from benchmarks.workloads import prompts_with_histories, random_prompt, short_rows
from prefillcli.engines.torch import TorchEngine
from prefillcli.models.find import read_model_files
from prefillcli.models.law import CHUNK_TOKENS, PACK_TOKENS
from prefillcli.models.load import load_model
from prefillcli.plan.behind import LabelSet
from prefillcli.plan.pack import Limits
from prefillcli.plan.plan import make_plan
from prefillcli.plan.trie import TokenArray
from prefillcli.tools.bench.contest import interleaved
from prefillcli.walk.determinism import by_row
from prefillcli.walk.walk import FASTEST, LayerWalk
from recipes.real_model import real_model

LABELS = LabelSet.of([[5], [7]])

Prompts = Sequence[TokenArray]


def random_cases(vocabulary: int, scale: float) -> Mapping[str, Prompts]:
    """Prompts of random tokens, by what they are."""
    return {
        "short rows": short_rows(int(128 * scale), 24, 160, vocabulary),
        "shared prefixes": prompts_with_histories(2, int(30 * scale), int(1500 * scale), 100, vocabulary),
        "one long prompt": [random_prompt(int(8000 * scale), vocabulary)],
    }


def score_all(engine: TorchEngine, prompts: Prompts) -> None:
    """Score them once."""
    for pack in make_plan(prompts, engine.limits).packs:
        for _ in engine.answer(pack, lambda prompt: LABELS, lambda tokens: None):
            pass


def measure(model: PreTrainedModel, prompts: Prompts, rounds: int, clock: Callable[[], float]) -> dict[str, Any]:
    """Seconds of both ways, in packs and chunks of the usual size, and how many times as long the deterministic one
    takes. What it finds out about products when they are first needed belongs to the warm-up."""
    limits = Limits(PACK_TOKENS["cpu"], 1 << 30, held_tokens=1 << 30)
    with ExitStack() as stack:
        methods = {}
        for name, arithmetic in {"as it is": FASTEST, "deterministic": by_row()}.items():
            own = deepcopy(model)  # a walk has its model for itself
            walk = LayerWalk(own, chunk_tokens=CHUNK_TOKENS["cpu"], arithmetic=arithmetic)
            engine = TorchEngine(walk, limits=limits)
            stack.enter_context(closing(engine))
            methods[name] = partial(score_all, engine, prompts)
        begun = clock()
        methods["deterministic"]()
        first = clock() - begun
        plain, fixed = interleaved(methods, rounds, on_run=log_run, clock=clock).values()
    ratios = Spread.of([there / here for here, there in zip(plain, fixed, strict=True)])
    return {
        "tokens": sum(len(each) for each in prompts),
        "seconds": Spread.of(plain).median,
        "deterministic_seconds": Spread.of(fixed).median,
        "first_seconds": first,
        "ratio": ratios.median,
        "ratios": str(ratios),
    }


def main(
    size: Annotated[str, typer.Option(help="A shape of benchmarks/models.py.")] = "100M",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "bfloat16",
    real: Annotated[bool, typer.Option(help="SmolLM2 and reviews instead of random ones.")] = False,
    rounds: Annotated[int, typer.Option(help="Rounds after one of warm-up; medians count.")] = 5,
    threads: Annotated[int, typer.Option(help="Threads that compute.")] = 1,
    scale: Annotated[float, typer.Option(help="Of the number of rows and of long lengths.")] = 1.0,
    wall: Annotated[bool, typer.Option(help="Measure by the clock on the wall.")] = False,
) -> None:
    """Measure each case."""
    torch.set_num_threads(threads)
    clock = time.perf_counter if wall else time.process_time
    if real:
        model = load_model(read_model_files(real_model(), dtype=dtype), torch.device("cpu"))
        cases: Mapping[str, Prompts] = {"reviews behind two examples": review_prompts(int(60 * scale))}
    else:
        model = random_llama(size, getattr(torch, dtype))
        cases = random_cases(int(model.config.vocab_size), scale)
    found, table = {}, Table("case", "tokens", "seconds", "deterministic", "its first run", "times")
    for name, prompts in cases.items():
        log(name)
        found[name] = measure(model, prompts, rounds, clock)
        each = found[name]
        cells = [f"{each[key]:.2f}" for key in ("seconds", "deterministic_seconds", "first_seconds")]
        table.add_row(name, f"{each['tokens']:,}", *cells, each["ratios"])
    Console(width=120).print(table)
    model_name = "SmolLM2-135M" if real else size
    typer.echo(json.dumps({"model": model_name, "dtype": dtype, "threads": threads, "cases": found}))


if __name__ == "__main__":
    typer.run(main)
