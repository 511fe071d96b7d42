"""What is computed of a pack, and what that is charged to.

Reads may leave between two layers. What is computed then is known twice: as a walk has counted it, and by the formula.
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


# What a pack's tokens are charged to: every computed token to one prompt, its time to all that share it.


@dataclass(frozen=True, slots=True)
class Account:
    """A prompt's part of a pack.

    `shared_tokens` of its tokens were computed once for several prompts. `computed_tokens` add up to the pack's and
    its `charged_tokens`: a shared token is counted with the first prompt that reads it. `share` is the prompt's part
    of the pack's time (adds up to 1), a shared token's cost divided among its prompts. `skipped` are the layers of a
    token that exits have spared, counted like `computed_tokens`; K,V that were computed twice are taken off, so a pack
    where hardly any read has left may have spared less than nothing.
    """

    prompt: int
    shared_tokens: int
    computed_tokens: int
    share: float
    skipped: float = 0.0


def account(pack: Pack, done: LayersDone | None = None) -> list[Account]:
    """One account for each prompt answered in `pack`. `done` says which layers of it were computed, by default all."""
    below = [0] * len(pack.parents)
    for node, prompts in pack.reads:
        below[node] += len(prompts)
    for node in range(len(below) - 1, -1, -1):
        if pack.parents[node] >= 0:
            below[pack.parents[node]] += below[node]
    lengths = [b - a for a, b in zip(pack.offsets[:-1], pack.offsets[1:], strict=True)]
    work, spared = _work(done, lengths)
    further = pack.kept_nodes  # later packs' prompts share them too
    shared = [0] * len(below)  # tokens from the root to the node that several prompts share
    fair = [0.0] * len(below)
    for node, parent in enumerate(pack.parents):
        held = sum(pack.held[number].length for number in pack.attach[node])
        inherited = (shared[parent], fair[parent]) if parent >= 0 else (held, 0.0)
        shared[node] = inherited[0] + (lengths[node] if below[node] > 1 or node in further else 0)
        fair[node] = inherited[1] + work[node] / max(below[node], 1)
    charged: set[int] = set()
    charged_above: set[int] = set()  # held nodes
    accounts = []
    for node, prompts in pack.reads:
        for prompt in prompts:
            computed, skipped = 0, 0.0
            step = node
            while step >= 0 and step not in charged:
                charged.add(step)
                computed += lengths[step]
                skipped += spared[step]
                if pack.parents[step] < 0:
                    above = [number for number in pack.attach[step] if pack.held[number].charged]
                    computed += sum(pack.held[number].length for number in above if number not in charged_above)
                    charged_above.update(above)
                step = pack.parents[step]
            accounts.append(Account(prompt, shared[node], computed, fair[node], skipped))
    return accounts


def _work(done: LayersDone | None, lengths: list[int]) -> tuple[list[float], list[float]]:
    """Each node's part of the pack's work, and the layers of a token that were spared of it."""
    tokens = np.asarray(lengths, dtype=np.float64)
    if done is None:
        return (tokens / tokens.sum()).tolist(), [0.0] * len(lengths)
    work = tokens * done.work
    return (work / work.sum()).tolist(), (tokens * in_full(done.layers) - work).tolist()
