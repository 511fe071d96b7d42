"""Which ids were seen before, in about eight bytes a row."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from prefillcli.data.rows import Int64Array, RowError
from prefillcli.data.values import plain_type


class SeenIds:
    """Finds null and repeated ids over a whole input.

    Integers are compared as they are, anything else by a 64-bit hash: in ten million rows the chance of one
    false duplicate is about one in 400,000.
    """

    def __init__(self) -> None:
        self._sorted: list[Int64Array] = []
        """Keys of all rows so far in sorted runs, each more than twice as long as the next."""

    def check(self, rows: Int64Array, ids: pa.ChunkedArray) -> dict[int, RowError]:
        """The rows among these whose id is null or was seen before, by row number; then remember the ids."""
        column = ids.combine_chunks()
        null = pc.is_null(column, nan_is_null=True).to_numpy(zero_copy_only=False)
        valid = np.flatnonzero(~null)
        keys = _keys(column.filter(pa.array(~null)))
        unique, first = np.unique(keys, return_index=True)
        repeated = np.ones(len(keys), bool)
        repeated[first] = False
        for run in self._sorted:
            at = np.minimum(np.searchsorted(run, keys), len(run) - 1)
            repeated |= run[at] == keys
        self._remember(unique)
        errors = {int(row): RowError("null_id", "the id is null or missing") for row in rows[null]}
        for position in np.flatnonzero(repeated):
            what = column[int(valid[position])].as_py()
            errors[int(rows[valid[position]])] = RowError("duplicate_id", f"an earlier row has the id {what!r}")
        return errors

    def _remember(self, keys: Int64Array) -> None:
        if len(keys) == 0:
            return
        while self._sorted and len(self._sorted[-1]) <= 2 * len(keys):
            keys = np.concatenate([self._sorted.pop(), keys])
            keys.sort()
        self._sorted.append(keys)


def _keys(ids: pa.Array) -> Int64Array:
    kind = plain_type(ids.type)
    if pa.types.is_integer(kind) and not pa.types.is_uint64(kind):
        keys: Int64Array = ids.cast(pa.int64()).to_numpy(zero_copy_only=False)
        return keys
    texts = (value if isinstance(value, str) else repr(value) for value in ids.to_pylist())
    return np.fromiter(map(hash, texts), np.int64, len(ids))
