"""Small files that options name: read whole, up to a bound, whatever lies at the path."""

from __future__ import annotations

import io
from typing import IO

from prefillcli.data.filesystems import filesystem_of, is_local, patiently, reading
from prefillcli.errors import UsageError
from prefillcli.redaction import without_secrets
from prefillcli.runtime import file_calls

MOST_BYTES = 32 << 20


class MissingFileError(UsageError):
    """There is no such file."""


def read_given(option: str, path: str, again: str = "", *, most: int = MOST_BYTES) -> bytes:
    """What is at a local path or URL that an option names, of at most `most` bytes.

    A pipe may stand for a file, as in `--recipe <(...)`. Raises MissingFileError where nothing is, and UsageError for
    a folder or a device, for more bytes, and if it cannot be read; `again` says how such a file is made.
    """
    shown = without_secrets(path)
    try:
        with reading(path):
            found = read_start(path, most + 1)
    except UsageError:
        raise
    except Exception as error:
        cause = error.__cause__
        reason = str(error)
        if isinstance(cause, FileNotFoundError):
            raise MissingFileError(f"{option} {shown}: no such file\n{again}".rstrip()) from None
        if isinstance(cause, OSError) and cause.strerror:
            reason = f"cannot be read: {cause.strerror}"
        raise UsageError(f"{option} {shown}: {reason}") from None
    if len(found) > most:
        raise UsageError(f"{option} {shown}: it holds more than {most >> 20} MiB\n{again}".rstrip())
    return found


def read_start(path: str, most: int) -> bytes:
    """The first `most` bytes of a file or pipe at a local path or URL. Raises OSError, and what clients of object
    stores raise."""
    filesystem, inner = filesystem_of(path)
    file: IO[bytes]
    if is_local(filesystem):
        file = file_calls.open_to_read(inner, pipes=True)
    else:
        file = patiently(lambda: filesystem.open(inner, "rb"))
    with file:
        found = io.BytesIO()
        while found.tell() < most and (block := file.read(min(1 << 20, most - found.tell()))):
            found.write(block)
        return found.getvalue()
