"""Copies between a CUDA device and host memory, beside what the device computes.

They run in a stream of their own, in order. Memory of the device belongs to the stream that computes: a tensor that is
copied is kept until that stream waits for its copy. So a process that is many layers ahead of the device reserves no
more memory than one that is not, as it would with `Tensor.record_stream`.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor


class CopyStream:
    """Copies of one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def host_memory(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An empty tensor in host memory that the device reads and writes by itself."""
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def start(self, target: Tensor, source: Tensor) -> torch.cuda.Event:
        """Copy `source` to `target`, once everything is done that the device has been given so far.

        Both must be contiguous, and the one on the device must live until `wait` for the returned event.
        """
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        copied: torch.cuda.Event = self._stream.record_event()
        return copied

    def wait(self, copied: torch.cuda.Event) -> None:
        """What the device is given from now on comes after this copy. The process itself does not wait."""
        torch.cuda.current_stream(self._device).wait_event(copied)

    def finish(self) -> None:
        """Wait until all copies are done, so that the process can read host memory."""
        self._stream.synchronize()


class Leaving:
    """Tensors of the device on their way to the host: no more than `most` groups of them at a time."""

    def __init__(self, copies: CopyStream, most: int) -> None:
        self._copies = copies
        self._most = most
        self._groups: deque[list[tuple[Tensor, torch.cuda.Event]]] = deque()

    def begin(self) -> None:
        """Begin a group. What is computed from now on comes after the copies of older ones."""
        while len(self._groups) >= self._most:
            self._let_go()
        self._groups.append([])

    def start(self, target: Tensor, source: Tensor) -> None:
        """Copy `source`, which nothing else changes, to host memory."""
        self._groups[-1].append((source, self._copies.start(target, source)))

    def clear(self) -> None:
        """What is computed from now on comes after all copies."""
        while self._groups:
            self._let_go()

    def _let_go(self) -> None:
        for _, copied in self._groups.popleft():
            self._copies.wait(copied)


def copies_for(device: torch.device) -> CopyStream | None:
    """What copies between host memory and a device; None where that is the same memory."""
    return CopyStream(device) if device.type == "cuda" else None
