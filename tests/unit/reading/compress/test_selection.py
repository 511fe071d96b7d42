"""Selection against a few lines of numpy, and what prompts that share a prefix keep of it."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefillcli.plan.pack import Limits
from prefillcli.plan.plan import make_plan
from prefillcli.reading.compress.selection import full_prefixes, select, select_all, tails
from prefillcli.reading.compress.settings import Compression

importances = st.lists(st.floats(0, 1, width=32), min_size=1, max_size=200).map(lambda x: np.asarray(x, np.float32))
rates = st.sampled_from([0.01, 0.1, 0.2, 0.3, 0.5, 0.77, 1.0])


def reference(importance: np.ndarray, keep: float, chunk: int, first: int, last: int) -> np.ndarray:
    tokens = len(importance)
    chunks = [range(at, min(at + chunk, tokens)) for at in range(0, tokens, chunk)]
    means = np.array([importance[list(c)].astype(np.float64).mean() for c in chunks])
    best = np.argsort(-means, kind="stable")[: ceil(round(keep * len(chunks), 9))]
    kept = {token for c in best for token in chunks[c]}
    kept |= set(range(min(first, tokens))) | set(range(max(0, tokens - last), tokens))
    return np.array(sorted(kept))


@given(importances, rates, st.integers(1, 40), st.integers(0, 9), st.integers(1, 70))
def test_one_prompt_keeps_its_best_chunks_and_its_ends(
    importance: np.ndarray, keep: float, chunk: int, first: int, last: int
) -> None:
    kept = select(importance, keep, chunk=chunk, first=first, last=last)
    np.testing.assert_array_equal(kept, reference(importance, keep, chunk, first, last))


@given(importances, rates, st.integers(1, 40), st.integers(0, 9), st.integers(1, 70), st.booleans())
def test_a_prompt_that_shares_nothing_is_selected_alone(
    importance: np.ndarray, keep: float, chunk: int, first: int, last: int, per_row: bool
) -> None:
    settings = Compression(
        query_window=0, select_chunk=chunk, keep_first=first, keep_last=last, keep_private=False, per_row=per_row
    )
    tokens = np.arange(3, 3 + len(importance), dtype=np.int32)
    other = np.full(50, 2, np.int32)
    kept = select_all([other, tokens], [np.ones(50, np.float32), importance], [0.5, keep], settings)
    np.testing.assert_array_equal(kept[1], reference(importance, keep, chunk, first, last))


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Prompts of two letters, which share prefixes over many levels, with random importances."""
    prompts = draw(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=40), min_size=1, max_size=12))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    tokens = [np.asarray(prompt, np.int32) for prompt in prompts]
    return tokens, [rng.random(len(prompt)).astype(np.float32) for prompt in tokens]


