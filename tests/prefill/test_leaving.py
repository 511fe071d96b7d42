"""Reads that leave between two layers: those that stay get the scores of the model's own forward, for less work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from prefillcli.plan.exit_work import LayersDone
from prefillcli.plan.pack import Limits, Pack
from prefillcli.plan.plan import make_plan
from prefillcli.prefill.forest import ATTENTION
from prefillcli.prefill.leaving import remainder
from prefillcli.prefill.walk import LayerWalk
from tests.prefill.test_walk import (
    ONE_PACK,
    Prompt,
    assert_equal,
    every_family,
    mixed,
    model_of,
    three_levels,
    tokens,
    two_levels,
    wanted,
)

Leaving = dict[int, int]  # the layer at which a prompt leaves
NEVER = 10**9


class LeaveAfter:
    """An exit rule: each prompt leaves at its layer. Takes down what it is shown."""

    def __init__(self, leaving: Leaving, *, peek: bool = False, regroup_cost: float = 0.0) -> None:
        self.layers = range(100)
        self.regroup_cost = regroup_cost
        self._leaving = leaving
        self._peek = peek
        self.pack: Pack | None = None
        self.shown: dict[int, dict[int, tuple[Tensor, Tensor]]] = {}  # by layer and prompt

    def peeks(self, layer: int) -> bool:
        return self._peek

    def __call__(self, layer: int, reads: Sequence[int], before: Tensor, after: Tensor) -> list[int]:
        assert self.pack is not None
        assert len(reads) == len(before) == len(after) > 0
        for read, *rows in zip(reads, before, after, strict=True):
            for prompt in self.pack.reads[read][1]:
                self.shown.setdefault(layer, {})[prompt] = (rows[0].clone(), rows[1].clone())
        return [read for read in reads if self.exit_of(read, self.pack) > layer]

    def exit_of(self, read: int, pack: Pack) -> int:
        """The last layer at which one of a read's prompts leaves."""
        return max(self._leaving.get(prompt, NEVER) for prompt in pack.reads[read][1])


@dataclass
class Walked:
    """Logits of the prompts that stayed, and tokens computed by each layer: in full, and K,V alone."""

    logits: dict[int, Tensor]
    full: list[int]
    keys: list[int]
    done: list[tuple[Pack, LayersDone]]


def walked(
    model: nn.Module,
    prompts: list[Prompt],
    rule: LeaveAfter | None,
    *,
    chunk: int,
    limits: Limits = ONE_PACK,
    hidden_on_host: bool = False,
) -> Walked:
    model.set_attn_implementation(ATTENTION)
    layers = model.get_decoder().layers
    begun, ended = [0] * len(layers), [0] * len(layers)

    def count(counts: list[int], index: int) -> Callable[..., None]:
        def counted(module: nn.Module, inputs: tuple[Tensor, ...], *output: object) -> None:
            counts[index] += inputs[0].shape[1]

        return counted

    hooks = [layer.register_forward_pre_hook(count(begun, i)) for i, layer in enumerate(layers)]
    hooks += [layer.register_forward_hook(count(ended, i)) for i, layer in enumerate(layers)]
    walk = LayerWalk(model, chunk_tokens=chunk, hidden_on_host=hidden_on_host)
    found: dict[int, Tensor] = {}
    counts = []
    try:
        for pack in make_plan(prompts, limits).packs:
            if rule is not None:
                rule.pack = pack
            ticks: list[float] = []
            done = LayersDone.none(pack)
            pieces = list(walk.read_logits(pack, ticks.append, rule, done))
            assert sum(ticks) == pytest.approx(len(pack.tokens))
            counts.append((pack, done))
            rows = list(torch.cat(pieces)) if pieces else []
            last = len(layers) - 2  # a rule is not asked after the last layer
            stay = [each for i, (_, each) in enumerate(pack.reads) if rule is None or rule.exit_of(i, pack) > last]
            for row, numbers in zip(rows, stay, strict=True):
                found |= dict.fromkeys(numbers, row)
    finally:
        walk.close()
        for hook in hooks:
            hook.remove()
    return Walked(found, ended, [a - b for a, b in zip(begun, ended, strict=True)], counts)


def trie_tokens(prompts: list[Prompt]) -> int:
    return len({tuple(prompt[: end + 1].tolist()) for prompt in prompts for end in range(len(prompt))})


def staying(prompts: list[Prompt], leaving: Leaving, layer: int) -> list[Prompt]:
    """The prompts that layer `layer` computes."""
    return [prompt for number, prompt in enumerate(prompts) if leaving.get(number, NEVER) >= layer]


@every_family
@pytest.mark.parametrize("make", [two_levels, three_levels, mixed])
def test_those_that_stay_have_the_logits_of_the_eager_forward(family: str, make: Callable[[], list[Prompt]]) -> None:
    prompts = make()
    leaving = {number: number % 2 for number in range(len(prompts)) if number % 3}
    found = walked(model_of(family), prompts, LeaveAfter(leaving), chunk=41).logits
    stay = [number for number in range(len(prompts)) if number not in leaving]
    assert set(stay) <= set(found)
    assert_equal(torch.stack([found[number] for number in stay]), wanted(family, make)[stay])


