"""Writes that a store refuses if the object is there already: of several writers one succeeds."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from fsspec import AbstractFileSystem
from fsspec.asyn import AsyncFileSystem


def exclusive_put(filesystem: Any, method: str = "pipe_file") -> Callable[[Any, Any], None] | None:
    """`pipe_file(path, data)` or `put_file(local, path)` of a filesystem, for objects that are not there yet.

    What it raises if one is there depends on the client. None if the filesystem cannot do that in one step; the store
    behind it may ignore the wish all the same.
    """
    options = _options(type(filesystem), method)
    if options is None:
        return None
    call = getattr(filesystem, method)
    return lambda first, second: call(first, second, **options)


def _options(kind: type, method: str) -> dict[str, Any] | None:
    base: type = AbstractFileSystem
    if issubclass(kind, AsyncFileSystem):
        base, method = AsyncFileSystem, f"_{method}"
    own = getattr(kind, method)
    if own is getattr(base, method):  # fsspec's own looks first and then writes: two runs may both find nothing
        return None
    parameters = inspect.signature(own).parameters
    if "mode" in parameters:  # s3fs, gcsfs
        return {"mode": "create"}
    return {"overwrite": False} if "overwrite" in parameters else None  # adlfs
