"""Recurrent modules over the newest token of each of several branches, in decoding."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers.cache_utils import LinearAttentionLayer

from prefillcli.prefill.recurrent import ModuleCall, recurrent_modules, stack_states


class BranchRecurrence:
    """The recurrent modules of one layer over the newest token of each of several branches.

    `ends` are the states behind each branch so far, one of each module. They stay as they are.
    """

    def __init__(self, ends: Sequence[Sequence[LinearAttentionLayer]]) -> None:
        self._branches = len(ends)
        self._states = [stack_states(own) for own in zip(*ends, strict=True)]

    @contextmanager
    def calls(self, layer: nn.Module) -> Iterator[None]:
        """The layer computes one more token of each branch in this context."""
        modules = recurrent_modules(layer)  # weights that are streamed come back in other modules
        for module, state in zip(modules, self._states, strict=True):
            forward = module.forward
            module.forward = lambda *a, _m=module, _f=forward, _s=state, **k: self._call(_m, _f, _s, a, k)
        try:
            yield
        finally:
            for module in modules:
                del module.forward

    def _call(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        state: LinearAttentionLayer,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """A module's output for the newest tokens, [1, branches, width]; its states move on."""
        call = ModuleCall(module, forward, args, kwargs, self._branches)
        call.compute_steps(state)
        return call.output
