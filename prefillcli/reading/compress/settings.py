"""The options of compression by command, the settings that follow from them, and the ways to pick tokens by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from prefillcli.options.reading import PAPER, CompressionOptions

Reduce = Literal["rank", "mean", "max"]
_USUAL = CompressionOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class Compression:
    """The settings of compression, by default those of the options. docs/compression.md gives the reasons."""

    # Queries are the prompt's last token and `lookahead - 1` tokens that the draft decodes greedily after it.
    lookahead: int = _USUAL.lookahead
    query_window: int = _USUAL.query_window  # this many of the prompt's last tokens are queries too
    query_reduce: Reduce = _USUAL.query_reduce  # the way to combine the queries' votes: see `importance`
    pool: int = _USUAL.pool  # odd number of tokens over which importance is averaged; 1 for none
    select_chunk: int = _USUAL.select_chunk  # tokens of a chunk, which are kept or dropped together
    # Prompts of at most this many tokens are read in full; auto: those for which the cost model predicts no gain.
    compress_above: int | Literal["auto"] = _USUAL.compress_above
    keep_first: int = _USUAL.keep_first  # tokens at the start that are always kept: attention sinks
    keep_last: int = _USUAL.keep_last  # tokens at the end that are always kept: the question
    # Keep all tokens after the prefix that a prompt shares, unless they are more than its keep rate allows.
    keep_private: bool = _USUAL.keep_private
    per_row: bool = (
        _USUAL.compress_per_row
    )  # select for each row separately, as in the paper, not once for a shared prefix
    # The number of layers that read whole prompts, in a model that is its own draft; None: by its depth.
    self_layer: int | None = _USUAL.self_layer

    @property
    def window(self) -> int:
        """The prompt's last tokens that are queries."""
        return max(self.query_window, 1)

    @property
    def decoded(self) -> int:
        """Tokens decoded after the prompt that are queries."""
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
        """Return these settings for a target with a sliding window of this many tokens, or with none.

        The last window of a prompt is always kept, so that the target's sliding layers see the same tokens before the
        answer as in the whole prompt.
        """
        return replace(self, keep_last=max(self.keep_last, sliding_window or 0))


def compression_of(options: CompressionOptions) -> Compression:
    """Return the options of compression, in the form for the draft and the selection."""
    names = {"per_row": "compress_per_row"}
    found = Compression(
        **{each.name: getattr(options, names.get(each.name, each.name)) for each in fields(Compression)}
    )
    if options.drafts_itself:
        found = replace(found, lookahead=1)  # it decodes nothing
    return replace(found, **PAPER) if options.paper else found


def keep_rate(options: CompressionOptions, plan: Mapping[str, Any]) -> float:
    """Return a job's keep rate: the given one or the one that its plan has chosen; 1 until then."""
    return float(plan.get("keep", 1.0 if options.keep == "auto" else options.keep))
