"""How the target reads a prompt: in full, or some of its tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from prefillcli.compress.selection import IntArray
from prefillcli.data.rows import Int32Array, Prompt

FULL, SPECPREFILL, FALLBACK = "full", "specprefill", "fallback:"


@dataclass(frozen=True, slots=True)
class Reading:
    """How the target reads a prompt.

    `kept` are the indices of the tokens it reads, ascending, which are their positions too; None: all of them.
    `method` is what the output says: `full`, `specprefill`, or `fallback:` with a reason of `draft.FALLBACKS`.
    """

    prompt: Prompt
    kept: IntArray | None = None
    method: str = FULL
    draft_seconds: float = 0.0

    @property
    def tokens(self) -> Int32Array:
        return self.prompt.tokens if self.kept is None else self.prompt.tokens[self.kept]

    @property
    def positions(self) -> Int32Array | None:
        return None if self.kept is None else self.kept.astype(np.int32)
