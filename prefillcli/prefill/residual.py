"""The residual stream of a pack: on the walk's device, or in host memory, from which chunks go to the device and back.

On the host it takes no memory of the device, however long a prompt is. There the rows of the next chunk come while the
current chunk is computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from prefillcli.prefill.copies import Leaving, copies_for


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
