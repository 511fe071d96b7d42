"""Text of the data stays text: only templates and the tokenizer put control tokens into a prompt.

A tokenizer finds its added tokens wherever their text stands, so `</s>` in a post would end the text. Rows
without such a text are encoded as ever. In others, before anything is rendered, the first character of each such text
is replaced by a letter that stands in for it: no token is found there any more, while those of the template are. These
are then written with letters of their own, the stand-ins become what they stand for, and a copy of the tokenizer that
knows its control tokens by those letters alone encodes the rest as plain text.
"""

from __future__ import annotations

import functools
import json
import re
import weakref
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

from prefillcli.data.rows import ErrorCode, RowError

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
        """Those of a tokenizer, found once."""
        found = _FOUND.get(tokenizer)
        if found is None:
            found = _FOUND[tokenizer] = Controls(tokenizer)
        return found

    def may_be_in(self, text: str, *, joined: bool) -> bool:
        """Whether the tokenizer might find a control token in `text`.

        `joined`: or in `text` followed by other data, because it ends as one begins.
        """
        if self._names is None:
            return False
        if self._names.search(text) or (joined and next(self._open_ends(text), None) is not None):
            return True
        return self._normalize is not None and bool(
            self._normalized_names and self._normalized_names.search(self._normalize(_printable(text)))
        )

    def protect(self, text: str, marks: Marks) -> str:
        """`text` with stand-ins, so that the tokenizer finds no control token in it, whatever follows it."""
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
        """A respelled text as a reader knows it."""
        for number, token in self._tokens.items():
            text = text.replace(_spelling(number), token.content)
        return text

    @functools.cached_property
    def literal_backend(self) -> Any:
        """The tokenizer with its control tokens written in letters of their own. Raises NotLiteral."""
        from tokenizers import Tokenizer

        try:
            backend = Tokenizer.from_str(json.dumps(self._respelled(json.loads(self._backend.to_str()))))
        except Exception as error:  # a part in Python, or a kind of model of which nothing is known here
            raise NotLiteral(f"this tokenizer cannot be copied: {error}") from None
        if any(backend.token_to_id(_spelling(number)) != number for number in self._tokens):
            raise NotLiteral("a copy of this tokenizer numbers its tokens in another way")
        backend.no_padding()
        backend.no_truncation()
        return backend

    def _respelled(self, spec: dict[str, Any]) -> dict[str, Any]:
        """The tokenizer's JSON with other texts for its control tokens, which no merge produces."""
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
        """The control tokens that the tokenizer finds in `text`: where they start and stop, and their ids."""
        encoding = self._backend.encode(_printable(text), add_special_tokens=False)
        found = []
        for number, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True):
            token = self._tokens.get(number)
            if token is not None:
                name = text[start:stop]
                start += len(name) - len(name.lstrip()) if token.lstrip else 0
                stop -= len(name) - len(name.rstrip()) if token.rstrip else 0
                # The unknown token also stands for any text without a token of its own: that is not a find.
                if start < stop and (number != self._unknown or text[start:stop] == token.content):
                    found.append((start, stop, number))
        return found

    def _open_ends(self, text: str) -> Iterator[int]:
        """Where the end of `text` begins like a control token."""
        for at in range(max(len(text) - self._longest_start, 0), len(text)):
            if text[at:] in self._starts:
                yield at


_FOUND: weakref.WeakKeyDictionary[Any, Controls] = weakref.WeakKeyDictionary()


def protect(controls: Controls, value: Any, typed: frozenset[str], *, joined: bool) -> tuple[Any, Marks | None]:
    """A value with stand-ins in its texts, and what they stand for; None if it was safe already.

    `typed` are characters that the texts will stand beside; `joined`: other data may follow them. Raises
    NotLiteral.
    """
    texts = list(_texts(value))
    if not any(controls.may_be_in(text, joined=joined) for text in texts):
        return value, None
    marks = Marks(texts, typed)
    return _changed(value, lambda text: controls.protect(text, marks)), marks


def not_literal(error: NotLiteral) -> RowError:
    """The error of a row."""
    return RowError(
        ErrorCode.CONTROL_TEXT, f"the row has the text of a control token, but {error}; --allow-special takes it"
    )


def _is_control(token: Any, special: bool) -> bool:
    """Not the words and runs of spaces that were added to a vocabulary, nor its byte tokens."""
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
    """Half surrogate pairs, which the library does not take, replaced one by one."""
    return text if text.isascii() else _SURROGATE.sub("\ufffd", text)


def _in_html(character: str) -> str:
    """A character as Jinja's `tojson` writes it."""
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


def _changed(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {_changed(key, change): _changed(inner, change) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_changed(inner, change) for inner in value]
    if isinstance(value, bytes) and change(repr(value)) != repr(value):
        raise NotLiteral("it is in bytes")
    return value