@given(trees(), rates, st.integers(1, 9))
def test_prompts_keep_the_same_chunks_of_what_they_share(
    tree: tuple[list[np.ndarray], list[np.ndarray]], keep: float, chunk: int
) -> None:
    prompts, importances = tree
    settings = Compression(query_window=0, select_chunk=chunk, keep_first=0, keep_last=0, keep_private=False)
    kept = select_all(prompts, importances, [keep] * len(prompts), settings)
    for a, (one, mine) in enumerate(zip(prompts, kept, strict=True)):
        assert mine is not None
        ends = {len(prompt) - 1 for prompt in prompts}  # always kept, also of prompts that this one begins with
        chunks = {int(token) // chunk for token in mine}
        best = ceil(round(keep * -(-len(one) // chunk), 9))
        assert best <= len(chunks) <= best + len(ends), "as many chunks as alone"
        for other, theirs in zip(prompts[a + 1 :], kept[a + 1 :], strict=True):
            shared = next((i for i, (x, y) in enumerate(zip(one, other, strict=False)) if x != y), None)
            whole = (min(len(one), len(other)) if shared is None else shared) // chunk * chunk
            assert theirs is not None
            np.testing.assert_array_equal(mine[mine < whole], theirs[theirs < whole])


def test_of_a_shared_prefix_the_best_of_any_row_is_kept() -> None:
    prefix = np.arange(100, dtype=np.int32)
    prompts = [np.concatenate([prefix, [200 + row] * 10]).astype(np.int32) for row in range(2)]
    importances = [np.zeros(110, np.float32) for _ in prompts]
    importances[0][33], importances[1][71] = 1.0, 0.9
    settings = Compression(select_chunk=10, keep_first=2, keep_last=10, keep_private=False)
    kept = select_all(prompts, importances, [0.2, 0.2], settings)
    for own in kept:
        assert own is not None
        assert own.tolist() == [0, 1, *range(30, 40), *range(70, 80), *range(100, 110)]
    alone = select_all(prompts, importances, [0.1, 0.1], replace(settings, per_row=True))
    assert alone[0] is not None
    assert alone[1] is not None
    assert set(alone[0]) - set(alone[1]) == set(range(30, 40))
    assert set(alone[1]) - set(alone[0]) == set(range(70, 80))


def test_what_a_row_has_for_itself_is_kept() -> None:
    """Two rows behind one prefix, one with a duplicate, and one with more of its own than the rate leaves of it."""
    prefix = np.arange(100, dtype=np.int32)
    own = [np.full(count, 200 + count, np.int32) for count in (14, 20, 20, 60)]
    prompts = [np.concatenate([prefix, each]) for each in own]
    importances = [np.linspace(1, 0, len(prompt)).astype(np.float32) for prompt in prompts]
    how = Compression(query_window=0, select_chunk=10, keep_first=0, keep_last=5)
    for per_row in (False, True):
        settings = replace(how, per_row=per_row)
        assert tails(prompts, [0.2] * 4, settings) == [14, 20, 20, 5]
        kept = select_all(prompts, importances, [0.2] * 4, settings)
        for prompt, found, tail in zip(prompts, kept, (14, 20, 20, 5), strict=True):
            assert found is not None
            assert set(range(len(prompt) - tail, len(prompt))) <= set(found)
            assert len(found) <= 0.2 * len(prompt) + 10 + tail
        assert set(range(100, 155)) - set(kept[3]), "of so much only the best is kept"
    assert tails(prompts, [0.2] * 4, replace(how, keep_private=False)) == [5] * 4
    assert tails(prompts, [0.1, 0.5, None, 0.5], how) == [5, 20, 5, 60], "as much as the row's own rate leaves"


@given(trees(), rates)
def test_a_private_end_is_what_no_other_prompt_goes_on_with(
    tree: tuple[list[np.ndarray], list[np.ndarray]], keep: float
) -> None:
    prompts, _ = tree
    settings = Compression(query_window=0, keep_last=1)
    for at, (prompt, tail) in enumerate(zip(prompts, tails(prompts, [keep] * len(prompts), settings), strict=True)):
        others = [p.tolist() for p in prompts[:at] + prompts[at + 1 :] if p.tolist() != prompt.tolist()]
        words = prompt.tolist()
        shared = max((n for n in range(len(words) + 1) for o in others if o[:n] == words[:n]), default=0)
        private = len(words) - shared
        assert tail == (max(private, 1) if private <= keep * len(words) else 1)


def test_the_compressed_prefix_is_computed_once() -> None:
    rng = np.random.default_rng(0)
    prefix = rng.integers(0, 500, 1000)
    prompts = [np.concatenate([prefix, rng.integers(500, 900, 40)]).astype(np.int32) for _ in range(20)]
    importances = [rng.random(len(prompt)).astype(np.float32) for prompt in prompts]
    found = {}
    for per_row in (False, True):
        kept = select_all(prompts, importances, [0.2] * 20, Compression(per_row=per_row))
        sparse = [
            (prompt[own], own.astype(np.int32)) for prompt, own in zip(prompts, kept, strict=True) if own is not None
        ]
        plan = make_plan([t for t, _ in sparse], Limits(10**6, 10**6), positions=[p for _, p in sparse])
        found[per_row] = plan.computed_tokens
    assert found[False] < 200 + 64 + 20 * 70 < found[True]


def test_a_prefix_that_another_row_computes_in_full_is_kept_in_full() -> None:
    prefix = np.arange(64, dtype=np.int32)
    full = np.concatenate([prefix, [900] * 5]).astype(np.int32)
    row = np.concatenate([prefix, np.arange(1000, 1040)]).astype(np.int32)
    importance = np.zeros(104, np.float32)
    importance[80] = 1.0
    settings = Compression(query_window=0, select_chunk=8, keep_first=1, keep_last=4)
    assert full_prefixes([full, row], [True, False]) == [69, 64]
    kept = select_all([full, row], [None, importance], [None, 0.2], settings)
    assert kept[0] is None
    assert kept[1] is not None
    assert kept[1].tolist() == [*range(64), *range(80, 88), *range(100, 104)], "one of five chunks behind the prefix"


@pytest.mark.parametrize(("keep", "chunks"), [(0.3, 10), (0.1, 10), (0.7, 100), (0.2, 5)])
def test_rates_are_meant_as_they_are_written(keep: float, chunks: int) -> None:
    kept = select(np.ones(chunks, np.float32), keep, chunk=1, first=0, last=0)
    assert len(kept) == round(keep * chunks)
