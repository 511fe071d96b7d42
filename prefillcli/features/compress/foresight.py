"""How prompts would be compressed, for forecasts: no draft is asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from prefillcli.core.feature import Foresight
from prefillcli.core.request import Request
from prefillcli.data.rows import Prompt
from prefillcli.features.compress.compressor import keep_rates
from prefillcli.features.compress.load import own_layers, plan_draft, translator_of, worth_of
from prefillcli.features.compress.selection import select_all
from prefillcli.features.compress.settings import compression_of
from prefillcli.models.open import Opened
from prefillcli.models.shape import Shape
from prefillcli.plan.pack import Limits

KEEP_RATES = (1.0, 0.5, 0.3, 0.2, 0.1)


class KeptTokens(Foresight):
    """The requests of prompts as if the draft found the first chunks of each the most important.

    Raises UsageError and ResourceError as loading would.
    """

    def __init__(self, settings: Any, opened: Opened, budget: int) -> None:
        compression, shape = compression_of(settings), Shape(opened.files.config)
        own = settings.drafts_itself
        self.chosen = settings.keep if isinstance(settings.keep, float) else None
        self.rates = sorted({*KEEP_RATES, self.chosen or 1.0}, reverse=True)
        self._own_layers = own_layers(compression, opened) if own else 0
        self._depth = self._own_layers / shape.layers
        self._worth = worth_of(compression, opened, own=own)
        self._compression = compression.for_target(shape.sliding_window)
        self._translator = translator_of(opened)
        self._reach = opened.max_length
        """Tokens of the longest prompt that the draft can read."""
        self._drafted: tuple[Sequence[Prompt], list[int | None]] = ((), [])
        if opened.draft is not None:
            limits = Limits(**plan_draft(opened, compression, budget, settings.chunk_tokens, {})["limits"])
            fits = limits.max_tokens if limits.read_tokens is None else min(limits.max_tokens, limits.read_tokens)
            self._reach = min(opened.draft.max_length - compression.decoded, fits)

    def requests(self, prompts: Sequence[Prompt], rate: float) -> list[Request]:
        rates = keep_rates(prompts, rate, self._compression, self._worth)
        if self._own_layers:
            from prefillcli.features.compress.self_draft import SelfDraft  # takes torch along

            chosen = SelfDraft(self._own_layers - 1).select(prompts, [], rates, self._compression)
            return [Request(prompt, thinning=own) for prompt, own in zip(prompts, chosen, strict=True)]
        longest = max((len(prompt.tokens) for prompt in prompts), default=0)
        equal = np.zeros(longest, dtype=np.float32)  # of equally important chunks the first are kept
        importances = [
            equal[: len(prompt.tokens)] if own is not None and length is not None and length <= self._reach else None
            for prompt, own, length in zip(prompts, rates, self._draft_lengths(prompts), strict=True)
        ]
        kept = select_all([prompt.tokens for prompt in prompts], importances, rates, self._compression)
        return [
            Request(prompt) if own is None or len(own) == len(prompt.tokens) else Request(prompt, own)
            for prompt, own in zip(prompts, kept, strict=True)
        ]

    def layers(self, requests: Sequence[Request]) -> float:
        whole = sum(len(request.tokens) for request in requests)
        if not self._own_layers or not whole:
            return 1.0
        return self._depth + (1 - self._depth) * sum(request.most_kept for request in requests) / whole

    def _draft_lengths(self, prompts: Sequence[Prompt]) -> list[int | None]:
        """How many tokens each prompt has for the draft; None for one that it cannot read. Asked of the same prompts
        for one rate after the other."""
        if self._translator is None:
            return [len(prompt.tokens) for prompt in prompts]
        if self._drafted[0] is not prompts:
            self._drafted = prompts, self._translator.lengths([prompt.tokens for prompt in prompts])
        return self._drafted[1]
