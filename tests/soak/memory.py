"""Memory over the time of a night: of the driver, of each worker, and of all that an attempt has started."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

SHARES = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Of the rows, around which memory is told."""
AGES = ((0, 60), (60, 120), (120, 240), (240, 480), (480, 3600))
"""Of processes in seconds, from and to, between which memory is told."""


@dataclass(frozen=True, slots=True)
class Process:
    """A process: its age in seconds, and its memory in bytes (proportional set size)."""

    pid: int
    age: float
    memory: int


@dataclass(frozen=True, slots=True)
class Look:
    """What an attempt had in memory at a time, in `seconds` since the night began, with so many rows done.

    `all` are the bytes of the driver and of all below it, which are more than the workers: the server that forks
    them, and what renders templates.
    """

    seconds: float
    attempt: int
    rows: float
    all: int
    driver: Process
    workers: tuple[Process, ...]


class MemoryOverTime:
    """The looks of a night at one job of `rows` rows."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._looks: list[Look] = []

    def add(self, look: Look) -> None:
        self._looks.append(look)

    def report(self) -> dict[str, Any]:
        """Medians in bytes: by the share of rows that are done, and of a worker by its age. The most there was."""
        working = [look for look in self._looks if look.workers]
        by_share = {}
        for share in SHARES:
            near = [look for look in working if abs(look.rows / self._rows - share) <= 0.1]
            by_share[f"{share:.0%}"] = {
                "driver": _median(look.driver.memory for look in near),
                "worker": _median(worker.memory for look in near for worker in look.workers),
                "all": _median(look.all for look in near),
            }
        workers = [worker for look in working for worker in look.workers]
        by_age = {
            f"{first} to {end} s": _median(each.memory for each in workers if first <= each.age < end)
            for first, end in AGES
        }
        most = {
            "driver": max((look.driver.memory for look in self._looks), default=None),
            "worker": max((worker.memory for worker in workers), default=None),
            "all": max((look.all for look in self._looks), default=None),
        }
        return {"memory": by_share, "memory of a worker": by_age, "most memory": most}

    def write(self, path: Path) -> None:
        """All looks, as lines of JSON."""
        path.write_text("".join(json.dumps(asdict(look)) + "\n" for look in self._looks))


def _median(numbers: Iterable[int]) -> int | None:
    found = list(numbers)
    return int(np.median(found)) if found else None
