"""Residual streams of several lanes, kept as one wide row for each token.

Most models hand [1, tokens, hidden] from layer to layer. Some hand on several such streams, which their layers mix.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from torch import Tensor

from prefillcli.prefill.forest import UnsupportedModelError


@dataclass(frozen=True, slots=True)
class Lanes:
    """How a model's layers take the residual stream.

    `count` lanes come as [1, tokens, lanes, hidden], or with `first` as [lanes, 1, tokens, hidden]. With `count` 0
    there is one stream, [1, tokens, hidden].
    """

    count: int = 0
    first: bool = False

    @classmethod
    def of(cls, hidden: Tensor, tokens: int) -> Self:
        """Those of `hidden`, which a layer takes for so many tokens. Raises UnsupportedModelError."""
        shape = tuple(hidden.shape)
        if len(shape) == 3 and shape[:2] == (1, tokens):
            return cls()
        if len(shape) == 4 and shape[:2] == (1, tokens):
            return cls(shape[2])
        if len(shape) == 4 and shape[1:3] == (1, tokens):
            return cls(shape[0], first=True)
        raise UnsupportedModelError(f"the layers take {list(shape)} for {tokens} tokens, which the walk does not know")

    def fold(self, hidden: Tensor) -> Tensor:
        """One row for each token, [1, tokens, lanes * hidden], of what layers take."""
        if not self.count:
            return hidden
        return (hidden.permute(1, 2, 0, 3) if self.first else hidden).flatten(2)

    def unfold(self, rows: Tensor) -> Tensor:
        """What layers take, of rows [1, tokens, lanes * hidden]."""
        if not self.count:
            return rows
        lanes = rows.view(*rows.shape[:2], self.count, -1)
        return lanes.permute(2, 0, 1, 3).contiguous() if self.first else lanes
