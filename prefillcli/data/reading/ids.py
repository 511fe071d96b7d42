"""Which ids were seen before, in about eight bytes a row."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from prefillcli.data.rows import ErrorCode, Float64Array, Int64Array, RowError
from prefillcli.data.values import is_text, plain_type, text_of, to_python


class SeenIds:
    """Finds null and repeated ids over a whole input.

    Numbers and times are compared as they are, anything else by a 64-bit hash, the same one in every process: in ten
    million rows the chance of one false duplicate is about one in 400,000. With `json` the ids are JSON texts, which
    are compared as a column of text would hold them: 1 is the same as "1", and another id than 1.0.
    """

    def __init__(self, *, json: bool = False) -> None:
        self._json = json
        self._sorted: list[Int64Array] = []
        """Keys of all rows so far in sorted runs, each more than twice as long as the next."""

    def check(self, rows: Int64Array, ids: pa.ChunkedArray) -> dict[int, RowError]:
        """The rows among these whose id is null or was seen before, by row number; then remember the ids."""
        column = ids.combine_chunks()
        null = pc.is_null(column, nan_is_null=True).to_numpy(zero_copy_only=False)
        valid = np.flatnonzero(~null)
        keys = (_json_keys if self._json else _keys)(column.filter(pa.array(~null)))
        unique, first = np.unique(keys, return_index=True)
        repeated = np.ones(len(keys), bool)
        repeated[first] = False
        for run in self._sorted:
            at = np.minimum(np.searchsorted(run, keys), len(run) - 1)
            repeated |= run[at] == keys
        self._remember(unique)
        errors = {int(row): RowError(ErrorCode.NULL_ID, "the id is null or missing") for row in rows[null]}
        for position in np.flatnonzero(repeated):
            (what,) = to_python(column.slice(int(valid[position]), 1))
            what = text_of(what) if self._json else what
            errors[int(rows[valid[position]])] = RowError(
                ErrorCode.DUPLICATE_ID, f"an earlier row has the id {what!r}"
            )
        return errors

    def _remember(self, keys: Int64Array) -> None:
        if len(keys) == 0:
            return
        while self._sorted and len(self._sorted[-1]) <= 2 * len(keys):
            keys = np.concatenate([self._sorted.pop(), keys])
            keys.sort()
        self._sorted.append(keys)


def _keys(ids: pa.Array) -> Int64Array:
    """A number for every id [rows], of which none is null."""
    if isinstance(ids, pa.ExtensionArray):
        return _keys(ids.storage)
    kind = plain_type(ids.type)
    if pa.types.is_floating(kind):
        numbers: Float64Array = ids.to_numpy(zero_copy_only=False).astype(np.float64) + 0.0  # -0.0 is 0.0
        as_integers: Int64Array = numbers.view(np.int64)
        return as_integers
    if pa.types.is_uint64(kind):
        unsigned: Int64Array = ids.to_numpy(zero_copy_only=False).view(np.int64)
        return unsigned
    if pa.types.is_temporal(kind) and not pa.types.is_interval(kind):
        ids, kind = ids.view(pa.int32() if kind.bit_width == 32 else pa.int64()), pa.int64()
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        keys: Int64Array = ids.cast(pa.int64()).to_numpy(zero_copy_only=False)
        return keys
    if is_text(kind):
        return _hashed(pc.cast(ids, pa.large_binary()).to_pylist())
    return _hashed(repr(value).encode("utf-8", "surrogatepass") for value in to_python(ids))


def _json_keys(ids: pa.Array) -> Int64Array:
    texts = (text_of(text) for text in ids.to_pylist())
    # A column of floats has both zeros as numbers that are equal.
    return _hashed(("0.0" if text == "-0.0" else text).encode("utf-8", "surrogatepass") for text in texts)


def _hashed(values: Iterable[bytes]) -> Int64Array:
    """Hashes that do not depend on the process, as Python's own do."""
    return np.frombuffer(b"".join(hashlib.blake2b(each, digest_size=8).digest() for each in values), np.int64)
