"""What a run takes: wall time by phase, and memory."""

from __future__ import annotations

import os
import resource
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

Phase = Literal["read", "waiting", "plan", "load", "draft", "model", "write"]
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


def peak_memory() -> dict[str, int]:
    """Largest memory used so far, in bytes: of the process (`host`) and by tensors on the devices (`device`)."""
    torch = sys.modules.get("torch")  # a run that failed early has not waited for it
    device = 0
    if torch is not None and torch.cuda.is_available():
        device = sum(torch.cuda.max_memory_allocated(i) for i in range(torch.cuda.device_count()))
    return {"host": _peak_host(), "device": device}


def _peak_host() -> int:
    status = Path("/proc/self/status")
    if status.exists():  # what getrusage says of Linux may be the peak of the process that started this one
        fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
        return int(fields["VmHWM"].split()[0]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


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
        self.samples.append((round(self._clock.total, 2), _host(), _device()))


def _host() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # no Linux: the peak so far is all there is
        return _peak_host()


def _device() -> int:
    cuda: Any = getattr(sys.modules.get("torch"), "cuda", None)  # may be in the middle of its import
    if not getattr(cuda, "is_initialized", bool)():
        return 0
    return sum(cuda.memory_allocated(i) for i in range(cuda.device_count()))
