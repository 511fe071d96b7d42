"""The files that a run writes beside the scores: how one of an earlier run is known, which may be replaced."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from prefillcli.data.filesystems import filesystem_of, is_local, reading
from prefillcli.data.given_file import MOST_BYTES, read_start
from prefillcli.data.output.columns import ROW_COLUMN
from prefillcli.data.reading.source import Source
from prefillcli.errors import PrefillError, UsageError

_PAGE = re.compile(rb"\s*<!doctype html>.*?<title>[^<]*\bprefill (score|bench|profile|inspect)\b", re.DOTALL)
_PAGE_POLICY = b"default-src 'none'; style-src 'unsafe-inline'"


@dataclass(frozen=True, slots=True)
class SideFile:
    """A kind of file."""

    meaning: str
    knows: Callable[[str, bytes], bool]
    """Whether the file at a path, with its first bytes, is of this kind."""


def _json_with(*names: str) -> Callable[[str, bytes], bool]:
    def knows(path: str, start: bytes) -> bool:
        try:
            content = json.loads(start)
        except (ValueError, RecursionError):
            return False
        return isinstance(content, dict) and content.keys() >= {"schema_version", *names}

    return knows


def _is_page(path: str, start: bytes) -> bool:
    return _PAGE.match(start) is not None and _PAGE_POLICY in start


def _is_rejects(path: str, start: bytes) -> bool:
    try:
        names = Source.open([path]).available
    except PrefillError:
        return False
    return names[:1] == (ROW_COLUMN,) and names[-2:] == ("error", "error_detail") and "computed_tokens" not in names


KINDS = {
    "report": SideFile("the report of a run", _json_with("status", "exit_code", "rows", "fingerprint")),
    "dry run": SideFile("the report of a dry run", _json_with("status", "exit_code", "survey")),
    "page": SideFile("a page of prefill", _is_page),
    "metrics": SideFile("metrics of prefill", lambda path, start: start.startswith(b"# HELP prefill_")),
    "rejects": SideFile("rejects of an earlier run", _is_rejects),
    "calibration": SideFile("a calibration", _json_with("labels", "scaling")),
    "bench": SideFile("written by prefill bench", _json_with("status", "workloads", "machine")),
    "profile": SideFile("written by prefill profile", _json_with("machine", "budget_bytes")),
    "exits": SideFile("an exit profile", _json_with("label_tokens", "exits")),
}


def require_ours(path: str, kind: str, called: str, *, overwrite: bool | None) -> None:
    """Raise UsageError unless a file of this kind may be written at `path`, in the form of `written_path`.

    There must be nothing, an empty file or one of the same kind; with `overwrite` any file. None: there is no such
    option.
    """
    if path.endswith("/"):
        raise UsageError(f"{called}: this names a folder, and a file is written; leave the slash out")
    filesystem, inner = filesystem_of(path)
    if is_local(filesystem):
        parent = next(each for each in map(str, Path(inner).parents) if os.path.lexists(each))
        if not os.path.isdir(parent):
            raise UsageError(f"{called}: {parent} is no folder, so nothing can be written in it")
        if os.path.exists(inner) and not os.path.isfile(inner):
            what = "a folder" if os.path.isdir(inner) else "a device or a pipe"
            raise UsageError(f"{called}: this is {what}, and a file is written; choose another path")
    try:
        with reading(path):
            start = read_start(path, MOST_BYTES)
    except PrefillError as error:
        cause = error.__cause__
        if isinstance(cause, FileNotFoundError):
            return
        if is_local(filesystem) and isinstance(cause, OSError):
            raise UsageError(f"{called}: {cause.strerror or cause}; choose another path") from None
        raise
    if not start or overwrite or KINDS[kind].knows(path, start):
        return
    advice = "" if overwrite is None else ", or replace it with --overwrite"
    raise UsageError(
        f"{called}: a file is there that is not {KINDS[kind].meaning}\nchoose another path, or remove it{advice}"
    )
