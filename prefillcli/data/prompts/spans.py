"""Where the tokens of a prompt lie in its text, and the text of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from prefillcli.data.rows import Prompt


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
