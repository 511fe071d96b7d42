"""The prompts of a window, compressed: who is, by how much, and which tokens are left."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from prefillcli.compress.draft import Draft, Estimate
from prefillcli.compress.rates import keep_rates
from prefillcli.compress.request import FALLBACK, FULL, SPECPREFILL, Request
from prefillcli.compress.selection import select_all
from prefillcli.compress.settings import Compression
from prefillcli.compress.worth import Worth
from prefillcli.data.rows import Prompt


class Compressor:
    """Decides for every prompt of a window how the target reads it.

    `keep` is the job's rate. `target_window` is the target's sliding window: so many of the last tokens are always
    kept, so that its sliding layers see before the answer what they would have seen; `settings` take that in. `worth`
    tells which prompts compression pays for.
    """

    def __init__(
        self, draft: Draft, settings: Compression, *, keep: float, worth: Worth, target_window: int | None = None
    ) -> None:
        self.draft = draft
        self.keep = keep
        self.worth = worth
        self.settings = replace(settings, keep_last=max(settings.keep_last, target_window or 0))

    def compress(
        self, prompts: Sequence[Prompt], tick: Callable[[float], None] = lambda tokens: None
    ) -> list[Request]:
        """One request for each prompt, in their order."""
        keeps = self.keeps(prompts)
        return self.select(prompts, keeps, self.estimate(prompts, keeps, tick))

    def keeps(self, prompts: Sequence[Prompt], keep: float | None = None) -> list[float | None]:
        """The keep rate of each prompt; None for those to be read in full. `keep` stands in for the job's."""
        return keep_rates(prompts, self.keep if keep is None else keep, self.settings, self.worth)

    def estimate(
        self, prompts: Sequence[Prompt], keeps: Sequence[float | None], tick: Callable[[float], None]
    ) -> list[Estimate]:
        """The draft's estimates; empty ones for prompts without a keep rate."""
        wanted = [number for number, keep in enumerate(keeps) if keep is not None]
        estimates = [Estimate() for _ in prompts]
        found = self.draft.estimate([prompts[number].tokens for number in wanted], tick)
        for number, estimate in zip(wanted, found, strict=True):
            estimates[number] = estimate
        return estimates

    def select(
        self, prompts: Sequence[Prompt], keeps: Sequence[float | None], estimates: Sequence[Estimate]
    ) -> list[Request]:
        """What is kept of each prompt."""
        kept = select_all(
            [prompt.tokens for prompt in prompts], [found.importance for found in estimates], keeps, self.settings
        )
        requests = []
        for prompt, own, found in zip(prompts, kept, estimates, strict=True):
            method = FULL if found.reason is None else FALLBACK + found.reason
            if own is not None and len(own) < len(prompt.tokens):
                requests.append(Request(prompt, own, SPECPREFILL, found.seconds))
            else:
                requests.append(Request(prompt, None, method, found.seconds))
        return requests
