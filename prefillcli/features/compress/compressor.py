"""The prompts of a window, compressed: which ones, to which rate, and which of their tokens are kept."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import ceil
from typing import Any

from prefillcli.core.request import Request, Thinning, Tick
from prefillcli.data.rows import FALLBACK, FULL, Prompt, is_fallback
from prefillcli.features.compress.base import FALLBACKS, ImportanceEstimate, Picker
from prefillcli.features.compress.selection import full_prefixes
from prefillcli.features.compress.settings import Compression
from prefillcli.models.shape import NoCostModel, prefill_flops, thinned_flops

# Which prompts compression pays for: those with enough tokens, or those for which the cost model predicts a gain.


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


# Which prompts are compressed, and by how much.


def keep_rates(
    prompts: Sequence[Prompt], keep: float, settings: Compression, worth: WorthCompressing
) -> list[float | None]:
    """The keep rate of each prompt; None for those to be read in full. `keep` is the job's rate.

    A row's own `keep` and `specprefill` come first. A prompt is also read in full if a prefix of it is computed in
    full anyway and compressing the rest does not pay.
    """
    keeps: list[float | None] = []
    ends = settings.keep_first + settings.tail  # a shorter prompt has nothing to drop
    for prompt in prompts:
        own = prompt.keep if prompt.keep is not None else keep
        compressed = own < 1 and prompt.specprefill is not False and len(prompt.tokens) > ends
        keeps.append(own if compressed else None)
    tokens = [prompt.tokens for prompt in prompts]
    while any(own is not None for own in keeps):
        in_full = [own is None for own in keeps]
        reach = [0] * len(prompts) if settings.per_row else full_prefixes(tokens, in_full)
        short = [
            number
            for number, (prompt, own) in enumerate(zip(prompts, keeps, strict=True))
            if own is not None and prompt.specprefill is None and not worth(len(prompt.tokens) - reach[number], own)
        ]
        if not short:
            break
        for number in short:
            keeps[number] = None
    return keeps


class Compressor:
    """Decides for every prompt of a window how the target reads it.

    `picker` picks the tokens. `keep` is the job's rate, and `worth` says which prompts compression pays for.
    `target_window` is the target's sliding window, if it has one; `settings` take it into account.
    """

    def __init__(
        self,
        picker: Picker,
        settings: Compression,
        *,
        keep: float,
        worth: WorthCompressing,
        target_window: int | None = None,
    ) -> None:
        self.picker = picker
        self.keep = keep
        self.worth = worth
        self.settings = settings.for_target(target_window)

    def close(self) -> None:
        self.picker.close()

    def compress(self, prompts: Sequence[Prompt], tick: Tick = lambda tokens: None) -> list[Request]:
        """One request for each prompt, in their order."""
        keeps = self.keeps(prompts)
        return self.select(prompts, keeps, self.estimate(prompts, keeps, tick))

    def keeps(self, prompts: Sequence[Prompt], keep: float | None = None) -> list[float | None]:
        """The keep rate of each prompt; None for those to be read in full. `keep` stands in for the job's rate."""
        return keep_rates(prompts, self.keep if keep is None else keep, self.settings, self.worth)

    def estimate(
        self, prompts: Sequence[Prompt], keeps: Sequence[float | None], tick: Tick
    ) -> list[ImportanceEstimate]:
        """The picker's estimates; empty ones for prompts without a keep rate."""
        wanted = [number for number, keep in enumerate(keeps) if keep is not None]
        estimates = [ImportanceEstimate() for _ in prompts]
        found = self.picker.estimate([prompts[number] for number in wanted], tick)
        for number, estimate in zip(wanted, found, strict=True):
            estimates[number] = estimate
        return estimates

    def select(
        self, prompts: Sequence[Prompt], keeps: Sequence[float | None], estimates: Sequence[ImportanceEstimate]
    ) -> list[Request]:
        """How the target reads each prompt."""
        kept = self.picker.select(prompts, estimates, keeps, self.settings)
        requests = []
        for prompt, own, found in zip(prompts, kept, estimates, strict=True):
            if isinstance(own, Thinning):
                requests.append(Request(prompt, method=self.picker.method, thinning=own))
            elif own is not None and len(own) < len(prompt.tokens):
                requests.append(Request(prompt, own, self.picker.method, found.seconds))
            else:
                method = FULL if found.reason is None else FALLBACK + found.reason
                requests.append(Request(prompt, None, method, found.seconds))
        return requests


def why_no_rate(
    prompts: Sequence[Prompt],
    keeps: Sequence[float | None],
    number: int,
    keep: float,
    compression: Compression,
    worth: WorthCompressing,
) -> str:
    """Why prompt `number` has no keep rate in `keeps`, as `Compressor.keeps` decides. `keep` is the job's rate."""
    prompt = prompts[number]
    tokens, own = len(prompt.tokens), keep if prompt.keep is None else prompt.keep
    if prompt.specprefill is False:
        return "its column specprefill is false"
    if prompt.keep is not None and prompt.keep >= 1:
        return "its column keep is 1"
    if own >= 1:
        return "--keep is 1"
    if tokens <= compression.keep_first + compression.tail:
        return (
            f"of its {tokens:,} tokens the first {compression.keep_first:,} and last {compression.tail:,} stay anyway"
        )
    if not worth(tokens, own):
        return f"its {tokens:,} tokens {worth.why_not(tokens, own)}"
    in_full = [keep is None and other != number for other, keep in enumerate(keeps)]
    reach = full_prefixes([each.tokens for each in prompts], in_full)[number]
    return (
        f"other rows are read in full and compute its first {reach:,} tokens anyway; the {tokens - reach:,} behind "
        f"them {worth.why_not(tokens - reach, own)}"
    )


def why_in_full(request: Request) -> str | None:
    """Why a prompt that has a keep rate is read in full after all; None if it is compressed."""
    if request.compressed:
        return None
    if is_fallback(request.method):
        return f"{request.method}: {FALLBACKS[request.method.removeprefix(FALLBACK)].meaning}"
    return "the chosen tokens, the first and last ones and those that other rows keep are all tokens of it"
