"""`python -m benchmarks.workers`: rows per second of one process and of several workers with a thread each.

Whole runs of `prefill score` in turn, with a random model and prompts of token ids. The table goes to stdout.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.console import log
from benchmarks.models import random_llama
from benchmarks.score_runs import SAMPLES, score_file
from benchmarks.spread import Spread
from benchmarks.workloads import prompts_with_histories, short_rows
from prefillcli.plan.trie import TokenArray

Report = dict[str, Any]


def _save(folder: Path, model: str, dtype: str) -> int:
    """A random model with the tokenizer of the samples; the size of that one's vocabulary."""
    network = random_llama(model, getattr(torch, dtype))
    network.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(SAMPLES / "models" / "target" / name, folder)
    return len(json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"])


def _scoring_seconds(report: Report) -> float:
    """Without the start: importing, opening and loading."""
    return float(sum(report["seconds"][name] for name in ("waiting", "plan", "draft", "model", "write")))


def _idle(report: Report) -> float:
    """The part of the scoring in which a worker did not compute."""
    busy = [worker["seconds"] for worker in report["workers"]]
    return float(1 - sum(busy) / len(busy) / _scoring_seconds(report))


def main(
    workers: Annotated[int, typer.Option(help="Workers to compare with one process.")] = 2,
    threads: Annotated[int, typer.Option(help="Threads of the one process; each worker has one.")] = 1,
    rounds: Annotated[int, typer.Option(help="Runs of each.")] = 3,
    model: Annotated[str, typer.Option(help="Size of the random Llama: 25M or 100M.")] = "25M",
    dtype: str = "float32",
    scale: Annotated[float, typer.Option(help="Fewer rows, for a quick look.")] = 1.0,
) -> None:
    """Measure what workers bring on short rows and on shared prefixes."""
    cases: dict[str, Callable[[int], list[TokenArray]]] = {
        "rows of 20 to 500 tokens": lambda words: short_rows(int(1_200 * scale), 20, 500, words),
        "40 posts of 150 behind histories of 2,000": lambda words: prompts_with_histories(
            int(24 * scale), 40, 2_000, 150, words
        ),
    }
    table = Table("prompts", "rows", "rows/s of one", f"rows/s of {workers} workers", "ratio", "whole run", "idle")
    with TemporaryDirectory() as place:
        folder = Path(place)
        vocabulary = _save(folder / "model", model, dtype)
        for name, make in cases.items():
            prompts = make(vocabulary)
            pq.write_table(pa.table({"prompt_token_ids": [each.tolist() for each in prompts]}), folder / "in.parquet")
            found: dict[int, list[Report]] = {1: [], workers: []}
            for number in range(rounds):
                for count, reports in found.items():
                    log(f"{name}, round {number + 1}, {count} workers")
                    own = threads if count == 1 else 1
                    options = ["--threads", str(own), "--workers", str(count), "--prompt-column", "prompt_token_ids"]
                    options += ["--max-error-rate", "1"]  # behind random tokens a label may be none
                    output = folder / "out.parquet"
                    reports.append(
                        score_file(folder / "in.parquet", output, folder / "model", *options, "--overwrite")
                    )
            one, several = ([_scoring_seconds(each) for each in found[count]] for count in (1, workers))
            whole = [
                a["seconds"]["total"] / b["seconds"]["total"] for a, b in zip(found[1], found[workers], strict=True)
            ]
            table.add_row(
                name,
                f"{len(prompts):,}",
                str(Spread.of([len(prompts) / seconds for seconds in one])),
                str(Spread.of([len(prompts) / seconds for seconds in several])),
                str(Spread.of([a / b for a, b in zip(one, several, strict=True)])),
                str(Spread.of(whole)),
                f"{max(map(_idle, found[workers])):.1%}",
            )
    Console(width=160).print(table)


if __name__ == "__main__":
    typer.run(main)
