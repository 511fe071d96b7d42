"""Windows one after the other: the prefix that ends one is not computed again for the next."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefillcli.plan import SCHEDULES
from prefillcli.plan.pack import Key, Limits, Pack, account, free_packs
from prefillcli.plan.plan import HELD_PACKS, Plan, make_plan, packs_to_run
from prefillcli.plan.trie import DISSOLVE_SHARE

BLOCK = 8
AMPLE = Limits(10**6, 10**6, held_tokens=10**6)
WHOLE = replace(AMPLE, whole_nodes=True, node_tokens=3)
both_kinds = pytest.mark.parametrize("ample", [AMPLE, WHOLE], ids=["parts of nodes", "whole nodes"])

Cache = dict[Key, list[int]]


def words(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 50, length).tolist()


@st.composite
def windows_of_users(draw: st.DrawFn) -> list[list[np.ndarray]]:
    """Rows of users under a common instruction, cut into windows anywhere."""
    task = words(draw(st.integers(0, 20)), 1)
    prompts = []
    for user in range(draw(st.integers(1, 5))):
        history = task + words(draw(st.integers(1, 40)), 10 + user)
        for row in range(draw(st.integers(1, 6))):
            own = words(draw(st.integers(0, 6)), 100 * user + row)
            prompts.append(np.asarray(history[: draw(st.integers(1, 60))] + own, dtype=np.int32))
    size = draw(st.integers(1, len(prompts)))
    return [prompts[at : at + size] for at in range(0, len(prompts), size)]


def test_what_a_worker_computes_first_is_behind_the_nodes_that_its_pack_holds() -> None:
    """The beginning of the third prompt was computed again, for the second one, after its next node was."""
    prompts = [np.asarray(tokens, dtype=np.int32) for tokens in ([23, 25], [23], [23, 25, 30])]
    packs = make_plan(prompts, Limits(1, 150, held_tokens=2), "fifo").packs
    assert [node.key for node in packs[-1].held] == [(1, 0), (0, 1)]
    *_, last = free_packs(packs)
    assert [(refill.block, [node.key for node in refill.held]) for refill in last.refills] == [
        ((1, 0), []),
        ((0, 1), [(1, 0)]),
    ]


def plans_of(windows, limits: Limits, schedule: str = "prefix-tree") -> list[Plan]:
    plans: list[Plan] = []
    for prompts in windows:
        carried = plans[-1].carried if plans else ()
        plans.append(make_plan(prompts, limits, schedule, carried=carried, block_tokens=BLOCK))
    return plans


def run(packs: list[Pack], cache: Cache, limits: Limits, found: dict[int, list[int]]) -> Cache:
    """Spell the packs' prompts into `found` as the walk would have them; what is kept at the end."""
    for pack in packs:
        cache = {key: own for key, own in cache.items() if key in pack.keep | {node.key for node in pack.held}}
        resident = limits.held_size(map(len, cache.values()))
        assert resident <= limits.held_tokens
        assert len(pack.tokens) + resident * limits.held_cost <= limits.max_tokens
        held = [cache[node.key][node.offset : node.offset + node.length] for node in pack.held]
        if limits.whole_nodes:
            assert held == [cache[node.key] for node in pack.held]
        assert [len(part) for part in held] == [node.length for node in pack.held]
        paths: list[list[int]] = []
        for node, parent in enumerate(pack.parents):
            before = paths[parent] if parent >= 0 else []
            for number in pack.attach[node]:
                assert pack.held[number].start == len(before)
                before = before + held[number]
            assert pack.starts[node] == len(before)
            paths.append(before + pack.tokens[pack.offsets[node] : pack.offsets[node + 1]].tolist())
        for node, numbers in pack.reads:
            assert found.keys().isdisjoint(numbers)
            found |= dict.fromkeys(numbers, paths[node])
        own = {
            key: pack.tokens[pack.offsets[node] : pack.offsets[node + 1]].tolist()
            for node, key in pack.kept_nodes.items()
        }
        cache = {key: tokens for key, tokens in (cache | own).items() if key in pack.keep}
        kept = limits.held_size(map(len, cache.values()))
        assert kept <= limits.held_tokens
        assert len(pack.tokens) + kept * limits.held_cost <= limits.max_tokens
    return cache


some_schedule = st.sampled_from(list(SCHEDULES))
some_limits = st.builds(
    lambda size, held, cost, states: Limits(min(size, 150), 150, held, cost, None, *states),
    st.integers(1, 200),
    st.integers(0, 200),
    st.sampled_from([0.0, 0.3, 1.0, 3.5]),
    st.sampled_from([(False, 0), (True, 0), (True, 4)]),
)


