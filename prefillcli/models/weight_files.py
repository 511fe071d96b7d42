"""Reading numbers from a model's files, with a check that the files stay what they were."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from prefillcli.errors import ContentChangedError, ResourceError

_STEP_BYTES = 16 << 20  # of one read: so long does stopping take
_CONVERTED = 16_384  # numbers converted at a time: so few that torch starts no threads, which would slow the walk's


class WeightFiles:
    """Files that are open for reading, by several threads if need be."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._files: dict[Path, tuple[int, tuple[int, int]]] = {}
        self._stopped = False
        try:
            for path in sorted(set(paths)):
                file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                self._files[path] = (file, _version(file))
        except OSError as error:
            self.close()
            raise ResourceError(f"{error.filename}: cannot be read: {error.strerror}") from None

    def read(self, path: Path, offset: int, dtype: torch.dtype, target: Tensor) -> None:
        """Fill `target` [numbers] on the CPU with numbers that are saved as `dtype` from byte `offset` on.

        Raises ContentChangedError if the file ends before, ResourceError if it cannot be read.
        """
        if dtype == target.dtype:
            self._read_bytes(path, offset, target.view(torch.uint8))
            return
        raw = torch.empty(min(_CONVERTED, len(target)), dtype=dtype)
        for start in range(0, len(target), _CONVERTED):
            part = target[start : start + _CONVERTED]
            saved = raw[: len(part)]
            self._read_bytes(path, offset + start * dtype.itemsize, saved.view(torch.uint8))
            part.copy_(saved)

    def require_unchanged(self, paths: Iterable[Path]) -> None:
        """Raise ContentChangedError if one of these files was written to since it was opened."""
        for path in paths:
            file, version = self._files[path]
            if _version(file) != version:
                raise ContentChangedError(f"{path} has changed while the model was read from it; run the job again")

    def stop(self) -> None:
        """Let a read that another thread waits for end soon, with an error."""
        self._stopped = True

    def close(self) -> None:
        """Close the files. No thread may be reading."""
        for file, _ in self._files.values():
            os.close(file)
        self._files.clear()

    def _read_bytes(self, path: Path, offset: int, target: Tensor) -> None:
        file, _ = self._files[path]
        rest = memoryview(target.numpy().data)
        while rest:
            if self._stopped:
                raise InterruptedError("reading was stopped")
            try:
                count = os.preadv(file, [rest[:_STEP_BYTES]], offset)
            except OSError as error:
                raise ResourceError(f"{path}: cannot be read: {error.strerror}") from None
            if not count:
                raise ContentChangedError(f"{path} was cut short while the model was read from it; run the job again")
            rest, offset = rest[count:], offset + count


def _version(file: int) -> tuple[int, int]:
    found = os.fstat(file)
    return found.st_size, found.st_mtime_ns
