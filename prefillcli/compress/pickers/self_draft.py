"""The model's own first layers: what they attend to goes on to the others."""

from __future__ import annotations

from collections.abc import Sequence

from prefillcli.compress.base import ImportanceEstimate, Tick
from prefillcli.compress.request import Thinning
from prefillcli.compress.selection import tails
from prefillcli.compress.settings import Compression
from prefillcli.data.rows import Prompt


class SelfDraft:
    """Leaves the choice to the model, which makes it after `layer` (`compress.self_draft`). Estimates are empty."""

    method = "self-draft"
    tokens = 0
    failure: BaseException | None = None

    def __init__(self, layer: int) -> None:
        self.layer = layer

    def estimate(self, prompts: Sequence[Prompt], tick: Tick) -> list[ImportanceEstimate]:
        return [ImportanceEstimate() for _ in prompts]

    def select(
        self,
        prompts: Sequence[Prompt],
        estimates: Sequence[ImportanceEstimate],
        keeps: Sequence[float | None],
        settings: Compression,
    ) -> list[Thinning | None]:
        lasts = tails([prompt.tokens for prompt in prompts], keeps, settings) if any(keeps) else [0] * len(prompts)
        return [
            None if keep is None else Thinning(self.layer, keep, last, settings)
            for keep, last in zip(keeps, lasts, strict=True)
        ]

    def close(self) -> None:
        pass
