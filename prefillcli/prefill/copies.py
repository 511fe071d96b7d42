"""Copies between a CUDA device and host memory, beside what the device computes.

They run in a stream of their own, in order. Memory of the device belongs to the stream that computes: a tensor that is
copied is kept until that stream waits for its copy. So a process that is many layers ahead of the device reserves no
more memory than one that is not, as it would with `Tensor.record_stream`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

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


# The residual stream of a pack: on the walk's device, or in host memory, from which chunks go to the device and
# back.
#
# On the host it takes no memory of the device, however long a prompt is. There the rows of the next chunk come while
# the current chunk is computed.


class ResidualRows:
    """Reads and writes rows of residual streams [1, tokens, hidden] for a walk on `device`.

    With `on_host` the streams are in host memory. All copies of a CUDA device go through one CUDA stream, in order: a
    row is written back before it is read again.
    """

    def __init__(self, device: torch.device, *, on_host: bool = False) -> None:
        self._device = device
        self._home = torch.device("cpu") if on_host else device
        self._copies = copies_for(device) if on_host else None
        self._leaving = None if self._copies is None else Leaving(self._copies, 1)

    def empty(self, tokens: int, like: Tensor) -> Tensor:
        """A stream for so many tokens, with the width and dtype of the rows `like` [1, rows, hidden]."""
        shape = (1, tokens, like.shape[-1])
        if self._copies is not None:
            return self._copies.host_memory(shape, like.dtype)
        return torch.empty(shape, dtype=like.dtype, device=self._home)

    def each(self, hidden: Tensor, spans: Sequence[tuple[int, int]]) -> Iterator[Tensor]:
        """The rows of each span, on the device; those of the next one are on their way meanwhile."""
        coming = [self._fetch(hidden, *span) for span in spans[:1]]
        try:
            for number in range(len(spans)):
                rows, copied = coming.pop()
                coming += [self._fetch(hidden, *span) for span in spans[number + 1 : number + 2]]
                self._wait(copied)  # and not for copies that were begun since
                yield rows
        finally:  # whatever ends a walk, memory is not used again while it is written
            for _, copied in coming:
                self._wait(copied)

    def write(self, hidden: Tensor, start: int, rows: Tensor) -> None:
        """Put rows [1, rows, hidden] of the device in the place from `start` on."""
        place = hidden[:, start : start + rows.shape[1]]
        if self._leaving is None:
            place.copy_(rows)
            return
        self._leaving.begin()
        self._leaving.start(place, rows.contiguous())

    def pick(self, hidden: Tensor, at: Tensor) -> Tensor:
        """The rows at `at` int64 [rows], which is on the CPU, on the device: [1, rows, hidden]."""
        if self._copies is not None:
            self._copies.finish()  # of rows that are on their way to the host
        return hidden[:, at.to(self._home)].to(self._device)

    def _wait(self, copied: torch.cuda.Event | None) -> None:
        if copied is not None and self._copies is not None:
            self._copies.wait(copied)

    def _fetch(self, hidden: Tensor, start: int, end: int) -> tuple[Tensor, torch.cuda.Event | None]:
        """Rows on the device, and the event after which they are there."""
        source = hidden[:, start:end]
        if self._copies is None:
            return source.to(self._device), None
        rows = torch.empty(source.shape, dtype=source.dtype, device=self._device)
        return rows, self._copies.start(rows, source)
