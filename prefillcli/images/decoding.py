"""Image files to pixels, by Pillow: only formats that are expected, and none that is larger than it may be."""

from __future__ import annotations

import io
import struct
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable
from functools import cache
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from prefillcli.errors import brief
from prefillcli.images.image import ImageError, RowImage

if TYPE_CHECKING:
    from PIL.Image import Image

# The formats, by how a file begins. Of a WebP file the name comes after its size.
_BEGINNINGS = {b"\x89PNG\r\n\x1a\n": "PNG", b"\xff\xd8\xff": "JPEG", b"GIF87a": "GIF", b"GIF89a": "GIF"}
_SWAPPING = (5, 6, 7, 8)  # EXIF orientations that exchange width and height
_REMEMBERED = 100_000
_sizes: OrderedDict[bytes, tuple[int, int]] = OrderedDict()  # of files that were decoded, the last ones, by their key
_sizes_lock = threading.Lock()


def check_image(data: bytes, *, max_pixels: int) -> RowImage:
    """Return the image in a file's bytes, which are decoded to their end.

    Raises ImageError for what is no PNG, JPEG, WebP or GIF file, is cut off or broken, or has more pixels than
    `max_pixels`. That is known from its header, before memory for pixels is taken. WebP files have a limit of Pillow's
    own beside it (twice its MAX_IMAGE_PIXELS). Many rows may have one image: it is decoded once.
    """
    key = blake2b(data, digest_size=16).digest()
    with _sizes_lock:
        size = _sizes.pop(key, None)
    if size is None:
        _, size = _decoded(data, max_pixels=max_pixels, pixels=False)
    else:
        _require_size(size, max_pixels)
    with _sizes_lock:
        _sizes[key] = size
        if len(_sizes) > _REMEMBERED:
            _sizes.popitem(last=False)
    return RowImage(data, key, *size)


def open_image(data: bytes) -> Image:
    """Return the pixels of a file that `check_image` has taken, upright and in RGB, without the file's metadata.

    They are those of transformers' `load_image`: the first frame of an animation, turned as EXIF says; transparency is
    left out.
    """
    return _decoded(data)[0]


def _decoded(data: bytes, *, max_pixels: int | None = None, pixels: bool = True) -> tuple[Image, tuple[int, int]]:
    """Return an image, upright and in RGB, and its width and height. Without `pixels` the image is made as small as
    its decoder can while it reads the whole file."""
    name = _format_of(data)
    if name == "WEBP":  # its decoder takes memory for all pixels when it is opened
        _require_size(_webp_size(data), max_pixels)
    try:
        image = _formats()[name](io.BytesIO(data))
        width, height = image.size
        _require_size((width, height), max_pixels)
        if name == "JPEG" and not pixels:
            image.draft(None, (1, 1))
        image.load()
        turn = image.getexif().get(0x0112, 1)  # what stands after the pixels in a PNG file counts, so it is read last
        if (method := _transposes().get(turn)) is not None:
            image = image.transpose(method)
        image.info.clear()  # a transparent colour there would only make a warning
        upright = image.convert("RGB")
    except ImageError:
        raise
    except Exception as error:  # a broken file may fail anywhere in the decoder: even for memory, with a wrong size
        raise ImageError(f"a {name} file that cannot be decoded: {brief(error)}") from None
    return upright, ((height, width) if turn in _SWAPPING else (width, height))


def _format_of(data: bytes) -> str:
    for beginning, name in _BEGINNINGS.items():
        if data.startswith(beginning):
            return name
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    raise ImageError("no PNG, JPEG, WebP or GIF file" if data else "a file without content")


def _require_size(size: tuple[int, int], max_pixels: int | None) -> None:
    width, height = size
    if max_pixels is not None and width * height > max_pixels:
        raise ImageError(f"{width:,} x {height:,} pixels; max_image_pixels is {max_pixels:,}")


def _webp_size(data: bytes) -> tuple[int, int]:
    # RFC 9649: the first chunk is a header of the whole canvas, or the only frame, without or with loss.
    kind = data[12:16]
    if kind == b"VP8X" and len(data) >= 30:
        return 1 + int.from_bytes(data[24:27], "little"), 1 + int.from_bytes(data[27:30], "little")
    if kind == b"VP8L" and len(data) >= 25:
        bits = int.from_bytes(data[21:25], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if kind == b"VP8 " and len(data) >= 30:
        width, height = struct.unpack_from("<HH", data, 26)
        return width & 0x3FFF, height & 0x3FFF
    raise ImageError("a WEBP file that cannot be decoded: its header is broken")


@cache
def _formats() -> dict[str, Callable[[io.BytesIO], Any]]:
    """Return what opens a file, by format. Pillow's `open` has a limit of pixels of its own, for the whole process,
    and warns."""
    from PIL.GifImagePlugin import GifImageFile
    from PIL.JpegImagePlugin import jpeg_factory
    from PIL.PngImagePlugin import PngImageFile
    from PIL.WebPImagePlugin import WebPImageFile

    # Of odd metadata, which a user cannot act on. Filters that somebody has chosen come before it.
    warnings.filterwarnings("ignore", module=r"PIL\.", append=True)
    return {"PNG": PngImageFile, "JPEG": jpeg_factory, "GIF": GifImageFile, "WEBP": WebPImageFile}


@cache
def _transposes() -> dict[int, Any]:
    """Return how an image is made upright, by its orientation in EXIF, as Pillow's own function for this does; that
    also writes the metadata anew, which fails where they are odd."""
    from PIL.Image import Transpose

    names = (
        "FLIP_LEFT_RIGHT", "ROTATE_180", "FLIP_TOP_BOTTOM", "TRANSPOSE", "ROTATE_270", "TRANSVERSE", "ROTATE_90",
    )  # fmt: skip
    return {turn: Transpose[name] for turn, name in enumerate(names, start=2)}
