"""The two drafters of TriForce (arXiv 2404.11912): retrieval, the model as its own drafter over a small part of each
prompt's K,V, and the hierarchy above it. With a few thousand tokens and small models they save passes, not time
(docs/log.md); the default is prompt lookup.

The target's own layers read the text after a retrieval cache: per layer and K,V head the chunks of the prompt that
the newest token attends to most. Their guesses are checked over all K,V. A drafter of its own may guess for them in
turn: then this is the paper's hierarchy, where each level is the same loop over another forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from prefillcli.plan.trie import common_prefix
from prefillcli.stats.arrays import Int64Array
from prefillcli.walk.continuations import DecodingReport
from prefillcli.walk.decoding import KeptForward
from prefillcli.walk.draft_model import PaddedForward
from prefillcli.walk.layout import on_device
from prefillcli.walk.lockstep import Chooser, Drafter, LockStep, RowText

# The tokens of a prompt that a retrieval cache keeps (section 4.1).
#
# A layer's keys are cut into chunks. The newest token's query is scored against the mean key of each chunk, and the
# best chunks stay. The queries that share a K,V head vote together. The first chunk and the latest tokens always
# stay.


LATEST = 64  # tokens that always stay
LATEST_SHARE = 0.25  # of the budget, at most


def latest_chunks(budget: int, chunk: int) -> int:
    """Return how many of the latest chunks always stay, at least one."""
    return max(1, min(LATEST, int(budget * LATEST_SHARE)) // chunk)


def saves(tokens: int, budget: int, chunk: int) -> bool:
    """Return whether the cache leaves out some of this many tokens, and the budget holds those that always stay."""
    return tokens > budget and budget // chunk > latest_chunks(budget, chunk) + 2


def chosen_tokens(keys: Tensor, query: Tensor, budget: int, chunk: int) -> Tensor:
    """The tokens that stay for each K,V head, int64 [kv heads, kept], ascending; at most `budget`.

    `keys` [kv heads, tokens, width] are a prompt's, more than the budget, and `query` [heads, width] the newest one's,
    both after position encoding.
    """
    heads, tokens, width = keys.shape
    chunks, rest = divmod(tokens, chunk)
    most = (budget - rest) // chunk
    always = min(latest_chunks(budget, chunk), most - 1)
    votes = query.view(heads, -1, width).sum(dim=1, dtype=torch.float32)
    # A mean key's score is the mean of its chunk's scores, and a sum of queries scores the sum of theirs.
    scored = keys[:, chunk : (chunks - always) * chunk]
    means = scored.reshape(heads, -1, chunk, width).mean(dim=2, dtype=torch.float32)
    best = (means @ votes.unsqueeze(-1)).squeeze(-1).topk(most - 1 - always, dim=1).indices + 1
    first = torch.zeros(heads, 1, dtype=torch.long, device=keys.device)
    latest = torch.arange(chunks - always, chunks, device=keys.device).expand(heads, -1)
    kept = torch.cat([first, best.sort(dim=1).values, latest], dim=1)
    within = (kept.unsqueeze(-1) * chunk + torch.arange(chunk, device=keys.device)).flatten(1)
    behind = torch.arange(chunks * chunk, tokens, device=keys.device).expand(heads, -1)
    return torch.cat([within, behind], dim=1)


def gathered(states: Tensor, tokens: Tensor) -> Tensor:
    """These tokens [kv heads, kept] of K or V [kv heads, tokens, width]."""
    return states.gather(1, tokens.unsqueeze(-1).expand(-1, -1, states.shape[-1]))


REBUILD_BELOW = 0.5  # rolling share of accepted guesses under which a cache is built anew
REBUILD_STRIDE = 128  # tokens of text after which it is built anew in any case
REBUILD_LEAST = 16  # tokens of text that a cache serves at least
ROLLING = 0.25  # weight of the latest round in the rolling acceptance


@dataclass(slots=True)
class _Cached:
    """A row with a retrieval cache. `draft` is its text as the cache's level has it."""

    draft: RowText
    built: int | None = None  # tokens after the prompt that had been read when the cache was built
    exact: int = 0  # tokens after the prompt whose K,V are those of the whole prompt
    accepted: float = 1.0  # rolling share