@given(windows_of_users(), some_limits, some_schedule, st.booleans())
@settings(max_examples=200, deadline=None)
def test_every_prompt_is_spelled_once_and_the_limits_hold(windows, limits, schedule, lost) -> None:
    """Whether the K,V of the window before are at hand or `lost`."""
    cache: Cache = {}
    for prompts, plan in zip(windows, plans_of(windows, limits, schedule), strict=True):
        assert [pack.index for pack in [*plan.given, *plan.packs]] == list(range(len(plan.given) + len(plan.packs)))
        at_hand = {} if lost else {key: cache[key] for pack in plan.given if (key := pack.block) in cache}
        assert lost or len(at_hand) == len(plan.given)
        found: dict[int, list[int]] = {}
        cache = run(packs_to_run(plan, (), at_hand), at_hand, limits, found)
        assert found == {n: prompt.tolist() for n, prompt in enumerate(prompts)}
        assert cache.keys() == {key for _, key in plan.carried}
        if cache:
            assert sum(map(len, cache.values())) == plan.carried[-1][0]


@given(windows_of_users(), some_limits, some_schedule, st.data())
@settings(max_examples=100, deadline=None)
def test_a_resumed_window_runs_what_it_needs(windows, limits, schedule, data) -> None:
    plan = plans_of(windows, limits, schedule)[-1]
    done = data.draw(st.sets(st.sampled_from(range(len(windows[-1])))))
    found: dict[int, list[int]] = {}
    run(packs_to_run(plan, done), {}, limits, found)
    assert found.items() >= {n: p.tolist() for n, p in enumerate(windows[-1]) if n not in done}.items()


@given(windows_of_users(), some_limits, some_schedule)
@settings(max_examples=100, deadline=None)
def test_rows_are_charged_what_is_computed_in_an_undisturbed_run(windows, limits, schedule) -> None:
    for prompts, plan in zip(windows, plans_of(windows, limits, schedule), strict=True):
        accounts = [each for pack in plan.packs for each in account(pack)]
        assert sorted(each.prompt for each in accounts) == list(range(len(prompts)))
        assert sum(each.computed_tokens for each in accounts) == plan.computed_tokens
        assert all(0 <= each.shared_tokens <= len(prompts[each.prompt]) for each in accounts)


@given(windows_of_users(), some_schedule, st.sampled_from([AMPLE, WHOLE]))
@settings(max_examples=100, deadline=None)
def test_given_blocks_are_taken_from_what_is_unique(windows, schedule, ample) -> None:
    plans = plans_of(windows, ample, schedule)
    for prompts, plan, before in zip(windows, plans, [None, *plans], strict=False):
        alone = make_plan(prompts, ample, schedule)
        given = sum(len(pack.tokens) for pack in plan.given)
        assert plan.unique_tokens == alone.unique_tokens - given
        assert plan.unique_tokens <= plan.computed_tokens
        if before is not None:
            ends = [pack.offsets[-1] + pack.starts[0] for pack in plan.given]
            assert ends == [end for end, _ in before.carried][: len(ends)]


@given(windows_of_users(), some_schedule)
@settings(max_examples=100, deadline=None)
def test_whole_blocks_never_make_a_window_dearer(windows, schedule) -> None:
    """What prompts that leave a given block compute again is less than the block."""
    for prompts, plan in zip(windows, plans_of(windows, WHOLE, schedule), strict=True):
        alone = make_plan(prompts, WHOLE, schedule)
        given = sum(len(pack.tokens) for pack in plan.given)
        own = len(plan.carried)  # where a prompt ends, a block ends one token before
        assert plan.computed_tokens <= alone.unique_tokens * (1 + DISSOLVE_SHARE) + own
        assert plan.computed_tokens >= alone.unique_tokens - given


@given(windows_of_users(), some_limits, some_schedule)
@settings(max_examples=100, deadline=None)
def test_packs_that_stand_alone_use_whole_nodes_too(windows, limits, schedule) -> None:
    limits = replace(limits, whole_nodes=True)
    for prompts, plan in zip(windows, plans_of(windows, limits, schedule), strict=True):
        for free in free_packs([*plan.given, *plan.packs]):
            found: dict[int, list[int]] = {}
            run([*free.refills, free.pack], {}, WHOLE, found)
            assert found == {n: prompts[n].tolist() for n in free.pack.prompts}


@given(windows_of_users(), some_schedule)
@settings(max_examples=100, deadline=None)
def test_windows_without_a_long_prefix_are_planned_as_without_blocks(windows, schedule) -> None:
    long = max(len(prompt) for prompts in windows for prompt in prompts) + 1
    for prompts in windows:
        plan, alone = (
            make_plan(prompts, replace(AMPLE, tokens=40), schedule, block_tokens=tokens) for tokens in (long, 0)
        )
        assert plan.unique_tokens == alone.unique_tokens
        assert not plan.given
        assert not plan.carried
        assert [repr(pack) for pack in plan.packs] == [repr(pack) for pack in alone.packs]


def rows_of(histories: list[list[int]], rows: int) -> list[np.ndarray]:
    return [
        np.asarray([*history, 1000 + row, *words(4, 1000 * user + row)], dtype=np.int32)
        for user, history in enumerate(histories)
        for row in range(rows)
    ]


def computed(plans: list[Plan]) -> int:
    return sum(plan.computed_tokens for plan in plans)


