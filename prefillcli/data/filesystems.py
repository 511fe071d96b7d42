"""From a path or URL to the filesystem that holds it."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import fsspec

from prefillcli.data.failures import Failure, explained
from prefillcli.data.paths import is_url
from prefillcli.errors import PrefillError, ResourceError, UsageError
from prefillcli.runtime.extras import require_extra

_FULL = (errno.ENOSPC, errno.EDQUOT)
_NO_HANDLES = (errno.EMFILE, errno.ENFILE)


EXTRA_OF = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "abfs": "azure", "abfss": "azure", "az": "azure"}
"""The extra of prefillcli that brings what an object store needs beside fsspec, by protocol."""


def is_local(filesystem: Any) -> bool:
    protocol = filesystem.protocol
    return "file" in ((protocol,) if isinstance(protocol, str) else protocol)


def filesystem_of(path: str) -> tuple[Any, str]:
    """The fsspec filesystem of a path or URL, and the path inside it.

    Raises UsageError if no package for its protocol is installed. Protocols beside those of the object stores are then
    tried through pyarrow (hdfs).
    """
    if not is_url(path):
        return fsspec.filesystem("file"), _absolute(os.path.expanduser(path))
    try:
        filesystem, inner = fsspec.core.url_to_fs(path)
    except (ImportError, ValueError) as error:
        extra = EXTRA_OF.get(path.partition("://")[0].rpartition("::")[2])
        if isinstance(error, ImportError) and extra is not None:
            require_extra(extra, f"cannot open {path}")
            raise UsageError(f"cannot open {path}: {error}") from None
        from pyarrow import fs  # here, or a recipe that is not there would be told of late

        try:
            arrow, inner = fs.FileSystem.from_uri(path)
        except Exception:  # Arrow does not know it either; fsspec's message says more
            raise UsageError(f"cannot open {path}: {error}") from None
        from fsspec.implementations.arrow import ArrowFSWrapper

        return ArrowFSWrapper(arrow), inner
    except Exception as error:  # clients of object stores raise anything
        raise UsageError(f"cannot open {path}: {error}") from None
    return filesystem, inner


def _absolute(path: str) -> str:
    """A whole path; `..` behind a symbolic link leads where the system goes, not back along the name."""
    whole = re.sub("^//+", "/", os.path.abspath(path))
    if ".." in path.split("/") and os.path.realpath(path) != os.path.realpath(whole):
        return os.path.realpath(path)
    return whole


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Turn what goes wrong while reading `path` into an error that names it.

    Raises UsageError where reading a local file is not allowed, ResourceError where too many files are open, else
    PrefillError.
    """
    try:
        yield
    except PrefillError:
        raise
    except PermissionError as error:
        if is_url(path):
            raise PrefillError(f"cannot read {path}: {explained(error)}") from error
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error
    except Exception as error:  # Arrow, zlib and the clients of object stores raise anything
        if isinstance(error, OSError) and error.errno in _NO_HANDLES:
            raise _no_handles(path) from error
        if is_url(path) and Failure.of(error) in (Failure.PASSING, Failure.REFUSED):
            raise PrefillError(f"cannot read {path}: {explained(error)}") from error
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise PrefillError(
            f"cannot read {path}: {reason}\nthe file may be damaged or incomplete: check it, then run again"
        ) from error


@contextmanager
def writing(path: str) -> Iterator[None]:
    """Turn what a disk or an object store raises into an error that names `path`."""
    try:
        yield
    except PrefillError:
        raise
    except OSError as error:
        if error.errno in _FULL:
            raise ResourceError(
                f"no space left on the device for {path}\nmake room, then run again with --resume"
            ) from error
        if error.errno in _NO_HANDLES:
            raise _no_handles(path) from error
        raise PrefillError(f"cannot use {path}: {error.strerror or error}") from error


def _no_handles(path: str) -> ResourceError:
    return ResourceError(f"cannot open {path}: too many open files\nallow more with `ulimit -n`, then run again")
