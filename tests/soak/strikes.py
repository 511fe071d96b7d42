"""One attempt at a job, and the ways in which it is cut short."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from enum import StrEnum
from pathlib import Path

import numpy as np

from benchmarks.memory import tree_memory
from prefillcli.runtime.memory import proportional_memory
from prefillcli.runtime.signals import start_of
from tests.soak.memory import Look, Process


class Strike(StrEnum):
    """What happens to an attempt."""

    DRIVER = "driver killed"
    WORKER = "worker killed"
    ALL = "driver and workers killed"
    TERMINATED = "driver told to stop"


_ENDS = {
    Strike.DRIVER: {-signal.SIGKILL},
    Strike.ALL: {-signal.SIGKILL},
    Strike.TERMINATED: {
        128 + signal.SIGTERM,
        -signal.SIGTERM,
    },  # the latter before it has begun, and after it has ended
}


def draw_strike(rng: np.random.Generator) -> Strike:
    """One at random: a worker as often as all others together."""
    return list(Strike)[rng.choice(4, p=[0.2, 0.5, 0.15, 0.15])]


class Attempt:
    """`prefill` with these words in a process of its own; its stderr goes to a file beside the output."""

    def __init__(self, words: list[str], output: Path, number: int) -> None:
        self._work = Path(f"{output}.prefill")
        self._number = number
        self._log = output.parent.parent / f"attempt-{number:03}.log"
        self._before = self._parts()
        self._expected: set[int] = set()
        self._rows = 0
        self.struck = False
        """Whether it was told to end, one way or the other."""
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "prefillcli", *words], stdout=subprocess.DEVNULL, stderr=log
            )

    @property
    def rows(self) -> int:
        """Rows that are done, by the last sign of life."""
        with suppress(OSError, ValueError, KeyError):
            beat = json.loads((self._work / "heartbeat.json").read_text())
            if beat["owner"]["pid"] == self._process.pid:
                self._rows = max(self._rows, int(beat["pace"]["rows"]))
        return self._rows

    @property
    def progresses(self) -> bool:
        """Whether it has written a part."""
        return bool(self._parts() - self._before)

    @property
    def last_words(self) -> str:
        return self._log.read_text(errors="replace").strip()[-500:]

    def ended(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self._process.poll()

    def expect(self, code: int) -> None:
        """It may end with this code."""
        self._expected.add(code)

    def expects(self, code: int) -> bool:
        return code in self._expected

    def look(self, seconds: float) -> Look:
        """Its memory now, `seconds` after the night began."""
        driver, together = _look_at(self._process.pid), tree_memory(self._process.pid)
        return Look(seconds, self._number, self.rows, together, driver, tuple(map(_look_at, self._workers())))

    def strike(self, strike: Strike, rng: np.random.Generator) -> bool:
        """Do it; whether there was anything to do it to."""
        workers = self._workers()
        if strike is Strike.WORKER:
            if not workers:
                return False
            _kill(int(rng.choice(workers)))
            return True
        self.struck = True
        self._expected |= _ENDS[strike]
        self._process.send_signal(signal.SIGTERM if strike is Strike.TERMINATED else signal.SIGKILL)
        if strike is Strike.ALL:
            for worker in workers:
                _kill(worker)
        return True

    def kill(self) -> None:
        """End it, however it is."""
        self._process.kill()
        self._process.wait()

    def _parts(self) -> set[str]:
        return {path.name for path in self._work.glob("part-*")}

    def _workers(self) -> list[int]:
        """Worker processes: the children of the fork server, which is a child of the driver."""
        return [worker for child in _children(self._process.pid) for worker in _children(child)]


def _children(pid: int) -> Iterator[int]:
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            yield from map(int, task.read_text().split())


def _look_at(pid: int) -> Process:
    """A process that may have ended: then it has no memory."""
    begun = start_of(pid)
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(begun) / os.sysconf("SC_CLK_TCK") if begun else 0.0
    return Process(pid, age, proportional_memory(pid) or 0)


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
