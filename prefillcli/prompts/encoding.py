"""Texts to token ids, with the tokenizers library's own batches where the tokenizer has them."""

from __future__ import annotations

import functools
import json
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from prefillcli.images.image import FIRST_FEATURE
from prefillcli.rows.records import ErrorCode, Prompt, RowError
from prefillcli.stats.arrays import Int32Array


class EncodedText(NamedTuple):
    """Token ids of a text, int32 [tokens], and of each its first character and the one after its last, [tokens, 2]."""

    ids: Int32Array
    offsets: Int32Array


class EncodedPair(NamedTuple):
    """Token ids of a text or a pair of texts, and of each token the type that the tokenizer gives it and the number of
    its text, -1 for a special one: int32 [tokens] each."""

    ids: Int32Array
    types: Int32Array
    parts: Int32Array


_WORD = "x"  # before a token whose text is taken: some tokenizers drop the space that begins a text


class Encoder:
    """A Hugging Face tokenizer without padding and truncation.

    `tokenizer` is a transformers tokenizer, fast or slow.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        if self._backend is not None:  # which cannot be changed while another thread encodes
            if self._backend.padding is not None:
                self._backend.no_padding()
            if self._backend.truncation is not None:
                self._backend.no_truncation()
        self._opening: list[int] = []  # special tokens that the tokenizer puts before a text
        self._closing = 0  # how many it puts after one
        bare, whole = (self.encode(["a"], special=special)[0].tolist() for special in (False, True))
        added = len(whole) - len(bare)
        before = next((at for at in range(added + 1) if whole[at : at + len(bare)] == bare), added)
        self._opening, self._closing = whole[:before], added - before
        self.special_ids: frozenset[int] = frozenset(tokenizer.all_special_ids) | frozenset(
            number for number, token in tokenizer.added_tokens_decoder.items() if token.special
        )
        # Tokens that stand before every text, like BOS.
        self.start_ids: frozenset[int] = frozenset(
            [number for ids in self.encode([""], special=True) for number in ids.tolist()]
            + [number for number in (tokenizer.bos_token_id, tokenizer.cls_token_id) if number is not None]
        )
        self.unknown_id: int | None = tokenizer.unk_token_id
        self.image = str(getattr(tokenizer, "image_token", None) or "<image>")  # the text of a place for one
        self.has_offsets = self._backend is not None  # whether it knows where tokens lie in a text
        self.controls = Controls.of(tokenizer)
        self.control_ids = self.special_ids | self.controls.names.keys()

    def bytes_of_tokens(self) -> Int32Array | None:
        """Bytes of each token's text, int32 [ids], where tokens are bytes of the text (byte-level BPE), else None."""
        if self._backend is None or type(self._backend.decoder).__name__ != "ByteLevel":
            return None
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        found = np.zeros(max(vocabulary.values()) + 1, np.int32)
        added = {token.content for token in self._backend.get_added_tokens_decoder().values()}
        for token, number in vocabulary.items():
            found[number] = len(token.encode()) if token in added else len(token)
        return found

    @functools.cached_property
    def _vocabulary(self) -> dict[str, int]:
        return dict(self.tokenizer.get_vocab())

    def last_id(self) -> int:
        """The largest token id, which may lie beyond the number of tokens."""
        return max(self._vocabulary.values())

    def longest_token(self) -> int:
        """Bytes of the longest token, as the vocabulary spells it."""
        return max(len(token.encode()) for token in self._vocabulary)

    def encode(self, texts: Sequence[str], *, special: bool, literal: bool = False) -> list[Int32Array]:
        """Token ids of every text, int32 [tokens].

        `special`: with the tokens that the tokenizer puts before a text by default. Those that it would put after one
        (EOS) are left out: the answer follows the prompt's last word. Those that a text begins with are not put before
        it once more. `literal`: the texts are as `Controls.respell` writes them. Raises NotLiteral if this tokenizer
        cannot encode them.
        """
        if not texts:
            return []
        if self._backend is None:
            found = self.tokenizer(list(texts), add_special_tokens=special)["input_ids"]
        else:
            backend = self.controls.literal_backend if literal else self._backend
            found = [e.ids for e in backend.encode_batch_fast(list(texts), add_special_tokens=special)]
        return [np.array(ids[self._own(ids) if special else slice(None)], np.int32) for ids in found]

    def _own(self, ids: Sequence[int]) -> slice:
        # The tokens of a prompt among those that the tokenizer makes of its text.
        size = len(self._opening)
        twice = size > 0 and list(ids[: 2 * size]) == [*self._opening, *self._opening]
        return slice(size if twice else 0, len(ids) - self._closing)

    def encode_pairs(self, texts: Sequence[tuple[str, ...]], *, literal: bool = False) -> list[EncodedPair]:
        """Texts, alone or in pairs, with all special tokens around them. `literal` as in `encode`.

        Needs a tokenizer of the tokenizers library.
        """
        if not texts:
            return []
        backend: Any = self.controls.literal_backend if literal else self._backend
        found = []
        for coded in backend.encode_batch_fast([own if len(own) > 1 else own[0] for own in texts]):
            parts = [-1 if part is None else part for part in coded.sequence_ids]
            found.append(EncodedPair(*(np.array(each, np.int32) for each in (coded.ids, coded.type_ids, parts))))
        return found

    def encode_with_offsets(self, texts: Sequence[str], *, special: bool, literal: bool = False) -> list[EncodedText]:
        """As `encode`, and where each token lies in its text: tokens that stand before a text have (0, 0).

        Bytes of one letter have the place of that letter; bytes of a run of unknown letters may have the place of the
        run. Needs a tokenizer of the tokenizers library.
        """
        if not texts:
            return []
        backend: Any = self.controls.literal_backend if literal else self._backend
        found = []
        for coded in backend.encode_batch(list(texts), add_special_tokens=special):
            own = self._own(coded.ids) if special else slice(None)
            offsets = np.array(coded.offsets[own], np.int32).reshape(-1, 2)
            found.append(EncodedText(np.array(coded.ids[own], np.int32), offsets))
        return found

    def decode(self, tokens: Sequence[int] | Int32Array, *, literal: bool = False) -> str:
        """The text of token ids, special tokens included; `literal` as `Controls.respell` writes it. Features of
        images that follow one another are the text of one."""
        ids = [int(number) for number in tokens]
        if any(number >= FIRST_FEATURE for number in ids):
            parts = groupby(ids, lambda number: number >= FIRST_FEATURE)
            return "".join(self.image if own else self.decode(list(run), literal=literal) for own, run in parts)
        if literal:
            names = self.controls.names
            runs = ((is_control, list(run)) for is_control, run in groupby(ids, names.__contains__))
            return "".join(
                "".join(map(self.controls.spelling, run)) if is_control else self.decode(run)
                for is_control, run in runs
            )
        return str(self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def text_behind(self, token: int) -> str:
        """The text that a token adds to the one before it, with its space, which is lost at the start of a text."""
        before = self.encode([_WORD], special=False, literal=False)[0].tolist()
        return self.decode([*before, token])[len(self.decode(before)) :]

    def tokens(self, ids: Sequence[int]) -> list[str]:
        """Return how the vocabulary spells token ids."""
        return [str(token) for token in self.tokenizer.convert_ids_to_tokens(list(ids))]


# Where the tokens of a prompt lie in its text, and the text of each.


class Spans(NamedTuple):
    """A prompt's text, and of each token its first character and the one after its last: int32 [tokens, 2]."""

    text: str
    offsets: npt.NDArray[np.int32]


def spans_of(tokenizer: Any, prompts: Sequence[Prompt]) -> Mapping[int, Spans] | None:
    """The spans of each prompt by its row number; None if the tokenizer has none, or a text does not give the same
    tokens.

    The text is the decoded tokens. It stands for the prompt only if tokenising it gives the same ids again. So a
    prompt that was cut within a letter, or ids that no text leads to, have no spans.
    """
    if not getattr(tokenizer, "is_fast", False):
        return None
    found = {}
    for prompt in prompts:
        spans = _spans(tokenizer, prompt.tokens.tolist())
        if spans is None:
            return None
        found[prompt.row] = spans
    return found


def _spans(tokenizer: Any, ids: list[int]) -> Spans | None:
    special = set(tokenizer.all_special_ids)
    start = next((at for at, token in enumerate(ids) if token not in special), len(ids))
    # As it stands, special tokens spelled out; else without those in front, which the tokenizer puts there itself.
    for part, add in ((ids, False), (ids[start:], True)):
        text = tokenizer.decode(part, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        coded = tokenizer(text, add_special_tokens=add, return_offsets_mapping=True, verbose=False)
        if coded["input_ids"][: len(ids)] == ids:
            return Spans(text, np.array(coded["offset_mapping"][: len(ids)], np.int32).reshape(-1, 2))
    return None


_OPEN = "\ufffd"  # tokenizers' text for bytes that are no whole character (yet)
_MOST_OPEN = 32  # tokens; a character of UTF-8 has at most four
_NEAR = 16  # characters


def token_texts(decode: Callable[[Sequence[int]], str], tokens: Sequence[int]) -> list[str]:
    """The text of each token; joined they are `decode(tokens)` exactly.

    Each is the text that the token adds to that of the tokens before it, because tokenizers write a word at the start
    of a text without its space. A character of several tokens is the text of the last of them.
    """
    texts = [""] * len(tokens)
    start = done = 0  # tokens before `done` have their text; the last of them, from `start`, are decoded along
    before = ""  # of tokens[start:done]
    for end in range(1, len(tokens) + 1):
        text = decode(tokens[start:end])
        is_open = text.endswith(_OPEN) or len(text) <= len(before)
        if is_open and end < len(tokens) and end - done < _MOST_OPEN:
            continue
        texts[end - 1] = text[len(before) :]
        start, done = done, end
        before = decode(tokens[start:done])
    return _fitted(texts, decode(tokens))


def _fitted(texts: list[str], whole: str) -> list[str]:
    # `texts`; if they do not add up to `whole`, the pieces of `whole` nearest to them.
    if not texts or "".join(texts) == whole:
        return texts
    fitted, at = [], 0
    for text in texts:
        found = whole.find(text, at, at + len(text) + _NEAR) if text else -1
        end = at if found < 0 else found + len(text)
        fitted.append(whole[at:end])
        at = end
    fitted[-1] += whole[at:]
    return fitted


# Letters that no normaliser changes, drops or joins: Yi, and the extinct Tangut, whose last ones spell control tokens.
_STAND_INS = (range(0xA000, 0xA48D), range(0x17000, 0x18000))
_START = chr(0x187F7)
_DIGITS = 0x18000 + 0x100
_DIGIT_VALUES = 0x200
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_SURROGATE = re.compile("[\ud800-\udfff]")


class NotLiteral(Exception):
    """A text of a control token cannot be encoded literally; the text says why."""


class Marks:
    """The letters that stand in for characters of one row; none of them is in the row or in `reserved`."""

    def __init__(self, texts: Iterable[str], reserved: frozenset[str]) -> None:
        used = set().union(*texts)
        if _START in used:
            raise NotLiteral(f"it also has the letter {_START!r}, with which control tokens are written")
        used |= reserved
        self._free = (chr(code) for code in chain(*_STAND_INS) if chr(code) not in used)
        self._letters: dict[str, str] = {}

    def stand_in(self, character: str) -> str:
        """The letter that stands in for `character`."""
        if character not in self._letters:
            letter = next(self._free, None)
            if letter is None:
                raise NotLiteral("it has every letter that could stand in for another")
            self._letters[character] = letter
        return self._letters[character]

    def undo(self, text: str) -> str:
        """`text` with the characters that the letters stand for, also where Jinja's `tojson` has escaped them."""
        for character, letter in self._letters.items():
            text = text.replace(letter, character)
            escaped = json.dumps(letter)[1:-1]
            if escaped in text:
                text = text.replace(escaped, _in_html(character))
        return text


class Controls:
    """The control tokens of a tokenizer: special tokens, and others that were added and are not words."""

    def __init__(self, tokenizer: Any) -> None:
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        unknown = getattr(getattr(self._backend, "model", None), "unk_token", None) or tokenizer.unk_token
        self._unknown: int | None = None if unknown is None else tokenizer.convert_tokens_to_ids(unknown)
        special = set(tokenizer.all_special_ids)
        self._tokens: dict[int, Any] = {
            number: token
            for number, token in tokenizer.added_tokens_decoder.items()
            if token.content and _is_control(token, number in special)
        }
        names = {token.content for token in self._tokens.values()}
        names |= set(map(str, tokenizer.all_special_tokens)) if self._backend is None else set()
        self._names = _any_of(names)
        normalizer = getattr(self._backend, "normalizer", None)
        self._normalize: Callable[[str], str] | None = None
        normalized = {token.content for token in self._tokens.values() if token.normalized}
        if normalizer is not None and normalized:
            self._normalize = normalizer.normalize_str
            self._normalized_names = _any_of({normalizer.normalize_str(name) for name in normalized})
        self._starts = frozenset(name[:size] for name in names for size in range(1, len(name)))
        self._longest_start = max(map(len, self._starts), default=0)

    @staticmethod
    def of(tokenizer: Any) -> Controls:
        """Those of a tokenizer; they are found only once."""
        found = _FOUND.get(tokenizer)
        if found is None:
            found = _FOUND[tokenizer] = Controls(tokenizer)
        return found

    def may_be_in(self, text: str, *, joined: bool) -> bool:
        """Return whether the tokenizer might find a control token in `text`.

        `joined`: or in `text` followed by other data, because its end is the beginning of one.
        """
        if self._names is None:
            return False
        if self._names.search(text) or (joined and self.opens(text)):
            return True
        return self._normalize is not None and bool(
            self._normalized_names and self._normalized_names.search(self._normalize(_printable(text)))
        )

    def opens(self, text: str) -> bool:
        """Return whether the end of `text` begins like a control token."""
        return next(self._open_ends(text), None) is not None

    def protect(self, text: str, marks: Marks) -> str:
        """`text` with stand-ins, in which the tokenizer finds no control token, whatever follows it."""
        if self._backend is None:
            raise NotLiteral("this tokenizer has no way to encode it as text")
        characters = list(text)
        for at in self._open_ends(text):
            characters[at] = marks.stand_in(text[at])
        while spans := self._find("".join(characters)):  # without one, another that overlaps it may be found
            for start, _, _ in spans:
                characters[start] = marks.stand_in(characters[start])
        return "".join(characters)

    def respell(self, text: str) -> str:
        """`text` with the control tokens that are found in it written as `literal_backend` knows them."""
        at = 0
        pieces = []
        for start, stop, number in self._find(text):
            pieces += [text[at:start], _spelling(number)]
            at = stop
        return "".join([*pieces, text[at:]])

    @property
    def names(self) -> dict[int, str]:
        """The text of each control token, by its id."""
        return {number: token.content for number, token in self._tokens.items()}

    def spelling(self, number: int) -> str:
        """A control token as `literal_backend` knows it, by its id."""
        return _spelling(number)

    def shown(self, text: str) -> str:
        """A respelled text in its usual spelling."""
        for number, token in self._tokens.items():
            text = text.replace(_spelling(number), token.content)
        return text

    @functools.cached_property
    def literal_backend(self) -> Any:
        """The tokenizer with its control tokens written in their own letters. Raises NotLiteral."""
        from tokenizers import Tokenizer

        try:
            backend = Tokenizer.from_str(json.dumps(self._respelled(json.loads(self._backend.to_str()))))
        except Exception as error:  # a part in Python, or an unknown kind of model
            raise NotLiteral(f"this tokenizer cannot be copied: {error}") from None
        if any(backend.token_to_id(_spelling(number)) != number for number in self._tokens):
            raise NotLiteral("a copy of this tokenizer numbers its tokens in another way")
        backend.no_padding()
        backend.no_truncation()
        return backend

    def _respelled(self, spec: dict[str, Any]) -> dict[str, Any]:
        # The tokenizer's JSON with other texts for its control tokens, which no merge produces.
        names = {token.content: _spelling(number) for number, token in self._tokens.items()}
        for token in spec["added_tokens"]:
            token["content"] = names.get(token["content"], token["content"])
        model = spec["model"]
        vocabulary = model["vocab"]
        if isinstance(vocabulary, dict):
            model["vocab"] = {names.get(name, name): number for name, number in vocabulary.items()}
        else:
            model["vocab"] = [[names.get(name, name), score] for name, score in vocabulary]
        if model.get("unk_token") in names:
            model["unk_token"] = names[model["unk_token"]]
        if "merges" in model:
            pairs = [(merge, merge.split(" ") if isinstance(merge, str) else merge) for merge in model["merges"]]
            model["merges"] = [merge for merge, pair in pairs if names.keys().isdisjoint([*pair, "".join(pair)])]
        return spec

    def _find(self, text: str) -> list[tuple[int, int, int]]:
        # The control tokens that the tokenizer finds in `text`: where they start and stop, and their ids.
        encoding = self._backend.encode(_printable(text), add_special_tokens=False)
        found = []
        for number, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True):
            token = self._tokens.get(number)
            if token is not None:
                name = text[start:stop]
                start += len(name) - len(name.lstrip()) if token.lstrip else 0
                stop -= len(name) - len(name.rstrip()) if token.rstrip else 0
                # The unknown token also stands for any text without its own token: that is not a find.
                if start < stop and (number != self._unknown or text[start:stop] == token.content):
                    found.append((start, stop, number))
        return found

    def _open_ends(self, text: str) -> Iterator[int]:
        # Where the end of `text` begins like a control token.
        for at in range(max(len(text) - self._longest_start, 0), len(text)):
            if text[at:] in self._starts:
                yield at


_FOUND: weakref.WeakKeyDictionary[Any, Controls] = weakref.WeakKeyDictionary()


def protect(controls: Controls, value: Any, typed: frozenset[str], *, joined: bool) -> tuple[Any, Marks | None]:
    """A value with stand-ins in its texts, and the characters that they stand for; None if it was safe already.

    `typed` are characters that will stand beside the texts; `joined`: other data may follow them. Raises
    NotLiteral.
    """
    texts = list(_texts(value))
    if not any(controls.may_be_in(text, joined=joined) for text in texts):
        return value, None
    marks = Marks(texts, typed)
    return change_texts(value, lambda text: controls.protect(text, marks)), marks


def not_literal(error: NotLiteral) -> RowError:
    """The error of a row."""
    return RowError(
        ErrorCode.CONTROL_TEXT, f"the row has the text of a control token, but {error}; --allow-special takes it"
    )


def _is_control(token: Any, special: bool) -> bool:
    # Not the words and runs of spaces that were added to a vocabulary, nor its byte tokens.
    if special or token.special:
        return not _BYTE.fullmatch(token.content)
    name = token.content.replace("▁", " ")
    is_word = all(character.isalnum() or character.isspace() for character in name)
    return not (is_word or len(name) == 1 or _BYTE.fullmatch(name))


def _any_of(names: set[str]) -> re.Pattern[str] | None:
    names = {name for name in names if name}
    return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True)))) if names else None


def _spelling(number: int) -> str:
    high, low = divmod(number, _DIGIT_VALUES)
    return f"{_START}{chr(_DIGITS + high // _DIGIT_VALUES)}{chr(_DIGITS + high % _DIGIT_VALUES)}{chr(_DIGITS + low)}"


def _printable(text: str) -> str:
    # Half surrogate pairs, which the library does not take, replaced one by one.
    return text if text.isascii() else _SURROGATE.sub("\ufffd", text)


def _in_html(character: str) -> str:
    # A character as Jinja's `tojson` writes it.
    if character in "<>&'":
        return f"\\u{ord(character):04x}"
    return json.dumps(character)[1:-1]


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _texts(key)
            yield from _texts(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner)
    elif isinstance(value, bytes):
        yield repr(value)


def change_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Return a value with its texts changed, keys among them. Raises NotLiteral for bytes that would change."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change_texts(key, change): change_texts(inner, change) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [change_texts(inner, change) for inner in value]
    if isinstance(value, bytes) and change(repr(value)) != repr(value):
        raise NotLiteral("it is in bytes")
    return value
