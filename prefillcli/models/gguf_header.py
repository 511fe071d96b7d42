"""The header of a GGUF file: what it says of the model, and where its tensors are. No tensor is read.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from prefillcli.errors import UsageError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_MOST_DIMENSIONS = 4
_KEPT_ITEMS = 4096  # of an array; vocabularies are longer, and are only counted
_ALIGNMENT = 32  # bytes, where the file says nothing


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
        """How many numbers it holds."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What one file says. `fields` are its settings by name; of long arrays, the length. `raw` are the bytes of each
    setting as they are in the file. The data begins at byte `data_start`."""

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
        """A setting of the family, `block_count` for example; None where it is not there."""
        return self.fields.get(f"{self.architecture}.{name}")


def read_gguf_header(path: Path) -> GgufHeader:
    """Raises UsageError if the file is no GGUF file or ends before its header does."""
    try:
        size = path.stat().st_size
        if size < 24:
            raise UsageError(f"{path}: not a GGUF file: {size} bytes")
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Cursor(data).header(path)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    except _NoGgufError as error:
        raise UsageError(f"{path}: {error}") from None


class _NoGgufError(Exception):
    """What is wrong with a file."""


class _Cursor:
    """Reads a mapped file from its beginning on."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0

    def header(self, path: Path) -> GgufHeader:
        if self._data[:4] != _MAGIC:
            raise _NoGgufError("not a GGUF file")
        self._at = 4
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
            if count <= _KEPT_ITEMS:
                return list(self._unpack(f"<{count}{_NUMBERS[inner]}"))
            self._skip(count * struct.calcsize(f"<{_NUMBERS[inner]}"))
            return count
        if inner not in (_STRING, _ARRAY):
            raise _NoGgufError(f"damaged: an array of type {inner}")
        for _ in range(count):
            if inner == _STRING:
                self._skip(*self._unpack("<Q"))
            else:
                raise _NoGgufError("an array of arrays is not read")
        return count

    def _text(self) -> str:
        (length,) = self._unpack("<Q")
        begun = self._at
        self._skip(length)
        try:
            return self._data[begun : self._at].decode()
        except UnicodeDecodeError:
            raise _NoGgufError("damaged: a name that is no text") from None

    def _unpack(self, form: str) -> tuple[Any, ...]:
        begun = self._at
        self._skip(struct.calcsize(form))
        return struct.unpack_from(form, self._data, begun)

    def _skip(self, count: int) -> None:
        self._at += count
        if self._at > len(self._data):
            raise _NoGgufError(f"truncated: it ends after {len(self._data):,} bytes, in its header")


def write_joined(parts: Sequence[GgufHeader], path: Path, *, data: bool) -> None:
    """Join the parts of a model that is split in one file at `path`, which must not be there.

    Without `data` the tensors are holes in the file: it says what the model is, and takes no room on the disk.
    """
    first = parts[0]
    settings = [raw for name, raw in first.raw.items() if not name.startswith("split.")]
    places: list[tuple[GgufHeader, GgufTensor, int]] = []
    table, end = [], 0
    for part in parts:
        for tensor in part.tensors:
            name = tensor.name.encode()
            shape = struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *tensor.shape[::-1])
            table.append(struct.pack("<Q", len(name)) + name + shape + struct.pack("<IQ", tensor.kind, end))
            places.append((part, tensor, end))
            end += -(-tensor_bytes(tensor) // first.alignment) * first.alignment
    head = _MAGIC + struct.pack("<IQQ", first.version, len(table), len(settings)) + b"".join(settings + table)
    start = -(-len(head) // first.alignment) * first.alignment
    with path.open("xb") as file:
        file.write(head)
        if data:
            for part, tensor, offset in places:
                with part.path.open("rb") as source:
                    source.seek(part.data_start + tensor.offset)
                    file.seek(start + offset)
                    _copy(source, file, tensor_bytes(tensor))
        file.truncate(start + end)


def tensor_bytes(tensor: GgufTensor) -> int:
    """Bytes of a tensor in its file; its kind must be known to the package `gguf`."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    numbers, size = GGML_QUANT_SIZES[GGMLQuantizationType(tensor.kind)]
    return int(tensor.numbers // numbers * size)


def _copy(source: Any, target: Any, count: int) -> None:
    while count:
        block = source.read(min(count, 16 << 20))
        if not block:
            raise UsageError(f"{source.name}: was cut short while it was read")
        target.write(block)
        count -= len(block)
