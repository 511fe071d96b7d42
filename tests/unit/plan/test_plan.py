"""Plans against brute force: every prompt once, every distinct prefix once, no pack over its limits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from prefillcli.images.image import FIRST_FEATURE, LAST_FEATURE
from prefillcli.plan import SCHEDULES
from prefillcli.plan.behind import LabelSet, with_labels
from prefillcli.plan.pack import Limits, Pack, account
from prefillcli.plan.plan import HELD_PACKS, LONG, make_plan, packs_to_run
from prefillcli.plan.trie import (
    build_forest,
    common_prefix,
    dissolve_small_nodes,
    forest_tokens,
    keys_with_positions,
    token_order,
)

prompts_of_few_words = st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=24).map(lambda ids: np.asarray(ids, dtype=np.int32)),
    min_size=1,
    max_size=20,
)


def unique_prefixes(prompts: list[np.ndarray]) -> int:
    return len({tuple(p[: i + 1]) for p in prompts for i in range(len(p))})


def tokens_of(pack: Pack, node: int) -> list[int]:
    return pack.tokens[pack.offsets[node] : pack.offsets[node + 1]].tolist()


def kept_of(pack: Pack, cache: dict[tuple[int, int], list[int]]) -> dict[tuple[int, int], list[int]]:
    """What is in the cache after a pack, given what was before: tokens by key."""
    own = {(pack.index, node): tokens_of(pack, node) for node in range(len(pack.parents))}
    return {key: (cache | own)[key] for key in pack.keep}


def spelled(packs: list[Pack], limits: Limits) -> dict[int, list[int]]:
    """Each prompt's tokens as the packs would have them computed, following parents and held nodes."""
    found: dict[int, list[int]] = {}
    cache: dict[tuple[int, int], list[int]] = {}
    for pack in packs:
        assert pack.held_tokens <= limits.held_tokens
        assert len(pack.tokens) + pack.held_tokens * limits.held_cost <= limits.max_tokens
        held = [cache[node.key] for node in pack.held]
        assert [len(tokens) for tokens in held] == [node.length for node in pack.held]
        paths: list[list[int]] = []
        for node, parent in enumerate(pack.parents):
            assert parent < node
            if parent >= 0:
                assert not pack.attach[node]
                before = paths[parent]
            else:
                before = []
                for number in pack.attach[node]:
                    assert pack.held[number].start == len(before)
                    before = before + held[number]
            assert pack.starts[node] == len(before)
            paths.append(before + tokens_of(pack, node))
        for node, numbers in pack.reads:
            for number in numbers:
                assert number not in found
                found[number] = paths[node]
        cache = kept_of(pack, cache)
    return found


some_schedule = st.sampled_from(sorted(SCHEDULES))


@given(prompts_of_few_words, st.integers(1, 60), st.integers(0, 60), st.sampled_from([0.0, 1.0, 3.5]), some_schedule)
@settings(max_examples=200)
def test_every_prompt_is_spelled_once_whatever_the_limits(prompts, size, held, cost, schedule) -> None:
    limits = Limits(tokens=min(size, 45), max_tokens=45, held_tokens=held, held_cost=cost)
    found = spelled(make_plan(prompts, limits, schedule).packs, limits)
    assert found == {n: p.tolist() for n, p in enumerate(prompts)}


@given(prompts_of_few_words, st.integers(1, 60), some_schedule)
@example([np.int32(ids) for ids in ([1, 2, 1, 0], [1, 2, 2, 0, 0, 0, 0, 0], [1, 2], [1, 2, 1, 1])], 9, "fifo")
def test_the_descendants_of_a_node_follow_it(prompts, size, schedule) -> None:
    for pack in make_plan(prompts, Limits(size, 10**6, held_tokens=20), schedule).packs:
        for node in range(len(pack.parents)):
            below = {node}
            for other in range(node + 1, len(pack.parents)):
                if pack.parents[other] in below:
                    below.add(other)
            assert below == set(range(node, node + len(below)))


@given(prompts_of_few_words, st.integers(1, 60))
def test_prompts_of_a_pack_keep_the_order_of_their_schedule(prompts, size) -> None:
    packs = make_plan(prompts, Limits(size, 10**6), "fifo").packs
    first = [min(numbers) for pack in packs for _, numbers in pack.reads]
    assert first == sorted(first)
    packs = make_plan(prompts, Limits(size, 10**6), "srjf").packs
    lengths = [len(prompts[numbers[0]]) for pack in packs for _, numbers in pack.reads]
    assert lengths == sorted(lengths)


