"""What exits spare, by the formula: against brute force over the tokens of each prompt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
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


def layers_needed(pack: Pack, through: Sequence[int | None], layers: int) -> npt.NDArray[np.float64]:
    """Layers of a token that each node takes, float64 [nodes].

    Read k leaves after `through[k]` layers, or never (None). A model has `layers`. Nodes that later packs
    hold go through all of them.
    """
    whole = in_full(layers)
    needed = np.zeros(len(pack.parents))
    ends = [(node, whole if count is None else count) for (node, _), count in zip(pack.reads, through, strict=True)]
    for node, most in [*ends, *((node, whole) for node in pack.kept_nodes)]:
        step = node
        while step >= 0 and needed[step] < most:
            needed[step] = most
            step = pack.parents[step]
    return needed


def remaining_work(pack: Pack, through: Sequence[int | None], layers: int) -> float:
    """The part of a pack's work that exits leave, between 0 and 1. Arguments as in `layers_needed`."""
    needed = layers_needed(pack, through, layers) * np.diff(pack.offsets)
    return float(needed.sum() / (in_full(layers) * len(pack.tokens)))


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
def test_a_token_goes_on_until_the_last_prompt_behind_it_has_left(prompts, size, data) -> None:
    for pack in make_plan(prompts, Limits(size, 10**6, held_tokens=30)).packs:
        through = some_exits(data, pack)
        most = np.zeros(len(pack.tokens))
        for path, count in zip(paths(pack), through, strict=True):
            most[path] = np.maximum(most[path], LAYERS - 1 + KEYS_SHARE if count is None else count)
        for node in nodes_kept_above(pack):
            most[pack.offsets[node] : pack.offsets[node + 1]] = LAYERS - 1 + KEYS_SHARE
        found = np.repeat(layers_needed(pack, through, LAYERS), np.diff(pack.offsets))
        np.testing.assert_array_equal(found, most)
        wanted = most.sum() / (len(pack.tokens) * (LAYERS - 1 + KEYS_SHARE))
        assert remaining_work(pack, through, LAYERS) == pytest.approx(wanted)


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
    wanted = (110 * (5 + KEYS_SHARE) + 30 * 2) / (140 * (5 + KEYS_SHARE))
    assert remaining_work(pack, through, LAYERS) == pytest.approx(wanted)


def test_the_example_of_a_long_prefix_with_short_suffixes() -> None:
    """2,000 + 20 x 150 tokens, 14 of 20 rows leave after 16 of 32 layers: 1.25 times as fast, unshared 1.51 times."""
    rng = np.random.default_rng(0)
    history = rng.integers(0, 10**6, 2000).astype(np.int32)
    suffixes = [rng.integers(0, 10**6, 150).astype(np.int32) for _ in range(20)]
    for prompts, faster in (([np.concatenate([history, each]) for each in suffixes], 1.25), (suffixes, 1.51)):
        (pack,) = make_plan(prompts, ONE_PACK).packs
        work = remaining_work(pack, [16 if k < 14 else None for k in range(20)], 32)
        assert 1 / work == pytest.approx(faster, abs=0.02)


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
