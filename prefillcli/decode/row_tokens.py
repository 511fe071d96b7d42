"""New tokens behind several rows: which keys each of them sees."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from prefillcli.decode.kept_pack import Run
from prefillcli.prefill.layout import IntArray, KeyWindow, Span, SpanSet, on_device

MOST_END = 256  # tokens of a prompt's end that are copied
MOST_PADDED = 2  # times what is copied, if all rows are padded to the longest end


@dataclass(frozen=True, slots=True)
class PaddedTokens:
    """New tokens as one padded batch [rows, longest]: `index` of each (padded with a row's first), the `places` of
    all tokens in the flattened batch."""

    index: Tensor
    places: Tensor


def private_ends(paths: Sequence[Sequence[Run]]) -> IntArray:
    """Of how many tokens at the end of each row's prompt the K,V are copied to stand with what follows it: short ends
    that no other row sees. Attention over all of them is then one call."""
    seen = Counter(run for path in paths for run in path)
    ends = np.asarray([path[-1][1] - path[-1][0] if path and seen[path[-1]] == 1 else 0 for path in paths])
    ends[ends > MOST_END] = 0
    fits = [most for most in set(ends.tolist()) if most * len(ends) <= MOST_PADDED * ends[ends <= most].sum()]
    ends[ends > max(fits, default=0)] = 0
    return ends


def room_of_end(tokens: int) -> int:
    """How much the copy of a prompt's end of so many tokens takes at most, with the padding that it is worth."""
    return MOST_PADDED * tokens if tokens <= MOST_END else 0


class RowTokens:
    """Some new tokens of each of some rows, one row after the other.

    `slots` are the rows' numbers, `counts` how many new tokens each has. Behind what it sees of the kept K,V, the runs
    `paths[slot]` with `lengths[slot]` tokens, a row has `read[slot]` tokens by itself already.
    """

    def __init__(
        self,
        slots: Sequence[int],
        counts: Sequence[int],
        *,
        paths: Sequence[Sequence[Run]],
        lengths: IntArray,
        read: IntArray,
        device: torch.device,
    ) -> None:
        self.slots = np.asarray(slots, dtype=np.int64)
        self.counts = np.asarray(counts, dtype=np.int64)
        self._paths, self._device = paths, device
        self._ends = np.cumsum(self.counts)
        self.tokens = int(self._ends[-1])
        self.most = int(self.counts.max())
        self._row = np.repeat(np.arange(len(slots)), self.counts)  # of each token
        steps = np.arange(self.tokens) - np.repeat(self._ends - self.counts, self.counts)
        self._lengths = lengths[self.slots]
        self._places: IntArray = read[self.slots][self._row] + steps  # among what the row has by itself
        self.own = int(self._places.max()) + 1
        self.depths: IntArray = self._lengths[self._row] + self._places
        self.slot_index = on_device(self.slots[self._row], device)
        self.place_index = on_device(self._places, device)
        self._steps = steps
        self._batch: PaddedTokens | None = None
        self._spans: dict[KeyWindow | None, list[tuple[Span, Tensor | None]]] = {}
        self._visible: dict[tuple[KeyWindow | None, int], Tensor | None] = {}

    @property
    def batch(self) -> PaddedTokens | None:
        """The tokens as a padded batch; None where each row has the same number of them."""
        if self._batch is None and self.most * len(self.slots) > self.tokens:
            index = np.repeat((self._ends - self.counts)[:, None], self.most, axis=1)
            index[self._row, self._steps] = np.arange(self.tokens)
            places = self._row * self.most + self._steps
            self._batch = PaddedTokens(on_device(index, self._device), on_device(places, self._device))
        return self._batch

    def spans(self, window: KeyWindow | None) -> list[tuple[Span, Tensor | None]]:
        """What the tokens see of the prompts, and where a window hides some of it, bool [1, 1, queries, keys]."""
        if window not in self._spans:
            found = SpanSet(self.depths, window)
            starts = (self._ends - self.counts).tolist()
            for slot, first, last in zip(self.slots.tolist(), starts, self._ends.tolist(), strict=True):
                for start, end, depth in self._paths[slot]:
                    found.add(first, last, start, end, depth)
            self._spans[window] = [(span, self._seen(span, window)) for span in found.merged()]
        return self._spans[window]

    def _seen(self, span: Span, window: KeyWindow | None) -> Tensor | None:
        if window is None or not span.masked:
            return None
        oldest = window.oldest(self.depths[span.q0 : span.q1])
        keys = np.arange(span.k0, span.k1) - span.k0 + span.k_depth
        return on_device(keys[None, :] >= oldest[:, None], self._device)[None, None]

    def visible(self, window: KeyWindow | None, groups: int) -> Tensor | None:
        """What the padded batch sees of the first `own` tokens that rows have by themselves; None: all of it.

        Bool [rows, 1, groups * longest, own]: `groups` heads of the queries, one behind the other, see the same.
        """
        if (window, groups) not in self._visible:
            last = np.full((len(self.slots), self.most), self.own - 1)
            last[self._row, self._steps] = self._places
            keys = np.arange(self.own)
            seen = keys <= last[:, :, None]
            if window is not None:
                oldest = window.oldest(self._lengths[:, None] + last) - self._lengths[:, None]
                seen &= keys >= oldest[:, :, None]
            repeated = np.tile(seen, (1, groups, 1))[:, None]
            self._visible[window, groups] = None if seen.all() else on_device(repeated, self._device)
        return self._visible[window, groups]
