"""What a model's forward hands to its layers, recorded chunk by chunk.

The same tensors (rotary tables, position ids) go to every layer, and live as long as the pack. Left where each chunk's
forward put them, they lie scattered between its temporaries, and the allocator cannot use the gaps again: with small
chunks that costs as much as the residual stream. So they are copied into one buffer each.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from prefillcli.prefill.forest import UnsupportedModelError

LayerCall = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(slots=True)
class Recording:
    """One forward over some tokens: what its layers were called with."""

    first: Tensor | None = None
    calls: list[LayerCall] = field(default_factory=list)
    """The arguments of each layer, but for the residual stream."""

    @property
    def hidden(self) -> Tensor:
        """The residual stream before the first layer, [1, tokens, hidden]. Raises UnsupportedModelError."""
        if self.first is None:
            raise UnsupportedModelError("the model's forward does not reach its layers")
        return self.first


class CallBuffers:
    """Buffers for the tensors of all chunks of a pack of `tokens` tokens."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._buffers: dict[tuple[int, torch.dtype, int], Tensor] = {}
        self._filled: dict[tuple[int, torch.dtype, int], int] = {}

    def keep(self, calls: list[LayerCall], chunk_tokens: int) -> list[LayerCall]:
        """The same calls with their tensors moved to the buffers. A tensor that several layers share stays one."""
        moved: dict[int, Tensor] = {}

        def move(value: Any) -> Any:
            if isinstance(value, Tensor):
                if id(value) not in moved:
                    moved[id(value)] = self._move(value, len(moved), chunk_tokens)
                return moved[id(value)]
            if isinstance(value, tuple | list):
                return type(value)(move(part) for part in value)
            if isinstance(value, dict):
                return {key: move(part) for key, part in value.items()}
            return value

        return [(move(args), move(kwargs)) for args, kwargs in calls]

    def _move(self, tensor: Tensor, number: int, chunk_tokens: int) -> Tensor:
        per_token, rest = divmod(tensor.numel(), chunk_tokens)
        if rest or not per_token:
            return tensor  # not made of one piece for each token
        key = (number, tensor.dtype, per_token)
        if key not in self._buffers:
            self._buffers[key] = torch.empty(per_token * self._tokens, dtype=tensor.dtype, device=tensor.device)
            self._filled[key] = 0
        start = self._filled[key]
        self._filled[key] = start + tensor.numel()
        return self._buffers[key][start : start + tensor.numel()].view(tensor.shape).copy_(tensor)
