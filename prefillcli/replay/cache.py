"""A prefix cache: K,V of the first tokens of paths in a trie."""

from __future__ import annotations

import numpy as np

from prefillcli.replay.workloads import IntArray


class PrefixCache:
    """Holds the K,V of up to `capacity` tokens; beyond that the least recently used are dropped.

    A whole path is used at once, and its last tokens are dropped first. So prefixes outlive their suffixes, and a path
    longer than the cache keeps its first tokens (suffix discarding, PrefillOnly 5.1).
    """

    def __init__(self, lengths: IntArray, capacity: int) -> None:
        self._lengths = lengths
        self._room = capacity  # tokens; below 0 while too many are held
        self._held = np.zeros_like(lengths)  # first tokens of each node
        self._used: dict[int, None] = {}  # nodes that are held, least recently used first

    def cached(self, paths: IntArray) -> IntArray:
        """Tokens held of `paths` [..., depth], root first."""
        held: IntArray = self._held[paths].sum(axis=-1)
        return held

    def add(self, path: IntArray) -> None:
        """A path was computed."""
        for node in path[::-1].tolist():
            self._room -= int(self._lengths[node] - self._held[node])
            self._held[node] = self._lengths[node]
            self._used.pop(node, None)
            self._used[node] = None
        while self._room < 0:
            oldest = next(iter(self._used))
            dropped = min(int(self._held[oldest]), -self._room)
            self._held[oldest] -= dropped
            self._room += dropped
            if not self._held[oldest]:
                del self._used[oldest]
