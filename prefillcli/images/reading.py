"""The images of a cell: what a value of a row may be, and how it becomes files of images."""

from __future__ import annotations

import base64
import binascii
import os
import re
import stat
from collections.abc import Callable
from urllib.parse import unquote_to_bytes

from prefillcli.errors import out_of_resource, without_secrets
from prefillcli.images.decoding import check_image
from prefillcli.images.image import ImageError, RowImage

MAX_BYTES = 128 << 20  # of an image file: more is never read
_DATA_URL = re.compile(r"data:[^,]*?;base64,", re.IGNORECASE)
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]*:")


def read_images(
    value: object,
    *,
    root: str | None,
    max_pixels: int,
    fetch: Callable[[str], bytes] | None = None,
    read_file: Callable[[str, str], bytes] | None = None,
) -> list[RowImage]:
    """Return the images that the value of a cell, or of a part of a chat, stands for: none for a null or blank one.

    It is the bytes of a file; a path below the folder `root`; a data URL; an http or https URL, which `fetch` answers
    (`fetching.fetch`; None: URLs are not allowed); the struct `{"bytes": ..., "path": ...}` of `datasets.Image`, whose
    bytes come first; or a list of these. `read_file` returns the bytes of the file at a path below `root`, which has
    neither `..` nor a `/` in front (`read_below`, which also refuses links that lead out; another one reads from
    a store). A `root` of None has no files: rows from a pipe.

    Raises ImageError for a value that is no image, or as `check_image`. Thread-safe.
    """
    if isinstance(value, list | tuple):
        found: list[RowImage] = []
        for number, each in enumerate(value, start=1):
            if isinstance(each, list | tuple):
                raise ImageError("a list in a list")
            try:
                found += read_images(each, root=root, max_pixels=max_pixels, fetch=fetch, read_file=read_file)
            except ImageError as error:
                raise ImageError(f"image {number} of {len(value)}: {error}") from None
        return found
    if isinstance(value, dict):
        if not value.keys() <= {"bytes", "path"}:
            raise ImageError("a struct of an image has bytes and path, and nothing else")
        value = value.get("path") if value.get("bytes") is None else value["bytes"]
    if value is None or (isinstance(value, str) and not value.strip()):
        return []
    if isinstance(value, str):
        data = _named(value, root, fetch, read_file or read_below)
    elif isinstance(value, bytes | bytearray | memoryview):
        data = bytes(value)
    else:
        raise ImageError(f"neither bytes nor a text that names an image, but {type(value).__name__}")
    if len(data) > MAX_BYTES:
        raise ImageError(f"a file of more than {MAX_BYTES >> 20} MiB")
    return [check_image(data, max_pixels=max_pixels)]


def read_below(root: str, path: str) -> bytes:
    """Return the content of a file of the local folder `root`, of a large one little more than `MAX_BYTES`.

    Raises ImageError for a path that leads out of it, by a link too, and for what is no file or cannot be read.
    Failures for want of memory or file handles pass through.
    """
    try:
        base = os.path.realpath(root)
        place = os.path.realpath(os.path.join(base, path))
        if os.path.commonpath([base, place]) != base:
            raise ImageError(f"{_shown(path)} leads out of the folder of images")
        # The place has no link in it, and a pipe would keep this waiting.
        handle = os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise ImageError(f"{_shown(path)} is no file")
            with open(handle, "rb", closefd=False) as file:
                return file.read(MAX_BYTES + 1)
        finally:
            os.close(handle)
    except OSError as error:
        if out_of_resource(error):
            raise
        raise ImageError(f"{_shown(path)}: {error.strerror or 'cannot be read'}") from None
    except ValueError:  # a null character, or half a character
        raise ImageError(f"{_shown(path)} is no path") from None


def _named(
    text: str, root: str | None, fetch: Callable[[str], bytes] | None, read_file: Callable[[str, str], bytes]
) -> bytes:
    """Return the bytes of what a text names: a data URL, a URL or a path."""
    scheme = _SCHEME.match(text.lstrip()[:32])
    kind = scheme[0].lower() if scheme else ""
    if kind == "data:":
        return _of_data_url(text.strip())
    if kind in ("http:", "https:"):
        if fetch is None:
            raise ImageError(f"{_shown(text)}: URLs are fetched with --allow-urls only")
        return fetch(text.strip())
    if "://" in text[:32]:
        raise ImageError(f"{_shown(text)}: of URLs, only http, https and data name images")
    if text.startswith("/") or ".." in text.split("/"):
        raise ImageError(f"{_shown(text)}: a path must be relative, and without ..")
    if root is None:
        raise ImageError(f"{_shown(text)}: no folder for paths: name one with --image-root")
    return read_file(root, text)


def _of_data_url(text: str) -> bytes:
    beginning = _DATA_URL.match(text)
    if beginning is None:
        raise ImageError("a data URL that is not base64")
    encoded = text[beginning.end() :]
    if len(encoded) > 3 * MAX_BYTES:
        raise ImageError(f"a data URL of more than {MAX_BYTES >> 20} MiB")
    try:
        plain = unquote_to_bytes(encoded) if "%" in encoded else encoded.encode("ascii")
        return base64.b64decode(b"".join(plain.split()), validate=True)
    except (binascii.Error, UnicodeEncodeError):
        raise ImageError("a data URL whose base64 is broken") from None


def _shown(text: str) -> str:
    shown = ascii(without_secrets(text.strip()))
    return shown if len(shown) <= 200 else f"{shown[:150]}...'"
