"""Wall time by phase."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


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
