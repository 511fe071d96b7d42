"""Attention in sequences, as on CUDA, with explicit scores instead of the operator."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from prefillcli.plan import SCHEDULES
from prefillcli.plan.pack import Limits, Pack
from prefillcli.plan.plan import make_plan
from prefillcli.walk import attention_checks, cuda_kernels
from prefillcli.walk.attention_checks import PathCheck
from prefillcli.walk.cuda_kernels import (
    CAUSAL,
    WHOLE,
    Seen,
    SequenceTable,
    attend_sequences,
    make_tables,
    sequence_tables,
)
from prefillcli.walk.layout import Chunk, KeyWindow, LastTokens, Tree, oldest_key, split_evenly
from tests.unit.walk import varlen_reference
from tests.unit.walk.families import each_family
from tests.unit.walk.test_attention_paths import in_base_2
from tests.unit.walk.test_sparse import eager_sparse, kept_of, walked_sparse
from tests.unit.walk.test_walk import (
    ONE_PACK,
    assert_equal,
    eager,
    mixed,
    model_of,
    three_levels,
    walked,
    wanted,
)
from tests.unit.walk.variants import make_variant
from tests.unit.walk.varlen_reference import by_sequences, flash_by_definition

CPU = torch.device("cpu")

prompts_of_few_words = st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=40).map(lambda ids: np.asarray(ids, dtype=np.int32)),
    min_size=1,
    max_size=12,
)
some_window = st.none() | st.builds(KeyWindow, st.integers(1, 30), aligned=st.booleans())


def seen_by_definition(tables: list[SequenceTable]) -> Counter[tuple[int, int]]:
    """How often each (query, key of the buffer) is seen, by the operator's alignment at the ends of sequences."""
    found: Counter[tuple[int, int]] = Counter()
    for table in tables:
        left, right = (math.inf if side < 0 else side for side in table.sides)
        edges, starts, lengths = (x.tolist() for x in (table.queries, table.keys, table.lengths))
        for number, length in enumerate(lengths):
            for query in range(edges[number], edges[number + 1]):
                at = query - edges[number + 1] + length
                keys = (key for key in range(length) if at - left <= key <= at + right)
                found.update((table.first + query, starts[number] + key) for key in keys)
    return found


def seen_on_paths(tree: Tree, nodes: list[int], depths: list[int], window: KeyWindow | None) -> set[tuple[int, int]]:
    """What queries at these depths, which see the path to the end of their nodes, see of the buffer."""
    seen = set()
    for query, (node, depth) in enumerate(zip(nodes, depths, strict=True)):
        before = 0
        for start, end in tree.path(node):
            keys = range(start, end)
            seen |= {(query, key) for at, key in enumerate(keys, before) if oldest_key(window, depth) <= at <= depth}
            before += end - start
    return seen


def node_of(tree: Tree, token: int) -> int:
    return next(node for node in range(len(tree.parents)) if tree.offsets[node] <= token < tree.offsets[node + 1])


@given(
    prompts_of_few_words,
    st.tuples(st.integers(1, 60), st.integers(0, 60), st.sampled_from(sorted(SCHEDULES))),
    some_window,
    st.integers(1, 50),
    st.integers(1, 20),
)
@settings(max_examples=150)
def test_each_query_sees_each_key_of_its_path_and_window_once(prompts, plan, window, chunk, most) -> None:
    size, held, schedule = plan
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_kernels, "MOST_QUERIES", most)
        for pack in make_plan(prompts, Limits(min(size, 45), 45, held_tokens=held), schedule).packs:
            tree = Tree(pack)
            for start, end in split_evenly(len(pack.tokens), chunk):
                computed = Chunk(tree, start, end, CPU, 1)
                tables = sequence_tables(computed, window)
                nodes = [node_of(tree, token) for token in range(start, end)]
                assert seen_by_definition(tables) == Counter(
                    seen_on_paths(tree, nodes, computed.depths.tolist(), window)
                )
                assert max(table.most_queries for table in tables) <= most
            check_reads(tree, pack, window)


def last_tokens(tree: Tree, nodes: list[int]) -> LastTokens:
    return LastTokens(tree, np.array([tree.offsets[node + 1] - 1 for node in nodes]), CPU)


def check_reads(tree: Tree, pack: Pack, window: KeyWindow | None) -> None:
    nodes = sorted(node for node, _ in pack.reads)
    if not nodes:
        return
    last = last_tokens(tree, nodes)
    for last.ahead in (0, 3):  # three tokens decoded behind the reads move the window on
        found = seen_by_definition(sequence_tables(last, window))
        assert found == Counter(seen_on_paths(tree, nodes, last.depths.tolist(), window))


