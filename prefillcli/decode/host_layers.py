"""Layers of a CUDA device that are kept in host memory: they leave while the next layer is computed, and come back for
the rows that are written on."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from prefillcli.prefill.copies import Leaving, copies_for
from prefillcli.prefill.held_parts import KeyValue

States = tuple[LinearAttentionLayer, ...]
"""What the recurrent modules of a layer know at a place."""
Name = TypeVar("Name")

_TENSORS = ("conv_states", "recurrent_states")


class HostLayers:
    """Copies of layers between `device` and pinned host memory. Raises RuntimeError for one that has none.

    On the host tokens come first, [tokens, kv heads, width], so that any run of them is contiguous.
    """

    def __init__(self, device: torch.device) -> None:
        copies = copies_for(device)
        if copies is None:
            raise RuntimeError(f"{device}: its memory is that of the host")
        self._copies = copies
        self._device = device
        self._leaving = Leaving(copies, 1)
        self._coming: list[Tensor] = []
        self._came: torch.cuda.Event | None = None

    def leave(
        self, both: KeyValue | None, states: Mapping[Name, States]
    ) -> tuple[KeyValue | None, dict[Name, States]]:
        """What will be a layer's part on the host: K,V [1, kv heads, tokens, width], which may be overwritten from now
        on, and states."""
        self._leaving.begin()
        rows = [self._to_host(each[0].transpose(0, 1)) for each in both or ()]
        moved = {name: _changed(own, self._to_host) for name, own in states.items()}
        return (rows[0], rows[1]) if rows else None, moved

    def fetch(
        self, both: KeyValue | None, runs: Sequence[tuple[int, int]], states: Sequence[States]
    ) -> tuple[KeyValue | None, list[States]]:
        """What will be some runs of a layer's tokens on the device, and states; it is not there before `arrive`."""
        moved = [_changed(own, self._to_device) for own in states]
        if both is None:
            return None, moved
        found = []
        for rows in both:
            tokens = sum(end - start for start, end in runs)
            target = torch.empty((tokens, *rows.shape[1:]), dtype=rows.dtype, device=self._device)
            at = 0
            for start, end in runs:
                self._came = self._copies.start(target[at : at + end - start], rows[start:end])
                at += end - start
            self._coming.append(target)
            found.append(target.transpose(0, 1)[None])
        return (found[0], found[1]), moved

    def arrive(self) -> None:
        """What the device is given from now on comes after all copies, and may use their memory again."""
        self._leaving.clear()
        if self._came is not None:
            self._copies.wait(self._came)
        self._coming.clear()
        self._came = None

    def _to_host(self, tensor: Tensor) -> Tensor:
        source = tensor.clone(memory_format=torch.contiguous_format)
        target = self._copies.host_memory(tuple(source.shape), source.dtype)
        self._leaving.start(target, source)
        return target

    def _to_device(self, tensor: Tensor) -> Tensor:
        target = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        self._came = self._copies.start(target, tensor)
        self._coming.append(target)
        return target


def _changed(states: States, change: Callable[[Tensor], Tensor]) -> States:
    """The same states, with other tensors."""
    found = []
    for state in states:
        other = copy.copy(state)
        for name in _TENSORS:
            tensors = getattr(state, name)
            setattr(other, name, {number: None if own is None else change(own) for number, own in tensors.items()})
        found.append(other)
    return tuple(found)
