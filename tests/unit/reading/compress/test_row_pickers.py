"""The pickers without a model keep what they say, as much as they say."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefillcli.reading.compress.selection import (
    by_importance,
    fill,
    random_importance,
    sentence_importance,
    split_sentences,
)

KEEP = st.integers(0, 100).map(lambda percent: percent / 100)
TOKENS = st.integers(0, 400)
END = st.integers(0, 50)
TEXT = st.text(alphabet="ab c.?!\n。", max_size=120)


def random_chunks(
    tokens: int, keep: float, *, chunk: int, first: int, last: int, rng: np.random.Generator
) -> np.ndarray:
    return fill(by_importance(random_importance(tokens, chunk, rng)), tokens, keep, first=first, last=last)


def bm25_sentences(text: str, offsets: Sequence[tuple[int, int]], keep: float, *, first: int, last: int) -> np.ndarray:
    order = by_importance(sentence_importance(text, offsets))
    return fill(order, len(offsets), keep, first=first, last=last)


def budget(keep: float, count: int) -> int:
    return math.ceil(Fraction(round(100 * keep), 100) * count)


def check(kept: np.ndarray, tokens: int, keep: float, first: int, last: int) -> None:
    assert kept.dtype == np.int64
    assert kept.ndim == 1
    assert (np.diff(kept) > 0).all()
    assert set(kept) <= set(range(tokens))
    ends = set(range(min(first, tokens))) | set(range(max(0, tokens - last), tokens))
    assert ends <= set(kept)
    assert len(kept) == len(ends) + budget(keep, tokens - len(ends)), "all methods keep as many"


def words(text: str) -> list[tuple[int, int]]:
    """A token for each character or word, as a byte-level tokenizer cuts: with the space before it."""
    edges = sorted({0, len(text), *(n for n, letter in enumerate(text) if letter in " .\n")})
    return list(pairwise(edges))


@given(TOKENS, KEEP, st.integers(1, 64), END, END, st.integers(0, 9))
def test_random_chunks_are_whole_but_one_and_fill_the_budget(
    tokens: int, keep: float, chunk: int, first: int, last: int, seed: int
) -> None:
    kept = random_chunks(tokens, keep, chunk=chunk, first=first, last=last, rng=np.random.default_rng(seed))
    check(kept, tokens, keep, first, last)
    again = random_chunks(tokens, keep, chunk=chunk, first=first, last=last, rng=np.random.default_rng(seed))
    np.testing.assert_array_equal(kept, again)
    bare = random_chunks(tokens, keep, chunk=chunk, first=0, last=0, rng=np.random.default_rng(seed))
    assert len(bare) == budget(keep, tokens)
    sizes = {number: min(chunk, tokens - number * chunk) for number in set(bare // chunk)}
    assert sum((bare // chunk == number).sum() < size for number, size in sizes.items()) <= 1


def test_random_chunks_are_drawn_from_everywhere() -> None:
    rng = np.random.default_rng(0)
    counts = np.zeros(640)
    for _ in range(500):
        counts[random_chunks(640, 0.2, chunk=32, first=0, last=0, rng=rng)] += 1
    assert counts.min() > 60  # 100 expected
    assert counts.max() < 140


@given(TEXT)
def test_sentences_are_the_text(text: str) -> None:
    sentences = split_sentences(text)
    assert "".join(sentences) == text
    assert all(sentences)
    assert not any("\n" in sentence.strip() for sentence in sentences)


def test_sentences_end_at_marks_and_line_ends() -> None:
    text = "1 Mar: paid 310.40 to Norvik, late.\n\nIs it so? Yes! 你好。再见\nAnswer:"
    assert split_sentences(text) == [
        "1 Mar: paid 310.40 to Norvik, late.\n\n",
        "Is it so? ",
        "Yes! ",
        "你好。",
        "再见\n",
        "Answer:",
    ]


@given(TEXT, KEEP, END, END)
def test_bm25_fills_its_budget(text: str, keep: float, first: int, last: int) -> None:
    offsets = [(0, 0), *words(text)]
    kept = bm25_sentences(text, offsets, keep, first=first, last=last)
    if text:
        check(kept, len(offsets), keep, first, last)
    else:
        assert set(kept) == ({0} if first or last else set()), "there is nothing to choose from"


NAMES = ("Aa", "Bb", "Cc", "Dd", "Ee")
HISTORY = [f"{n} Mar: card payment to {name}, 12.{n}0, on time.\n" for n, name in enumerate(NAMES)]


def test_bm25_finds_the_sentence_that_shares_the_rare_word(capfd: pytest.CaptureFixture[str]) -> None:
    text = "".join(HISTORY) + "Question: is Dd in the file? Answer:"
    offsets = words(text)
    kept = bm25_sentences(text, offsets, 0.5, first=0, last=6)
    found = "".join(text[slice(*offsets[n])] for n in kept)
    assert "payment to Dd, 12.30, on time" in found
    assert "Question: is Dd in the file? Answer:" in found
    assert "Bb" not in found
    assert capfd.readouterr() == ("", "")  # no progress bars


def test_bm25_ranks_as_the_formula_does() -> None:
    sentences = ["a b c. ", "a a d. ", "b e f g h i. ", "c c c. ", "a c? "]
    text = "".join(sentences)
    offsets = words(text)
    documents = [s.strip(".? ").split() for s in sentences]
    mean = sum(map(len, documents)) / len(documents)

    def score(document: list[str]) -> float:
        total = 0.0
        for word in documents[-1]:
            holders = sum(word in d for d in documents)
            weight = math.log(1 + (len(documents) - holders + 0.5) / (holders + 0.5))
            count = document.count(word)
            total += weight * count / (count + 1.5 * (1 - 0.75 + 0.75 * len(document) / mean))
        return total

    ranked = sorted(range(len(documents)), key=lambda n: -score(documents[n]))
    owner = [next(n for n in range(5) if offset[1] <= len("".join(sentences[: n + 1]))) for offset in offsets]
    seen: list[int] = []
    for percent in range(1, 101):
        for token in bm25_sentences(text, offsets, percent / 100, first=0, last=0):
            if owner[token] not in seen:
                seen.append(owner[token])
    assert seen == ranked
