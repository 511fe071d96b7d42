"""The settings of compression."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
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
"""The settings of SpecPrefill's published code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compression:
    """How prompts are compressed. docs/compression.md says why the defaults are what they are."""

    lookahead: int = 8
    """Queries are the prompt's last token and `lookahead - 1` tokens that the draft decodes greedily behind it."""
    query_window: int = 8
    """So many of the prompt's last tokens are queries too."""
    query_reduce: Reduce = "rank"
    """How the votes of the queries are combined: see `importance`."""
    pool: int = 13
    """Odd number of tokens over which importance is averaged; 1 for none."""
    select_chunk: int = 16
    """Tokens of a chunk, which are kept or dropped together."""
    compress_above: int | Literal["auto"] = "auto"
    """Prompts of at most so many tokens are read in full; auto: those for which the cost model predicts no gain."""
    keep_first: int = 4
    """Tokens at the start that are always kept: attention sinks."""
    keep_last: int = 64
    """Tokens at the end that are always kept: the question."""
    keep_private: bool = True
    """Keep all tokens behind the prefix that a prompt shares, unless they are more than its keep rate leaves of it."""
    per_row: bool = False
    """Select for each row by itself, as in the paper, not once for a shared prefix."""
    self_layer: int | None = None
    """Layers of a model that is its own draft which read whole prompts; None: by its depth."""

    @property
    def window(self) -> int:
        """The prompt's last tokens that are queries."""
        return max(self.query_window, 1)

    @property
    def decoded(self) -> int:
        """Tokens decoded behind the prompt that are queries."""
        return self.lookahead - 1

    @property
    def queries(self) -> int:
        """Queries of one prompt."""
        return self.window + self.decoded

    @property
    def tail(self) -> int:
        """Tokens at the end that are always kept: the question, and the prompt's queries."""
        return max(self.keep_last, self.window)

    def for_target(self, sliding_window: int | None) -> Compression:
        """These settings for a target with a sliding window of so many tokens, or with none.

        The last window of a prompt is always kept, so that the target's sliding layers see before the answer what
        they would have seen.
        """
        return replace(self, keep_last=max(self.keep_last, sliding_window or 0))


def compression_of(settings: Any) -> Compression:
    """The options of compression as the draft and the selection take them."""
    names = {"per_row": "compress_per_row"}
    found = Compression(
        **{each.name: getattr(settings, names.get(each.name, each.name)) for each in fields(Compression)}
    )
    if settings.drafts_itself:
        found = replace(found, lookahead=1)  # it decodes nothing
    return replace(found, **PAPER) if settings.paper else found


def keep_rate(settings: Any, plan: Mapping[str, Any]) -> float:
    """A job's keep rate: given or, by its plan, chosen; 1 until it is."""
    rate: float = plan.get("keep", 1.0 if settings.keep == "auto" else settings.keep)
    return rate
