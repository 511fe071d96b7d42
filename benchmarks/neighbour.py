"""`python -m benchmarks.neighbour`: what other busy programs cost `prefill score`, by how its threads wait.

Every run is the command in its own process. All ways take turns, alone and beside the other programs, so that a
disturbance of the machine hits all of them. Progress goes to stderr, a table and one line of JSON to stdout.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.console import log
from benchmarks.score_runs import SAMPLES
from benchmarks.spread import Spread
from prefillcli.runtime.cores import affinity

CORES = len(affinity())
#: How the threads run, and what the environment says for that.
WAYS: dict[str, dict[str, str]] = {
    "spinning": {"OMP_NUM_THREADS": str(CORES), "GOMP_SPINCOUNT": "300000"},  # libgomp's own count
    "spinning shortly": {"OMP_NUM_THREADS": str(CORES), "GOMP_SPINCOUNT": "10000"},
    "sleeping": {"OMP_NUM_THREADS": str(CORES), "OMP_WAIT_POLICY": "PASSIVE"},
    "as many as the load allows": {"OMP_NUM_THREADS": str(CORES), "OMP_DYNAMIC": "true"},  # OpenMP's way
    "half of them": {"OMP_NUM_THREADS": str(max(1, CORES // 2))},
    "auto": {},
}
_SAID = ("OMP_", "GOMP_", "KMP_", "MKL_", "PREFILL_")


def main(
    data: Annotated[Path, typer.Option(help="What is scored.")] = SAMPLES / "labeling.parquet",
    model: Annotated[Path, typer.Option(help="By which model.")] = SAMPLES / "models" / "target",
    way: Annotated[list[str] | None, typer.Option(help=f"One of {', '.join(WAYS)}; repeatable.")] = None,
    neighbours: Annotated[int, typer.Option(help="Busy programs, each of one thread.")] = max(1, CORES // 2),
    rounds: Annotated[int, typer.Option(help="Rounds; in each every way runs alone and beside the others.")] = 5,
    limit: Annotated[int | None, typer.Option(help="Rows, for a quick look.")] = None,
) -> None:
    """Seconds that the model takes for a job, alone and beside busy programs."""
    ways = way or list(WAYS)
    seconds: dict[str, dict[str, list[float]]] = {name: {"alone": [], "beside": []} for name in ways}
    for turn in range(1, rounds + 1):
        for name in ways:
            for where, others in (("alone", 0), ("beside", neighbours)):
                with _busy(others):
                    taken, threads = _score(data, model, WAYS[name], limit)
                seconds[name][where].append(taken)
                log(f"round {turn}: {name}, {where}: {taken:.2f} s on {threads}")
    results = {name: _result(name, seconds) for name in ways}
    table = Table("threads", "alone, s", "over the best", "beside, s", "over the best alone")
    for name, result in results.items():
        table.add_row(name, *(str(Spread.of(result[column])) for column in result))
    Console(width=130).print(table)
    medians = {
        name: {column: Spread.of(values).median for column, values in result.items()}
        for name, result in results.items()
    }
    print(json.dumps({"cores": CORES, "neighbours": neighbours, "rounds": rounds, "medians": medians}))


def _result(name: str, seconds: dict[str, dict[str, list[float]]]) -> dict[str, list[float]]:
    """Seconds, and what they are of the best way's undisturbed ones of the same round."""
    best = [min(turn) for turn in zip(*(each["alone"] for each in seconds.values()), strict=True)]
    columns = {}
    for where, own in seconds[name].items():
        columns[where] = own
        columns[f"{where}_over_best"] = [mine / fastest for mine, fastest in zip(own, best, strict=True)]
    return columns


@contextmanager
def _busy(programs: int) -> Iterator[None]:
    """Run a number of programs that compute all the time."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(programs)]
    try:
        yield
    finally:
        for each in running:
            each.kill()
            each.wait()


def _score(data: Path, model: Path, way: dict[str, str], limit: int | None) -> tuple[float, str]:
    """The model's seconds for the job, and how many threads ran."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_SAID)}
    with TemporaryDirectory() as folder:
        output = Path(folder) / "out.parquet"
        command = [sys.executable, "-m", "prefillcli", "score", str(data), "--model", str(model)]
        command += ["--output", str(output), "--quiet", *(["--limit", str(limit)] if limit else [])]
        subprocess.run(command, env=kept | way, check=True, stdout=subprocess.DEVNULL)  # noqa: S603 - our own command line
        report = json.loads(output.with_suffix(".run.json").read_text())
    ran = report["threads"]
    return report["seconds"]["model"], f"{ran['min']} to {ran['max']} threads"


if __name__ == "__main__":
    typer.run(main)
