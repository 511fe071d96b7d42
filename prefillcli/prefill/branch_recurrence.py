"""Recurrent modules over new tokens of several branches, in decoding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers.cache_utils import LinearAttentionLayer

from prefillcli.prefill.recurrent import ModuleCall, recurrent_modules
from prefillcli.prefill.recurrent_states import pick_states, stack_states


class BranchRecurrence:
    """The recurrent modules of one layer over new tokens of several branches.

    `ends` are the states behind each branch so far, one of each module. They stay as they are.
    """

    def __init__(self, ends: Sequence[Sequence[LinearAttentionLayer]]) -> None:
        self._branches = len(ends)
        self._states = [stack_states(own) for own in zip(*ends, strict=True)]

    def __bool__(self) -> bool:
        """Whether the layer has recurrent modules."""
        return bool(self._states)

    def keep(self, branches: Sequence[int]) -> None:
        """Go on with these branches alone, under new numbers: 0, 1, 2 ..."""
        self._branches = len(branches)
        self._states = [pick_states(state, branches) for state in self._states]

    @contextmanager
    def calls(self, layer: nn.Module, branches: Sequence[int], counts: Sequence[int]) -> Iterator[None]:
        """In this context the layer computes so many tokens of each of some branches, one branch after the other."""
        modules = (
            recurrent_modules(layer) if self._states else []
        )  # weights that are streamed come back in other modules
        for at, module in enumerate(modules):
            forward = module.forward
            module.forward = lambda *a, _m=module, _f=forward, _at=at, **k: self._call(
                ModuleCall(_m, _f, a, k, sum(counts)), _at, branches, counts
            )
        try:
            yield
        finally:
            for module in modules:
                del module.forward

    def _call(self, call: ModuleCall, at: int, branches: Sequence[int], counts: Sequence[int]) -> Any:
        """A module's output for these tokens, [1, tokens, width]; its states move on."""
        if max(counts) == 1 and list(branches) == list(range(self._branches)):
            call.compute_steps(self._states[at])
            return call.output
        states = [pick_states(self._states[at], [branch]) for branch in range(self._branches)]
        start = 0
        for branch, count in zip(branches, counts, strict=True):
            call.compute(slice(start, start + count), states[branch])
            start += count
        self._states[at] = stack_states(states)
        return call.output
