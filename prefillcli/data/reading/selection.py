"""Which rows and columns of the input a job reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from prefillcli.data.rows import Int64Array
from prefillcli.errors import UsageError

BATCH_ROWS = 2048
"""Rows of a batch, at most."""
BATCH_BYTES = 8 << 20
"""Bytes of a batch, about."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Row numbers below `limit`, and of those only `chosen`, if given."""

    limit: int | None = None
    chosen: Int64Array | None = None
    """Ascending row numbers."""

    @classmethod
    def draw(cls, sample: int, total: int, seed: int) -> Selection:
        """`sample` of `total` rows, the same ones for the same seed; all of them if there are fewer."""
        if sample >= total:
            return cls()
        chosen = np.random.default_rng(seed).choice(total, sample, replace=False)
        return cls(chosen=np.sort(chosen).astype(np.int64))

    @property
    def end(self) -> int | None:
        """Row number from which on nothing is read; None if all rows are."""
        if self.chosen is not None:
            return int(self.chosen[-1]) + 1 if len(self.chosen) else 0
        return self.limit

    def within(self, start: int, stop: int) -> Int64Array:
        """Selected row numbers in [start, stop), ascending."""
        if self.chosen is None:
            return np.arange(start, stop if self.limit is None else min(stop, self.limit), dtype=np.int64)
        low, high = np.searchsorted(self.chosen, (start, stop))
        return self.chosen[low:high]

    def before(self, row: int) -> int:
        """How many rows before `row` are selected."""
        if self.chosen is not None:
            return int(np.searchsorted(self.chosen, row))
        return row if self.limit is None else min(row, self.limit)

    def count(self, total: int) -> int:
        """How many of `total` rows are selected."""
        if self.chosen is not None:
            return len(self.chosen)
        return total if self.limit is None else min(total, self.limit)


@dataclass(frozen=True, slots=True)
class Sampling:
    """Which rows the user asked for: all, the first `limit`, or of these `sample` drawn at random."""

    limit: int | None = None
    sample: int | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class ColumnChoice:
    """The columns that are read."""

    columns: tuple[str, ...]
    """Those that the prompt needs."""
    optional: tuple[str, ...]
    """Those that are read where they are there: on some lines, in some files."""
    carried: pa.Schema
    """Id and kept columns; from JSON Lines every one is a string that holds JSON."""

    @property
    def columns_and_optional(self) -> tuple[str, ...]:
        return (*self.columns, *self.optional)


def require_columns(names: Sequence[str], available: Sequence[str], where: str, optional: Sequence[str] = ()) -> None:
    """Raise UsageError naming the first column that is missing, or of which there are two; some may be missing."""
    for name in names:
        if name not in available:
            listed = ", ".join(map(_listed, available[:20])) + (", ..." if len(available) > 20 else "")
            raise UsageError(f"no column {name!r} in {where}\navailable: {listed}")
    for name in (*names, *optional):
        if available.count(name) > 1:
            raise UsageError(f"two columns of {where} are named {name!r}\nrename or drop one of them")


def _listed(name: str) -> str:
    """A name among others: names in the data may have line breaks, and be as long as a row."""
    return name if name.isprintable() and 0 < len(name) <= 60 else repr(name[:60])
