"""Small copies of images, for pages: made of the pixels, so that nothing else of a file is in them."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import NamedTuple

from prefillcli.images.decoding import open_image
from prefillcli.images.image import RowImage

LONGEST = 96  # pixels of the longer side
MOST_BYTES = 6000  # of a thumbnail's file
MOST_OF_ROW = 3
_QUALITIES = (60, 35, 15)  # of JPEG, the best that is small enough


class Thumbnail(NamedTuple):
    """A small JPEG copy of an image as a data URL, its `width` and `height` in pixels, and what stands for it where it
    is not seen."""

    url: str
    width: int
    height: int
    text: str


def thumbnails_of(images: Sequence[RowImage], most: int = MOST_OF_ROW) -> tuple[Thumbnail, ...]:
    """Return small copies of the first images of a row, at most so many."""
    return tuple(
        _thumbnail(image, f"image {number}, {image.width} x {image.height} pixels")
        for number, image in enumerate(images[:most], start=1)
    )


def _thumbnail(image: RowImage, text: str) -> Thumbnail:
    small, longest = open_image(image.data), LONGEST
    while True:
        small.thumbnail((longest, longest))
        for quality in _QUALITIES:
            file = io.BytesIO()
            small.save(file, "JPEG", quality=quality, optimize=True)
            if file.tell() <= MOST_BYTES:
                url = "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode("ascii")
                return Thumbnail(url, *small.size, text)
        longest //= 2
