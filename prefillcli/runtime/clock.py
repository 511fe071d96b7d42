"""What a run takes: wall time by phase, and memory over time."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from prefillcli.runtime.memory import device_memory, peak_resident_memory, resident_memory

Phase = Literal["read", "waiting", "plan", "load", "exits", "draft", "model", "write", "evaluate"]
"""What the seconds of a run go to, one after the other; `run.json` has each under its name."""


class Clock:
    """Adds up seconds under names."""

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self.seconds: defaultdict[Phase, float] = defaultdict(float)

    @property
    def total(self) -> float:
        """Seconds since the clock was made."""
        return time.monotonic() - self._begun

    @contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        begun = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] += time.monotonic() - begun


class MemoryWatch:
    """Looks at the memory in use now and then, from a thread; use it as a context manager.

    At most `most` samples are kept: each time there are so many, every second one goes and the pace halves.
    """

    def __init__(self, clock: Clock, *, interval: float = 0.2, most: int = 500) -> None:
        self.samples: list[tuple[float, int, int]] = []
        """Seconds on the clock; bytes of the process, and of tensors on the devices."""
        self._clock = clock
        self._interval = interval
        self._most = most
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="prefill-memory", daemon=True)

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._stopped.set()
        self._thread.join()
        self._look()

    def _watch(self) -> None:
        self._look()
        while not self._stopped.wait(self._interval):
            self._look()

    def _look(self) -> None:
        if len(self.samples) == self._most:
            del self.samples[1::2]
            self._interval *= 2
        self.samples.append((round(self._clock.total, 2), _host(), device_memory()))


def _host() -> int:
    try:
        return resident_memory()
    except OSError:  # not Linux: the peak so far is all that is known
        return peak_resident_memory()


def duration(seconds: float) -> str:
    """Seconds as one would say them: `12.3 s`, `4.5 min`, `2.1 h`."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
