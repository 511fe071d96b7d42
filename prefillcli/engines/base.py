"""What a job asks of an engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from prefillcli.plan.pack import Limits, Pack

#: For each label the token ids whose probabilities it sums.
LabelTokens = tuple[tuple[int, ...], ...]


class Engine(Protocol):
    """Answers packs, one after the other, in the order of a plan."""

    limits: Limits

    def answer(
        self, pack: Pack, labels: Callable[[int], LabelTokens], tick: Callable[[float], None]
    ) -> dict[int, npt.NDArray[np.float64]]:
        """For each prompt of `pack` the log-probability of each label over the whole vocabulary.

        `labels` gives a prompt's label tokens. `tick` is called with the tokens each step advanced by (they add up
        to the pack's) and may raise to stop.
        """

    def close(self) -> None:
        """Let go of memory."""