class RetrievalDrafter(Drafter):
    """Guesses with the model of `source` over `budget` tokens of each prompt, in chunks of `chunk` tokens.

    It has no guess for a row whose prompt is no longer than the budget, or if memory runs out. `inner` guesses
    `inner_tokens` tokens for it in turn; `report` counts their fate. Raises UnsupportedModelError for recurrent
    layers.
    """

    name = "retrieval"

    def __init__(
        self,
        source: KeptForward,
        chooser: Chooser,
        *,
        budget: int,
        chunk: int,
        report: DecodingReport,
        inner: Drafter | None = None,
        inner_tokens: int = 0,
    ) -> None:
        self._source = source
        self._newest = source.watch_newest()
        self._budget, self._chunk = budget, chunk
        self._forward = PaddedForward(source.walk)
        counts = DecodingReport(drafters=report.drafters)  # passes over the cache are not passes of the whole
        self._level = LockStep(self._forward, chooser, frozenset(), inner, inner_tokens, counts)
        self._rows: dict[int, _Cached] = {}
        self._open = False

    def begin(self, rows: Sequence[RowText]) -> None:
        able = [row for row in rows if saves(len(row.beginning.prompt), self._budget, self._chunk)]
        self._rows = {row.number: _Cached(RowText(row.number, row.beginning)) for row in able}
        self._open = False
        self._level.begin([each.draft for each in self._rows.values()])

    def reaches(self, row: RowText) -> bool:
        return row.number in self._rows

    def propose(self, rows: Sequence[RowText], most: Sequence[int]) -> list[list[int]]:
        try:
            return self._propose(rows, most)
        except torch.OutOfMemoryError:  # texts need no guesses
            self._rows, self._forward.layers = {}, []
            return [[] for _ in rows]

    @torch.inference_mode()
    def _propose(self, rows: Sequence[RowText], most: Sequence[int]) -> list[list[int]]:
        wanted = {row.number: len(row.written) + tokens for row, tokens in zip(rows, most, strict=True)}
        able = [row for row in rows if wanted[row.number] > len(row.written) and self._is_ready(row)]
        if able and not self._open:
            self._open_caches()
        if able:
            self._catch_up(able)
        going = [self._rows[row.number].draft for row in able]
        while going:
            self._level.advance(going, [wanted[draft.number] - len(draft.written) for draft in going])
            going = [draft for draft in going if len(draft.written) < wanted[draft.number]]
        asked = {row.number for row in able}
        return [
            self._rows[row.number].draft.written[len(row.written) :] if row.number in asked else [] for row in rows
        ]

    def checked(self, row: RowText, proposed: Sequence[int], accepted: int) -> None:
        cached = self._rows[row.number]
        cached.accepted += ROLLING * (accepted / len(proposed) - cached.accepted)

    def end(self, row: RowText) -> None:
        cached = self._rows.pop(row.number, None)
        if cached is not None:
            self._level.end([cached.draft])

    def _is_ready(self, row: RowText) -> bool:
        cached = self._rows.get(row.number)
        return cached is not None and (cached.built is not None or row.number in self._newest.places)

    def _open_caches(self) -> None:
        # Make room. The model has been called by now, so that its layers' windows are known.
        longest = max(len(cached.draft.beginning.prompt) for cached in self._rows.values())
        widths = [self._budget if each is None else min(each.size, longest) for each in self._newest.windows]
        self._forward.open(list(self._rows), widths)
        self._open = True

    def _catch_up(self, rows: Sequence[RowText]) -> None:
        of, places = [], []
        for row in rows:
            cached, read = self._rows[row.number], self._source.text_read(row.number)
            draft = cached.draft
            same = common_prefix(np.asarray(draft.written, dtype=np.int32), np.asarray(row.written, dtype=np.int32))
            self._level.rewind(draft, same)
            draft.written[same:] = row.written[same:]
            if self._is_due(cached, read) and row.number in self._newest.places:
                self._build(row, cached, read)
            of.append(np.full(read - cached.exact, row.number))
            places.append(np.arange(cached.exact, read))
            cached.exact = read
            self._forward.has_text(row.number, read)
            self._level.has_read(draft, read)
        self._put_text(np.concatenate(of), np.concatenate(places))

    def _put_text(self, rows: Int64Array, places: Int64Array) -> None:
        if not len(rows):
            return
        device = self._source.walk.device
        at = on_device(np.asarray([self._forward.place(row) for row in rows.tolist()]), device)
        columns, longest = on_device(places, device), int(places.max()) + 1
        for index, layer in enumerate(self._forward.layers):
            text = self._source.text_keys_values(index, rows, places)
            if text is not None:
                layer.put_text(at, columns, *text, longest)

    def _is_due(self, cached: _Cached, read: int) -> bool:
        if cached.built is None:
            return True
        since = read - cached.built
        return since >= REBUILD_STRIDE or (since >= REBUILD_LEAST and cached.accepted < REBUILD_BELOW)

    def _build(self, row: RowText, cached: _Cached, read: int) -> None:
        prompt = len(row.beginning.prompt)
        place, device = self._forward.place(row.number), self._source.walk.device
        for index, layer in enumerate(self._forward.layers):
            both = self._source.prompt_keys_values(index, row.number)
            query = self._newest.of(index, row.number)
            if both is None or query is None:
                continue
            window = self._newest.windows[index]
            if window is not None:
                first = max(0, min(window.oldest(prompt), prompt))
                layer.choose(place, both[0][:, first:], both[1][:, first:], np.arange(first, prompt))
                continue
            keys = both[0].to(device)
            kept = chosen_tokens(keys, query, self._budget, self._chunk)
            layer.choose(place, gathered(keys, kept), gathered(both[1], kept.to(both[1].device)))
        if cached.built is None:
            self._forward.begin_text(row.number, self._source.text_position(row.number), prompt)
        cached.built, cached.accepted = read, 1.0


