"""What reads that leave between two layers save: counted by a walk, and by the formula."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prefillcli.plan.pack import Pack

KEYS_SHARE = 0.125  # of a layer, for K,V alone


@dataclass(slots=True)
class LayersDone:
    """How many layers each node of a pack went through, int64 [nodes].

    `full` are whole layers; of `keys` only K,V were computed: the last layer, and those that were peeked at.
    `regroupings` counts how often the rest of the pack was laid out anew.
    """

    full: npt.NDArray[np.int64]
    keys: npt.NDArray[np.int64]
    regroupings: int = 0

    @classmethod
    def none(cls, pack: Pack) -> LayersDone:
        """Nothing of `pack` is computed yet."""
        nodes = len(pack.parents)
        return cls(np.zeros(nodes, dtype=np.int64), np.zeros(nodes, dtype=np.int64))
