"""`python -m tests.soak`: a night of a job that is killed over and over, on a disk that fills once.

Many short rows and some long ones are scored by two workers, compressed and with early exits. Every few minutes the
driver, a worker or all of them are killed or told to stop, and the job is resumed until it is complete. Then every row
of the output is looked for, and a sample is scored again without any disturbance. A table goes to stdout, and one line
of JSON. Exit code 1 if a row is lost, doubled, misplaced or wrong, or an attempt ended in a way that nothing had asked
for. Linux, and root for the disk: `unshare --map-root-user --mount make soak` gives it to anybody.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.console import log
from benchmarks.score_runs import SAMPLES
from tests.soak.disk import NightDisk
from tests.soak.memory import MemoryOverTime
from tests.soak.proof import Proof
from tests.soak.rows import write_night
from tests.soak.strikes import Attempt, Strike, draw_strike

_LOOK_SECONDS = 0.5
_EARLY_SHARE = 0.2  # of the attempts are struck before they have scored anything
_EARLY_SECONDS = 30.0


class Night:
    """The attempts at one job, and what befell them."""

    def __init__(
        self, command: list[str], disk: NightDisk, output: Path, *, rows: int, kill_every: float, seed: int
    ) -> None:
        self.strikes: Counter[str] = Counter()
        self.ends: Counter[int] = Counter()
        self.unexpected: list[str] = []
        self.memory = MemoryOverTime(rows)
        self.attempts = 0
        self.disk_filled = 0
        self._command = command
        self._disk = disk
        self._output = output
        self._rows = rows
        self._kill_every = kill_every
        self._rng = np.random.default_rng(seed)
        self._begun = time.monotonic()
        self._struck_at_end = False

    def run(self, seconds: float, memory_every: float, fill_at: float) -> bool:
        """Attempts until the job is complete; whether that is so within so many `seconds`."""
        end = self._begun + seconds
        while time.monotonic() < end:
            self.attempts += 1
            attempt = Attempt(self._command, self._output, self.attempts)
            try:
                code = self._follow(attempt, end, memory_every, fill_at)
            finally:
                attempt.kill()
            self.ends[code] += 1
            self.disk_filled += self._disk.full and code == 5
            log(f"attempt {self.attempts}: exit code {code}, {attempt.rows:,} rows")
            if code == 0:
                return True
            if not attempt.expects(code):
                self.unexpected.append(f"attempt {self.attempts} ended with {code}: {attempt.last_words}")
                if len(self.unexpected) >= 3:
                    return False
            self._disk.empty()
        return False

    def _follow(self, attempt: Attempt, end: float, memory_every: float, fill_at: float) -> int:
        """Watch and strike an attempt until it has ended; its exit code."""
        early = self._rng.random() < _EARLY_SHARE
        strike_at = time.monotonic() + self._rng.uniform(1, _EARLY_SECONDS) if early else None
        memory_at = 0.0
        while (code := attempt.ended()) is None and time.monotonic() < end:
            now = time.monotonic()
            if strike_at is None and attempt.progresses:
                strike_at = now + self._rng.uniform(0.5, 1.5) * self._kill_every
            if now >= memory_at:
                memory_at = now + memory_every
                self.memory.add(attempt.look(now - self._begun))
            if not (self.disk_filled or self._disk.full or attempt.struck) and attempt.rows > fill_at * self._rows:
                self._disk.fill()
                attempt.expect(5)
            at_end = not self._struck_at_end and attempt.rows >= self._rows - 1  # of a float
            if at_end or (strike_at is not None and now >= strike_at and not self._disk.full):
                self._struck_at_end |= at_end
                strike = Strike.DRIVER if at_end else draw_strike(self._rng)
                if attempt.strike(strike, self._rng):
                    self.strikes[strike] += 1
                strike_at = None
            time.sleep(_LOOK_SECONDS)
        return -1 if code is None else code

    def report(self) -> dict[str, Any]:
        """What has happened, and what was in memory."""
        return {
            "seconds": round(time.monotonic() - self._begun),
            "attempts": self.attempts,
            "strikes": dict(self.strikes),
            "ends": {str(code): count for code, count in self.ends.items()},
            "disk_filled": self.disk_filled,
            "unexpected": self.unexpected,
            **self.memory.report(),
        }


def main(
    rows: Annotated[int, typer.Option(help="Short rows.")] = 1_000_000,
    long: Annotated[int, typer.Option(help="Long rows, of about 900 tokens.")] = 2_000,
    workers: Annotated[int, typer.Option(help="Worker processes.")] = 2,
    kill_every: Annotated[float, typer.Option(help="Seconds of progress between two strikes, on average.")] = 180.0,
    disk: Annotated[int, typer.Option(help="MiB of the disk that fills once.")] = 1_024,
    fill_at: Annotated[float, typer.Option(help="Share of the rows after which it fills.")] = 0.4,
    short_sample: Annotated[int, typer.Option(help="Short rows that are scored again.")] = 4_000,
    long_sample: Annotated[int, typer.Option(help="Long rows that are scored again.")] = 100,
    memory_every: Annotated[float, typer.Option(help="Seconds between two looks at memory.")] = 10.0,
    minutes: Annotated[float, typer.Option(help="It gives up after so many.")] = 240.0,
    folder: Annotated[Path, typer.Option(help="Where everything goes.")] = Path("out/soak"),
    seed: Annotated[int, typer.Option(help="Of rows and strikes.")] = 0,
) -> None:
    """Run the night and prove what is left of it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # with the attempt and the disk
    folder.mkdir(parents=True, exist_ok=True)
    night_rows, model = folder / "night.parquet", SAMPLES / "models" / "deep"
    log(f"writing {rows + long:,} rows")
    write_night(night_rows, rows=rows, long=long, seed=seed)
    flags = ["--id-column", "id", "--dtype", "float32", "--keep", "0.3", "--draft", str(SAMPLES / "models" / "draft")]
    flags += ["--set", "compress_above=512", "--set", "compress_per_row=true", "--max-error-rate", "0.01"]
    with NightDisk(folder / "disk", disk << 20) as night_disk:
        output = night_disk.path / "scores.parquet"
        command = ["score", str(night_rows), "-m", str(model), "-o", str(output), "--resume", "--quiet", *flags]
        command += ["--exit", "--workers", str(workers)]
        night = Night(command, night_disk, output, rows=rows + long, kill_every=kill_every, seed=seed)
        complete = night.run(60 * minutes, memory_every, fill_at)
        report = night.report() | {"rows": rows + long, "complete": complete}
        night.memory.write(folder / "memory.jsonl")
        if complete:
            proof = Proof(night_rows, output, folder, model, flags)
            report |= proof.report(short=short_sample, long=long_sample)
    _print(report)
    print(json.dumps(report))
    raise typer.Exit(0 if complete and not night.unexpected and report["sound"] else 1)


def _print(report: dict[str, Any]) -> None:
    table = Table("what", "how much")
    for name, value in report.items():
        parts = value.items() if isinstance(value, dict) else [("", value)]
        for part, number in parts:
            table.add_row(f"{name} {part}".strip(), f"{number:,}" if isinstance(number, int) else str(number))
    Console(width=150).print(table)


if __name__ == "__main__":
    typer.run(main)
