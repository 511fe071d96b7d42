"""Small files that options name."""

from __future__ import annotations

import json

from prefillcli.data.filesystems import reading
from prefillcli.data.output.store import open_file
from prefillcli.data.proof.seals import take_checksum
from prefillcli.errors import UsageError
from prefillcli.redaction import without_secrets

MOST_BYTES = 32 << 20


def read_given(option: str, path: str, again: str) -> bytes:
    """What is at a local path or URL that an option names, up to `MOST_BYTES` and one more.

    Raises UsageError if it cannot be read; `again` says how such a file is made.
    """
    try:
        with reading(path), open_file(path) as file:
            return file.read(MOST_BYTES + 1)
    except UsageError:
        raise
    except Exception as error:
        missing = isinstance(error.__cause__, FileNotFoundError)
        reason = f"no such file\n{again}" if missing else str(error)
        raise UsageError(f"{option} {without_secrets(path)}: {reason}") from None


def read_sealed(option: str, path: str, again: str) -> tuple[bytes, bool]:
    """As `read_given` the JSON that a command of prefill has written, without the checksum in it, and whether there
    was one.

    Raises UsageError if something has changed since. What is no JSON is for the caller to refuse.
    """
    data = read_given(option, path, again)
    try:
        content = json.loads(data)
        right = take_checksum(content)
    except (ValueError, TypeError, AttributeError, RecursionError):
        return data, False
    if right is False:
        raise UsageError(f"{option} {without_secrets(path)}: it is not as prefill wrote it\n{again}")
    return json.dumps(content).encode(), right is not None
