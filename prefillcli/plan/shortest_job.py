"""The shortest remaining job first: algorithm 1 of PrefillOnly, section 6."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

NumberArray = npt.NDArray[np.integer[Any]] | npt.NDArray[np.floating[Any]]

Completion = Callable[[NumberArray, NumberArray], NumberArray]
"""Completion times of prompts with so many (input tokens, cached tokens), in any unit."""


def missed_tokens(input_tokens: NumberArray, cached_tokens: NumberArray) -> NumberArray:
    """The paper's stand-in for completion times: tokens that are not in the prefix cache."""
    return input_tokens - cached_tokens


def shortest_job(
    input_tokens: NumberArray,
    cached_tokens: NumberArray,
    waited: NumberArray | float = 0.0,
    *,
    fairness: float = 0.0,
    completion: Completion = missed_tokens,
) -> int:
    """The number of the prompt to compute next: algorithm 1. Arrays have an entry for each waiting prompt, in order.

    `cached_tokens` are as of now for shortest remaining job first with continuous calibration, and as of each prompt's
    arrival without. Having waited for a time takes `fairness` (the paper's lambda) times as much off a prompt's
    completion time, in its unit. Of equal prompts the first is taken.
    """
    return int(np.argmin(completion(input_tokens, cached_tokens) - fairness * waited))
