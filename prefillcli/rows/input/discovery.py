"""Columns named by the folders of an input, as Hive does: `date=2026-01-01/hour=7/part.parquet`.

A partitioned output has the same folders."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path, PurePosixPath
from typing import Any, Literal
from urllib.parse import unquote

import pyarrow as pa
from fsspec.utils import glob_translate

from prefillcli.errors import PrefillError, UsageError
from prefillcli.rows.filesystems import (
    WORK_ENDING,
    filesystem_of,
    is_local,
    is_url,
    refuse_pointer,
    require_reachable,
    unreadable_folder,
)
from prefillcli.rows.proof import FoundFile, stamp_of

_NULL = "__HIVE_DEFAULT_PARTITION__"


@dataclass(frozen=True, slots=True)
class Partitions:
    """The keys with their types, and for every file its values (null where its path lacks the key)."""

    schema: pa.Schema
    values: tuple[dict[str, Any], ...]
    # For every file, those of its folders that name a key: `date=2026-01-01/hour=7`.
    folders: tuple[str, ...] = ()

    @classmethod
    def of(cls, paths: Iterable[str]) -> Partitions:
        """Return the keys in the folders of these paths, in the order of their first use.

        As pyarrow.dataset infers them: keys and values are URL-decoded, a key is int32 if every value is one, else a
        string.
        """
        paths = tuple(paths)
        raw = [_segments(path) for path in paths]
        names = list(dict.fromkeys(name for segments in raw for name in segments))
        columns = [_typed([segments.get(name) for segments in raw]) for name in names]
        schema = pa.schema([(name, column.type) for name, column in zip(names, columns, strict=True)])
        rows = zip(*(column.to_pylist() for column in columns), strict=True) if names else (() for _ in raw)
        values = tuple(dict(zip(names, row, strict=True)) for row in rows)
        return cls(schema, values, tuple("/".join(_key_folders(path)) for path in paths))

    def runs(self, table: pa.Table) -> Iterator[tuple[str, pa.Table]]:
        """Yield the rows of a table that has the keys as columns, cut where the folder changes, without these
        columns."""
        names = self.schema.names
        known: dict[tuple[Any, ...], str] = {}
        for values, folder in zip(self.values, self.folders, strict=True):
            known.setdefault(tuple(values[name] for name in names), folder)
        folders = [known[values] for values in zip(*(table[name].to_pylist() for name in names), strict=True)]
        rest = table.drop_columns(names)
        start = 0
        for folder, rows in groupby(folders):
            size = sum(1 for _ in rows)
            yield folder, rest.slice(start, size)
            start += size


def _segments(path: str) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for folder in _key_folders(path):
        name, _, value = folder.partition("=")
        found[unquote(name)] = None if value == _NULL else unquote(value)
    return found


def _key_folders(path: str) -> list[str]:
    return [folder for folder in PurePosixPath(path).parts[:-1] if folder.find("=") > 0]


def _typed(texts: Sequence[str | None]) -> pa.Array:
    column = pa.array(texts, pa.string())
    try:
        return column.cast(pa.int32()) if column.null_count < len(column) else column
    except pa.ArrowInvalid:
        return column


Kind = Literal["parquet", "jsonl", "csv", "tsv"]

CODECS = {".gz": "gzip", ".zst": "zstd"}
KINDS: dict[str, Kind] = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".csv": "csv",
    ".tsv": "tsv",
}
ENDINGS = f"{' or '.join(', '.join(KINDS).rsplit(', ', 1))} (all but the first two also with {' or '.join(CODECS)})"
# Endings of files and folders that a run writes beside its output; never taken from a directory or a glob.
_REPORTS = (".run.json", ".run.html", ".dry-run.json", ".prom")


@dataclass(frozen=True, slots=True)
class InputFile(FoundFile):
    """One input file."""

    kind: Kind
    codec: str | None  # compression of a file of lines: gzip, zstd or None
    below: str  # the path below the given directory, else the whole path: its folders may name columns


def discover(inputs: Sequence[str]) -> tuple[list[InputFile], tuple[str, ...]]:
    """Find the files of `inputs` in reading order, and the files in directories that were left out because of their
    ending.

    Inputs keep their order; the files of a directory (recursive) or a glob are sorted by path. Hidden files,
    files and folders that begin with `_`, and work folders and reports of earlier runs are never taken from a
    directory or a glob. Raises UsageError if an input matches nothing, has an unknown ending, or if formats are mixed.
    """
    if not inputs:
        raise UsageError("no input given: name a file, a directory, a glob or a URL")
    found: list[InputFile] = []
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


def would_find(given: str, path: str, *, folder: bool) -> bool:
    """Return whether an input typed as `given` (directory or glob) would include the file at `path`, or the files in a
    `folder` of parts there."""
    filesystem, root = filesystem_of(given)
    other, inner = filesystem_of(path)
    if filesystem != other or filesystem.isfile(root):
        return False
    links, roots = {inner.rstrip("/")}, {root.rstrip("/") or "/"}
    if is_local(filesystem):
        links.add(os.path.join(os.path.realpath(os.path.dirname(inner)), os.path.basename(inner)))
        roots.add(os.path.realpath(root))
    inside = "/part-0.parquet" if folder else ""
    return any(_would_take(filesystem, one, link + inside) for one in roots for link in links)


def _would_take(filesystem: Any, root: str, name: str) -> bool:
    if filesystem.isdir(root):
        return name.startswith(root.rstrip("/") + "/") and _visible(name, root) and _format_of(name) is not None
    matches = re.compile(glob_translate(root)).fullmatch
    folders = () if "**" in root else tuple(str(folder) for folder in PurePosixPath(name).parents)
    return _visible(name, _glob_root(root)) and any(matches(each) for each in (name, *folders))


def _glob_root(pattern: str) -> str:
    return pattern[: min((pattern.index(mark) for mark in "*?[" if mark in pattern), default=None)].rpartition("/")[0]


def _expand(path: str) -> tuple[list[InputFile], list[str]]:
    filesystem, inner = filesystem_of(path)
    try:
        if filesystem.isfile(inner):
            return [_input_file(filesystem, inner, path)], []
        if filesystem.isdir(inner):
            return _directory(filesystem, inner, path)
        if any(mark in inner for mark in "*?["):
            return _glob(filesystem, inner, path)
    except PrefillError:
        raise
    except Exception as error:  # OSError, or any error of an object store's client
        raise UsageError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    raise UsageError(f"input not found: {path}")


def _directory(filesystem: Any, inner: str, shown: str, *, by_glob: bool = False) -> tuple[list[InputFile], list[str]]:
    names = sorted(_walk_local(inner)) if is_local(filesystem) else sorted(filesystem.find(inner))
    visible = [name for name in names if _visible(name, inner)]
    taken = [name for name in visible if _format_of(name) is not None]
    if not taken:
        raise UsageError(f"no input files in {shown}: expected files that end in {ENDINGS}")
    left_out = [_display(filesystem, name, shown) for name in visible if _format_of(name) is None]
    root = "" if by_glob else inner
    return [_input_file(filesystem, name, _display(filesystem, name, shown), root) for name in taken], left_out


def _glob(filesystem: Any, inner: str, shown: str) -> tuple[list[InputFile], list[str]]:
    fixed = _glob_root(inner)
    found: list[InputFile] = []
    left_out: list[str] = []
    for name in sorted(_local_matches(inner) if is_local(filesystem) else filesystem.glob(inner)):
        if not _visible(name, fixed):
            continue
        if filesystem.isdir(name):
            if "**" not in inner:
                taken, other = _directory(filesystem, name, _display(filesystem, name, shown), by_glob=True)
                found += taken
                left_out += other
        else:
            found.append(_input_file(filesystem, name, _display(filesystem, name, shown)))
    if not found:
        raise UsageError(f"no file matches {shown}")
    return found, left_out


def _local_matches(pattern: str) -> Iterator[str]:
    # Files and folders that match, through symbolic links, as `_walk_local` finds them: fsspec leaves out what it
    # cannot look at, and with `**` linked folders.
    fixed, bare = _glob_root(pattern), pattern.rstrip("/")
    if not os.path.lexists(fixed or "/"):
        return
    matches = re.compile(glob_translate(bare)).fullmatch
    for path, is_folder in _candidates(fixed or "/", PurePosixPath(bare[len(fixed) :]).parts[1:], set()):
        if matches(path) and (is_folder or bare == pattern):
            yield path


def _candidates(folder: str, parts: Sequence[str], seen: set[str]) -> Iterator[tuple[str, bool]]:
    # Visible entries below a folder that these last parts of a glob may match, and whether each is a folder.
    anywhere = parts[0] == "**"
    if anywhere and (real := os.path.realpath(folder)) in seen:
        return
    elif anywhere:
        seen.add(real)
    matches = re.compile(glob_translate(parts[0])).fullmatch
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        unreadable_folder(error)
    for name in names:
        path = os.path.join(folder, name)
        if (anywhere or matches(name)) and _visible(path, folder):
            is_folder = stat.S_ISDIR(require_reachable(path).st_mode)
            yield path, is_folder
            rest = parts if anywhere else parts[1:]
            if is_folder and rest:
                yield from _candidates(path, rest, seen)


def _walk_local(root: str) -> Iterator[str]:
    # Files below `root`, through symbolic links, each folder once.
    seen: set[str] = set()
    for folder, subfolders, names in os.walk(root, onerror=unreadable_folder, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:
            subfolders.clear()
            continue
        seen.add(real)
        subfolders.sort()
        for name in names:
            path = os.path.join(folder, name)
            if _visible(path, root) and stat.S_ISREG(require_reachable(path).st_mode):
                yield path


def _visible(name: str, root: str) -> bool:
    parts = PurePosixPath(name[len(root) :].lstrip("/")).parts
    if parts and (parts[-1].endswith(_REPORTS) or parts[-1] in ("run.json", "run.html")):
        return False
    return not any(part.startswith((".", "_")) or part.endswith(WORK_ENDING) for part in parts)


def _format_of(name: str) -> tuple[Kind, str | None] | None:
    stem, ending = os.path.splitext(name.lower())
    codec = CODECS.get(ending)
    if codec is not None:
        ending = os.path.splitext(stem)[1]
    kind = KINDS.get(ending)
    if kind is None or (kind == "parquet" and codec is not None):
        return None
    return kind, codec


def _display(filesystem: Any, name: str, shown: str) -> str:
    if not is_url(shown):
        return name if os.path.isabs(shown) else os.path.relpath(name)
    return str(filesystem.unstrip_protocol(name))


_SMALL = 1 << 10  # bytes


def _input_file(filesystem: Any, inner: str, shown: str, root: str = "") -> InputFile:
    form = _format_of(inner) or _format_of(inner.partition("?")[0])  # the query of a signed URL
    if form is None:
        raise UsageError(f"unknown ending: {shown}\nexpected a file that ends in {ENDINGS}")
    stamp = stamp_of(filesystem, inner)
    if is_local(filesystem) and stamp.size < _SMALL:
        refuse_pointer(Path(inner))
    return InputFile(shown, filesystem, inner, stamp, *form, inner[len(root) :])
