"""The first and the last tokens."""

from __future__ import annotations

import numpy as np

from prefillcli.compress.base import Float32Array
from prefillcli.compress.pickers.row_picker import RowPicker
from prefillcli.compress.selection import ends
from prefillcli.data.rows import Int64Array, Prompt


class Ends(RowPicker):
    """Half of the budget behind the first tokens, which are kept anyway, and half before the last ones."""

    method = "ends"

    def rank(self, prompt: Prompt) -> Float32Array:
        return np.zeros(len(prompt.tokens), dtype=np.float32)  # the place alone decides

    def order(self, importance: Float32Array, first: int, last: int) -> Int64Array:
        return outside_in(len(importance), first, last)


def outside_in(tokens: int, first: int, last: int) -> Int64Array:
    """The tokens between the `first` and the `last` ones, from the left and from the right in turn."""
    between = np.flatnonzero(~ends(tokens, first, last))
    half = len(between) // 2
    order = np.empty_like(between)
    order[::2], order[1::2] = between[: len(between) - half], between[::-1][:half]
    return order
