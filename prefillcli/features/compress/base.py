"""Why prompts that should be compressed are read in full."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from prefillcli.core.request import Thinning, Tick
from prefillcli.data.rows import FALLBACK, FULL, Int32Array, Int64Array, Prompt, is_fallback, reading_method
from prefillcli.features.compress.settings import Compression
from prefillcli.plan.trie import TokenArray

if TYPE_CHECKING:
    from torch import Tensor


NO_MEMORY, TOO_LONG, VOCABULARY = "draft_memory", "draft_length", "draft_vocabulary"
NO_VOTE, NOT_FINITE, FAILED = "draft_window", "draft_not_finite", "draft_error"
TEXT = "draft_text"

ENOUGH_ROWS = 32
"""Rows that show that a draft is of no use if it has compressed none of them."""


class Fallback(NamedTuple):
    """A reason: what it means, and whether it is a fault of the draft and not of the prompt."""

    meaning: str
    fault: bool = False


FALLBACKS = {
    NO_MEMORY: Fallback("the prompt does not fit the memory budget of the draft"),
    TOO_LONG: Fallback("the prompt is longer than the draft's position encoding reaches"),
    VOCABULARY: Fallback("the prompt has a token that the draft's vocabulary lacks"),
    TEXT: Fallback("the draft's own tokenizer has no tokens for the prompt's text, or for too much of it"),
    NO_VOTE: Fallback("no layer of the draft attends to the whole prompt"),
    NOT_FINITE: Fallback("the draft's attention is not finite", fault=True),
    FAILED: Fallback("the draft failed on the prompt's pack, for lack of memory for example", fault=True),
}
"""The reasons by name."""


def compressed_rows(methods: Mapping[str, int]) -> int:
    """Rows that were compressed, of the rows by method."""
    return sum(rows for method, rows in _readings(methods).items() if method != FULL and not is_fallback(method))


def faulty_rows(methods: Mapping[str, int]) -> int:
    """Rows on which the draft was at fault, if no row was compressed, else 0. `methods`: rows by method."""
    if compressed_rows(methods):
        return 0
    readings = _readings(methods)
    return sum(readings[FALLBACK + reason] for reason, row in FALLBACKS.items() if row.fault)


def fallbacks_of_useless_draft(methods: Mapping[str, int]) -> dict[str, int]:
    """Rows by fallback, if no row was compressed and there is a fault or `ENOUGH_ROWS` rows; else empty."""
    fallbacks = {method: rows for method, rows in sorted(_readings(methods).items()) if is_fallback(method)}
    if compressed_rows(methods):
        return {}
    return fallbacks if faulty_rows(methods) or sum(fallbacks.values()) >= ENOUGH_ROWS else {}


def _readings(methods: Mapping[str, int]) -> Counter[str]:
    """The rows by how they were read: whether a row left early says nothing of the draft."""
    readings: Counter[str] = Counter()
    for method, rows in methods.items():
        readings[reading_method(method)] += rows
    return readings


Float32Array = npt.NDArray[np.float32]


@dataclass(slots=True)
class ImportanceEstimate:
    """How important a picker finds the tokens of a prompt.

    `importance` is float32 [tokens], of any scale; the tokens with the largest are kept first. It is None for a prompt
    that is read in full. `reason`, one of `FALLBACKS`, says why if it should have been compressed.
    """

    importance: Float32Array | None = None
    reason: str | None = None
    seconds: float = 0.0
    """The prompt's share of the time that the estimates took."""
    voters: tuple[int, ...] = ()
    """The draft's layers that voted, by their numbers from 0."""


class Estimator(Protocol):
    """A draft model, or several at work in other processes."""

    @property
    def tokens(self) -> int:
        """Tokens computed so far."""

    @property
    def failure(self) -> BaseException | None:
        """What it failed with last."""

    def estimate(
        self, prompts: Sequence[TokenArray], tick: Tick, overlaps: Sequence[Overlap] | None = None
    ) -> list[ImportanceEstimate]:
        """One estimate for each prompt, int32 [tokens] each; with `overlaps` of the tokens of another tokenizer.

        A failure concerns the prompts that were computed together: they get it as their reason."""

    def close(self) -> None:
        """Let go of memory."""


class Picker(Protocol):
    """Picks which tokens of a prompt the target reads, in two steps: one estimate serves any number of keep rates."""

    @property
    def method(self) -> str:
        """Its name in the registry, which the output's column `method` has for the prompts that it compressed."""

    @property
    def tokens(self) -> int:
        """Tokens that models have computed for it so far."""

    @property
    def failure(self) -> BaseException | None:
        """What it failed with last."""

    def estimate(self, prompts: Sequence[Prompt], tick: Tick) -> list[ImportanceEstimate]:
        """One estimate for each prompt.

        `tick` is called with the tokens each step advanced by; it may raise to stop. What fails on a prompt becomes
        the reason of its estimate.
        """

    def select(
        self,
        prompts: Sequence[Prompt],
        estimates: Sequence[ImportanceEstimate],
        keeps: Sequence[float | None],
        settings: Compression,
    ) -> Sequence[Int64Array | Thinning | None]:
        """The kept tokens of prompts that are computed together: ascending indices, or None for a prompt in full; or
        how the target chooses them itself.

        A prompt is read in full without a keep rate in `keeps` and without importance in `estimates`. The first
        `settings.keep_first` tokens and the last ones that `tails` tells are always kept.
        """

    def close(self) -> None:
        """Let go of memory."""


# Which tokens of a draft each token of the target overlaps, where the two have different tokenizers.


@dataclass(frozen=True, slots=True)
class Overlap:
    """Token i of the target overlaps `width[i]` tokens of the draft, one or more, from `first[i]` on.

    int32 and uint8 [tokens].
    """

    first: Int32Array
    width: npt.NDArray[np.uint8]

    def spread(self, votes: Tensor) -> Tensor:
        """Votes on the target's tokens, [queries, tokens], from those on the draft's, [queries, draft tokens].

        A token has the largest vote on those that it overlaps.
        """
        import torch

        first, width = (
            torch.as_tensor(each.astype(np.int64), device=votes.device) for each in (self.first, self.width)
        )
        found = votes[:, first]
        for step in range(1, int(self.width.max(initial=1))):
            wider = torch.nonzero(width > step)[:, 0]
            found[:, wider] = torch.maximum(found[:, wider], votes[:, first[wider] + step])
        return found
