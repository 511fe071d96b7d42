"""Prompts in the tokens of another model's tokenizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from prefillcli.prompts.encoding import EncodedText, Encoder, NotLiteral, token_texts
from prefillcli.stats.arrays import Float64Array, Int32Array

TEXT = "draft_text"  # why a prompt is not mapped: the other tokenizer has no tokens for its text


@dataclass(frozen=True, slots=True)
class Overlap:
    """Token i of the target overlaps `width[i]` tokens of the draft, one or more, from `first[i]` on.

    int32 and uint8 [tokens].
    """

    first: Int32Array
    width: npt.NDArray[np.uint8]


# A prompt is not mapped if the draft has no tokens for more than this share of its letters, apart from white space.
UNREAD = 0.05
_MOST = 255  # the most tokens of the draft that are compared with one of the target


class Translation(NamedTuple):
    """A prompt in the draft's tokens, int32 [draft tokens], and which of them the target's tokens overlap."""

    tokens: Int32Array
    overlap: Overlap


class _Run(NamedTuple):
    """Tokens of a prompt between control tokens, or one control token."""

    ids: list[int]
    control: bool


class Translator:
    """Maps prompts from the tokenizer `target` to the tokenizer `draft`, both of transformers.

    The draft's is one of the tokenizers library. A draft has numbers for as many tokens as are `embedded`.
    """

    def __init__(self, target: Any, draft: Any, embedded: int | None = None) -> None:
        self._embedded = embedded
        self._target, self._draft = Encoder(target), Encoder(draft)
        self._literal = _can_be_literal(self._draft)
        self._target_literal = _can_be_literal(self._target)
        self._target_names = self._target.controls.names
        self._target_bytes = self._target.bytes_of_tokens()
        names = self._draft.controls.names
        spelled = {name: self._draft.controls.spelling(number) for number, name in names.items()}
        self._spellings = spelled if self._literal else {name: name for name in spelled}

    def lengths(self, prompts: Sequence[Int32Array]) -> list[int | None]:
        """The number of draft tokens of each prompt; None for one that the draft cannot read."""
        return [None if isinstance(each, str) else len(each.tokens) for each in self.translate(prompts)]

    def translate(self, prompts: Sequence[Int32Array]) -> list[Translation | str]:
        """Each prompt, int32 [tokens], in the draft's tokens, or the reason of `FALLBACKS` why it has none."""
        begun = [self._begun(tokens.tolist()) for tokens in prompts]
        runs = [list(self._runs(ids[start:])) for ids, start in begun]
        texts = iter(self._texts([run.ids for each in runs for run in each if not run.control]))
        read: list[tuple[str, Int32Array]] = []
        for (_, start), each in zip(begun, runs, strict=True):
            read.append(_joined(start, [self._control(run) if run.control else next(texts) for run in each]))
        coded = self._draft.encode_with_offsets([text for text, _ in read], special=True, literal=self._literal)
        return [self._mapped(text, places, own) for (text, places), own in zip(read, coded, strict=True)]

    def whole(self, prompts: Sequence[Int32Array]) -> list[Int32Array]:
        """Each prompt, int32 [tokens], as an encoder reads its text: in the draft's tokens, with all special ones
        around them."""
        texts = []
        for ids, start in (self._begun(tokens.tolist()) for tokens in prompts):
            runs = self._runs(ids[start:])
            texts.append(
                "".join(self._control(run)[0] if run.control else self._target.decode(run.ids) for run in runs)
            )
        return [each.ids for each in self._draft.encode_pairs([(text,) for text in texts], literal=self._literal)]

    def decode(self, tokens: Int32Array) -> str:
        """The text of some of the draft's tokens."""
        return self._draft.decode(tokens)

    def _begun(self, ids: list[int]) -> tuple[list[int], int]:
        # A prompt, and the number of tokens at its start that stand before every text.
        starts = self._target.start_ids
        return ids, next((at for at, number in enumerate(ids) if number not in starts), len(ids))

    def _runs(self, ids: list[int]) -> Iterator[_Run]:
        begin = 0
        for at, number in enumerate(ids):
            if number in self._target_names:
                if begin < at:
                    yield _Run(ids[begin:at], control=False)
                yield _Run([number], control=True)
                begin = at + 1
        if begin < len(ids):
            yield _Run(ids[begin:], control=False)

    def _control(self, run: _Run) -> tuple[str, Int32Array]:
        name = self._target_names[run.ids[0]]
        text = self._spellings.get(name, name)
        return text, np.array([[0, len(text)]], np.int32)

    def _texts(self, runs: Sequence[list[int]]) -> list[tuple[str, Int32Array]]:
        # The text of each run of tokens, and their places in it. If tokens are bytes of the text, these bytes give the
        # places. Else the tokenizer does, if it makes the same tokens from the text. It does not if the prompt was
        # cut, or given in ids that no text leads to. Then a token's place is the text that it adds to that of the
        # tokens before it.
        texts = [self._target.decode(ids) for ids in runs]
        places = [self._places_by_bytes(ids, text) for ids, text in zip(runs, texts, strict=True)]
        others = [number for number, own in enumerate(places) if own is None] if self._target.has_offsets else []
        coded = self._target.encode_with_offsets(
            [texts[number] for number in others], special=False, literal=self._target_literal
        )
        for number, own in zip(others, coded, strict=True):
            if own.ids.tolist() == runs[number]:
                places[number] = own.offsets
        return [
            (text, _places_of([len(part) for part in token_texts(self._target.decode, ids)]) if own is None else own)
            for ids, text, own in zip(runs, texts, places, strict=True)
        ]

    def _places_by_bytes(self, ids: list[int], text: str) -> Int32Array | None:
        if self._target_bytes is None:
            return None
        ends = np.cumsum(self._target_bytes[ids])
        letters = np.frombuffer(text.encode(errors="replace"), np.uint8)
        if ends[-1] != len(letters):
            return None
        letter = np.cumsum((letters & 0xC0) != 0x80) - 1  # of each byte: all but the first of a letter are 10xxxxxx
        starts = np.concatenate([[0], ends[:-1]])
        return np.stack([letter[starts], letter[ends - 1] + 1], axis=1).astype(np.int32)

    def _mapped(self, text: str, places: Int32Array, coded: EncodedText) -> Translation | str:
        # `places` are those of the target's tokens; tokens before the text have (-1, 0).
        if self._embedded is not None and int(coded.ids.max(initial=0)) >= self._embedded:
            return TEXT
        own = coded.offsets.copy()
        before = int(np.argmax(own[:, 1] > 0)) if own.size and own[:, 1].any() else len(own)
        own[:before] = (-1, 0)
        if before == len(own):
            return TEXT
        if not _ascending(own) or not _ascending(places) or own[-1, 1] > len(text):
            return TEXT
        if self._unread(text, coded, own) > UNREAD:
            return TEXT
        mine, theirs = _apart(places), _apart(own)
        first = np.minimum(np.searchsorted(theirs[:, 1], mine[:, 0], side="right"), len(own) - 1)
        end = np.searchsorted(theirs[:, 0], mine[:, 1], side="left")
        width = np.clip(end - first, 1, _MOST)
        return Translation(coded.ids, Overlap(first.astype(np.int32), width.astype(np.uint8)))

    def _unread(self, text: str, coded: EncodedText, own: Int32Array) -> float:
        # The share of a text's letters, apart from white space, that lie in no token known to the draft.
        letters = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
        known = own[:, 0] >= 0
        if self._draft.unknown_id is not None:
            known &= coded.ids != self._draft.unknown_id
        steps = np.zeros(len(letters) + 1, np.int64)
        np.add.at(steps, own[known, 0], 1)
        np.add.at(steps, own[known, 1], -1)
        visible = ~np.isin(letters, _SPACES)
        unread = visible & (np.cumsum(steps[:-1]) == 0)
        return float(unread.sum() / max(1, visible.sum()))


