"""What can be chosen about compression."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Compression:
    """How prompts are compressed. The defaults are the paper's, with a threshold and ends that are always kept."""

    lookahead: int = 8
    """Queries: the prompt's last token and `lookahead - 1` greedily decoded ones."""
    query_window: int = 0
    """If not 0: the queries are the last so many tokens of the prompt instead, and nothing is decoded."""
    query_reduce: Literal["mean", "max"] = "mean"
    pool: int = 13
    """Odd number of tokens over which importance is averaged; 1 for none."""
    select_chunk: int = 32
    """Tokens that are kept or dropped together; 1 for each by itself."""
    compress_above: int = 8192
    """Prompts of at most so many tokens are read in full."""
    keep_first: int = 4
    """Tokens at the start that are always kept: attention sinks."""
    keep_last: int = 64
    """Tokens at the end that are always kept: the question."""
    per_row: bool = False
    """Select for every row by itself, as in the paper, instead of once for a shared prefix."""

    @property
    def queries(self) -> int:
        """Queries of one prompt."""
        return self.query_window or self.lookahead

    @property
    def tail(self) -> int:
        """Tokens at the end that are always kept: the question, whatever asks, and the last one, which is answered."""
        return max(self.keep_last, self.query_window, 1)

    @property
    def decodes(self) -> bool:
        return not self.query_window and self.lookahead > 1
