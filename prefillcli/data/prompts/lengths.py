"""What happens to a prompt that is too long."""

from __future__ import annotations

from collections.abc import Set
from typing import Literal

import numpy as np

from prefillcli.data.rows import MAX_ROW_BYTES, ErrorCode, Int32Array, RowError

OnLong = Literal["error", "truncate-left", "truncate-middle", "skip"]


_LEAST_ROW_BYTES = 8 << 20  # a row also has what the prompt does not need


def default_row_bytes(max_length: int, longest_token: int, on_long: OnLong) -> int:
    """Bytes of the longest row that is worth reading, where a token has at most `longest_token` bytes.

    Twice what can make a prompt of `max_length` tokens, within bounds. With `truncate-*` longer rows count too, and
    the bound is `MAX_ROW_BYTES`.
    """
    if on_long in ("truncate-left", "truncate-middle"):
        return MAX_ROW_BYTES
    return min(max(2 * max_length * longest_token, _LEAST_ROW_BYTES), MAX_ROW_BYTES)


def fit(tokens: Int32Array, max_length: int, on_long: OnLong, start_ids: Set[int]) -> Int32Array | RowError:
    """At most `max_length` of the tokens, or why the row has no prompt.

    `truncate-left` drops the oldest tokens but keeps those of `start_ids` (BOS) at the very start;
    `truncate-middle` keeps the first and the last half.
    """
    if len(tokens) <= max_length:
        return tokens
    if on_long in ("error", "skip"):
        code = ErrorCode.PROMPT_TOO_LONG if on_long == "error" else ErrorCode.SKIPPED_TOO_LONG
        return RowError(code, f"{len(tokens)} tokens, the limit is {max_length}")
    head = 0
    if on_long == "truncate-middle":
        head = max_length // 2
    else:
        while head < max_length - 1 and int(tokens[head]) in start_ids:
            head += 1
    return np.concatenate([tokens[:head], tokens[len(tokens) - (max_length - head) :]])


def without_padding(tokens: Int32Array, padding: int) -> Int32Array:
    """The tokens int32 [tokens] up to the last one that is no padding; of padding alone the first one, as transformers
    has it."""
    last = np.flatnonzero(tokens != padding)[-1:]
    return tokens[: int(last[0]) + 1] if len(last) else tokens[:1]
