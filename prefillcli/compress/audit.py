"""Which rows are read in full as well."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from prefillcli.data.rows import Window

_SEED = 20_261


class AuditDraw:
    """Draws about `rows` random rows of `total`, window by window, the same ones every time."""

    def __init__(self, rows: int, total: int) -> None:
        self._rows = rows
        self._total = max(total, 1)

    def draw(self, window: Window, candidates: Sequence[int]) -> list[int]:
        """Some of the `candidates` (any numbers): as many as the window's part of all rows asks for."""
        first, last = int(window.rows[0]), int(window.rows[-1])
        quota = self._before(last + 1) - self._before(first)
        return draw(candidates, quota, window.index)

    def _before(self, row: int) -> int:
        """Rows to be drawn of those before this one."""
        return -(-self._rows * min(row, self._total) // self._total)


def draw(candidates: Sequence[int], count: int, number: int) -> list[int]:
    """`count` of the candidates or all of them, ascending, seeded by `number`."""
    if count <= 0:
        return []
    order = np.random.default_rng([_SEED, number]).permutation(len(candidates))[:count]
    return [candidates[at] for at in sorted(order.tolist())]
