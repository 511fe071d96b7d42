"""A small disk of its own, in memory, that can be filled and emptied. Linux, as root."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Self

_LEFT = 128 << 10  # bytes that are left on a full disk
_BLOCK = 1 << 20


class NightDisk:
    """A tmpfs of `size` bytes at `path`; use it as a context manager. Raises OSError where it may not be mounted."""

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        self.full = False
        self._size = size
        self._ballast = path / "ballast"

    def __enter__(self) -> Self:
        self.path.mkdir(parents=True, exist_ok=True)
        try:
            subprocess.run(
                ["mount", "-t", "tmpfs", "-o", f"size={self._size}", "tmpfs", str(self.path)],
                check=True,
            )
        except subprocess.CalledProcessError as error:
            raise OSError(f"{self.path}: no disk can be mounted: run as root, or with unshare") from error
        return self

    def __exit__(self, *_exception: object) -> None:
        subprocess.run(["umount", "--lazy", str(self.path)], check=True)

    def fill(self) -> None:
        """Leave hardly any room, whatever is written meanwhile."""
        self.full = True
        with self._ballast.open("wb") as file:
            while (room := self._free() - _LEFT) > 0:
                try:
                    file.write(bytes(min(room, _BLOCK)))
                    file.flush()
                except OSError:
                    return

    def empty(self) -> None:
        """Take the ballast away."""
        self.full = False
        self._ballast.unlink(missing_ok=True)

    def _free(self) -> int:
        found = os.statvfs(self.path)
        return found.f_bavail * found.f_frsize
