"""`python -m benchmarks.balance`: how evenly a large job is shared out among many workers, on a simulated clock.

The driver's part is real: windows are planned, grouped and dispatched. The workers take one simulated second for each
token. The table goes to stdout.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import typer
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from benchmarks.console import log
from benchmarks.simulated_crew import SimulatedCrew
from prefillcli.data.prompts.labels import ClassLabels, Label
from prefillcli.data.rows import Int32Array, Prompt, Window
from prefillcli.data.windows import MAX_ROWS
from prefillcli.jobs.loop import USUAL, ScoringLoop, ScoringOptions
from prefillcli.jobs.recorder import Recorder
from prefillcli.jobs.runners.parallel import PACK_SHARE
from prefillcli.jobs.runners.pool import Pool, WorkerSpec
from prefillcli.models.files import sample_model
from prefillcli.models.law import PACK_TOKENS
from prefillcli.options.commands import ScoreSettings
from prefillcli.options.load import load_settings
from prefillcli.plan.behind import LabelSet
from prefillcli.plan.blocks import BLOCK_TOKENS
from prefillcli.plan.pack import Limits
from prefillcli.plan.plan import Plan
from prefillcli.runtime.clock import Clock
from prefillcli.runtime.signals import Stop
from prefillcli.stats.evaluation import Measure

_VOCABULARY = 32_000
#: Outputs of a head, whose probability nobody looks at.
_CLASSES = ClassLabels([Label("Yes"), Label("No")], ((0,), (1,)), Measure.SHARES)


class _NoSink:
    """Keeps nothing."""

    def done(self, window: int) -> set[int]:
        return set()

    def window_before(self, window: int) -> int:
        return window - 1

    def carried_into(self, window: int) -> list[tuple[int, str]]:
        return []

    def write(self, *_arguments: Any, **_options: Any) -> None:
        pass


def _short(draw: np.random.Generator) -> Iterator[Int32Array]:
    while True:
        yield draw.integers(0, _VOCABULARY, draw.integers(20, 200), dtype=np.int32)


def _instruction(draw: np.random.Generator) -> Iterator[Int32Array]:
    start = draw.integers(0, _VOCABULARY, 300, dtype=np.int32)
    for own in _short(draw):
        yield np.concatenate([start, own])


def _users(draw: np.random.Generator) -> Iterator[Int32Array]:
    while True:
        history = draw.integers(0, _VOCABULARY, draw.integers(200, 4_000), dtype=np.int32)
        for _ in range(draw.integers(5, 100)):
            yield np.concatenate([history, draw.integers(0, _VOCABULARY, 40, dtype=np.int32)])


WORKLOADS: dict[str, Callable[[np.random.Generator], Iterator[Int32Array]]] = {
    "20 to 200 tokens": _short,
    "the same behind one instruction of 300": _instruction,
    "5 to 100 posts behind histories of 200 to 4,000": _users,
}


def _windows(rows: int, workload: str) -> Iterator[Window]:
    tokens = WORKLOADS[workload](np.random.default_rng(0))
    for index, start in enumerate(range(0, rows, MAX_ROWS)):
        numbers = np.arange(start, min(start + MAX_ROWS, rows))
        prompts = [Prompt(int(row), next(tokens), LabelSet(())) for row in numbers]
        yield Window(index, numbers, prompts, {}, pa.table({}))


@dataclass(frozen=True, slots=True)
class Balance:
    """How a job was shared out. `ratio` is its time over that of the best balance without computing anything again."""

    tokens: float
    ratio: float
    again: float
    windows: int


def share_out(rows: int, workers: int, pack_tokens: int, workload: str) -> Balance:
    """Plan and dispatch a job of so many rows to simulated workers."""
    crew = SimulatedCrew(workers, limits=Limits(PACK_TOKENS["cuda"], 1 << 30, held_tokens=1 << 20))
    settings = load_settings(ScoreSettings, {"inputs": ["rows.parquet"], "quiet": True}, environment={})
    with Stop() as stop:
        pool = Pool(
            crew, WorkerSpec(0, settings), lambda spec, number: WorkerSpec(number, settings),
            cost=_tokens, stop=stop,
        )  # fmt: skip
        pool.begin(plans=True, pack_tokens=pack_tokens)
        job: Any = SimpleNamespace(
            sink=_NoSink(), clock=Clock(), stop=stop, settings=settings, labels=_CLASSES, probabilities=None,
            opened=SimpleNamespace(tokenizer=AutoTokenizer.from_pretrained(sample_model())),
            granularity=USUAL, require_unchanged=lambda rows: None,
        )  # fmt: skip
        recorder = Recorder(job, lambda: None)
        options = ScoringOptions("prefix-tree", BLOCK_TOKENS)
        scoring = ScoringLoop(pool, options, recorder)
        scoring.score(_windows(rows, workload), lambda: True)
    least = (sum(crew.busy) - crew.refilled) / workers
    return Balance(sum(crew.busy), crew.now / least, crew.refilled / sum(crew.busy), scoring.most_open)


def _tokens(plan: Plan) -> float:
    return float(plan.computed_tokens)


def main(
    rows: Annotated[int, typer.Option(help="Rows of the job.")] = 1_000_000,
    workers: Annotated[int, typer.Option(help="Simulated workers.")] = 64,
    pack_tokens: Annotated[int, typer.Option(help="Tokens of a pack.")] = int(PACK_TOKENS["cuda"] * PACK_SHARE),
) -> None:
    """Share out jobs of different kinds. The memory is that of the process so far."""
    table = Table(
        "rows", "tokens", "time over best balance", "computed again", "windows open", "processor time", "peak memory"
    )
    for workload in WORKLOADS:
        log(workload)
        begun = time.process_time()
        found = share_out(rows, workers, pack_tokens, workload)
        table.add_row(
            workload,
            f"{found.tokens / 1e6:,.0f} M",
            f"{found.ratio:.3f}",
            f"{found.again:.2%}",
            str(found.windows),
            f"{time.process_time() - begun:,.0f} s",
            f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:,.0f} MiB",
        )
    Console(width=150).print(table)


if __name__ == "__main__":
    typer.run(main)