@given(prompts_of_few_words, st.integers(0, 40), some_schedule)
@settings(max_examples=100)
def test_one_by_one_prompts_come_as_their_schedule_says(prompts, held, schedule) -> None:
    """Every pack has one prompt, and the reference compares tokens alone."""
    plan = make_plan(prompts, Limits(tokens=0, max_tokens=10**6, held_tokens=held), schedule)
    texts = ["".join(map(str, prompt)) for prompt in prompts]
    waiting = set(range(len(prompts)))
    previous = ""
    cache: dict[tuple[int, int], list[int]] = {}
    for pack in plan.packs:
        ((_, numbers),) = pack.reads
        at_hand = held_texts(pack, cache)

        def missed(number: int, at_hand: list[str] = at_hand) -> int:
            text = texts[number]  # of a prompt that is at hand whole, the last node is computed again
            return len(text) - max(len(path) for path in at_hand if text.startswith(path) and path != text)

        first = min(numbers)
        if schedule == "fifo":
            assert first == min(waiting)
        elif schedule == "srjf":
            assert (len(texts[first]), first) == min((len(texts[n]), n) for n in waiting)
        elif schedule == "srjf-calibrated":
            assert missed(first) == min(missed(n) for n in waiting)
            assert len(pack.tokens) == missed(first)
        else:
            assert previous < texts[first]
            previous = texts[first]
        waiting -= set(numbers)
        cache = kept_of(pack, cache)
    assert not waiting


def held_texts(pack: Pack, cache: dict[tuple[int, int], list[int]]) -> list[str]:
    """The paths to the held nodes, the empty one among them: a root's `attach` tells which nodes are one path."""
    paths = [""]
    for seen in pack.attach:
        text = ""
        for number in seen:
            text += "".join(map(str, cache[pack.held[number].key]))
            paths.append(text)
    return paths


@given(prompts_of_few_words)
def test_one_pack_computes_hardly_more_than_the_unique_tokens(prompts) -> None:
    plan = make_plan(prompts, Limits(10**6, 10**6))
    assert plan.unique_tokens == unique_prefixes(prompts)
    assert plan.unique_tokens <= plan.computed_tokens <= 1.02 * plan.unique_tokens


@given(prompts_of_few_words, st.integers(1, 40))
def test_kept_prefixes_are_not_computed_twice(prompts, size) -> None:
    forest = build_forest(prompts, token_order(prompts))
    unique = forest_tokens(forest)
    plan = make_plan(prompts, Limits(size, 10**6, held_tokens=10**6))
    emptied = (len(plan.packs) - 1) // HELD_PACKS  # times; what follows computes one path afresh
    assert plan.computed_tokens <= unique * 1.01 + emptied * max(map(len, prompts))


@given(prompts_of_few_words, st.integers(1, 40))
def test_packs_stay_within_their_size_unless_one_prompt_is_larger(prompts, size) -> None:
    for pack in make_plan(prompts, Limits(size, 10**6, held_tokens=10**6)).packs:
        assert len(pack.tokens) <= size or len(pack.reads) == 1


@given(prompts_of_few_words, st.integers(1, 40), st.integers(0, 30), some_schedule)
def test_accounts_add_up_to_the_pack(prompts, size, held, schedule) -> None:
    for pack in make_plan(prompts, Limits(size, 10**6, held_tokens=held), schedule).packs:
        accounts = account(pack)
        assert sorted(a.prompt for a in accounts) == sorted(pack.prompts)
        assert sum(a.computed_tokens for a in accounts) == len(pack.tokens)
        assert abs(sum(a.share for a in accounts) - 1) < 1e-9
        for a in accounts:
            assert a.shared_tokens <= len(prompts[a.prompt])


@given(prompts_of_few_words, st.integers(1, 30), some_schedule, st.data())
def test_a_resumed_plan_runs_what_its_held_prefixes_need(prompts, size, schedule, data) -> None:
    limits = Limits(size, 10**6, held_tokens=10**6)
    plan = make_plan(prompts, limits, schedule)
    done = data.draw(st.sets(st.sampled_from(range(len(prompts)))))
    run = packs_to_run(plan, done)
    chosen = {pack.index for pack in run}
    for pack in plan.packs:
        if not done.issuperset(pack.prompts):
            assert pack.index in chosen
    for pack in run:
        assert chosen.issuperset(pack.needs)
    # what the packs before, run alone, leave behind is enough
    found = spelled(run, limits)
    assert found.items() >= {n: p.tolist() for n, p in enumerate(prompts) if n not in done}.items()


@pytest.mark.parametrize("schedule", ["", "FIFO", "prefix_tree", "srjf-calibrate"])
def test_an_unknown_schedule_is_refused_and_never_fifo(schedule: str) -> None:
    for prompts in ([], [np.asarray([1, 2], dtype=np.int32)]):
        with pytest.raises(ValueError, match="prefix-tree, fifo, srjf, srjf-calibrated"):
            make_plan(prompts, Limits(8, 8, 0, 0.0), schedule)


