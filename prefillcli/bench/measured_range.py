"""How far the rounds of a measurement lie apart."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from pydantic import BaseModel


class Range(BaseModel):
    """Median, smallest and largest of some rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Range:
        return cls(median=statistics.median(values), low=min(values), high=max(values))