_SPACES = np.array([code for code in range(0x3001) if chr(code).isspace()], np.uint32)


def _can_be_literal(encoder: Encoder) -> bool:
    # Whether a tokenizer can be told not to find its control tokens in plain text.
    try:
        return encoder.has_offsets and encoder.controls.literal_backend is not None
    except NotLiteral:
        return False


def _joined(start: int, parts: Sequence[tuple[str, Int32Array]]) -> tuple[str, Int32Array]:
    # The text of a prompt, and its tokens' places in it; the first `start` tokens lie before it.
    places = [np.full((start, 2), (-1, 0), np.int32)]
    length = 0
    for text, offsets in parts:
        places.append(offsets + np.int32(length))
        length += len(text)
    return "".join(text for text, _ in parts), np.concatenate(places).astype(np.int32)


def _places_of(lengths: Sequence[int]) -> Int32Array:
    # Places, [tokens, 2], of tokens with texts of these lengths. A token without text is a part of the next letter.
    ends = np.cumsum(lengths, dtype=np.int32)
    starts = ends - np.array(lengths, np.int32)
    following = np.where(starts < ends, np.arange(len(ends)), len(ends) - 1)
    return np.stack([starts, ends[np.minimum.accumulate(following[::-1])[::-1]]], axis=1)


def _apart(places: Int32Array) -> Float64Array:
    # The same places without overlaps: tokens that end together, as bytes of one letter do, divide it among them.
    ends = places[:, 1]
    begins = np.flatnonzero(np.diff(ends, prepend=ends[0] - 1))
    counts = np.diff(begins, append=len(ends))
    stops = ends[begins].astype(np.float64)
    starts = np.maximum(places[begins, 0], np.concatenate([places[:1, 0], ends[begins][:-1]]))
    number = np.arange(len(ends)) - np.repeat(begins, counts)
    start, size, count = (np.repeat(each, counts) for each in (starts, stops - starts, counts))
    return np.stack([start + number * size / count, start + (number + 1) * size / count], axis=1)


def _ascending(places: Int32Array) -> bool:
    # Whether neither starts nor ends of tokens ever go back.
    return bool((np.diff(places, axis=0) >= 0).all()) and bool((places[:, 0] <= places[:, 1]).all())
