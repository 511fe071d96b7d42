"""Which version of a file this is, as far as its filesystem knows without reading it."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any, Protocol

from prefillcli.data.failures import patiently
from prefillcli.data.filesystems import is_local

SETTLED_NS = 5_000_000_000
"""A file whose last change is younger could change again without a trace: times move in steps of up to 2 seconds, and
the clock of a file server may be a little off."""

# What stands for the content of an object, by the names that fsspec's filesystems give it.
_VERSIONS = ("ETag", "etag", "generation", "md5Hash", "blob_id", "xet_hash", "sha")


@dataclass(frozen=True, slots=True)
class Stamp:
    """A version of a file. Equal stamps mean equal content, unless the file was still young: see `settled`."""

    size: int
    """Bytes."""
    identity: tuple[int | str, ...]
    """Of a local file device, inode, size and time of modification; else what the store says of the object."""
    changed_ns: int = 0
    """When the inode changed, which no program can set; 0 for a remote file. It also changes with name and rights."""
    version: str | None = None
    """What a remote store says in place of a digest: an ETag or a generation."""

    def settled(self, at_ns: int) -> bool:
        """Whether any change after `at_ns` makes another stamp."""
        return at_ns - self.changed_ns > SETTLED_NS


class Stamped(Protocol):
    """A file, and its stamp when it was found."""

    @property
    def path(self) -> str: ...
    @property
    def filesystem(self) -> Any: ...
    @property
    def inner(self) -> str: ...
    @property
    def stamp(self) -> Stamp: ...


def stamp_of(filesystem: Any, inner: str, *, fresh: bool = False) -> Stamp:
    """The stamp of a file now; `fresh` asks a remote store again, whatever was listed before.

    Raises FileNotFoundError, OSError, or what the client of an object store raises.
    """
    if is_local(filesystem):
        found = os.stat(inner)
        identity = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
        return Stamp(found.st_size, identity, found.st_ctime_ns)
    if fresh:
        filesystem.invalidate_cache(inner)
    info = patiently(lambda: filesystem.info(inner))
    size = int(info.get("size") or 0)
    version = next((f"{name} {info[name]}" for name in _VERSIONS if _proves(info.get(name))), None)
    if version is not None:
        return Stamp(size, (size, version), version=version)
    times = [str(info[name]) for name in ("mtime", "LastModified", "last_modified", "created") if info.get(name)]
    return Stamp(size, (size, *times))


def now_ns() -> int:
    """Nanoseconds since the epoch, as stamps count them."""
    return time.time_ns()


def _proves(version: object) -> bool:
    """Whether it is there, and not a weak ETag, which two contents may share."""
    return bool(version) and not str(version).startswith("W/")
