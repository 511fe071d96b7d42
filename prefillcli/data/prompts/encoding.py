"""Texts to token ids, with the tokenizers library's own batches where the tokenizer has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from prefillcli.data.prompts.controls import Controls
from prefillcli.data.rows import Int32Array, Prompt


class EncodedText(NamedTuple):
    """Token ids of a text, int32 [tokens], and of each its first character and the one after its last, [tokens, 2]."""

    ids: Int32Array
    offsets: Int32Array


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
        self._closing = 0
        self._closing = self._count_closing()
        self.special_ids: frozenset[int] = frozenset(tokenizer.all_special_ids) | frozenset(
            number for number, token in tokenizer.added_tokens_decoder.items() if token.special
        )
        self.start_ids: frozenset[int] = frozenset(
            [number for ids in self.encode([""], special=True) for number in ids.tolist()]
            + [number for number in (tokenizer.bos_token_id, tokenizer.cls_token_id) if number is not None]
        )
        """Tokens that stand before every text, like BOS."""
        self.unknown_id: int | None = tokenizer.unk_token_id
        self.size = len(tokenizer)
        self.has_offsets = self._backend is not None
        """Whether it can say where tokens lie in a text."""
        self.controls = Controls.of(tokenizer)

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

    def longest_token(self) -> int:
        """Bytes of the longest token, as the vocabulary spells it."""
        return max(len(token.encode()) for token in self.tokenizer.get_vocab())

    def encode(self, texts: Sequence[str], *, special: bool, literal: bool = False) -> list[Int32Array]:
        """Token ids of every text, int32 [tokens].

        `special`: with those that the tokenizer puts before a text by default. Those it would put after one (EOS)
        are left out: the answer follows the prompt's last word. `literal`: the texts are as `Controls.respell` writes
        them. Raises NotLiteral if this tokenizer has no such way.
        """
        if not texts:
            return []
        if self._backend is None:
            found = self.tokenizer(list(texts), add_special_tokens=special)["input_ids"]
        else:
            backend = self.controls.literal_backend if literal else self._backend
            found = [e.ids for e in backend.encode_batch_fast(list(texts), add_special_tokens=special)]
        closing = self._closing if special else 0
        return [np.array(ids[: len(ids) - closing], np.int32) for ids in found]

    def encode_with_offsets(self, texts: Sequence[str], *, special: bool, literal: bool = False) -> list[EncodedText]:
        """As `encode`, and where each token lies in its text: tokens that stand before a text have (0, 0).

        Bytes of one letter have the place of that letter, bytes of a run of unknown letters may have that of the run.
        Needs a tokenizer of the tokenizers library.
        """
        if not texts:
            return []
        backend: Any = self.controls.literal_backend if literal else self._backend
        closing = self._closing if special else 0
        found = []
        for coded in backend.encode_batch(list(texts), add_special_tokens=special):
            end = len(coded.ids) - closing
            offsets = np.array(coded.offsets[:end], np.int32).reshape(-1, 2)
            found.append(EncodedText(np.array(coded.ids[:end], np.int32), offsets))
        return found

    def _count_closing(self) -> int:
        """Special tokens that the tokenizer puts after a text."""
        bare = self.encode(["a"], special=False)[0].tolist()
        whole = self.encode(["a"], special=True)[0].tolist()
        added = len(whole) - len(bare)
        return next((added - at for at in range(added + 1) if whole[at : at + len(bare)] == bare), 0)

    def decode(self, tokens: Sequence[int] | Int32Array) -> str:
        """The text of token ids, special tokens included."""
        ids = [int(number) for number in tokens]
        return str(self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def tokens(self, ids: Sequence[int]) -> list[str]:
        """How the vocabulary spells token ids."""
        return [str(token) for token in self.tokenizer.convert_ids_to_tokens(list(ids))]


# Where the tokens of a prompt lie in its text, and the text of each.


class Spans(NamedTuple):
    """A prompt's text, and of each token its first character and the one after its last: int32 [tokens, 2]."""

    text: str
    offsets: npt.NDArray[np.int32]


def spans_of(tokenizer: Any, prompts: Sequence[Prompt]) -> Mapping[int, Spans] | None:
    """The spans of each prompt by its row number; None where a tokenizer has none, or texts do not give the tokens.

    The text is the tokens decoded. It stands for the prompt only if it is tokenised to the same ids again, so a
    prompt cut in the middle of a letter, or ids that no text leads to, have none.
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


_OPEN = "\ufffd"  # what tokenizers write for bytes that are no whole character (yet)
_MOST_OPEN = 32  # tokens; a character of UTF-8 has at most four
_NEAR = 16  # characters


def token_texts(decode: Callable[[Sequence[int]], str], tokens: Sequence[int]) -> list[str]:
    """The text of each token; joined they are `decode(tokens)` exactly.

    Each is what it adds to the text of the tokens before it, as tokenizers write a word at the start of a text without
    its space. A character of several tokens is the text of the last of them.
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
    """`texts`, or where they do not make up `whole` what of it lies nearest to them."""
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
