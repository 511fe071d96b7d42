"""The header of a GGUF file: the model's settings, and the places of its tensors. No tensor is read.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

from prefillcli.errors import UsageError
from prefillcli.models.files import GGUF_MAGIC, check_gguf

_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_MOST_DIMENSIONS = 4
_KEPT_ITEMS = 4096  # of an array; vocabularies are longer, and are only counted
POINTER_HEAD = "cls.output.weight"  # of a decision model: compares options with their question
POINTER_BIAS = "cls.output.bias"
_ALIGNMENT = 32  # bytes, where the file does not set it


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor of a file. `shape` is as torch has it, `kind` the number of its quantisation, `offset` in bytes from
    the start of the file's data."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int

    @property
    def numbers(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The header of one file. `fields` are its settings by name; of long arrays, the length. `raw` are the bytes of
    each setting in the file. The data begins at byte `data_start`."""

    path: Path
    size: int
    version: int
    fields: dict[str, Any]
    raw: dict[str, bytes]
    tensors: tuple[GgufTensor, ...]
    data_start: int
    alignment: int

    @property
    def architecture(self) -> str:
        """The family, as llama.cpp calls it."""
        return str(self.fields.get("general.architecture", ""))

    def setting(self, name: str) -> Any:
        """Return a setting of the family, `block_count` for example; None where it is missing."""
        return self.fields.get(f"{self.architecture}.{name}")


def read_gguf_header(path: Path, *, whole: bool = False) -> GgufHeader:
    """Read the header of a file, with `whole` arrays or the lengths of long ones. Raises UsageError if it is not a
    GGUF file or ends before its header does."""
    check_gguf(path)
    try:
        if whole:
            return _read(path, whole=True)
        own = path.stat()
        return _known(path, own.st_size, own.st_mtime_ns, own.st_ctime_ns, own.st_ino, own.st_dev)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    except _NoGgufError as error:
        raise UsageError(f"{path}: {error}") from None


@lru_cache(maxsize=8)
def _known(path: Path, *of_file: int) -> GgufHeader:
    # The header of a file as long as nothing has written to it: a vocabulary takes a quarter of a second to pass.
    return _read(path)


def _read(path: Path, *, whole: bool = False) -> GgufHeader:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _Cursor(data, whole=whole).header(path)


class _NoGgufError(Exception):
    """The fault in a file."""


class _Cursor:
    """Reads a mapped file from its beginning on; of long arrays only the length, unless they are read `whole`."""

    def __init__(self, data: mmap.mmap, *, whole: bool = False) -> None:
        self._data = data
        self._at = 0
        self._whole = whole

    def header(self, path: Path) -> GgufHeader:
        self._at = len(GGUF_MAGIC)
        version, tensors, settings = self._unpack("<IQQ")
        if version not in _VERSIONS:
            raise _NoGgufError(
                f"GGUF version {version} is not read; versions {' and '.join(map(str, _VERSIONS))} are\n"
                "convert it again with a current llama.cpp"
            )
        fields: dict[str, Any] = {}
        raw: dict[str, bytes] = {}
        for _ in range(settings):
            begun = self._at
            name = self._text()
            if name in fields:
                raise _NoGgufError(f"damaged: two settings are called {name[:60]!r}")
            fields[name] = self._value(*self._unpack("<I"))
            raw[name] = self._data[begun : self._at]
        found = tuple(self._tensor() for _ in range(tensors))
        if len({tensor.name for tensor in found}) != len(found):
            raise _NoGgufError("damaged: two tensors have one name")
        alignment = fields.get("general.alignment", _ALIGNMENT)
        if type(alignment) is not int or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
            raise _NoGgufError(f"damaged: an alignment of {alignment!r}, which is not a power of two")
        start = -(-self._at // alignment) * alignment
        return GgufHeader(path, len(self._data), version, fields, raw, found, start, alignment)

    def _tensor(self) -> GgufTensor:
        name = self._text()
        (dimensions,) = self._unpack("<I")
        if not 1 <= dimensions <= _MOST_DIMENSIONS:
            raise _NoGgufError(f"damaged: {name[:60]!r} has {dimensions} dimensions")
        shape = self._unpack(f"<{dimensions}Q")
        kind, offset = self._unpack("<IQ")
        return GgufTensor(name, shape[::-1], kind, offset)

    def _value(self, kind: int) -> Any:
        if kind in _NUMBERS:
            return self._unpack(f"<{_NUMBERS[kind]}")[0]
        if kind == _STRING:
            return self._text()
        if kind != _ARRAY:
            raise _NoGgufError(f"damaged: a setting of type {kind}")
        inner, count = self._unpack("<IQ")
        if inner in _NUMBERS:
            if count <= _KEPT_ITEMS or self._whole:
                return list(self._unpack(f"<{count}{_NUMBERS[inner]}"))
            self._skip(count * struct.calcsize(f"<{_NUMBERS[inner]}"))
            return count
        if inner not in (_STRING, _ARRAY):
            raise _NoGgufError(f"damaged: an array of type {inner}")
        if inner == _ARRAY and count:
            raise _NoGgufError("an array of arrays is not read")
        if self._whole:
            return [self._text() for _ in range(count)]
        for _ in range(count):
            self._skip(*self._unpack("<Q"))
        return count

    def _text(self) -> str:
        (length,) = self._unpack("<Q")
        begun = self._at
        self._skip(length)
        try:
            return self._data[begun : self._at].decode()
        except UnicodeDecodeError:
            raise _NoGgufError("damaged: a name that is not text") from None

    def _unpack(self, form: str) -> tuple[Any, ...]:
        begun = self._at
        self._skip(struct.calcsize(form))
        return struct.unpack_from(form, self._data, begun)

    def _skip(self, count: int) -> None:
        self._at += count
        if self._at > len(self._data):
            raise _NoGgufError(f"truncated: it ends after {len(self._data):,} bytes, in its header")
