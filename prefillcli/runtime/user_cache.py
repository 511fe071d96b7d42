"""Where prefill keeps what it can make again."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/prefillcli`, or `~/.cache/prefillcli`. It need not be there yet.

    A user without a home gets one that cannot be made: nothing is kept.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if os.path.isabs(base) else Path(os.path.expanduser("~/.cache"))
    if not root.is_absolute():  # `~` stays as it is, and would be made in the working directory
        root = Path(os.devnull)
    return root / "prefillcli"


# Entries that are remembered from run to run, in a JSON file of the user's cache.


class KeptEntries:
    """What is known by a name, in `$XDG_CACHE_HOME/prefillcli/FILE`.

    The file is only ever replaced as a whole: of two processes that write at once, the new entries of one may be lost.
    A file that is damaged, missing or cannot be written counts as empty.
    """

    def __init__(self, file: str) -> None:
        self._path = cache_folder() / file

    def read(self) -> dict[str, Any]:
        """All entries; none if the file is not as it was written."""
        try:
            content = json.loads(self._path.read_bytes())
            entries: dict[str, Any] = content["entries"]
            return entries if isinstance(entries, dict) and content["check"] == _check(entries) else {}
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return {}

    def write(self, entries: dict[str, Any]) -> bool:
        """Replace all entries. Gives whether that could be done; never raises for a folder that cannot be written."""
        text = json.dumps({"check": _check(entries), "entries": entries})
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self._path.parent, prefix=f"{self._path.stem}.", suffix=".tmp")
            try:
                with os.fdopen(handle, "w") as file:
                    file.write(text)
                os.replace(name, self._path)
            except BaseException:
                os.unlink(name)
                raise
            return True
        return False


def _check(entries: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()
