"""By what a later job recognises a row that it need not score again: a digest of all that its results follow from.

The digests of an output are a file in its work folder, `row-digests.bin`: 16 bytes for each row, in the order of the
output; zeros where a row has no score.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from prefillcli.data.output.counts import DIGEST
from prefillcli.data.output.scored_truth import id_texts
from prefillcli.data.output.store import Store
from prefillcli.data.prompts.labels import Labels
from prefillcli.data.proof.seals import Digesting
from prefillcli.data.rows import Prompt, Window
from prefillcli.data.values import to_python
from prefillcli.errors import DamagedFileError

NAME = "row-digests.bin"
SIZE = 16
"""Bytes of a digest."""
TYPE = pa.binary(SIZE)
_NONE = bytes(SIZE)


class RowDigests:
    """Notes the digest of each prompt's row in it.

    A row's results follow from its id (or number), its tokens, the labels after them, whether they were cut, its own
    keep rate and adapter, the values that sections of it are made of, and its values in the carried `columns`, by
    which rows are chosen. What else they follow from is the same for all rows: the job's fingerprint, and `common`.
    """

    def __init__(
        self,
        labels: Labels,
        *,
        id_column: str | None,
        json_carried: bool,
        columns: Sequence[str] = (),
        common: Sequence[Prompt] = (),
    ) -> None:
        self._labels = labels
        self._id_column = id_column
        self._json = json_carried
        self._columns = sorted(columns)
        self._common = b""
        self._common = b"".join(self._of(prompt, ()) for prompt in common)

    def __call__(self, window: Window) -> None:
        places = {row: place for place, row in enumerate(window.rows.tolist())}
        names = [str(row) for row in places]
        if self._id_column is not None:
            names = id_texts(window.carried[self._id_column], json_text=self._json)
        values = [to_python(window.carried[name]) for name in self._columns]
        for prompt in window.prompts:
            place = places[prompt.row]
            prompt.digest = self._of(prompt, [names[place], *(column[place] for column in values)])

    def _of(self, prompt: Prompt, own: Iterable[Any]) -> bytes:
        rest = [*own, self._labels.sets[prompt.labels], prompt.truncated, prompt.keep, prompt.specprefill]
        text = json.dumps([*rest, prompt.adapter, prompt.made_of], sort_keys=True, default=_plain).encode()
        found = hashlib.blake2b(self._common, digest_size=SIZE)
        found.update(b"%d " % len(text) + text)
        found.update(np.ascontiguousarray(prompt.tokens, "<i4").tobytes())
        return found.digest()


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else repr(value)


class DigestFile:
    """The digests of an output in the making."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = Digesting(file)

    def add(self, rows: pa.Table) -> None:
        """Those of the next rows, as parts have them; an earlier version wrote parts without any."""
        known = rows[DIGEST].to_pylist() if DIGEST in rows.column_names else [None] * len(rows)
        self._file.write(b"".join(_NONE if each is None else each for each in known))

    @property
    def digest(self) -> str:
        """SHA-256 of the whole file, in hexadecimal digits."""
        return self._file.digest()


@contextmanager
def writing_digests(work: Store) -> Iterator[DigestFile]:
    """The file with the digests of an output, which appears in its work folder when the block ends."""
    with work.create(NAME) as file:
        yield DigestFile(file)


class DigestReader:
    """Reads the digests of an output, which must be those that were written. Close what `open` gives by `finish`."""

    def __init__(self, file: IO[bytes], location: str) -> None:
        self._file = file
        self._hash = hashlib.sha256()
        self._location = location

    def next(self, rows: int) -> pa.Array:
        """The digests of the next rows, null where a row has none. Raises DamagedFileError if there are fewer."""
        data = self._read(rows * SIZE)
        if len(data) < rows * SIZE:
            raise self._damaged()
        known = np.frombuffer(data, np.uint64).reshape(-1, 2).any(axis=1)
        mask = pa.array(known)
        digests = pa.Array.from_buffers(TYPE, rows, [None, pa.py_buffer(data)])
        return pc.if_else(mask, digests, pa.scalar(None, TYPE))

    def finish(self, digest: str) -> None:
        """Raise DamagedFileError unless everything was read, and is what was written."""
        if self._read(1) or self._hash.hexdigest() != digest:
            raise self._damaged()

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size and (more := self._file.read(size - len(data))):
            data += more
        self._hash.update(data)
        return data

    def _damaged(self) -> DamagedFileError:
        return DamagedFileError(f"{self._location}/{NAME} is not as it was written")