@every_family
def test_packs_that_hold_a_prefix_of_reads_that_left_are_not_disturbed(family: str) -> None:
    prompts = mixed()
    leaving = {number: number % 2 for number in range(len(prompts)) if number % 3}
    limits = Limits(110, 10**6, held_tokens=10**6)
    assert any(pack.keep for pack in make_plan(prompts, limits).packs)
    found = walked(model_of(family), prompts, LeaveAfter(leaving), chunk=41, limits=limits).logits
    stay = [number for number in range(len(prompts)) if number not in leaving]
    assert_equal(torch.stack([found[number] for number in stay]), wanted(family, mixed)[stay])


@pytest.mark.parametrize("peek", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_rule_sees_the_hidden_states_of_the_eager_forward(family: str, peek: bool) -> None:
    model, prompts = model_of(family), two_levels()
    rule = LeaveAfter({0: 0, 3: 1}, peek=peek)
    walked(model, prompts, rule, chunk=33)
    model.set_attn_implementation("eager")
    for number, prompt in enumerate(prompts):
        ids = torch.as_tensor(prompt, dtype=torch.long)[None]
        with torch.inference_mode():
            states = model(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states
        for layer, shown in rule.shown.items():
            assert (number in shown) == ({0: 0, 3: 1}.get(number, NEVER) >= layer)
            if number in shown:
                for found, expected in zip(shown[number], states[layer : layer + 2], strict=True):
                    torch.testing.assert_close(found, expected[0, -1], atol=1e-4, rtol=1e-4)


def test_a_token_is_computed_until_the_last_read_behind_it_has_left() -> None:
    prompts = three_levels()
    leaving = {**dict.fromkeys(range(4), 0), **dict.fromkeys(range(4, 7), 1), 9: 2}
    model = model_of("gemma3_text")  # seven layers
    found = walked(model, prompts, LeaveAfter(leaving), chunk=50)
    counts = found.full[:-1]
    assert set(found.logits) == set(range(len(prompts))) - set(leaving)
    assert counts == [trie_tokens(staying(prompts, leaving, layer)) for layer in range(len(counts))]
    assert counts[0] > counts[1] > counts[2] > counts[3] == counts[-1]


def test_when_all_have_left_no_layer_is_computed() -> None:
    prompts = two_levels()
    found = walked(model_of("gemma3_text"), prompts, LeaveAfter(dict.fromkeys(range(6), 2)), chunk=50)
    assert found.logits == {}
    assert found.full == [trie_tokens(prompts)] * 3 + [0] * 4


def test_a_prompt_that_another_begins_with_may_leave_before_it() -> None:
    long = tokens(np.random.default_rng(8), 90)
    prompts = [long, long[:50]]
    found = walked(model_of("gemma3_text"), prompts, LeaveAfter({1: 0}), chunk=64)
    assert found.full[:-1] == [90] * 6
    assert set(found.logits) == {0}


class BringBack(LeaveAfter):
    def __call__(self, layer: int, reads: Sequence[int], before: Tensor, after: Tensor) -> list[int]:
        return [[1, 2], [0, 1]][layer]


def test_a_rule_cannot_bring_a_read_back() -> None:
    model, prompts = model_of("gemma3_text"), two_levels()
    model.set_attn_implementation(ATTENTION)
    walk = LayerWalk(model, chunk_tokens=50)
    (pack,) = make_plan(prompts, ONE_PACK).packs
    try:
        with pytest.raises(ValueError, match="have left"):
            list(walk.read_logits(pack, exits=BringBack({})))
    finally:
        walk.close()


@settings(deadline=None)
@given(data=st.data())
def test_what_remains_of_a_pack_is_the_paths_of_its_reads(data: st.DataObject) -> None:
    words = st.lists(st.integers(0, 2), min_size=1, max_size=6)
    prompts = [np.asarray(each, dtype=np.int32) for each in data.draw(st.lists(words, min_size=1, max_size=8))]
    (pack,) = make_plan(prompts, ONE_PACK).packs
    reads = sorted(data.draw(st.sets(st.sampled_from(range(len(pack.reads))))))
    left = remainder(pack, reads, [])
    assert left.pack.tokens.tolist() == pack.tokens[left.tokens].tolist()
    for read, (node, numbers) in zip(reads, left.pack.reads, strict=True):
        assert numbers == pack.reads[read][1]
        path: list[int] = []
        while node >= 0:
            path = [*left.pack.tokens[left.pack.offsets[node] : left.pack.offsets[node + 1]].tolist(), *path]
            node = left.pack.parents[node]
        assert path == prompts[numbers[0]].tolist()
    ends = {pack.reads[read][0] for read in reads}
    below = set(range(len(left.nodes))) - set(left.pack.parents)
    assert {left.nodes[node] for node in below} <= ends, "every leaf is the end of a read that stays"
