"""Prompt lookup as a drafter, against a plain search."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from prefillcli.walk.continuations import Beginning, DecodingReport, Speculation, Writing
from prefillcli.walk.drafters import LONGEST_MATCH, PromptLookup, continuation
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


ROWS = beginnings(5, seed=2)


def test_greedy_text_is_that_of_generate() -> None:
    expected = [generated(tiny_llama(), row, 24) for row in ROWS]
    writing = Writing(24, speculation=Speculation("lookup", tokens=4))
    forward, report = Recomputing(tiny_llama(), ROWS), DecodingReport()
    texts = write_texts(forward, ROWS, writing, drafter=PromptLookup(), report=report)
    assert [list(text.tokens) for text in texts] == expected
