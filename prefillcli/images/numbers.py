"""Numbers for the features of a job's images."""

from __future__ import annotations

import threading
from collections import OrderedDict

from prefillcli.images.image import FIRST_FEATURE, LAST_FEATURE, PlacedImage, RowImage


class FeatureNumbers:
    """Gives the features of each image of a job numbers of their own. Thread-safe.

    An image with the same content has the same numbers again, so that its prompts share it, as long as it is among the
    `most` that were placed last. Numbers that have run out begin again. Then no image that was placed among the last
    half of them, some 10^9 features, has a number of another one.
    """

    def __init__(self, most: int = 100_000, *, first: int = FIRST_FEATURE, last: int = LAST_FEATURE) -> None:
        self._most, self._first, self._count = most, first, last + 1 - first
        self._places: OrderedDict[tuple[bytes, int, bool], int] = OrderedDict()  # the features given out before
        self._given = 0
        self._lock = threading.Lock()

    def placed(self, image: RowImage, features: int, several: bool = False) -> PlacedImage:
        """Return the image with numbers for that many features, those that it has already where it is remembered."""
        key = image.key, features, several
        with self._lock:
            place = self._places.pop(key, None)
            if place is None or self._given - place > self._count // 2:
                place = self._new_place(features)
            self._places[key] = place
            if len(self._places) > self._most:
                self._places.popitem(last=False)
        return PlacedImage(self._first + place % self._count, features, image, several)

    def _new_place(self, features: int) -> int:
        left = self._count - self._given % self._count
        place = self._given + (left if features > left else 0)  # an image's numbers are consecutive
        self._given = place + features
        return place
