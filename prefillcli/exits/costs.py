"""What exits cost and save, in layers of a token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from prefillcli.exits.layer_readings import Float64Array


@dataclass(frozen=True, slots=True)
class ExitCosts:
    """Shares of one layer's work for one token.

    `keys` is what it takes to store its K,V alone, as all tokens but the last do in the last layer. `repeated` is what
    a peek does twice for tokens that stay: q, k and v. `regroup` is what it takes to lay a token that stays out anew.
    `reading` is for a row, not for a token: its last token goes through the layer, norm, head and probe by itself.
    """

    keys: float = 0.04
    repeated: float = 0.115
    regroup: float = 0.05
    reading: float = 3.0


class Work(NamedTuple):
    """What rows cost, where they leave, and which exits peek.

    `share` is the work over that of rows that are all read in full. `left` [rows] numbers the exit that each row
    leaves by, -1 where it goes on to the end. `peeks` and `leaving`, the share of all rows, have an entry for each
    exit. `layers` is the mean number of layers that a token goes through.
    """

    share: float
    left: npt.NDArray[np.int64]
    peeks: tuple[bool, ...]
    leaving: tuple[float, ...]
    layers: float


def work_of(
    decided: npt.NDArray[np.bool_], exit_layers: Sequence[int], weights: Float64Array, layers: int, costs: ExitCosts
) -> Work:
    """The work for rows of which `decided` [exits, rows] may leave after `exit_layers`, numbered from 0.

    Each row pays for `weights` [rows] tokens by itself, through so many `layers`. An exit peeks where that is cheaper:
    who leaves is spared the layer except for its K,V, who stays does part of it twice.
    """
    full = layers - 1 + costs.keys
    inside = np.ones(decided.shape[1], dtype=np.bool_)
    left = np.full(decided.shape[1], -1, dtype=np.int64)
    paid = np.zeros(decided.shape[1])
    gone = np.full(decided.shape[1], full)
    peeks: list[bool] = []
    for number, layer in enumerate(exit_layers):
        going = inside & decided[number]
        staying = inside & ~decided[number]
        paid[inside] += costs.reading
        paid[staying] += costs.regroup * weights[staying]
        spared, twice = (1 - costs.keys) * weights[going].sum(), costs.repeated * weights[staying].sum()
        peeks.append(bool(spared > twice))
        gone[going] = layer + (costs.keys if peeks[-1] else 1)
        if peeks[-1]:
            paid[staying] += costs.repeated * weights[staying]
        left[going] = number
        inside = staying
    total = float(weights.sum())
    walked = float((gone * weights).sum()) / total
    leaving = tuple(float(np.mean(left == number)) for number in range(len(exit_layers)))
    return Work((walked + float(paid.sum()) / total) / full, left, tuple(peeks), leaving, walked)
