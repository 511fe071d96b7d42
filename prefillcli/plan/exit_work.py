"""What is computed of a pack whose reads may leave between two layers: as a walk has counted it, and by the formula.

In both, a node goes on until the last read behind it has left, and K,V alone take `KEYS_SHARE` of a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prefillcli.plan.pack import Pack

KEYS_SHARE = 0.125
#: Rows that a shared node may be left with, at most; more than the last are the rest.
LIVE_ROWS = (1, 2, 5, 10)


@dataclass(slots=True)
class LayersDone:
    """How many layers each node of a pack went through, int64 [nodes].

    `full` are whole layers; of `keys` only K,V were computed: the last layer, and those that were peeked at.
    `regroupings` counts how often the rest of the pack was laid out anew. `layers` are those of the model.
    """

    full: npt.NDArray[np.int64]
    keys: npt.NDArray[np.int64]
    regroupings: int = 0
    layers: int = 0

    @classmethod
    def none(cls, pack: Pack) -> LayersDone:
        """Nothing of `pack` is computed yet."""
        nodes = len(pack.parents)
        return cls(np.zeros(nodes, dtype=np.int64), np.zeros(nodes, dtype=np.int64))

    @property
    def work(self) -> npt.NDArray[np.float64]:
        """Layers of a token that were computed for each token of a node, float64 [nodes]."""
        return self.full + KEYS_SHARE * self.keys


def in_full(layers: int) -> float:
    """Layers of a token that a token takes where no read leaves: of the last layer only K,V."""
    return layers - 1 + KEYS_SHARE


def layers_needed(pack: Pack, through: Sequence[int | None], layers: int) -> npt.NDArray[np.float64]:
    """Layers of a token that each node takes, float64 [nodes].

    Read k leaves when `through[k]` layers are behind it, or never (None). A model has `layers`. Nodes that later packs
    hold go through all of them.
    """
    whole = in_full(layers)
    needed = np.zeros(len(pack.parents))
    ends = [(node, whole if count is None else count) for (node, _), count in zip(pack.reads, through, strict=True)]
    for node, most in [*ends, *((node, whole) for node in pack.kept_nodes)]:
        step = node
        while step >= 0 and needed[step] < most:
            needed[step] = most
            step = pack.parents[step]
    return needed


def remaining_work(pack: Pack, through: Sequence[int | None], layers: int) -> float:
    """The part of a pack's work that exits leave, between 0 and 1. Arguments as in `layers_needed`."""
    needed = layers_needed(pack, through, layers) * np.diff(pack.offsets)
    return float(needed.sum() / (in_full(layers) * len(pack.tokens)))


def carried_by_few(pack: Pack, through: Sequence[int | None], layers: int) -> dict[str, int]:
    """By how few rows shared nodes were kept alive: layers of a token, by the rows that were left behind the node.

    Counted are whole layers of nodes that several rows share, while some of these have left. Nodes that later packs
    hold are not, because they go on for others. Arguments as in `layers_needed`.
    """
    alive = np.zeros((len(pack.parents), layers - 1), dtype=np.int64)  # rows behind a node at each layer
    rows = np.zeros(len(pack.parents), dtype=np.int64)
    for (node, prompts), count in zip(pack.reads, through, strict=True):
        alive[node, :count] += len(prompts)
        rows[node] += len(prompts)
    for node in range(len(pack.parents) - 1, -1, -1):
        if pack.parents[node] >= 0:
            alive[pack.parents[node]] += alive[node]
            rows[pack.parents[node]] += rows[node]
    for node in pack.kept_nodes:
        while node >= 0:
            alive[node] = 0
            node = pack.parents[node]
    tokens = np.broadcast_to(np.diff(pack.offsets)[:, None], alive.shape)
    fewer = (alive > 0) & (alive < rows[:, None])
    bucket = np.searchsorted(LIVE_ROWS, alive[fewer])
    sums = np.bincount(bucket, weights=tokens[fewer], minlength=len(LIVE_ROWS) + 1)
    least = [1, *(most + 1 for most in LIVE_ROWS[:-1])]
    names = [str(a) if a == b else f"{a}-{b}" for a, b in zip(least, LIVE_ROWS, strict=True)]
    return dict(zip([*names, f">{LIVE_ROWS[-1]}"], sums.astype(int).tolist(), strict=True))
