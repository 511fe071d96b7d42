"""SpecPrefill: the tokens that a draft model finds important."""

from __future__ import annotations

from collections.abc import Sequence

from prefillcli.compress.base import Estimator, ImportanceEstimate, Tick
from prefillcli.compress.selection import select_all
from prefillcli.compress.settings import Compression
from prefillcli.data.rows import Int64Array, Prompt


class SpecPrefill:
    """Prompts that share a prefix keep the same tokens of it, so that it is still computed once."""

    method = "specprefill"

    def __init__(self, draft: Estimator) -> None:
        self._draft = draft

    @property
    def tokens(self) -> int:
        return self._draft.tokens

    @property
    def failure(self) -> BaseException | None:
        return self._draft.failure

    def estimate(self, prompts: Sequence[Prompt], tick: Tick) -> list[ImportanceEstimate]:
        return self._draft.estimate([prompt.tokens for prompt in prompts], tick)

    def select(
        self,
        prompts: Sequence[Prompt],
        estimates: Sequence[ImportanceEstimate],
        keeps: Sequence[float | None],
        settings: Compression,
    ) -> list[Int64Array | None]:
        tokens, importances = [prompt.tokens for prompt in prompts], [found.importance for found in estimates]
        return select_all(tokens, importances, keeps, settings)

    def close(self) -> None:
        self._draft.close()
