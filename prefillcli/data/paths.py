"""Paths and URLs as texts: which is which, and how one is taken apart. Nothing here looks at a disk."""

from __future__ import annotations

import re

WORK_ENDING = ".prefill"
"""Ending of the work folder beside an output; never read as input."""

_SCHEME = re.compile(r"^[A-Za-z][A-Za-z0-9+.\-]+(?=://|::)")


def is_url(path: str) -> bool:
    """Whether `path` names its filesystem (`s3://bucket/x`), as opposed to a plain local path."""
    return _SCHEME.match(path) is not None


def split_path(path: str) -> tuple[str, str]:
    """The folder and the name of a file at a local path or URL; the folder of a bare name is `.`."""
    folder, slash, name = path.rpartition("/")
    if folder.endswith(("/", ":")):  # the root of a URL, like memory://
        return f"{folder}/", name
    return folder or slash or ".", name
