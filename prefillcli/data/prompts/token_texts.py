"""The text of each token of a prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
