"""Which tokens of a draft each token of the target overlaps, where the two have different tokenizers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from prefillcli.data.rows import Int32Array


@dataclass(frozen=True, slots=True)
class Overlap:
    """Token i of the target overlaps `width[i]` tokens of the draft, one or more, from `first[i]` on.

    int32 and uint8 [tokens].
    """

    first: Int32Array
    width: npt.NDArray[np.uint8]

    def spread(self, votes: Tensor) -> Tensor:
        """Votes on the target's tokens, [queries, tokens], from those on the draft's, [queries, draft tokens].

        A token has the largest vote on those that it overlaps.
        """
        first, width = (
            torch.as_tensor(each.astype(np.int64), device=votes.device) for each in (self.first, self.width)
        )
        found = votes[:, first]
        for step in range(1, int(self.width.max(initial=1))):
            wider = torch.nonzero(width > step)[:, 0]
            found[:, wider] = torch.maximum(found[:, wider], votes[:, first[wider] + step])
        return found
