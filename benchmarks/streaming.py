"""`python -m benchmarks.streaming`: weights that are read while others compute, against weights in memory.

A model of random weights is saved twice, once for each way. Each way runs in its own process. They take turns, so that
a disturbance of the machine hits both. Before each run the files of the streamed model are dropped from the page
cache, so that they are read from the disk. Progress goes to stderr, a table and one line of JSON to stdout.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
from contextlib import ExitStack, closing, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import monotonic, process_time
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.console import log
from benchmarks.models import random_llama
from prefillcli.plan.behind import LabelSet

PROMPT_TOKENS = 512
LABELS = LabelSet.of([[5], [7]])
RESIDENT, STREAMED = "resident", "stream"


class Side:
    """A process with the model, loaded in one of the two ways."""

    def __init__(self, model: Path, memory: str | None) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, there = spawn.Pipe()
        self._process = spawn.Process(target=_serve, args=(there, model, memory))
        self._process.start()
        there.close()

    def run(self, tokens: int) -> dict[str, Any]:
        """Score a pack of so many tokens."""
        self._pipe.send(tokens)
        answer: dict[str, Any] = self._pipe.recv()
        return answer

    def close(self) -> None:
        with suppress(OSError):
            self._pipe.send(0)
        self._process.join()


def _serve(pipe: Connection, folder: Path, memory: str | None) -> None:
    from prefillcli.jobs.load import load_walk
    from prefillcli.models.find import read_model_files
    from prefillcli.models.open import Opened
    from prefillcli.options.commands import ScoreSettings
    from prefillcli.options.load import load_settings
    from prefillcli.plan.pack import Limits
    from prefillcli.plan.plan import make_plan
    from prefillcli.runtime.memory import peak_resident_memory, reset_peak_memory

    files = read_model_files(folder)
    weights = "resident" if memory is None else "stream"
    flags = {"inputs": ["rows"], "memory": "4GiB", "weights": weights, "weights_memory": memory}
    settings = load_settings(ScoreSettings, {k: v for k, v in flags.items() if v is not None}, environment={})
    opened = Opened(files, torch.device("cpu"), None, (), files.max_length)
    loaded = load_walk(opened, settings)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(10, 8_000, PROMPT_TOKENS).astype(np.int32) for _ in range(1 << 10)]
    with closing(loaded.engine) as engine:
        while tokens := pipe.recv():
            (pack,) = make_plan(prompts[: tokens // PROMPT_TOKENS], Limits(tokens, tokens)).packs
            if memory is not None:
                _drop_from_cache(folder)
            before, begun, worked = engine.weights_report(), monotonic(), process_time()
            reset_peak_memory()
            (answers,) = engine.answer(pack, lambda prompt: LABELS, lambda tokens: None)
            after = engine.weights_report()
            if before is None or after is None:
                raise RuntimeError("the engine says nothing of its weights")
            pipe.send(
                {
                    "seconds": monotonic() - begun,
                    "processor": process_time() - worked,
                    "peak": peak_resident_memory(),
                    "bytes": after.bytes,
                    "read": after.bytes_read - before.bytes_read,
                    "waited": after.seconds_waited - before.seconds_waited,
                    "scores": [answer.logprobs.tolist() for answer in answers],
                }
            )


def _drop_from_cache(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)


def main(
    size: Annotated[str, typer.Option(help="A shape of benchmarks/models.py.")] = "600M",
    dtype: Annotated[str, typer.Option(help="Of weights and activations.")] = "bfloat16",
    memory: Annotated[str, typer.Option(help="--weights-memory of the streamed run.")] = "300MiB",
    tokens: Annotated[int, typer.Option(help="Tokens of the large pack; the small one has a fifth.")] = 32_768,
    rounds: Annotated[int, typer.Option(help="Rounds after one of warm-up.")] = 3,
) -> None:
    """Throughput, memory and waiting of streamed weights."""
    sizes = [tokens, tokens // 5 // PROMPT_TOKENS * PROMPT_TOKENS]
    runs: dict[str, dict[int, list[dict[str, Any]]]] = {}
    with TemporaryDirectory() as folder, ExitStack() as stack:
        paths = {way: Path(folder) / way for way in (RESIDENT, STREAMED)}
        random_llama(size, getattr(torch, dtype)).save_pretrained(paths[RESIDENT])
        shutil.copytree(paths[RESIDENT], paths[STREAMED])
        sides = {way: Side(path, memory if way == STREAMED else None) for way, path in paths.items()}
        for side in sides.values():
            stack.callback(side.close)
        for side in sides.values():
            side.run(PROMPT_TOKENS)  # the first calls of a process take longer
        for turn in range(1, rounds + 1):
            for pack in sizes:
                for way in sides if turn % 2 else reversed(sides):
                    run = sides[way].run(pack)
                    runs.setdefault(way, {size: [] for size in sizes})[pack].append(run)
                    spent = f"{run['seconds']:.1f} s, {run['processor']:.1f} s of the processor"
                    log(f"round {turn}: {way}, {pack:,} tokens: {spent}, waited {run['waited']:.2f} s")
            _show(runs, sizes, memory)


def _show(runs: dict[str, dict[int, list[dict[str, Any]]]], sizes: list[int], memory: str) -> None:
    columns = ["resident, s", "streamed, s", "throughput", "by processor time", "waited, s", "read, MiB", "held, MiB"]
    table = Table("tokens", *columns)
    found = []
    for size in sizes:
        mine, other = runs[STREAMED][size], runs[RESIDENT][size]
        ratios = [there["seconds"] / here["seconds"] for here, there in zip(mine, other, strict=True)]
        # Other programs on the machine lengthen the seconds, but hardly those of the processor.
        alone = [
            there["processor"] / (here["processor"] + here["waited"]) for here, there in zip(mine, other, strict=True)
        ]
        # All weights are resident on the other side, and everything else is the same.
        held = [here["peak"] - there["peak"] + there["bytes"] for here, there in zip(mine, other, strict=True)]
        result = {
            "tokens": size,
            "resident_seconds": median(run["seconds"] for run in other),
            "streamed_seconds": median(run["seconds"] for run in mine),
            "throughput": median(ratios),
            "throughput_spread": [min(ratios), max(ratios)],
            "throughput_alone": median(alone),
            "throughput_alone_spread": [min(alone), max(alone)],
            "seconds_waited": median(run["waited"] for run in mine),
            "bytes_read": median(run["read"] for run in mine),
            "weights_held": max(held),
            "same_bits": all(run["scores"] == mine[0]["scores"] for run in [*mine, *other]),
        }
        found.append(result)
        table.add_row(
            f"{size:,}",
            f"{result['resident_seconds']:.1f}",
            f"{result['streamed_seconds']:.1f}",
            f"{result['throughput']:.3f} ({min(ratios):.3f}-{max(ratios):.3f})",
            f"{result['throughput_alone']:.3f} ({min(alone):.3f}-{max(alone):.3f})",
            f"{result['seconds_waited']:.2f}",
            f"{result['bytes_read'] / 2**20:,.0f}",
            f"{result['weights_held'] / 2**20:,.0f}",
        )
    Console(width=130).print(table)
    weights = runs[RESIDENT][sizes[0]][0]["bytes"]
    print(json.dumps({"weights_bytes": weights, "weights_memory": memory, "packs": found}))


if __name__ == "__main__":
    typer.run(main)
