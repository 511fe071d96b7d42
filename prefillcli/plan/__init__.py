"""Order and packing: from the prompts of a window to the packs that the engine walks.

The orders are here, one row each. Jobs take the first, and no order computes less; `python -m benchmarks.details
schedules` compares the others with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple


class WaitingPrompts(NamedTuple):
    """Equal prompts, which are computed together: the number of the first one, and their tokens."""

    came: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """An order by name: docs/benchmarks.md compares them.

    Prompts are taken by `key`, the smallest first; those with equal keys, or all without a key, depth first through
    the forest. With `calibrated` the next one is chosen anew each time, by algorithm 1 of PrefillOnly.
    """

    name: str
    key: Callable[[WaitingPrompts], Any] | None = None
    calibrated: bool = False


SCHEDULES: dict[str, Schedule] = {
    schedule.name: schedule
    for schedule in (
        Schedule("prefix-tree"),
        Schedule("fifo", key=lambda job: job.came),
        Schedule("srjf", key=lambda job: (job.tokens, job.came)),
        Schedule("srjf-calibrated", key=lambda job: job.came, calibrated=True),  # of equal ones the first
    )
}
