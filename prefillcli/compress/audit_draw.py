"""Which compressed rows are also read in full, for the audit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from prefillcli.data.reading.selection import Selection
from prefillcli.data.rows import Window

_SEED = 20_261


class AuditDraw:
    """Draws `rows` random rows of the `selection` from `total`, window by window, the same ones every time.

    Each window gives its share of the rows; one that has fewer candidates makes the draw smaller.
    """

    def __init__(self, rows: int, selection: Selection, total: int) -> None:
        self._rows = rows
        self._selection = selection
        self._total = max(selection.count(total), 1)

    def draw(self, window: Window, candidates: Sequence[int]) -> list[int]:
        """The share of `window`, drawn from the `candidates` (any numbers)."""
        quota = self._before(int(window.rows[-1]) + 1) - self._before(int(window.rows[0]))
        return draw(candidates, quota, window.index)

    def _before(self, row: int) -> int:
        """How many rows are drawn of those before this one."""
        return -(-self._rows * self._selection.before(row) // self._total)


def draw(candidates: Sequence[int], count: int, number: int) -> list[int]:
    """`count` of the candidates or all of them, ascending, seeded by `number`."""
    if count <= 0:
        return []
    order = np.random.default_rng([_SEED, number]).permutation(len(candidates))[:count]
    return [candidates[at] for at in sorted(order.tolist())]
