"""Picking tokens of each prompt by itself, without a model."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from prefillcli.compress.base import Float32Array, ImportanceEstimate, Tick
from prefillcli.compress.selection import budget, ends, tails
from prefillcli.compress.settings import Compression
from prefillcli.data.rows import Int64Array, Prompt


class RowPicker(ABC):
    """Keeps the first and last tokens that SpecPrefill always keeps, and of the others `ceil(keep * others)`.

    That is as much as SpecPrefill keeps if what it always keeps is chosen as often as anything else. A prefix that
    prompts share is not the same for all of them any more.
    """

    method: str
    tokens = 0
    failure: BaseException | None = None

    @abstractmethod
    def rank(self, prompt: Prompt) -> Float32Array | None:
        """The importance of a prompt's tokens, float32 [tokens]; None for a prompt that it cannot judge."""

    def order(self, importance: Float32Array, first: int, last: int) -> Int64Array:
        """The tokens in the order in which they are kept; `first` and `last` tokens are kept anyway."""
        return by_importance(importance)

    def estimate(self, prompts: Sequence[Prompt], tick: Tick) -> list[ImportanceEstimate]:
        found = []
        for prompt in prompts:
            begun = time.monotonic()
            importance = self.rank(prompt)
            found.append(ImportanceEstimate(importance, seconds=time.monotonic() - begun))
            tick(len(prompt.tokens))
        return found

    def select(
        self,
        prompts: Sequence[Prompt],
        estimates: Sequence[ImportanceEstimate],
        keeps: Sequence[float | None],
        settings: Compression,
    ) -> list[Int64Array | None]:
        lasts = tails([prompt.tokens for prompt in prompts], keeps, settings)
        kept: list[Int64Array | None] = []
        for estimate, keep, last in zip(estimates, keeps, lasts, strict=True):
            if keep is None or estimate.importance is None:
                kept.append(None)
            else:
                order = self.order(estimate.importance, settings.keep_first, last)
                kept.append(fill(order, len(estimate.importance), keep, first=settings.keep_first, last=last))
        return kept

    def close(self) -> None:  # noqa: B027 - there is nothing to let go of
        pass


def by_importance(importance: Float32Array) -> Int64Array:
    """The tokens, the most important first and of equal ones the earlier; those of minus infinity are never kept."""
    order = np.argsort(-importance, kind="stable")
    return order[importance[order] > -np.inf]


def fill(order: Int64Array, tokens: int, keep: float, *, first: int, last: int) -> Int64Array:
    """Those of so many tokens that are kept, ascending: both ends, and of the others the first of `order`."""
    kept = ends(tokens, first, last)
    others = order[~kept[order]]
    kept[others[: budget(keep, len(others))]] = True
    return np.flatnonzero(kept)
