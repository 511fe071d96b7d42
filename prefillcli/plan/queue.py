"""The prompts that wait to be computed, and which of them a schedule takes next."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from prefillcli.plan.schedules import SCHEDULES, WaitingPrompts
from prefillcli.plan.trie import TrieNode

# The shortest remaining job first: algorithm 1 of PrefillOnly, section 6.


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


class Queue:
    """Ends of prompts in a forest, in the order of a schedule.

    Prompts that end at the same node are one job, which came with the first of them. All have come before the first is
    taken, so they have waited equally long and algorithm 1's lambda changes nothing here; its completion times
    are the tokens that are not at hand. With `groups`, which say the group of each prompt, a group's prompts are taken
    before those of the next. Raises ValueError for a schedule that is none.
    """

    def __init__(self, roots: Sequence[TrieNode], schedule: str, groups: Sequence[int] = ()) -> None:
        if schedule not in SCHEDULES:
            raise ValueError(f"{schedule!r} is not a schedule: there are {', '.join(SCHEDULES)}")
        by = SCHEDULES[schedule]
        self._calibrated = by.calibrated
        self._places: dict[int, tuple[int, int, int]] = {}  # id(node) -> number, first and last end below, depth first
        ends: list[TrieNode] = []
        stack = [(root, False) for root in reversed(roots)]
        while stack:
            node, below_done = stack.pop()
            if below_done:
                number, first, _ = self._places[id(node)]
                self._places[id(node)] = number, first, len(ends)
                continue
            self._places[id(node)] = len(self._places), len(ends), len(ends)
            if node.ending:
                ends.append(node)
            stack.append((node, True))
            stack.extend((child, False) for child in reversed(node.children))
        order = list(range(len(ends)))
        if (key := by.key) is not None:
            order.sort(key=lambda at: key(WaitingPrompts(min(ends[at].ending), ends[at].end)))
        if groups and (by.key is not None or by.calibrated):
            order.sort(key=lambda at: groups[ends[at].prompt])
        self._jobs: list[TrieNode] = [ends[at] for at in order]
        self._job_of = np.argsort(np.asarray(order, dtype=np.int64))  # of each end, depth first
        self._input = np.asarray([node.end for node in self._jobs], dtype=np.float64)
        self._cached = np.zeros(len(ends))
        self._waiting = np.ones(len(ends), dtype=bool)  # ends, depth first
        self._left = len(ends)
        self._next = 0
        self._ends = [len(ends)]  # of the groups among the jobs
        if groups and by.calibrated:
            numbers = [groups[job.prompt] for job in self._jobs]
            self._ends = [at for at in range(1, len(ends)) if numbers[at] != numbers[at - 1]] + [len(ends)]

    def __bool__(self) -> bool:
        return self._left > 0

    def number(self, node: TrieNode) -> int:
        """The node's number in depth-first order."""
        return self._places[id(node)][0]

    def awaits(self, node: TrieNode) -> bool:
        """Whether a prompt waits that begins with this node."""
        _, first, last = self._places[id(node)]
        return bool(self._waiting[first:last].any())

    def next(self) -> TrieNode:
        """The end of the prompts to compute next."""
        if self._calibrated:
            taken, first = len(self._jobs) - self._left, 0
            for end in self._ends:
                if taken < end:
                    break
                first = end
            self._next = first + shortest_job(self._input[first:end], self._cached[first:end])
        return self._jobs[self._next]

    def take(self) -> None:
        """The prompts that are next do not wait any more."""
        self._waiting[self._places[id(self._jobs[self._next])][1]] = False
        self._left -= 1
        if self._calibrated:
            self._input[self._next] = np.inf
        else:
            self._next += 1

    def computed(self, nodes: Iterable[TrieNode]) -> None:
        """These nodes, parents first, are computed in the pack that is being filled."""
        if self._calibrated:
            for node in nodes:
                _, first, last = self._places[id(node)]
                self._cached[self._job_of[first:last]] = node.end

    def held(self, nodes: Iterable[TrieNode]) -> None:
        """A new pack begins, with the K,V of these nodes at hand. A prompt that ends at one computes it again."""
        if self._calibrated:
            self._cached[:] = 0
            for node in sorted(nodes, key=lambda node: node.start):
                _, first, last = self._places[id(node)]
                self._cached[self._job_of[first + bool(node.ending) : last]] = node.end
