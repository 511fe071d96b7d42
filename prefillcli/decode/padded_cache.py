"""K,V of several rows side by side, padded: for rows that see few tokens each, and share none of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from prefillcli.prefill.layout import IntArray, KeyWindow, on_device

TEXT_STEP = 64  # tokens by which the room for text grows


@dataclass(slots=True)
class PassTokens:
    """The tokens of one pass, row by row: `rows` is the place of each token's row in the cache, `steps` its number
    among the row's new ones. `before[place]` text tokens of a row were read earlier. A query at `depths` sees the
    tokens up to its own."""

    rows: IntArray
    steps: IntArray
    before: IntArray
    depths: IntArray
    first_depths: IntArray  # of each row's text
    device: torch.device
    tables: dict[Any, Any] = field(default_factory=dict)

    @property
    def columns(self) -> IntArray:
        """Each token's place among its row's text."""
        return self.before[self.rows] + self.steps

    @property
    def most(self) -> int:
        """New tokens of a row, at most."""
        return int(self.steps.max()) + 1

    @property
    def text(self) -> int:
        """Text tokens of a row after this pass, at most, of all rows' that read."""
        return int(self.columns.max()) + 1

    def on_device(self, name: str) -> Tensor:
        """`rows`, `steps`, `columns`, as int64 [tokens]."""
        if name not in self.tables:
            self.tables[name] = on_device(getattr(self, name), self.device)
        kept: Tensor = self.tables[name]
        return kept


class PaddedLayer:
    """One layer's K,V [rows, kv heads, columns, width]: `chosen` columns of tokens before the text, then the text.

    Of the chosen ones the first `counts[row]` are in use.
    """

    def __init__(self, rows: int, chosen: int) -> None:
        self.chosen = chosen
        self.counts = np.zeros(rows, dtype=np.int64)
        self.depths = np.zeros((rows, chosen), dtype=np.int64)
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    @property
    def keys_values(self) -> tuple[Tensor, Tensor]:
        """All columns. There is something stored."""
        if self._keys is None or self._values is None:
            raise RuntimeError("nothing was stored yet")
        return self._keys, self._values

    @torch.inference_mode()
    def choose(self, row: int, keys: Tensor, values: Tensor, depths: IntArray | None = None) -> None:
        """Keep these K,V [kv heads, tokens, width] before a row's text, instead of those so far.

        `depths` are needed where the layer has a window.
        """
        tokens = keys.shape[1]
        self._make_room(keys[None], values[None], 0)
        every_key, every_value = self.keys_values
        every_key[row, :, :tokens].copy_(keys, non_blocking=True)
        every_value[row, :, :tokens].copy_(values, non_blocking=True)
        self.counts[row] = tokens
        if depths is not None:
            self.depths[row, :tokens] = depths

    @torch.inference_mode()
    def put_text(self, rows: Tensor, columns: Tensor, keys: Tensor, values: Tensor, longest: int) -> None:
        """Store K,V [tokens, kv heads, width] of text: of each token the row int64 [tokens] and its place in the text.

        No text is longer than `longest`.
        """
        self._make_room(keys.transpose(0, 1)[None], values.transpose(0, 1)[None], longest)
        for place, own in zip(self.keys_values, (keys, values), strict=True):
            place[rows, :, columns + self.chosen] = own

    def append(self, new: PassTokens, key: Tensor, value: Tensor) -> None:
        """Store K,V [1, kv heads, tokens, width] of a pass."""
        both = key[0].transpose(0, 1), value[0].transpose(0, 1)
        self.put_text(new.on_device("rows"), new.on_device("columns"), *both, new.text)

    @torch.inference_mode()
    def keep(self, rows: Sequence[int]) -> None:
        """Keep these rows alone, in this order."""
        self.counts, self.depths = self.counts[list(rows)], self.depths[list(rows)]
        if self._keys is not None and self._values is not None:
            at = torch.as_tensor(rows, dtype=torch.long, device=self._keys.device)
            self._keys, self._values = self._keys[at], self._values[at]

    def visible(self, new: PassTokens, window: KeyWindow | None, first: int, last: int) -> Tensor | None:
        """What the queries of rows `first` to `last` see, bool [rows, 1, most, columns], up to the longest text; None
        if they see all."""
        at = (first, last, window, self.chosen, self.counts.tobytes(), window and self.depths.tobytes())
        if at not in new.tables:
            new.tables[at] = self._visible(new, window, first, last)
        kept: Tensor | None = new.tables[at]
        return kept

    def _visible(self, new: PassTokens, window: KeyWindow | None, first: int, last: int) -> Tensor | None:
        rows = slice(first, last)
        before, starts = new.before[rows, None, None], new.first_depths[rows, None, None]
        text = np.arange(new.text)[None, None]
        steps = np.arange(new.most)[None, :, None]
        shape = (last - first, new.most)
        chosen = np.arange(self.chosen)[None, None] < self.counts[rows, None, None]
        seen = np.concatenate(
            [
                np.broadcast_to(chosen, (*shape, self.chosen)),
                np.broadcast_to(text <= before + steps, (*shape, new.text)),
            ],
            axis=2,
        )
        if window is not None:
            depths = np.concatenate(
                [
                    np.broadcast_to(self.depths[rows, None], (last - first, 1, self.chosen)),
                    starts + text,
                ],
                axis=2,
            )
            seen = seen & (depths >= window.oldest(starts + before + steps))
        return None if seen.all() else on_device(seen, new.device)[:, None]

    def _make_room(self, keys: Tensor, values: Tensor, text: int) -> None:
        """Room for so many text tokens of K,V like these [any, kv heads, any, width]."""
        for name, like in (("_keys", keys), ("_values", values)):
            before: Tensor | None = getattr(self, name)
            columns = self.chosen + text
            if before is not None and before.shape[2] >= columns:
                continue
            columns = self.chosen + -(-text // TEXT_STEP) * TEXT_STEP
            room = like.new_zeros(len(self.counts), like.shape[1], columns, like.shape[3])
            if before is not None:
                room[:, :, : before.shape[2]] = before
            setattr(self, name, room)
