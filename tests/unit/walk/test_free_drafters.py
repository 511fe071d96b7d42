"""Prompt lookup and earlier texts as drafters, against plain searches."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefillcli.walk.continuations import Beginning, DecodingReport, Speculation, Writing
from prefillcli.walk.drafters import LONGEST_MATCH, EarlierTexts, PromptLookup, SuffixDrafter, continuation
from prefillcli.walk.lockstep import RowText, write_texts
from tests.unit.walk.models import Recomputing, beginnings, generated, tiny_llama

TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=40)


@given(TEXTS, st.integers(1, 8))
def test_lookup_continues_the_latest_of_the_longest_matches(text: list[int], most: int) -> None:
    expected: list[int] = []
    for length in range(min(LONGEST_MATCH, len(text) - 1), 1, -1):
        ends = [end for end in range(length, len(text)) if text[end - length : end] == text[-length:]]
        if ends:
            whole = list(text)
            for at in range(ends[-1], ends[-1] + most):  # what repeats goes on
                whole.append(whole[at])
            expected = whole[len(text) :]
            break
    assert continuation(np.array(text, dtype=np.int32), most) == expected


def test_lookup_finds_what_a_row_quotes_of_its_prompt_after_guesses_were_taken_back() -> None:
    prompt = np.arange(100, 120, dtype=np.int32)
    row = RowText(0, Beginning(prompt, (7,), "row"), written=[103, 104])
    lookup = PromptLookup()
    lookup.begin([row])
    assert lookup.propose([row], [3]) == [[105, 106, 107]]
    row.written[:] = [103, 111, 112]
    assert lookup.propose([row], [3]) == [[113, 114, 115]]
    row.written += [3] * 300 + [101, 102]
    assert lookup.propose([row], [3]) == [[103, 104, 105]]


@given(st.lists(TEXTS, min_size=1, max_size=5), TEXTS, st.integers(1, 6))
def test_earlier_texts_are_continued_as_most_of_them_went_on(
    texts: list[list[int]], text: list[int], most: int
) -> None:
    earlier = EarlierTexts()
    for number, each in enumerate(texts):
        earlier.add(str(number), each)
    found: list[list[int]] = []
    length = min(len(text), 32)
    while length >= 2 and not found:
        found = [
            [*each[end:], -1]
            for each in texts
            for end in range(length, len(each) + 1)
            if each[end - length : end] == text[-length:]
        ]
        length -= 1
    guess = earlier.continuation(text, most)
    assert len(guess) <= most
    for depth, token in enumerate(guess):
        following = [each[depth] for each in found if each[:depth] == guess[:depth]]
        assert following.count(token) == max(following.count(other) for other in following)
        assert following.count(token) >= 0.3 * len(found)
    if found and not guess:
        following = [each[0] for each in found]
        most_frequent = max(following.count(other) for other in following)
        assert following.count(-1) == most_frequent or most_frequent < 0.3 * len(found)


def test_the_oldest_texts_are_forgotten_and_a_text_counts_once() -> None:
    earlier = EarlierTexts(most_tokens=100)
    for number in range(50):
        for _ in range(2):
            earlier.add(f"row {number}", [number, 200, number + 100, 3])
        assert len(earlier) <= 100
        assert earlier.continuation([number, 200], 2) == [number + 100, 3]
    assert earlier.continuation([0, 200], 2) == []
    earlier.add("too long", [1] * 60)
    assert earlier.continuation([1, 1], 1) == []


ROWS = beginnings(5, seed=2)


@pytest.mark.parametrize("drafter", [PromptLookup(), SuffixDrafter(EarlierTexts())], ids=lambda drafter: drafter.name)
def test_greedy_text_is_that_of_generate(drafter: PromptLookup | SuffixDrafter) -> None:
    expected = [generated(tiny_llama(), row, 24) for row in ROWS]
    writing = Writing(24, speculation=Speculation(drafter.name, tokens=4))
    for _ in range(2):
        forward = Recomputing(tiny_llama(), ROWS)
        texts = write_texts(forward, ROWS, writing, drafter=drafter, report=DecodingReport())
        assert [list(text.tokens) for text in texts] == expected
    if drafter.name == "suffix":  # the second time each text is known; it takes two tokens to find it
        assert len(forward.passes) < 12
