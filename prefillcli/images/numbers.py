"""Numbers for the features of a job's images."""

from __future__ import annotations

import threading
from bisect import bisect, insort
from collections import OrderedDict
from hashlib import blake2b
from itertools import count

from prefillcli.images.image import FIRST_FEATURE, LAST_FEATURE, PlacedImage, RowImage

_TRIES = 64  # of places for an image, before older images are forgotten


class FeatureNumbers:
    """Gives the features of each image of a job numbers of their own. Thread-safe.

    An image with the same content has the same numbers again, so that its prompts share it. They come from its
    content: a resumed run packs prompts as the first one did, unless two images want the same numbers. No two of the
    `most` images that were placed last share a number, as long as there are enough.
    """

    def __init__(self, most: int = 100_000, *, first: int = FIRST_FEATURE, last: int = LAST_FEATURE) -> None:
        self._most, self._first, self._count = most, first, last + 1 - first
        self._firsts: OrderedDict[tuple[bytes, int, bool], int] = OrderedDict()
        self._taken: list[tuple[int, int]] = []  # the numbers of these images, first and one after the last, ascending
        self._lock = threading.Lock()

    @property
    def given(self) -> bool:
        """Whether any image was placed."""
        return bool(self._firsts)

    def placed(self, image: RowImage, features: int, several: bool = False) -> PlacedImage:
        """Return the image with numbers for that many features, those that it has already where it is remembered."""
        key = image.key, features, several
        with self._lock:
            if key not in self._firsts:
                while len(self._firsts) >= self._most:
                    self._forget()
                self._firsts[key] = first = self._free(*key)
                insort(self._taken, (first, first + features))
            self._firsts.move_to_end(key)
            return PlacedImage(self._firsts[key], features, image, several)

    def _free(self, content: bytes, features: int, several: bool) -> int:
        for attempt in count():
            digest = blake2b(b"%d %d " % (several, attempt) + content, digest_size=8).digest()
            first = self._first + int.from_bytes(digest, "little") % (self._count - features + 1)
            at = bisect(self._taken, (first, 0))
            before = at and self._taken[at - 1][1] > first
            if not before and (at == len(self._taken) or self._taken[at][0] >= first + features):
                break
            if attempt >= _TRIES:
                self._forget()
        return first

    def _forget(self) -> None:
        # The image that was placed longest ago.
        _, first = self._firsts.popitem(last=False)
        del self._taken[bisect(self._taken, (first, 0))]
