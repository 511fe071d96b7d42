"""What simpler methods than a draft model would keep of a prompt, at the same rate.

All give ascending int64 token indices without repeats. `first` and `last` tokens are kept by all of them, as by
SpecPrefill here: without the question no method has a chance. On top of them all keep `ceil(keep * others)` of the
other tokens, as SpecPrefill does if it chooses what it keeps anyway as often as anything else.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from math import ceil

import bm25s
import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]

_SENTENCE_END = re.compile(r"[.!?]\s+|[。！？]\s*|\n\s*")  # noqa: RUF001 - full-width marks
_ENDED = re.compile(r"[.!?。！？]\s*\Z")  # noqa: RUF001
_WORD = re.compile(r"\w+")


def random_chunks(
    tokens: int, keep: float, *, chunk: int, first: int, last: int, rng: np.random.Generator
) -> IntArray:
    """Chunks of `chunk` tokens at random until the budget is met, and the forced ends; the last one is cut to it."""
    kept = _ends(tokens, first, last)
    order = rng.permutation(-(-tokens // chunk))
    rank = np.argsort(order)[np.arange(tokens) // chunk]
    return _fill(kept, np.argsort(rank, kind="stable"), keep)


def first_and_last(tokens: int, keep: float, *, first: int, last: int) -> IntArray:
    """The forced ends and the budget beside them, half of it behind the first tokens and half before the last ones."""
    kept = _ends(tokens, first, last)
    between = np.flatnonzero(~kept)
    half = len(between) // 2
    outside_in = np.empty_like(between)
    outside_in[::2], outside_in[1::2] = between[: len(between) - half], between[::-1][:half]
    return _fill(kept, outside_in, keep)


def bm25_sentences(text: str, offsets: Sequence[tuple[int, int]], keep: float, *, first: int, last: int) -> IntArray:
    """The sentences nearest to the prompt's last one by BM25 until the budget is met, and the forced ends.

    Retrieval with the last sentence as the query (RAG-LLAMA LS of SpecPrefill's appendix B, there with embeddings).
    Sentences end at line ends and at ".", "!", "?"; the query is the last one that ends in such a mark, with what
    follows it ("Answer:"). Equal scores go by position; the sentence that passes the budget is cut to it. `offsets`
    are the tokens' (start, end) characters in `text`; those of special tokens may be (0, 0).
    """
    tokens = len(offsets)
    kept = _ends(tokens, first, last)
    sentences = split_sentences(text)
    if not tokens or not sentences:
        return np.flatnonzero(kept)
    query = next((n for n in range(len(sentences) - 1, -1, -1) if _ENDED.search(sentences[n])), len(sentences) - 1)
    scores = _bm25([_words(s) for s in sentences], _words("".join(sentences[query:])))
    # A token belongs to the sentence of its last character: it may begin with the space before.
    ends = np.cumsum([len(sentence) for sentence in sentences])
    characters = np.array([max(start, end - 1) for start, end in offsets])
    owner = np.minimum(np.searchsorted(ends, characters, side="right"), len(sentences) - 1)
    by_rank = np.argsort(np.argsort(-scores, kind="stable"), kind="stable")[owner]
    return _fill(kept, np.argsort(by_rank, kind="stable"), keep)


def split_sentences(text: str) -> list[str]:
    """The sentences of `text`, with the white space behind them; joined they are `text`.

    "310.40" is not split, "Dr. Haas" is.
    """
    ends = [match.end() for match in _SENTENCE_END.finditer(text)]
    return [part for start, end in pairwise([0, *ends, len(text)]) if (part := text[start:end])]


def _bm25(sentences: list[list[str]], query: list[str]) -> npt.NDArray[np.float32]:
    """Lucene's BM25 of each sentence. Zeros where no word of the query is in any."""
    query = sorted(set(query).intersection(*[{word for words in sentences for word in words}]))
    if not query:
        return np.zeros(len(sentences), dtype=np.float32)
    index = bm25s.BM25()
    index.index(sentences, show_progress=False)
    scores: npt.NDArray[np.float32] = index.get_scores(query)
    return scores


def _words(sentence: str) -> list[str]:
    return _WORD.findall(sentence.lower())


def _ends(tokens: int, first: int, last: int) -> npt.NDArray[np.bool_]:
    """bool [tokens]: the first and the last ones."""
    kept = np.zeros(tokens, dtype=np.bool_)
    kept[:first] = True
    kept[max(0, tokens - last) :] = True
    return kept


def _fill(kept: npt.NDArray[np.bool_], order: npt.NDArray[np.intp], keep: float) -> IntArray:
    """What is `kept`, and as many of the others, by their `order`, as the rate gives of those."""
    others = order[~kept[order]]
    kept[others[: _share(keep, len(others))]] = True
    return np.flatnonzero(kept)


def _share(keep: float, count: int) -> int:
    """ceil(keep * count), where 0.3 of 10 are 3."""
    return min(count, ceil(Fraction(str(keep)) * count))
