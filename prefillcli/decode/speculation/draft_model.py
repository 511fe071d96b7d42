"""The draft model as a drafter: it sees the first and the latest tokens of each text (StreamingLLM, arXiv 2309.17453).

The first `sinks` tokens and the `recent` ones are read as one short sequence, at consecutive positions: what lies
between was never there. Guesses that were wrong are forgotten. When a row's sequence is full, it is read anew, with
the tokens that are the latest by then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from prefillcli.decode.lockstep import Chooser, RowText
from prefillcli.decode.padded_forward import PaddedForward, check_forgets
from prefillcli.plan.trie import TokenArray, common_prefix
from prefillcli.prefill.walk import LayerWalk

LEAST_ROOM = 64  # tokens behind what is read first, before a sequence is full


@dataclass(slots=True)
class _Sequence:
    """The `tokens` that the draft model has read of a row: its `first` ones, then those from its token `start` on."""

    first: int
    start: int
    tokens: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A small model with the tokenizer of the model that it guesses for.

    `max_length` is the longest sequence that its position encoding takes. Raises UnsupportedModelError for a model
    that cannot forget what it has read: one with recurrent layers, or one that is walked with its own cache.
    """

    walk: LayerWalk
    max_length: int

    def __post_init__(self) -> None:
        check_forgets(self.walk)


class StreamingDrafter:
    """Guesses with `draft`, tokens below `vocabulary`: the target may know fewer than the draft model."""

    name = "draft"

    def __init__(
        self,
        draft: DraftModel,
        chooser: Chooser,
        *,
        vocabulary: int,
        sinks: int = 16,
        recent: int = 240,
    ) -> None:
        self._forward = PaddedForward(draft.walk)
        self._chooser = chooser
        self._vocabulary = vocabulary
        self._known = int(draft.walk.model.get_input_embeddings().weight.shape[0])
        self._longest = min(2 * (sinks + recent) + LEAST_ROOM, draft.max_length)
        self._sinks = min(sinks, self._longest // 4)
        self._recent = min(recent, self._longest // 2)
        self._sequences: dict[int, _Sequence] = {}

    def begin(self, rows: Sequence[RowText]) -> None:
        self._forward.open([row.number for row in rows])
        self._sequences = {}

    def propose(self, rows: Sequence[RowText], most: Sequence[int]) -> list[list[int]]:
        room = self._longest - self._sinks - self._recent
        wanted = {row.number: min(tokens, room) for row, tokens in zip(rows, most, strict=True)}
        guessed: dict[int, list[int]] = {row.number: [] for row in rows}
        unread = {row.number: self._unread(row, wanted[row.number]) for row in rows if wanted[row.number] > 0}
        going = [row for row in rows if unread.get(row.number)]
        while going:
            logits = self._forward.last_logits([(row.number, unread[row.number]) for row in going])
            places = [row.position + len(guessed[row.number]) for row in going]
            keys = [row.beginning.key for row in going]
            tokens, _ = self._chooser.choose(logits[:, : self._vocabulary], keys, places)
            for row, token in zip(going, tokens, strict=True):
                self._sequences[row.number].tokens += unread[row.number]
                guessed[row.number].append(token)
                unread[row.number] = [token]
            going = [row for row in going if len(guessed[row.number]) < wanted[row.number]]
        return [guessed[row.number] for row in rows]

    def checked(self, row: RowText, proposed: Sequence[int], accepted: int) -> None:
        """Nothing to do: what was read is compared with the row's text before the next guess."""

    def end(self, row: RowText) -> None:
        self._forward.drop([row.number])
        self._sequences.pop(row.number, None)

    def _unread(self, row: RowText, guesses: int) -> list[int]:
        """The tokens that are to be read before so many are guessed; what the row does not have is forgotten.

        None where the draft model does not know a token.
        """
        text = [*row.beginning.tokens, *row.written]
        kept = self._sequences.get(row.number)
        length = len(row.beginning.prompt) + len(text)
        if kept is None or not kept.start < length <= self._longest - guesses + kept.start - kept.first:
            return self._read_anew(row, text)
        new, read = _from(row, text, kept.start), kept.tokens[kept.first :]
        same = min(common_prefix(np.asarray(read, dtype=np.int32), new), len(new) - 1)
        if same < len(read):
            self._forward.forget(row.number, len(read) - same)
            del kept.tokens[kept.first + same :]
        return [int(token) for token in new[same:]] if self._knows(new[same:]) else []

    def _read_anew(self, row: RowText, text: list[int]) -> list[int]:
        """Begin with the first tokens and the latest ones of a row's prompt and its text, which are to be read."""
        length = len(row.beginning.prompt) + len(text)
        first = 0 if length <= self._sinks + self._recent else self._sinks
        start = length - self._recent if first < length - self._recent else 0
        tokens = np.concatenate([_from(row, text, 0, first), _from(row, text, start)])
        if not self._knows(tokens):
            self._sequences.pop(row.number, None)
            return []
        self._forward.begin_text(row.number, 0, 0)
        self._sequences[row.number] = _Sequence(first, start)
        return [int(token) for token in tokens]

    def _knows(self, tokens: TokenArray) -> bool:
        return int(tokens.max()) < self._known


def _from(row: RowText, text: Sequence[int], start: int, end: int | None = None) -> TokenArray:
    """Tokens of a row's prompt and `text`."""
    prompt = row.beginning.prompt
    behind = text[max(0, start - len(prompt)) : None if end is None else max(0, end - len(prompt))]
    return np.concatenate([prompt[start:end], np.asarray(behind, dtype=np.int32)])