def test_queries_that_see_nothing_weigh_nothing() -> None:
    """Where a window has passed a read's own node, the operator answers with a log-sum-exp of +inf."""
    own = [Seen(WHOLE, 0, 1, 3, 3), Seen(WHOLE, 1, 2, 3, 6), Seen(WHOLE, 2, 3, 6, 6)]
    tables = make_tables(own, [Seen(WHOLE, 0, 2, 0, 2)], 3, CPU)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, heads, count, 8, generator=generator) for heads, count in ((4, 3), (2, 7), (2, 7))
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_kernels, "flash_sequences", flash_by_definition)
        out, lse = attend_sequences(tables, query, key, value, 0.3)
    keys, values = (x.repeat_interleave(2, dim=1) for x in (key, value))
    for at, seen in enumerate(([0, 1], [0, 1, 3, 4, 5])):
        scores = 0.3 * query[:, :, at : at + 1] @ keys[:, :, seen].transpose(2, 3)
        torch.testing.assert_close(out[:, :, at : at + 1], scores.softmax(-1) @ values[:, :, seen])
        torch.testing.assert_close(lse[:, :, at], scores.logsumexp(-1)[:, :, 0])
    assert not out[:, :, 2].any()
    assert (lse[:, :, 2] == -math.inf).all()


@each_family
def test_logits_equal_the_eager_forward(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = by_sequences(monkeypatch)
    assert_equal(walked(model_of(family), mixed(), chunk=97), wanted(family, mixed))
    assert calls.tables or family == "gemma2"  # whose soft caps go another way


@pytest.mark.parametrize("model", [lambda: model_of("gemma3_text"), lambda: make_variant("llama4_text")])
def test_local_attention_equals_the_eager_forward(model: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows that slide, and parts that a path is cut into."""
    by_sequences(monkeypatch)
    own, prompts = model(), mixed()
    reference = eager(own, prompts)
    for chunk, limits in ((97, ONE_PACK), (1000, ONE_PACK), (41, Limits(110, 10**6, held_tokens=10**6))):
        assert_equal(walked(own, prompts, chunk=chunk, limits=limits), reference)


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_prompts_with_gaps_equal_the_eager_forward(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    by_sequences(monkeypatch)
    model, prompts = model_of(family), mixed()
    kept = kept_of(prompts)
    assert_equal(walked_sparse(model, prompts, kept, chunk=41), eager_sparse(model, prompts, kept))


def test_narrow_values_and_soft_caps_go_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = by_sequences(monkeypatch)
    own, prompts = make_variant("deepseek_v3"), three_levels()
    assert_equal(walked(own, prompts, chunk=97), eager(own, prompts))
    walked(model_of("gemma2"), prompts, chunk=97)
    assert not calls.tables


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_held_and_repeated_prefixes_equal_the_eager_forward(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    by_sequences(monkeypatch)
    monkeypatch.setattr(cuda_kernels, "MOST_QUERIES", 16)
    kept, again = Limits(110, 10**6, held_tokens=10**6), Limits(110, 10**6)
    assert_equal(walked(model_of(family), mixed(), chunk=41, limits=kept), wanted(family, mixed))
    assert_equal(walked(model_of(family), mixed(), chunk=1000, limits=again), wanted(family, mixed))


def test_every_layer_reuses_the_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = by_sequences(monkeypatch)
    model = model_of("llama")
    walked(model, three_levels(), chunk=10**6)
    layers = model.config.num_hidden_layers
    uses = Counter(id(table) for table in calls.tables)
    assert max(uses.values()) == layers - 1  # the last layer computes the last tokens alone


def empty_ones_weigh_all(query: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    out, lse = flash_by_definition(query, *others)
    return out, lse.nan_to_num(posinf=1e4)


def as_if_causal(table: SequenceTable) -> SequenceTable:
    return replace(table, sides=CAUSAL)


def without_a_left_side(table: SequenceTable) -> SequenceTable:
    return replace(table, sides=(-1, table.sides[1]))


def lengths_by_the_next_start(table: SequenceTable) -> SequenceTable:
    """As an operator would that knows no lengths of its own."""
    return replace(table, lengths=table.keys.diff().clamp(0, table.most_keys))


def checked(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, operator: Callable[..., Any]) -> PathCheck:
    """The check that a device gets, on the CPU with this operator."""
    way = attention_checks._WAYS["varlen-flash"]
    monkeypatch.setitem(attention_checks._WAYS, "varlen-flash", replace(way, lacks=lambda device, dtype: None))
    monkeypatch.setattr(cuda_kernels, "flash_sequences", operator)
    return attention_checks.check_path("varlen-flash", CPU, dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_an_operator_that_does_as_it_says_agrees_with_explicit_scores(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert checked(monkeypatch, dtype, flash_by_definition).status == "agrees"


@pytest.mark.parametrize("change", [as_if_causal, without_a_left_side, lengths_by_the_next_start])
def test_an_operator_that_sees_other_keys_is_found_out(
    change: Callable[[SequenceTable], SequenceTable], monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(query: Tensor, key: Tensor, value: Tensor, table: SequenceTable, scale: float) -> tuple[Tensor, Tensor]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(varlen_reference, "check_arguments", lambda *tensors: None)
            return flash_by_definition(query, key, value, change(table), scale)

    assert checked(monkeypatch, torch.bfloat16, wrong).status in ("differs", "fails")


@pytest.mark.parametrize("wrong", [in_base_2(flash_by_definition), empty_ones_weigh_all])
def test_an_operator_with_another_log_sum_exp_is_found_out(
    wrong: Callable[..., tuple[Tensor, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In base 2, as ROCm's operator once answered."""
    assert checked(monkeypatch, torch.bfloat16, wrong).status == "differs"
