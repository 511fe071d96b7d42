"""Layers that are called through torch.compile: norms, rotary encodings, activations and sums in fewer kernels.

A layer's class is compiled once for all its layers and all lengths of chunks. Its attention is the walk's own and is
not traced, so a layer is four graphs: what is before and behind attention, in the layer and in its attention module.
What torch.compile does not understand of a layer is called as it is.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import MethodType
from typing import Any

import torch
from torch import nn

from prefillcli.errors import UsageError, brief
from prefillcli.prefill.forest import leave_untraced
from prefillcli.prefill.fusion import called_through


@contextmanager
def compiled(layer: nn.Module, chunk_tokens: int) -> Iterator[None]:
    """While this lasts, calls of `layer` go through what its class is compiled to, whatever `chunk_tokens` is."""
    forward = MethodType(_compile(type(layer).forward), layer)
    with torch._dynamo.config.patch(suppress_errors=True), called_through(layer, forward):
        yield


def check_compiler(device: torch.device) -> None:
    """Raise UsageError if torch.compile does not work for the device."""
    leave_untraced()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch's own parts, while it imports them
            found = torch.compile(_sample, dynamic=True)(torch.ones(3, device=device))
        if not torch.allclose(found.cpu(), _sample(torch.ones(3))):
            raise ValueError("it computes something else")
    except Exception as error:  # of any of the stages of a compilation
        raise UsageError(
            f"--compile: torch.compile does not work for {device}: {brief(error)}\nleave it out"
        ) from None


def _sample(rows: torch.Tensor) -> torch.Tensor:
    return torch.tanh(rows) * 2 + 1


@cache
def _compile(forward: Callable[..., Any]) -> Callable[..., Any]:
    once: Callable[..., Any] = torch.compile(forward, dynamic=True)
    return once
