"""Taking times and memory so that they can be compared on a shared machine."""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, smallest and largest of some measurements."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f}-{self.high:.2f})"


def interleaved(methods: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each method, run in turn for `rounds` rounds after one warm-up of each.

    What disturbs the machine for a while then disturbs all methods: compare within a round.
    """
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    for turn in range(rounds + 1):
        for name, method in methods.items():
            begun = time.perf_counter()
            method()
            if turn:
                seconds[name].append(time.perf_counter() - begun)
                print(f"  round {turn}: {name} {seconds[name][-1]:.2f} s", file=sys.stderr, flush=True)
    return seconds


def peak_bytes(task: Callable[..., Callable[[], object]], *args: Any) -> int:
    """Host memory at the peak of a step above what was in use before it, in a process of its own.

    `task(*args)` prepares and returns the step. Linux only (it resets and reads VmHWM).
    """
    here, there = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_peak_in_child, args=(there, task, args))
    process.start()
    there.close()
    try:
        return int(here.recv())
    except EOFError:
        raise RuntimeError(f"the measured process ended with {process.exitcode}") from None
    finally:
        process.join()


def _peak_in_child(pipe: Connection, task: Callable[..., Callable[[], object]], args: tuple[Any, ...]) -> None:
    step = task(*args)
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before = _status("VmRSS")
    step()
    pipe.send(_status("VmHWM") - before)


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")
