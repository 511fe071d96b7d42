"""Digests remembered from run to run, so that a file that did not change is not read again."""

from __future__ import annotations

import json
import time
from typing import Any

from prefillcli.data.proof.stamps import Stamp
from prefillcli.runtime.kept_entries import KeptEntries

MOST = 4096


class DigestCache:
    """Digests of local files by path and stamp, in `$XDG_CACHE_HOME/prefillcli/digests.json`.

    It is only ever replaced as a whole: of two processes that write at once, the new entries of one are lost, and its
    files are read once more. A cache that is damaged, missing or cannot be written counts as empty.
    """

    def __init__(self, most: int = MOST) -> None:
        self._kept = KeptEntries("digests.json")
        self._most = most
        self._entries: dict[str, list[Any]] | None = None
        self._new: dict[str, list[Any]] = {}

    def get(self, path: str, stamp: Stamp) -> str | None:
        """The digest of this version of the file, if it is known."""
        if self._entries is None:
            self._entries = self._kept.read()
        entry = self._entries.get(_key(path, stamp))
        if entry is None:
            return None
        self._new[_key(path, stamp)] = [entry[0], int(time.time())]
        return str(entry[0])

    def put(self, path: str, stamp: Stamp, digest: str) -> None:
        """Remember a digest; the caller vouches that the stamp was settled before the file was read."""
        self._new[_key(path, stamp)] = [digest, int(time.time())]

    def save(self) -> None:
        """Add what is new to the file, of which the `most` entries used last stay.

        Never raises for a folder that cannot be written.
        """
        if not self._new:
            return
        entries = self._kept.read() | self._new
        self._kept.write(dict(sorted(entries.items(), key=lambda item: -item[1][1])[: self._most]))
        self._new = {}


def _key(path: str, stamp: Stamp) -> str:
    return json.dumps([path, *stamp.identity, stamp.changed_ns])