@pytest.mark.sampled(3)
@both_kinds
@pytest.mark.parametrize("size", [2, 7, 10, 25])
def test_a_document_is_computed_once_for_all_windows(size: int, ample: Limits) -> None:
    prompts = rows_of([words(1000, 7)], 100)
    windows = [prompts[at : at + size] for at in range(0, 100, size)]
    (whole,) = plans_of([prompts], ample)
    rest = 1  # a block of eight has parts of one token
    assert computed(plans_of(windows, ample)) <= whole.unique_tokens * (1 + DISSOLVE_SHARE) + len(windows) * rest
    apart = [make_plan(prompts, AMPLE).computed_tokens for prompts in windows]
    assert sum(apart) > 1000 * len(windows)


@both_kinds
def test_users_that_windows_cut_are_computed_once(ample: Limits) -> None:
    task = words(100, 3)
    prompts = rows_of([task + words(200, 20 + user) for user in range(12)], 9)
    (whole,) = plans_of([prompts], ample)
    for size in (13, 14, 20, 31):
        windows = [prompts[at : at + size] for at in range(0, len(prompts), size)]
        alone = sum(at % 9 == 1 and at < len(prompts) for at in range(size, len(prompts), size))
        # A user's only row before the cut: nothing tells that its history comes again.
        most = whole.unique_tokens * (1 + DISSOLVE_SHARE) + 200 * alone + 2 * len(windows)
        assert whole.unique_tokens <= computed(plans_of(windows, ample)) <= most


def test_prompts_that_leave_a_given_block_do_not_read_it() -> None:
    """The window before had one user; in this one another begins alike."""
    first, second = words(100, 1), words(60, 2)
    one = make_plan(rows_of([first], 4), WHOLE, block_tokens=BLOCK)
    assert [end for end, _ in one.carried] == [100]
    prompts = rows_of([first, first[:30] + second], 4)
    plan = make_plan(prompts, WHOLE, carried=one.carried, block_tokens=BLOCK)
    assert plan.computed_tokens == plan.unique_tokens + 30
    (pack,) = [pack for pack in plan.packs if pack.block is None]
    assert [(held.start, held.offset, held.length) for held in pack.held] == [(0, 0, 100), (0, 0, 30), (30, 0, 60)]


def test_states_take_room_of_what_is_held() -> None:
    prompts = rows_of([words(64, 5)], 4)
    for states, carried in [(0, 64), (6, 64), (7, 63), (69, 1), (70, 0)]:
        limits = Limits(10**6, 10**6, held_tokens=70, whole_nodes=True, node_tokens=states)
        (plan,) = plans_of([prompts], limits)
        assert (plan.carried[-1][0] if plan.carried else 0) == carried


def test_a_few_tokens_that_are_shared_by_chance_get_no_block() -> None:
    task, history = words(300, 3), words(2000, 4)
    others = [[*task, 90], [*task, history[0], 91], [*task, *history[:3], 92]]
    prompts = [np.asarray(ids, dtype=np.int32) for ids in [*others, *([*task, *history, n] for n in (60, 61, 62))]]
    plan = make_plan(prompts, WHOLE, block_tokens=1024)
    assert [end for end, _ in plan.carried] == [300, 2300]
    assert plan.computed_tokens <= plan.unique_tokens * (1 + DISSOLVE_SHARE) + 3


def test_what_does_not_fit_the_memory_is_not_carried() -> None:
    prompts = rows_of([words(64, 5)], 4)
    longest = max(map(len, prompts))
    cases = [(64, 0.0, 64), (63, 0.0, 63), (60, 0.0, 60), (20, 0.0, 20), (0, 0.0, 0), (10**6, 2.0, 32)]
    for held, cost, carried in cases:
        limits = Limits(10**6, longest + 64, held_tokens=held, held_cost=cost)
        (plan,) = plans_of([prompts], limits)
        assert (plan.carried[-1][0] if plan.carried else 0) == carried


def test_other_tokens_or_positions_are_not_taken_for_a_block() -> None:
    prompts = rows_of([words(64, 5)], 4)
    carried = make_plan(prompts, AMPLE, block_tokens=BLOCK).carried
    assert carried
    others = [np.concatenate([prompt[:30], prompt[30:] + 1]).astype(np.int32) for prompt in prompts]
    given = [len(make_plan(rows, AMPLE, carried=carried, block_tokens=BLOCK).given) for rows in (prompts, others)]
    assert given == [len(carried), 30 // BLOCK]
    shifted = [np.arange(len(prompt), dtype=np.int32) + 1 for prompt in prompts]
    assert not make_plan(prompts, AMPLE, positions=shifted, carried=carried, block_tokens=BLOCK).given
    same = [np.arange(len(prompt), dtype=np.int32) for prompt in prompts]
    assert len(make_plan(prompts, AMPLE, positions=same, carried=carried, block_tokens=BLOCK).given) == len(carried)


def test_a_resumed_run_repeats_few_packs_beside_the_blocks() -> None:
    plan = plans_of([rows_of([words(40, user) for user in range(6)], 9)], replace(AMPLE, tokens=1))[0]
    for pack in plan.packs:
        others = {number for other in plan.packs if other is not pack for number in other.prompts}
        again = [each for each in packs_to_run(plan, others) if each.block is None]
        assert len(again) <= HELD_PACKS
