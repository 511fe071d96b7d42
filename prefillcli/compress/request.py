"""How the target reads a prompt: in full, or some of its tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from prefillcli.compress.selection import IntArray
from prefillcli.data.rows import Int32Array, Prompt

FULL, SPECPREFILL, FALLBACK = "full", "specprefill", "fallback:"
FAILED, NOT_FINITE = "draft_error", "draft_not_finite"
"""Reasons that speak against the draft; the others are of a prompt that is not for it."""
MANY = 32
"""Rows that show, without one that was compressed, that the draft is of no use."""


def rows_failed(methods: Mapping[str, int]) -> int:
    """Rows on which the draft has failed, if it has compressed none; else 0. `methods`: rows by method."""
    if methods.get(SPECPREFILL):
        return 0
    return sum(methods.get(FALLBACK + reason, 0) for reason in (FAILED, NOT_FINITE))


def useless_fallbacks(methods: Mapping[str, int]) -> dict[str, int]:
    """Rows by fallback where no row was compressed: the draft has failed, or `MANY` prompts were not for it."""
    fallbacks = {method: rows for method, rows in sorted(methods.items()) if method.startswith(FALLBACK)}
    useless = rows_failed(methods) or (not methods.get(SPECPREFILL) and sum(fallbacks.values()) >= MANY)
    return fallbacks if useless else {}


@dataclass(frozen=True, slots=True)
class Request:
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
