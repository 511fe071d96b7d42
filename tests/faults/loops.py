"""The loop over the calls of a job: the first fails, the second, and so on, until a job completes untouched."""

from __future__ import annotations

import os
import shutil
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path

from tests.faults.nursery import AnyKind, Nursery, Outcome


@dataclass
class Job:
    """What is done in a folder of its own in each turn, and what must hold then."""

    run: Callable[..., None]
    """Gets the folder, in a process of its own."""
    check: Callable[[Path, Outcome], None]
    """Looks at the folder after a fault, and goes on with the job."""
    begin: Path | None = None
    """A folder to begin with a copy of."""
    while_hung: Callable[[Path], None] = lambda folder: None
    """Looks at the folder while the process hangs."""
    hits: Counter[str] = field(default_factory=Counter)
    """The calls that failed so far."""


EVERY = int(os.environ.get("FAULTS_EVERY", "1"))
"""Of so many calls one fails, where a loop does not say otherwise."""


def fail_each(
    nursery: Nursery, place: Path, job: Job, kind: AnyKind, *, every: int = EVERY, first: int | None = None
) -> int:
    """Let each call of the job fail, or one of `every` so many from the `first` on; returns how many did.

    Without `first`, the first call fails, and then each test and kind goes on from a call of its own.
    """
    numbers: Iterator[int] = count(first or 1, every)
    if first is None:
        numbers = chain([1], count(2 + zlib.crc32(f"{kind.meaning} {place.name}".encode()) % every, every))
    for number in numbers:
        folder = place / f"{number}"
        if job.begin is None:
            folder.mkdir()
        else:
            shutil.copytree(job.begin, folder, symlinks=True)
        outcome = nursery.run(
            kind.fault(number), job.run, folder, while_hung=lambda folder=folder: job.while_hung(folder)
        )
        try:
            if outcome.hit is None:
                assert outcome.done, outcome
            job.check(folder, outcome)
        except BaseException as error:
            error.add_note(f"{kind.meaning}, call {number}: {outcome}")
            raise
        shutil.rmtree(folder)
        if outcome.hit is None:
            assert number > 1, f"no call can have {kind.meaning}"
            return sum(job.hits.values())
        job.hits[outcome.hit] += 1
    raise AssertionError("the numbers have no end")
