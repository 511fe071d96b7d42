"""The prompts of a window, compressed: which ones, to which rate, and which of their tokens are kept."""

from __future__ import annotations

from collections.abc import Sequence

from prefillcli.compress.base import ImportanceEstimate, Picker, Tick
from prefillcli.compress.fallbacks import FALLBACK
from prefillcli.compress.rates import keep_rates
from prefillcli.compress.request import Request, Thinning
from prefillcli.compress.settings import Compression
from prefillcli.compress.worth import WorthCompressing
from prefillcli.data.rows import FULL, Prompt


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