# The hierarchy (algorithm 1): three levels.
#
# A cheap drafter guesses for the model over its retrieval cache. The model over all K,V checks the tokens gathered
# there. All levels choose by the same noise, so each checks by comparing, and the text is that of the last one.


FIRST_LEVEL_TOKENS = 3  # that are guessed for one pass over the retrieval cache


class HierarchyDrafter(Drafter):
    """Guesses by `retrieval`, which has its own drafter, and by `beside` for rows whose prompts are too short for
    retrieval."""

    name = "hierarchy"

    def __init__(self, retrieval: RetrievalDrafter, beside: Drafter) -> None:
        self._retrieval, self._beside = retrieval, beside
        self._long: set[int] = set()  # the rows that retrieval has begun with

    def begin(self, rows: Sequence[RowText]) -> None:
        self._retrieval.begin(rows)
        self._long = {row.number for row in rows if self._retrieval.reaches(row)}
        self._beside.begin([row for row in rows if row.number not in self._long])

    def propose(self, rows: Sequence[RowText], most: Sequence[int]) -> list[list[int]]:
        found: dict[int, list[int]] = {}
        for drafter in (self._retrieval, self._beside):
            own = [(row, tokens) for row, tokens in zip(rows, most, strict=True) if self._of(row) is drafter]
            if own:
                guessed = drafter.propose([row for row, _ in own], [tokens for _, tokens in own])
                found |= {row.number: guess for (row, _), guess in zip(own, guessed, strict=True)}
        return [found[row.number] for row in rows]

    def checked(self, row: RowText, proposed: Sequence[int], accepted: int) -> None:
        self._of(row).checked(row, proposed, accepted)

    def end(self, row: RowText) -> None:
        self._of(row).end(row)

    def _of(self, row: RowText) -> Drafter:
        return self._retrieval if row.number in self._long else self._beside
