"""Too long prompts: error, skipped, cut on the left, cut in the middle."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from prefillcli.data.prompts.builder import fit
from prefillcli.data.rows import RowError

TOKENS = np.array([1, 10, 11, 12, 13, 14, 15], np.int32)
BOS = frozenset({1})


def test_a_prompt_of_the_limit_is_left_alone() -> None:
    for on_long in ("error", "skip", "truncate-left", "truncate-middle"):
        assert fit(TOKENS, 7, on_long, BOS) is TOKENS


def test_error_and_skip_say_how_long_it_is() -> None:
    assert fit(TOKENS, 6, "error", BOS) == RowError("prompt_too_long", "7 tokens, the limit is 6")
    assert fit(TOKENS, 6, "skip", BOS) == RowError("skipped_too_long", "7 tokens, the limit is 6")


def test_left_drops_the_oldest_tokens_but_not_bos() -> None:
    assert list(fit(TOKENS, 4, "truncate-left", BOS)) == [1, 13, 14, 15]
    assert list(fit(TOKENS, 4, "truncate-left", frozenset())) == [12, 13, 14, 15]
    assert list(fit(TOKENS, 1, "truncate-left", BOS)) == [15]


def test_middle_keeps_both_halves() -> None:
    assert list(fit(TOKENS, 4, "truncate-middle", BOS)) == [1, 10, 14, 15]
    assert list(fit(TOKENS, 5, "truncate-middle", BOS)) == [1, 10, 13, 14, 15]
    assert list(fit(TOKENS, 1, "truncate-middle", BOS)) == [15]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 40), st.booleans())
def test_a_cut_prompt_has_the_limit_and_the_last_tokens(tokens: list[int], limit: int, left: bool) -> None:
    array = np.array(tokens, np.int32)
    cut = fit(array, limit, "truncate-left" if left else "truncate-middle", frozenset({0}))
    assert not isinstance(cut, RowError)
    assert len(cut) == min(limit, len(tokens))
    assert cut[-1] == tokens[-1]
    assert cut.dtype == np.int32
