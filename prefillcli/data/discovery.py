"""From what the user typed (files, directories, globs, URLs) to the list of files to read."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Literal

from prefillcli.data.filesystems import filesystem_of, is_local, is_url
from prefillcli.data.identity import Stamp, stamp_of
from prefillcli.errors import PrefillError, UsageError

Kind = Literal["parquet", "jsonl"]

_CODECS = {".gz": "gzip", ".zst": "zstd"}
_KINDS: dict[str, Kind] = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
}
ENDINGS = ".parquet, .pq, .jsonl, .ndjson or .json (the last three also with .gz or .zst)"
WORK_ENDING = ".prefill"
"""Ending of the work folder beside an output; never read as input."""


@dataclass(frozen=True, slots=True)
class Found:
    """One input file."""

    path: str
    """As a user would name it: local path or URL."""
    filesystem: Any
    inner: str
    """The path inside `filesystem`."""
    kind: Kind
    codec: str | None
    """Compression of a JSON Lines file: gzip, zstd or None."""
    stamp: Stamp
    """Which version of the file was found."""

    @property
    def size(self) -> int:
        """Bytes."""
        return self.stamp.size

    @property
    def local(self) -> bool:
        return is_local(self.filesystem)


def discover(inputs: Sequence[str]) -> tuple[list[Found], tuple[str, ...]]:
    """The files of `inputs` in reading order, and the files in directories left out for their ending.

    Inputs keep their order; the files of a directory (recursive) or a glob are sorted by path. Hidden files,
    files and folders that begin with `_`, and work folders of earlier runs are never taken from a directory
    or a glob. Raises UsageError if an input matches nothing, has an unknown ending, or if formats are mixed.
    """
    if not inputs:
        raise UsageError("no input given: name a file, a directory, a glob or a URL")
    found: list[Found] = []
    left_out: list[str] = []
    for path in inputs:
        taken, other = _expand(str(path))
        found += taken
        left_out += other
    first = found[0]
    for file in found:
        if file.kind != first.kind:
            raise UsageError(
                f"mixed formats: {first.path} is {first.kind}, {file.path} is {file.kind}\n"
                "score them in separate jobs, or name the files of one format with a glob"
            )
    return found, tuple(left_out)


def _expand(path: str) -> tuple[list[Found], list[str]]:
    filesystem, inner = filesystem_of(path)
    try:
        if filesystem.isfile(inner):
            return [_found(filesystem, inner, path)], []
        if filesystem.isdir(inner):
            return _directory(filesystem, inner, path)
        if any(mark in inner for mark in "*?["):
            return _glob(filesystem, inner, path)
    except PrefillError:
        raise
    except Exception as error:  # OSError, or whatever the client of an object store raises
        raise UsageError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    raise UsageError(f"input not found: {path}")


def _directory(filesystem: Any, inner: str, shown: str) -> tuple[list[Found], list[str]]:
    names = sorted(_walk_local(inner)) if is_local(filesystem) else sorted(filesystem.find(inner))
    visible = [name for name in names if _visible(name, inner)]
    taken = [name for name in visible if _format(name) is not None]
    if not taken:
        raise UsageError(f"no input files in {shown}: expected files that end in {ENDINGS}")
    left_out = [_display(filesystem, name, shown) for name in visible if _format(name) is None]
    return [_found(filesystem, name, _display(filesystem, name, shown)) for name in taken], left_out


def _glob(filesystem: Any, inner: str, shown: str) -> tuple[list[Found], list[str]]:
    fixed = inner[: min(inner.index(mark) for mark in "*?[" if mark in inner)].rpartition("/")[0]
    found: list[Found] = []
    left_out: list[str] = []
    for name in sorted(filesystem.glob(inner)):
        if not _visible(name, fixed):
            continue
        if filesystem.isdir(name):
            if "**" not in inner:
                taken, other = _directory(filesystem, name, _display(filesystem, name, shown))
                found += taken
                left_out += other
        else:
            found.append(_found(filesystem, name, _display(filesystem, name, shown)))
    if not found:
        raise UsageError(f"no file matches {shown}")
    return found, left_out


def _walk_local(root: str) -> Iterator[str]:
    """Files below `root`, through symbolic links, each folder once."""
    seen: set[str] = set()

    def fail(error: OSError) -> None:
        raise error

    for folder, subfolders, names in os.walk(root, onerror=fail, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:
            subfolders.clear()
            continue
        seen.add(real)
        subfolders.sort()
        for name in names:
            path = os.path.join(folder, name)
            if os.path.isfile(path):
                yield path


def _visible(name: str, root: str) -> bool:
    parts = PurePosixPath(name[len(root) :].lstrip("/")).parts
    return not any(part.startswith((".", "_")) or part.endswith(WORK_ENDING) for part in parts)


def _format(name: str) -> tuple[Kind, str | None] | None:
    stem, ending = os.path.splitext(name.lower())
    codec = _CODECS.get(ending)
    if codec is not None:
        ending = os.path.splitext(stem)[1]
    kind = _KINDS.get(ending)
    if kind is None or (kind == "parquet" and codec is not None):
        return None
    return kind, codec


def _display(filesystem: Any, name: str, shown: str) -> str:
    if not is_url(shown):
        return name if os.path.isabs(shown) else os.path.relpath(name)
    return str(filesystem.unstrip_protocol(name))


def _found(filesystem: Any, inner: str, shown: str) -> Found:
    form = _format(inner)
    if form is None:
        raise UsageError(f"unknown ending: {shown}\nexpected a file that ends in {ENDINGS}")
    return Found(shown, filesystem, inner, form[0], form[1], stamp_of(filesystem, inner))
