"""What can be chosen about compression."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Reduce = Literal["rank", "mean", "max"]

PAPER: dict[str, Any] = {
    "lookahead": 8,
    "query_window": 0,
    "query_reduce": "mean",
    "pool": 13,
    "select_chunk": 32,
    "keep_private": False,
}
"""SpecPrefill's own setting, of its published code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compression:
    """How prompts are compressed. docs/compression.md says why the defaults are what they are."""

    lookahead: int = 8
    """The prompt's last token asks, and `lookahead - 1` tokens that the draft decodes greedily behind it."""
    query_window: int = 8
    """The last so many tokens of the prompt ask too."""
    query_reduce: Reduce = "rank"
    """How the votes of the queries become one: see `importance`."""
    pool: int = 13
    """Odd number of tokens over which importance is averaged; 1 for none."""
    select_chunk: int = 16
    """Tokens that are kept or dropped together; 1 for each by itself."""
    compress_above: int | Literal["auto"] = "auto"
    """Prompts of at most so many tokens are read in full; auto: those that the cost model sees no gain in."""
    keep_first: int = 4
    """Tokens at the start that are always kept: attention sinks."""
    keep_last: int = 64
    """Tokens at the end that are always kept: the question."""
    keep_private: bool = True
    """Keep all that a prompt has behind the prefix it shares, unless that is more than `keep` leaves of the prompt."""
    per_row: bool = False
    """Select for every row by itself, as in the paper, instead of once for a shared prefix."""

    @property
    def window(self) -> int:
        """Tokens at the prompt's end that ask."""
        return max(self.query_window, 1)

    @property
    def decoded(self) -> int:
        """Tokens decoded behind the prompt that ask."""
        return self.lookahead - 1

    @property
    def queries(self) -> int:
        """Queries of one prompt."""
        return self.window + self.decoded

    @property
    def tail(self) -> int:
        """Tokens at the end that are always kept: the question, and all of the prompt that asks."""
        return max(self.keep_last, self.window)
