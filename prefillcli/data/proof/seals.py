"""Digests that prove a file whole: of any file, inside Parquet files a seal over all their other bytes, and in JSON a
checksum of its values.

Page checksums cover the pages of a Parquet file, but not its footer. The seal is an entry of the footer's metadata
that holds the SHA-256 of the file as it is with 64 zeros in the seal's place, so that the file proves itself
wherever it is copied to.
"""

from __future__ import annotations

import hashlib
import io
import json
from typing import IO, Any

from prefillcli.errors import DamagedFileError

JOB_KEY = b"prefillcli"
"""Key of the job in the metadata of a Parquet file that a job wrote."""
_KEY = b"prefillcli.seal"
_BLANK = b"0" * 64
_MAGIC = b"PAR1"
_BLOCK = 1 << 20
UNSEALED = {_KEY: _BLANK}
"""Metadata of a Parquet file that is to be sealed."""


class Digesting(io.RawIOBase):
    """A file to write, with the digest of all that was written. Closing it leaves the file open."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._hash = hashlib.sha256()
        self._size = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._size

    def write(self, data: Any) -> int:
        self._file.write(data)
        self._hash.update(data)
        size = len(memoryview(data))
        self._size += size
        return size

    def digest(self) -> str:
        """SHA-256, in hexadecimal digits."""
        return self._hash.hexdigest()


def seal(file: IO[bytes], digest: str) -> None:
    """Put the digest of a Parquet file that has the entry `UNSEALED` into the seal's place."""
    start, footer = _footer(file)
    file.seek(start + _place(footer))
    file.write(digest.encode())
    file.seek(0, io.SEEK_END)


def seal_of(file: IO[bytes]) -> str:
    """The digest that a Parquet file says it has. Raises DamagedFileError if it has no seal."""
    _, footer = _footer(file)
    place = _place(footer)
    return footer[place : place + len(_BLANK)].decode("ascii", errors="replace")


def digest_of(file: IO[bytes], *, sealed: bool) -> str:
    """The digest of a file's content; of a `sealed` Parquet file with the seal left blank.

    Raises DamagedFileError if there is no seal.
    """
    rest, tail = (None, b"")
    if sealed:
        rest, footer = _footer(file)
        place = _place(footer)
        tail = footer[:place] + _BLANK + footer[place + len(_BLANK) :]
    file.seek(0)
    hasher = hashlib.sha256()
    while block := file.read(_BLOCK if rest is None else min(_BLOCK, rest)):
        hasher.update(block)
        rest = None if rest is None else rest - len(block)
    hasher.update(tail)
    return hasher.hexdigest()


def require_seal(file: IO[bytes]) -> None:
    """Raise DamagedFileError unless a Parquet file is as it was sealed."""
    if seal_of(file) != digest_of(file, sealed=True):
        raise DamagedFileError("its bytes are not those that were written")


def with_checksum(content: dict[str, Any]) -> bytes:
    """JSON with a checksum of its own."""
    content = json.loads(json.dumps(content))
    return json.dumps({**content, "checksum": _checksum(content)}, indent=1).encode()


def sealed_text(text: str) -> str:
    """The text of a JSON object with a checksum in it, for a file that later commands read."""
    return with_checksum(json.loads(text)).decode() + "\n"


def take_checksum(content: dict[str, Any]) -> bool | None:
    """Take the checksum out of what JSON holds. Gives whether it is that of the rest; None where there was none."""
    checksum = content.pop("checksum", None)
    return None if checksum is None else bool(checksum == _checksum(content))


def _checksum(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _footer(file: IO[bytes]) -> tuple[int, bytes]:
    """Where the footer of a Parquet file begins, and all bytes from there."""
    size = file.seek(0, io.SEEK_END)
    file.seek(max(size - 8, 0))
    end = file.read(8)
    length = int.from_bytes(end[:4], "little") + 8
    if len(end) < 8 or end[4:] != _MAGIC or length > size:
        raise DamagedFileError("it is not a whole Parquet file")
    file.seek(size - length)
    return size - length, file.read(length)


def _place(footer: bytes) -> int:
    """Where in a footer the value of the seal begins: after the key, a type and a length."""
    at = footer.rfind(_KEY)
    start = at + len(_KEY) + 2
    if at < 0 or start + len(_BLANK) > len(footer):
        raise DamagedFileError("it has no seal")
    return start