def test_common_prefix_over_long_strides() -> None:
    rng = np.random.default_rng(0)
    for length in (0, 1, 63, 64, 65, 319, 320, 5000):
        a = rng.integers(0, 9, length).astype(np.int32)
        assert common_prefix(a, np.concatenate([a, [1]])) == length
        if length:
            b = a.copy()
            b[-1] += 1
            assert common_prefix(a, b) == length - 1


def ids(start: int, end: int, *more: int) -> np.ndarray:
    return np.asarray([*range(start, end), *more], dtype=np.int32)


def test_prompts_share_within_a_pack_and_through_the_cache() -> None:
    prompts = [ids(0, 10, 1), ids(100, 110), ids(0, 10, 2), ids(0, 10, 3)]

    def computed(limits: Limits) -> set[int]:
        return {make_plan(prompts, limits, schedule).computed_tokens for schedule in SCHEDULES}

    assert computed(Limits(1000, 1000)) == {10 + 3 + 10}
    assert computed(Limits(1, 1000)) == {11 + 10 + 11 + 11}
    # The second prompt's tokens are of no use later, so they push nothing out.
    assert computed(Limits(1, 1000, held_tokens=10)) == {10 + 3 + 10}


@pytest.mark.parametrize(
    ("schedule", "order", "hits"),
    [("fifo", "ABCD", 1), ("srjf", "ACBD", 1), ("srjf-calibrated", "ADCB", 2), ("prefix-tree", "DABC", 2)],
)
def test_the_example_of_figure_5(schedule: str, order: str, hits: int) -> None:
    """A < C < B < D; A and D share a prefix, B and C another; the cache holds the tokens of one request."""
    prompts = {"A": ids(0, 50, 1), "B": ids(100, 160, *range(10)), "C": ids(100, 160, 50), "D": ids(0, 50, *range(40))}
    plan = make_plan(list(prompts.values()), Limits(1, 1000, held_tokens=90), schedule)
    assert "".join("ABCD"[pack.prompts[0]] for pack in plan.packs) == order
    assert sum(bool(pack.held and pack.attach[0]) for pack in plan.packs) == hits


@given(prompts_of_few_words, st.integers(1, 30), st.integers(0, 60), some_schedule)
def test_no_order_computes_less_than_the_trie(prompts, size, held, schedule) -> None:
    trie = forest_tokens(dissolve_small_nodes(build_forest(prompts, token_order(prompts))))
    assert make_plan(prompts, Limits(size, 10**6, held_tokens=held), schedule).computed_tokens >= trie


@given(prompts_of_few_words, st.integers(1, 60))
def test_the_prompts_of_a_pack_are_few_enough_to_be_watched(prompts, most) -> None:
    packs = make_plan(prompts, Limits(10**6, 10**6, read_tokens=most)).packs
    for pack in packs:
        seen = sum(len(prompts[numbers[0]]) for _, numbers in pack.reads)
        assert seen <= most or len(pack.reads) == 1
    assert sorted(number for pack in packs for number in pack.prompts) == list(range(len(prompts)))


def test_prompts_that_end_alike_are_in_several_packs_where_their_labels_are_long() -> None:
    rng = np.random.default_rng(0)
    history = rng.integers(3, 99, 40).astype(np.int32)
    labels = [LabelSet.of([[rng.integers(3, 99, 91).tolist()]]) for _ in range(20)]
    limits = Limits(tokens=400, max_tokens=10**6, held_tokens=100, held_cost=1.0)
    packs = make_plan([history] * 20, limits, labels=labels).packs
    walked = [with_labels(pack, labels.__getitem__)[0] for pack in packs]
    assert max(len(pack.tokens) for pack in walked) <= limits.tokens
    assert sorted(prompt for pack in packs for prompt in pack.prompts) == list(range(20))
    # All but the last token of the prompts is held from pack to pack.
    assert sum(len(pack.tokens) for pack in packs) == len(history) - 1 + sum(len(pack.reads) for pack in packs)


def test_what_differs_in_position_mark_variant_or_token_has_another_key() -> None:
    tokens = np.array([0, 1, FIRST_FEATURE - 1, FIRST_FEATURE, FIRST_FEATURE + (1 << 24), LAST_FEATURE], np.int32)
    keys = [
        keys_with_positions(tokens, np.full(len(tokens), at, np.int32), variant)
        for at in (0, 1, (1 << 24) - 1, LONG, LONG + 1)
        for variant in (0, 1, 255)
    ]
    assert len(np.unique(np.concatenate(keys))) == 5 * 3 * len(tokens)
