"""Files of images of every kind, made by Pillow or put together from chunks."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
from PIL import Image


def noise(width: int, height: int, bands: int = 3, *, seed: int = 0) -> Image.Image:
    """An image of random colours, smooth enough that JPEG has something to say."""
    grid = np.random.default_rng(seed).integers(0, 256, (height, width, bands), dtype=np.uint8)
    return Image.fromarray(grid.squeeze() if bands == 1 else grid)


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    """The file of an image."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def turned(image: Image.Image, kind: str, orientation: object) -> bytes:
    """The file of an image that EXIF says to turn."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return saved(image, kind, exif=exif)


def chunk(kind: bytes, content: bytes) -> bytes:
    """A chunk of a PNG file."""
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(width: int, height: int, pixels: bytes, *, bits: int = 8, colour: int = 2, between: bytes = b"") -> bytes:
    """A PNG file of these rows, each with its filter byte in front."""
    header = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0)
    body = chunk(b"IHDR", header) + between + chunk(b"IDAT", zlib.compress(pixels)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def riff(*chunks: tuple[bytes, bytes]) -> bytes:
    """A WebP file of these chunks."""
    body = b"WEBP" + b"".join(
        kind + struct.pack("<I", len(content)) + content + b"\0" * (len(content) % 2) for kind, content in chunks
    )
    return b"RIFF" + struct.pack("<I", len(body)) + body


def animated(kind: str, **options: Any) -> bytes:
    """A file of three frames."""
    first, *others = (noise(21, 13, seed=seed) for seed in range(3))
    return saved(first, kind, save_all=True, append_images=others, duration=50, **options)


def _deep_png() -> bytes:
    rows = np.random.default_rng(1).integers(0, 1 << 16, (9, 12), dtype=np.uint16).astype(">u2")
    return png(12, 9, b"".join(b"\0" + row.tobytes() for row in rows), bits=16, colour=0)


def _deep_colour_png() -> bytes:
    rows = np.random.default_rng(2).integers(0, 1 << 16, (9, 12, 4), dtype=np.uint16).astype(">u2")
    return png(12, 9, b"".join(b"\0" + row.tobytes() for row in rows), bits=16, colour=6)


def _apng_with_other_default() -> bytes:
    return animated("PNG", default_image=True)


def images() -> dict[str, bytes]:
    """Files that are images, of every kind that a user may have."""
    colours = noise(24, 17).quantize(16)
    rgba, grey = noise(24, 17, 4), noise(24, 17, 1)
    cmyk = Image.fromarray(np.random.default_rng(3).integers(0, 256, (17, 24, 4), dtype=np.uint8), "CMYK")
    found = {
        "png": saved(noise(40, 33), "PNG"),
        "jpeg": saved(noise(40, 33), "JPEG"),
        "progressive jpeg": saved(noise(40, 33), "JPEG", progressive=True),
        "grey jpeg": saved(grey, "JPEG"),
        "cmyk jpeg": saved(cmyk, "JPEG"),
        "webp": saved(noise(40, 33), "WEBP"),
        "webp without loss": saved(noise(40, 33), "WEBP", lossless=True),
        "webp with alpha": saved(rgba, "WEBP"),
        "webp with alpha, without loss": saved(rgba, "WEBP", lossless=True),
        "gif": saved(noise(40, 33), "GIF"),
        "interlaced gif": saved(noise(40, 33), "GIF", interlace=1),
        "grey gif": saved(grey, "GIF"),
        "gif with transparency": saved(colours, "GIF", transparency=3),
        "grey png": saved(grey, "PNG"),
        "png with alpha": saved(rgba, "PNG"),
        "grey png with alpha": saved(rgba.convert("LA"), "PNG"),
        "palette png": saved(colours, "PNG"),
        "palette png, one colour transparent": saved(colours, "PNG", transparency=3),
        "palette png with alpha": saved(colours, "PNG", transparency=bytes(range(0, 256, 16))),
        "png, one colour transparent": saved(noise(24, 17), "PNG", transparency=(1, 2, 3)),
        "grey png, one transparent": saved(grey, "PNG", transparency=7),
        "1 bit png": saved(grey.convert("1"), "PNG"),
        "16 bit png": _deep_png(),
        "16 bit png with alpha": _deep_colour_png(),
        "animated gif": animated("GIF"),
        "animated webp": animated("WEBP"),
        "animated png": animated("PNG"),
        "animated png with another first image": _apng_with_other_default(),
        "several jpegs": animated("MPO"),
        "1x1 png": saved(noise(1, 1), "PNG"),
        "1x1 jpeg": saved(noise(1, 1), "JPEG"),
        "1x1 gif": saved(noise(1, 1), "GIF"),
        "1x1 webp": saved(noise(1, 1), "WEBP"),
        "1x10000 png": saved(noise(1, 10_000), "PNG"),
        "10000x1 jpeg": saved(noise(10_000, 1), "JPEG"),
        "png and a zip after it": saved(noise(9, 9), "PNG") + b"PK\x03\x04" + b"\0" * 26 + b"PK\x05\x06" + b"\0" * 18,
        "gif and a script": saved(noise(0x2F, 0x2A), "GIF") + b"*/=1;alert(1)//",
        "jpeg and a page": saved(noise(9, 9), "JPEG", comment=b"<script>alert(1)</script>") + b"<html>",
        "png with a wrong profile": saved(noise(9, 9), "PNG", icc_profile=b"no profile"),
        "jpeg with broken exif": saved(noise(9, 9), "JPEG", exif=b"Exif\0\0II*\0\x08\0\0\0\xff\x7f\x12\x01"),
        "png with exif after its pixels": _exif_at_the_end(),
        "png with xmp": saved(noise(9, 5), "PNG", pnginfo=_xmp()),
    }
    for kind in ("JPEG", "PNG", "WEBP"):
        found |= {f"{kind.lower()} turned {turn}": turned(noise(20, 11), kind, turn) for turn in range(10)}
    return found


def _exif_at_the_end() -> bytes:
    plain, exif = saved(noise(20, 11), "PNG"), Image.Exif()
    exif[0x0112] = 6
    return plain[:-12] + chunk(b"eXIf", exif.tobytes().removeprefix(b"Exif\0\0")) + plain[-12:]


def _xmp() -> Any:
    from PIL.PngImagePlugin import PngInfo

    info = PngInfo()
    info.add_itxt("XML:com.adobe.xmp", '<x tiff:Orientation="8"/>')
    return info


def others() -> dict[str, bytes]:
    """Files that are no image of these formats, most of which Pillow would open."""
    picture = noise(9, 9)
    return {
        "bmp": saved(picture, "BMP"),
        "tiff": saved(picture, "TIFF"),
        "ppm": saved(picture, "PPM"),
        "icon": saved(picture, "ICO"),
        "pdf": saved(picture, "PDF"),
        "eps": saved(picture, "EPS"),
        "svg": b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>',
        "html": b"<html><img src=x></html>",
        "text": b"a cat",
        "sound": b"RIFF\x24\0\0\0WAVEfmt ",
        "nothing": b"",
        "zeros": bytes(1000),
    }
