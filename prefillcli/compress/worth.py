"""Which prompts compression pays for: those with enough tokens, or those for which the cost model predicts a gain."""

from __future__ import annotations

from functools import lru_cache
from math import ceil
from typing import Any

from prefillcli.compress.settings import Compression
from prefillcli.models.flops import prefill_flops, thinned_flops
from prefillcli.models.shape import NoCostModel

OVERHEAD = 0.05
"""Share of the model's operations in full that picking and gathering tokens takes: up to 0.03 in docs/benchmarks.md,
0.03 to 0.30 in the paper, on unified memory."""
UNKNOWN_ABOVE = 8192
"""Where the cost model does not know an architecture, compression is taken to pay above so many tokens."""


class WorthCompressing:
    """Whether compressing a prompt pays.

    `target` and `draft` are text configurations of transformers. Without a target `compress_above` must be a number;
    without a draft no model picks the tokens, unless the target does so itself after `own_layers` of its layers.
    """

    def __init__(
        self, compression: Compression, target: Any = None, draft: Any = None, *, own_layers: int | None = None
    ) -> None:
        self._compression = compression
        self._own_layers = own_layers
        self._target = target
        self._draft = draft
        self._speedup = lru_cache(maxsize=1 << 16)(self._predict)

    def __call__(self, tokens: int, keep: float) -> bool:
        """Whether a prompt of `tokens` is to be compressed to the rate `keep`."""
        above = self._compression.compress_above
        if above != "auto":
            return tokens > above
        speedup = self.speedup(tokens, keep)
        return tokens > UNKNOWN_ABOVE if speedup is None else speedup > 1

    def speedup(self, tokens: int, keep: float) -> float | None:
        """The predicted speedup, for a prompt by itself: 1 / (r + k + overhead).

        r: the draft's operations, decoding included, over the model's in full. k: the model's operations over what is
        kept, ends included, over those in full. A target that picks itself reads the whole prompt in its first layers:
        r is 0, and k counts them. None where the cost model does not know an architecture.
        """
        return self._speedup(tokens, keep)

    def why_not(self, tokens: int, keep: float) -> str:
        """Why compressing a prompt does not pay, as the end of a sentence about its tokens."""
        above = self._compression.compress_above
        if above != "auto":
            return f"are not more than --compress-above {above:,}"
        speedup = self.speedup(tokens, keep)
        if speedup is None:
            return f"are not more than {UNKNOWN_ABOVE:,}, and the cost model does not know this architecture"
        return f"would be read at {speedup:.2f} times the speed with this draft, which does not pay"

    def _predict(self, tokens: int, keep: float) -> float | None:
        how = self._compression
        kept = min(tokens, ceil(keep * tokens) + how.keep_first + how.tail)
        try:
            full = prefill_flops(self._target, tokens).total
            draft = 0.0
            if self._draft is not None:
                draft = prefill_flops(self._draft, tokens + how.decoded, head_tokens=how.decoded).total
            if self._own_layers is None:
                sparse = prefill_flops(self._target, kept).total
            else:
                sparse = thinned_flops(self._target, tokens, kept, self._own_layers).total
        except NoCostModel:
            return None
        return 1 / (draft / full + sparse / full + OVERHEAD)
