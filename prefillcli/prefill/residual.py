"""The residual stream of a pack: on the walk's device, or in host memory, from which chunks go to the device and back.

On the host it takes no memory of the device, however long a prompt is. There the rows of the next chunk come while the
current chunk is computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


class ResidualRows:
    """Reads and writes rows of residual streams [1, tokens, hidden] for a walk on `device`.

    With `on_host` the streams are in host memory. All copies of a CUDA device go through one CUDA stream, in order: a
    row is written back before it is read again.
    """

    def __init__(self, device: torch.device, *, on_host: bool = False) -> None:
        self._device = device
        self._home = torch.device("cpu") if on_host else device
        self._copies: torch.cuda.Stream | None = None
        if self._home != device:
            self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def empty(self, tokens: int, like: Tensor) -> Tensor:
        """A stream for so many tokens, with the width and dtype of the rows `like` [1, rows, hidden]."""
        shape = (1, tokens, like.shape[-1])
        return torch.empty(shape, dtype=like.dtype, device=self._home, pin_memory=self._copies is not None)

    def each(self, hidden: Tensor, spans: Sequence[tuple[int, int]]) -> Iterator[Tensor]:
        """The rows of each span, on the device; those of the next one are on their way meanwhile."""
        coming = [self._fetch(hidden, *span) for span in spans[:1]]
        for number in range(len(spans)):
            rows, copied = coming.pop()
            coming += [self._fetch(hidden, *span) for span in spans[number + 1 : number + 2]]
            if copied is not None:  # computing waits for this copy, and not for those that were begun since
                current = torch.cuda.current_stream(self._device)
                current.wait_event(copied)
                rows.record_stream(current)
            yield rows

    def write(self, hidden: Tensor, start: int, rows: Tensor) -> None:
        """Put rows [1, rows, hidden] of the device in the place from `start` on."""
        place = hidden[:, start : start + rows.shape[1]]
        if self._copies is None:
            place.copy_(rows)
            return
        self._copies.wait_stream(torch.cuda.current_stream(self._device))
        with self._copying():
            place.copy_(rows, non_blocking=True)
        rows.record_stream(self._copies)

    def pick(self, hidden: Tensor, at: Tensor) -> Tensor:
        """The rows at `at` int64 [rows], which is on the CPU, on the device: [1, rows, hidden]."""
        if self._copies is not None:
            self._copies.synchronize()  # rows that are on their way to the host
        return hidden[:, at.to(self._home)].to(self._device)

    def _fetch(self, hidden: Tensor, start: int, end: int) -> tuple[Tensor, torch.cuda.Event | None]:
        """Rows on the device, and the event after which they are there."""
        with self._copying():
            rows = hidden[:, start:end].to(self._device, non_blocking=True)
        return rows, None if self._copies is None else self._copies.record_event()

    def _copying(self) -> AbstractContextManager[object]:
        return nullcontext() if self._copies is None else torch.cuda.stream(self._copies)
