"""A model's forward in float32 whose weights are in half precision, without a second copy of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

HALF = (torch.bfloat16, torch.float16)


@contextmanager
def in_float32(model: nn.Module) -> Iterator[None]:
    """While this lasts, the model computes in float32: each module's own weights are converted while it is called.

    Afterwards, the weights are the tensors that they were. A module whose weights another one multiplies with raises
    what torch says of two dtypes.
    """
    with ExitStack() as hooks:
        for module in model.modules():
            if any(tensor.dtype in HALF for tensor in _own(module)):
                converted: list[tuple[Tensor, Tensor]] = []
                hooks.callback(_restore, converted)
                hooks.callback(module.register_forward_pre_hook(_converting(converted)).remove)
                hooks.callback(module.register_forward_hook(_restoring(converted), always_call=True).remove)
        yield


def _own(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


def _converting(converted: list[tuple[Tensor, Tensor]]) -> Any:
    def hook(module: nn.Module, *_: Any) -> None:
        for tensor in _own(module):
            if tensor.dtype in HALF:
                converted.append((tensor, tensor.data))
                tensor.data = tensor.data.float()

    return hook


def _restoring(converted: list[tuple[Tensor, Tensor]]) -> Any:
    def hook(*_: Any) -> None:
        _restore(converted)

    return hook


def _restore(converted: list[tuple[Tensor, Tensor]]) -> None:
    while converted:
        tensor, data = converted.pop()
        tensor.data = data
