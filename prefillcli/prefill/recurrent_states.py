"""States of recurrent modules, as transformers' caches hold them: copied, stacked to a batch, taken out of one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

MOST_STATES = 8  # that a module keeps under numbers of its own


def fork_state(state: LinearAttentionLayer) -> LinearAttentionLayer:
    """A copy of a state that can be changed."""
    return stack_states([state]) or state


def stack_states(states: Sequence[LinearAttentionLayer]) -> LinearAttentionLayer | None:
    """The states of several runs as those of one batch; None if there are none."""
    if not states:
        return None
    stacked = LinearAttentionLayer(number_of_states=MOST_STATES)
    first = states[0]
    stacked.dtype, stacked.device = first.dtype, first.device
    for name in ("is_conv_states_initialized", "is_recurrent_states_initialized", "has_previous_state"):
        setattr(stacked, name, dict(getattr(first, name)))
    stacked.conv_kernel_size = dict(first.conv_kernel_size)
    for kind in ("conv_states", "recurrent_states"):
        every = [getattr(state, kind) for state in states]
        joined = {n: None if own is None else torch.cat([each[n] for each in every]) for n, own in every[0].items()}
        setattr(stacked, kind, joined)
    return stacked


def state_bytes(state: LinearAttentionLayer) -> int:
    """The bytes of its tensors."""
    return sum(tensor.nbytes for tensor in tensors_of(state))


def pick_states(state: LinearAttentionLayer, rows: Sequence[int]) -> LinearAttentionLayer:
    """Some of the stacked states, as a copy."""
    picked = fork_state(state)
    for kind in ("conv_states", "recurrent_states"):
        own = getattr(picked, kind)
        setattr(picked, kind, {n: None if each is None else _rows(each, rows) for n, each in own.items()})
    return picked


def tensors_of(state: LinearAttentionLayer) -> list[Tensor]:
    """All tensors of a state, in the same order for states of the same module."""
    return [each for own in (state.conv_states, state.recurrent_states) for each in own.values() if each is not None]


def _rows(states: Tensor, rows: Sequence[int]) -> Tensor:
    return states[torch.as_tensor(rows, dtype=torch.long, device=states.device)]
