"""Plans against brute force: every prompt once, every distinct prefix once, no pack over its limits."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from prefillcli.plan.account import account
from prefillcli.plan.pack import HELD_PACKS, Limits
from prefillcli.plan.plan import Plan, make_plan, packs_to_run
from prefillcli.plan.trie import build_forest, common_prefix, dissolve_small_nodes, forest_tokens, token_order

prompts_of_few_words = st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=24).map(lambda ids: np.asarray(ids, dtype=np.int32)),
    min_size=1,
    max_size=20,
)


def unique_prefixes(prompts: list[np.ndarray]) -> int:
    return len({tuple(p[: i + 1]) for p in prompts for i in range(len(p))})


def spelled(plan: Plan, prompts: list[np.ndarray]) -> dict[int, list[int]]:
    """Each prompt's tokens as the packs would have them computed, following parents and held paths."""
    found: dict[int, list[int]] = {}
    held: list[int] = []
    for pack in plan.packs:
        assert len(held) >= pack.held
        paths: list[list[int]] = []
        for node, parent in enumerate(pack.parents):
            before = paths[parent] if parent >= 0 else held[: pack.attach[node]]
            assert pack.starts[node] == len(before)
            assert parent >= 0 or pack.attach[node] <= pack.held
            paths.append(before + pack.tokens[pack.offsets[node] : pack.offsets[node + 1]].tolist())
        for node, numbers in pack.reads:
            for number in numbers:
                assert number not in found
                found[number] = paths[node]
        kept = held[: pack.hold_attach]
        for node in pack.hold_nodes:
            kept = kept + pack.tokens[pack.offsets[node] : pack.offsets[node + 1]].tolist()
        held = kept
    return found


@given(prompts_of_few_words, st.integers(1, 60), st.integers(0, 30), st.sampled_from(["prefix-tree", "fifo"]))
@settings(max_examples=300)
def test_every_prompt_is_spelled_once_whatever_the_limits(prompts, size, held, schedule) -> None:
    limits = Limits(tokens=size, max_tokens=100, held_tokens=held, held_cost=1.0)
    plan = make_plan(prompts, limits, schedule)
    found = spelled(plan, prompts)
    assert found == {n: p.tolist() for n, p in enumerate(prompts)}


@given(prompts_of_few_words)
def test_the_sorted_trie_has_each_distinct_prefix_once(prompts) -> None:
    forest = build_forest(prompts, token_order(prompts))
    assert forest_tokens(forest) == unique_prefixes(prompts)


@given(prompts_of_few_words)
def test_one_pack_computes_hardly_more_than_the_unique_tokens(prompts) -> None:
    plan = make_plan(prompts, Limits(10**6, 10**6))
    assert plan.unique_tokens == unique_prefixes(prompts)
    assert plan.unique_tokens <= plan.computed_tokens <= 1.02 * plan.unique_tokens


@given(prompts_of_few_words, st.floats(0, 1))
def test_dissolving_keeps_to_its_budget(prompts, share) -> None:
    forest = build_forest(prompts, token_order(prompts))
    before = forest_tokens(forest)
    assert forest_tokens(dissolve_small_nodes(forest, share)) <= before * (1 + share)


@given(prompts_of_few_words, st.integers(1, 40))
def test_kept_prefixes_are_never_computed_twice(prompts, size) -> None:
    forest = build_forest(prompts, token_order(prompts))
    unique = forest_tokens(forest)
    plan = make_plan(prompts, Limits(size, 10**6, held_tokens=10**6))
    assert plan.computed_tokens <= unique * 1.01


@given(prompts_of_few_words, st.integers(1, 40))
def test_packs_stay_within_their_size_unless_one_prompt_is_larger(prompts, size) -> None:
    for pack in make_plan(prompts, Limits(size, 10**6, held_tokens=10**6)).packs:
        assert len(pack.tokens) <= size or len(pack.reads) == 1


@given(prompts_of_few_words, st.integers(1, 40), st.integers(0, 30))
def test_accounts_add_up_to_the_pack(prompts, size, held) -> None:
    for pack in make_plan(prompts, Limits(size, 10**6, held_tokens=held)).packs:
        accounts = account(pack)
        assert sorted(a.prompt for a in accounts) == sorted(pack.prompts)
        assert sum(a.computed_tokens for a in accounts) == len(pack.tokens)
        assert abs(sum(a.share for a in accounts) - 1) < 1e-9
        for a in accounts:
            assert a.shared_tokens <= len(prompts[a.prompt])


@given(prompts_of_few_words, st.integers(1, 30), st.data())
def test_a_resumed_plan_runs_what_its_held_prefixes_need(prompts, size, data) -> None:
    plan = make_plan(prompts, Limits(size, 10**6, held_tokens=10**6))
    done = data.draw(st.sets(st.sampled_from(range(len(prompts)))))
    run = packs_to_run(plan, done)
    chosen = {pack.index for pack in run}
    for pack in plan.packs:
        if not done.issuperset(pack.prompts):
            assert pack.index in chosen
    for pack in run:
        assert chosen.issuperset(pack.needs)
    held = 0  # what the packs before, run alone, leave behind is enough
    for pack in run:
        assert pack.held <= held
        held = pack.hold_attach + sum(pack.offsets[n + 1] - pack.offsets[n] for n in pack.hold_nodes)


def test_common_prefix_over_long_strides() -> None:
    rng = np.random.default_rng(0)
    for length in (0, 1, 63, 64, 65, 319, 320, 5000):
        a = rng.integers(0, 9, length).astype(np.int32)
        assert common_prefix(a, np.concatenate([a, [1]])) == length
        if length:
            b = a.copy()
            b[-1] += 1
            assert common_prefix(a, b) == length - 1


def test_fifo_shares_with_the_row_before_only() -> None:
    a, b = np.arange(10, dtype=np.int32), np.arange(100, 110, dtype=np.int32)
    prompts = [
        np.append(a, 1).astype(np.int32),
        b,
        np.append(a, 2).astype(np.int32),
        np.append(a, 3).astype(np.int32),
    ]
    assert make_plan(prompts, Limits(1000, 1000), "fifo").computed_tokens == 11 + 10 + 11 + 1
    assert make_plan(prompts, Limits(1000, 1000)).computed_tokens == 10 + 3 + 10


@given(prompts_of_few_words, st.integers(1, 60))
def test_the_prompts_of_a_pack_are_few_enough_to_be_watched(prompts, most) -> None:
    packs = make_plan(prompts, Limits(10**6, 10**6, read_tokens=most)).packs
    for pack in packs:
        seen = sum(len(prompts[numbers[0]]) for _, numbers in pack.reads)
        assert seen <= most or len(pack.reads) == 1
    assert sorted(number for pack in packs for number in pack.prompts) == list(range(len(prompts)))


@given(prompts_of_few_words)
def test_a_resumed_run_repeats_few_packs(prompts) -> None:
    plan = make_plan(prompts, Limits(1, 10**6, held_tokens=10**6))
    for pack in plan.packs:
        others = {number for other in plan.packs if other is not pack for number in other.prompts}
        assert len(packs_to_run(plan, others)) <= HELD_PACKS
