"""Small files that a command of prefill has written, with a checksum, and that options name."""

from __future__ import annotations

import json

from prefillcli.data.filesystems import read_given
from prefillcli.data.output.store import put_text
from prefillcli.data.proof import sealed_text, take_checksum
from prefillcli.errors import UsageError, without_secrets


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


def write_sealed(path: str, text: str) -> None:
    """Write JSON to a local path or URL with a checksum of it. Raises OSError and PrefillError."""
    put_text(path, sealed_text(text))
