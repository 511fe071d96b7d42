"""The length of a prompt: what of its tokens is kept, and from how many bytes on a row cannot fit."""

from __future__ import annotations

from collections.abc import Sequence, Set

import numpy as np
import numpy.typing as npt

from prefillcli.errors import counted
from prefillcli.prompts.encoding import EncodedPair
from prefillcli.prompts.settings import OnLong
from prefillcli.rows.records import MAX_ROW_BYTES, ErrorCode, RowError
from prefillcli.stats.arrays import Int32Array

_LEAST_ROW_BYTES = 8 << 20  # a row also holds values that the prompt does not need


def default_row_bytes(max_length: int, longest_token: int, on_long: OnLong) -> int:
    """Bytes of the longest row that is worth reading, where a token has at most `longest_token` bytes.

    Twice the most bytes that can make a prompt of `max_length` tokens, within bounds. With `truncate-*` longer rows
    count too, and the bound is `MAX_ROW_BYTES`.
    """
    if on_long.startswith("truncate"):
        return MAX_ROW_BYTES
    return min(max(2 * max_length * longest_token, _LEAST_ROW_BYTES), MAX_ROW_BYTES)


def fit(tokens: Int32Array, max_length: int, on_long: OnLong, start_ids: Set[int]) -> Int32Array | RowError:
    """At most `max_length` of the tokens, or why the row has no prompt.

    `truncate-left` drops the oldest tokens but keeps those of `start_ids` (BOS) at the very start;
    `truncate-middle` keeps the first and the last half, `truncate-right` the beginning.
    """
    if len(tokens) <= max_length:
        return tokens
    if on_long in ("error", "skip"):
        code = ErrorCode.PROMPT_TOO_LONG if on_long == "error" else ErrorCode.SKIPPED_TOO_LONG
        return RowError(code, f"{counted(len(tokens), 'token')}, the limit is {max_length}")
    head = 0
    if on_long == "truncate-right":
        head = max_length
    elif on_long == "truncate-middle":
        head = max_length // 2
    else:
        while head < max_length - 1 and int(tokens[head]) in start_ids:
            head += 1
    return np.concatenate([tokens[:head], tokens[len(tokens) - (max_length - head) :]])


def fit_pair(coded: EncodedPair, max_length: int, on_long: OnLong) -> npt.NDArray[np.intp] | RowError:
    """The places of at most `max_length` tokens, ascending, or why the row has no prompt.

    The special tokens stay. Of a pair, the longer text is cut first, down to the length of the other one, as
    tokenizers do by default (`longest_first`). Each text is cut as `fit` cuts.
    """
    every = np.arange(len(coded.ids))
    if len(every) <= max_length:
        return every
    sizes = [int(np.count_nonzero(coded.parts == part)) for part in (0, 1)]
    room = max_length - (len(every) - sum(sizes))
    if on_long in ("error", "skip") or room < 1 + bool(sizes[1]):
        found = fit(coded.ids, max_length, "skip" if on_long == "skip" else "error", frozenset())
        if isinstance(found, RowError):
            return found
    kept = coded.parts < 0
    for part, most in enumerate(_longest_first(sizes, room)):
        own = every[coded.parts == part].astype(np.int32)
        if most:
            cut = fit(own, most, on_long, frozenset())
            kept[own if isinstance(cut, RowError) else cut] = True
    return every[kept]


def _longest_first(sizes: Sequence[int], room: int) -> list[int]:
    # The lengths to which tokenizers cut the texts of a pair.
    short, long = sorted(sizes)
    long = short if short > room else max(short, room - short)
    if short + long > room:
        short, long = room // 2, room - room // 2
    return [long, short] if sizes[0] > sizes[1] else [short, long]


def without_padding(tokens: Int32Array, padding: int) -> Int32Array:
    """The tokens int32 [tokens] up to the last one that is no padding; of padding alone the first one, as in
    transformers."""
    last = np.flatnonzero(tokens != padding)[-1:]
    return tokens[: int(last[0]) + 1] if len(last) else tokens[:1]
