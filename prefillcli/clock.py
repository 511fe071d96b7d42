"""What a run takes: wall time by phase, and memory."""

from __future__ import annotations

import resource
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Clock:
    """Adds up seconds under names."""

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self.seconds: defaultdict[str, float] = defaultdict(float)

    @property
    def total(self) -> float:
        """Seconds since the clock was made."""
        return time.monotonic() - self._begun

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
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
