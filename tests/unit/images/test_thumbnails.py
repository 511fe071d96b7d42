"""Small copies of images: bounded, of the pixels that a viewer sees, and without what else is in a file."""

from __future__ import annotations

import base64
import io

import numpy as np
import pytest
from PIL import Image, ImageOps

from prefillcli.images.decoding import check_image
from prefillcli.images.thumbnails import LONGEST, MOST_BYTES, MOST_OF_ROW, Thumbnail, thumbnails_of
from tests.unit.images.files import noise, saved

MOST_PIXELS = 1 << 24


def thumbnail(data: bytes) -> tuple[Thumbnail, bytes, Image.Image]:
    """The small copy of an image, its file, and its pixels as Pillow reads them."""
    (found,) = thumbnails_of([check_image(data, max_pixels=MOST_PIXELS)])
    beginning, _, content = found.url.partition(",")
    assert beginning == "data:image/jpeg;base64"
    file = base64.b64decode(content, validate=True)
    return found, file, Image.open(io.BytesIO(file), formats=["JPEG"])


@pytest.mark.parametrize("size", [(1, 1), (3, 2), (96, 96), (1, 10_000), (10_000, 1), (1200, 900)])
@pytest.mark.parametrize("bands", [2, 3, 4])
def test_a_thumbnail_is_small_however_large_the_image_is(size: tuple[int, int], bands: int) -> None:
    found, file, image = thumbnail(saved(noise(*size, bands), "PNG"))
    assert len(file) <= MOST_BYTES
    assert image.size == (found.width, found.height)
    assert max(image.size) == min(max(size), LONGEST)
    assert found.text == f"image 1, {size[0]} x {size[1]} pixels"


def test_a_thumbnail_shows_the_image_upright() -> None:
    halves = Image.new("RGB", (400, 200), "red")
    halves.paste("blue", (0, 0, 200, 200))
    exif = Image.Exif()
    exif[0x0112] = 6
    data = saved(halves, "JPEG", quality=95, exif=exif)
    _, _, image = thumbnail(data)
    seen = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).resize(image.size)
    assert image.size == (48, 96)
    assert np.abs(np.asarray(image, int) - np.asarray(seen, int)).mean() < 8


def test_nothing_of_a_file_but_its_pixels_is_in_a_thumbnail() -> None:
    exif = Image.Exif()
    exif[0x010F] = "PRIVATE-CAMERA"
    exif.get_ifd(0x8825).update({1: "N", 2: (48.0, 51.0, 29.6), 3: "E", 4: (2.0, 17.0, 40.2)})
    options = {"exif": exif, "comment": b"PRIVATE-COMMENT", "icc_profile": b"PRIVATE-PROFILE" * 20}
    data = saved(noise(64, 48), "JPEG", quality=90, **options)
    assert Image.open(io.BytesIO(data)).getexif().get_ifd(0x8825)[2] == (48.0, 51.0, 29.6)
    _, file, image = thumbnail(data)
    assert not image.getexif()
    assert not image.getexif().get_ifd(0x8825)
    assert not {"exif", "comment", "icc_profile", "xmp", "photoshop"} & image.info.keys()
    assert b"PRIVATE" not in file
    assert b"Exif" not in file


def test_a_row_has_few_thumbnails() -> None:
    images = [check_image(saved(noise(8, 8, seed=seed), "PNG"), max_pixels=64) for seed in range(5)]
    assert len(thumbnails_of(images)) == MOST_OF_ROW == 3
    assert thumbnails_of(images, 0) == ()
