"""What a file is by its first bytes, where that is not what its ending says."""

from __future__ import annotations

import re

from prefillcli.errors import UsageError

_SPREADSHEET = "save its sheet as CSV in UTF-8"
_BEGINNINGS: tuple[tuple[bytes, str, str], ...] = (
    (b"\x1f\x8b", "it is compressed with gzip", "give its name the ending .{kind}.gz"),
    (b"\x28\xb5\x2f\xfd", "it is compressed with Zstandard", "give its name the ending .{kind}.zst"),
    (b"BZh", "it is compressed with bzip2", "unpack it, or compress it with gzip or Zstandard"),
    (b"\xfd7zXZ", "it is compressed with xz", "unpack it, or compress it with gzip or Zstandard"),
    (b"PK\x03\x04", "it is a ZIP archive or a spreadsheet (.xlsx)", f"unpack it, or {_SPREADSHEET}"),
    (b"\xd0\xcf\x11\xe0", "it is a spreadsheet of an old Excel (.xls)", _SPREADSHEET),
    (b"PAR1", "it is a Parquet file", "give its name the ending .parquet"),
    (b"ARROW1", "it is an Arrow file", "write it as Parquet"),
)
_TEXTS: tuple[tuple[re.Pattern[bytes], str, str], ...] = (
    (re.compile(rb"<(!doctype html|html)", re.IGNORECASE), "it is an HTML page", "download the file itself"),
    (
        re.compile(rb'\[\s*[\[{"\]]'),
        "it is one JSON array",
        "write a line for each element: jq -c '.[]' {path} > new.jsonl",
    ),
)
_OBJECT = re.compile(rb'\{\s*"(?:[^"\\]|\\.)*"\s*:')


def refuse_other_content(path: str, kind: str, start: bytes) -> None:
    """Raise UsageError if a file of lines begins with `start` as one of another kind does."""
    text = start.removeprefix(b"\xef\xbb\xbf").lstrip()
    binary = b"\0" in start or not start.isascii()  # a column may be named PAR1
    found = [(what, advice) for beginning, what, advice in _BEGINNINGS if binary and start.startswith(beginning)]
    found += [(what, advice) for beginning, what, advice in _TEXTS if beginning.match(text)]
    if kind != "jsonl" and _OBJECT.match(text):
        found.append(("its lines are JSON objects", "give its name the ending .jsonl"))
    if found:
        what, advice = found[0]
        raise UsageError(f"{path}: {what}\n{advice.format(kind=kind, path=path)}")
