"""What exits spare, by the formula: against brute force over the tokens of each prompt."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefillcli.plan.pack import (
    KEYS_SHARE,
    LayersDone,
    Limits,
    Pack,
    account,
    carried_by_few,
    in_full,
)
from prefillcli.plan.plan import make_plan
from tests.unit.plan.test_plan import prompts_of_few_words

LAYERS = 6
ONE_PACK = Limits(10**6, 10**6)
Exit = int | None


def some_exits(data: st.DataObject, pack: Pack) -> list[Exit]:
    some = st.none() | st.integers(0, LAYERS - 1)
    return data.draw(st.lists(some, min_size=len(pack.reads), max_size=len(pack.reads)))


def paths(pack: Pack) -> list[list[int]]:
    """For each read the tokens of the pack that it sees."""
    found = []
    for node, _ in pack.reads:
        path: list[int] = []
        while node >= 0:
            path += range(pack.offsets[node], pack.offsets[node + 1])
            node = pack.parents[node]
        found.append(path)
    return found


def nodes_kept_above(pack: Pack) -> set[int]:
    found = set()
    for node in pack.kept_nodes:
        while node >= 0:
            found.add(node)
            node = pack.parents[node]
    return found


@given(prompts_of_few_words, st.integers(1, 40), st.data())
def test_few_rows_that_carry_a_shared_prefix_are_counted(prompts, size, data) -> None:
    names = {1: "1", 2: "2", **dict.fromkeys(range(3, 6), "3-5"), **dict.fromkeys(range(6, 11), "6-10")}
    for pack in make_plan(prompts, Limits(size, 10**6, held_tokens=30)).packs:
        through = some_exits(data, pack)
        kept = nodes_kept_above(pack)
        wanted: Counter[str] = Counter()
        seen = [set(path) for path in paths(pack)]
        for node in set(range(len(pack.parents))) - kept:
            behind = [k for k in range(len(seen)) if pack.offsets[node] in seen[k]]
            rows = sum(len(pack.reads[k][1]) for k in behind)
            for layer in range(LAYERS - 1):
                alive = sum(len(pack.reads[k][1]) for k in behind if through[k] is None or through[k] > layer)
                if 0 < alive < rows:
                    wanted[names.get(alive, ">10")] += pack.offsets[node + 1] - pack.offsets[node]
        found = carried_by_few(pack, through, LAYERS)
        assert list(found) == ["1", "2", "3-5", "6-10", ">10"]
        assert Counter(found) == wanted


def test_a_stubborn_row_carries_the_prefix_on() -> None:
    history = np.arange(3, 103, dtype=np.int32)
    prompts = [np.concatenate([history, np.full(10, 200 + i, dtype=np.int32)]) for i in range(4)]
    (pack,) = make_plan(prompts, ONE_PACK).packs
    through = [None if prompts == (2,) else 2 for _, prompts in pack.reads]
    assert carried_by_few(pack, through, LAYERS) == {"1": 300, "2": 0, "3-5": 0, "6-10": 0, ">10": 0}


@given(prompts_of_few_words, st.integers(1, 40), st.integers(0, 30), st.data())
def test_accounts_add_up_to_what_was_computed_and_spared(prompts, size, held, data) -> None:
    for pack in make_plan(prompts, Limits(size, 10**6, held_tokens=held)).packs:
        nodes = len(pack.parents)
        counts = st.lists(st.integers(0, LAYERS - 1), min_size=nodes, max_size=nodes)
        done = LayersDone(np.asarray(data.draw(counts)), np.ones(nodes, dtype=np.int64), layers=LAYERS)
        accounts, lengths = account(pack, done), np.diff(pack.offsets)
        work = (lengths * (done.full + KEYS_SHARE)).sum()
        assert sum(each.skipped for each in accounts) == pytest.approx(len(pack.tokens) * in_full(LAYERS) - work)
        assert sum(each.share for each in accounts) == pytest.approx(1)
        assert [each.computed_tokens for each in accounts] == [each.computed_tokens for each in account(pack)]


@given(prompts_of_few_words)
def test_where_nobody_leaves_nothing_is_spared(prompts) -> None:
    (pack,) = make_plan(prompts, ONE_PACK).packs
    nodes = len(pack.parents)
    done = LayersDone(np.full(nodes, LAYERS - 1), np.ones(nodes, dtype=np.int64), layers=LAYERS)
    for found, wanted in zip(account(pack, done), account(pack), strict=True):
        assert (found.prompt, found.skipped) == (wanted.prompt, 0)
        assert found.share == pytest.approx(wanted.share)


def test_rows_that_left_early_are_charged_less_time() -> None:
    prompts = [np.arange(start, start + 50, dtype=np.int32) for start in (0, 100)]
    (pack,) = make_plan(prompts, ONE_PACK).packs
    done = LayersDone(np.asarray([2, LAYERS - 1]), np.asarray([0, 1]), layers=LAYERS)
    first, second = account(pack, done)
    assert first.share / second.share == pytest.approx(2 / in_full(LAYERS))
    assert (first.skipped, second.skipped) == (pytest.approx(50 * (in_full(LAYERS) - 2)), 0)
