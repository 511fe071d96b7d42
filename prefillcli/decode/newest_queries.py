"""Queries of the newest tokens of rows, by layer: what a retrieval cache is chosen by."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from prefillcli.decode.contracts import NewTokens
from prefillcli.prefill.layout import KeyWindow


class NewestQueries:
    """Those of a model's last pass over its rows. `windows` are the layers', as far as they have attended."""

    def __init__(self, layers: int) -> None:
        self.windows: list[KeyWindow | None] = [None] * layers
        self._queries: list[Tensor | None] = [None] * layers
        self._newest: dict[int, int] = {}  # by row: its newest token's number in the pass

    def begin(self, new: NewTokens) -> None:
        """A pass over these tokens begins."""
        self._newest, end = {}, 0
        for row, tokens in new:
            end += len(tokens)
            self._newest[row] = end - 1

    def put(self, layer: int, queries: Sequence[Tensor], window: KeyWindow | None) -> None:
        """Queries [heads, tokens, width] of the pass, in one piece; none of a layer without attention."""
        if queries:
            self._queries[layer], self.windows[layer] = queries[0], window

    def forget(self, row: int, tokens: int) -> None:
        """The last `tokens` of a row were guessed wrong."""
        if row in self._newest:
            self._newest[row] -= tokens

    def has(self, row: int) -> bool:
        """Whether the last pass was over this row."""
        return row in self._newest

    def of(self, layer: int, row: int) -> Tensor | None:
        """The query [heads, width] of a row's newest token, after position encoding."""
        queries = self._queries[layer]
        return None if queries is None else queries[:, self._newest[row]]
