"""Reads that leave between two layers: those that stay get the scores of the model's own forward, for less work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from prefillcli.core.request import Request, answer_requests
from prefillcli.engines.base import EarlyExits, Readings, Treatment
from prefillcli.engines.hf import HfEngine
from prefillcli.engines.torch import TorchEngine
from prefillcli.plan.behind import LabelSet
from prefillcli.plan.pack import LayersDone, Limits, Pack
from prefillcli.plan.plan import make_plan
from prefillcli.rows.records import Prompt as Prompted
from prefillcli.walk.forest import ATTENTION, register
from prefillcli.walk.walk import LayerWalk
from tests.unit.plan.test_exit_work import layers_needed
from tests.unit.walk.families import each_family, make_model
from tests.unit.walk.test_walk import (
    ONE_PACK,
    Prompt,
    assert_equal,
    each_device,
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
        self.leaving = leaving
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
        return max(self.leaving.get(prompt, NEVER) for prompt in pack.reads[read][1])


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
    **how: bool,
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
    found: dict[int, Tensor] = {}
    counts = []
    with closing(LayerWalk(model, chunk_tokens=chunk, **how)) as walk:
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
    for hook in hooks:
        hook.remove()
    return Walked(found, ended, [a - b for a, b in zip(begun, ended, strict=True)], counts)


def trie_tokens(prompts: list[Prompt]) -> int:
    return len({tuple(prompt[: end + 1].tolist()) for prompt in prompts for end in range(len(prompt))})


def staying(prompts: list[Prompt], leaving: Leaving, layer: int) -> list[Prompt]:
    """The prompts that layer `layer` computes."""
    return [prompt for number, prompt in enumerate(prompts) if leaving.get(number, NEVER) >= layer]


HELD = Limits(110, 10**6, held_tokens=10**6)


@each_family
@pytest.mark.parametrize(("make", "limits"), [(three_levels, ONE_PACK), (mixed, HELD)])
def test_those_that_stay_have_the_logits_of_the_eager_forward(
    family: str, make: Callable[[], list[Prompt]], limits: Limits
) -> None:
    prompts = make()
    leaving = {number: number % 2 for number in range(len(prompts)) if number % 3}
    assert limits == ONE_PACK or any(pack.keep for pack in make_plan(prompts, limits).packs)
    found = walked(model_of(family), prompts, LeaveAfter(leaving), chunk=41, limits=limits).logits
    stay = [number for number in range(len(prompts)) if number not in leaving]
    assert set(stay) <= set(found)
    assert_equal(torch.stack([found[number] for number in stay]), wanted(family, make)[stay])


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
                before, after = shown[number]
                if layer + 2 == len(states):  # transformers' last one is behind the norm
                    with torch.inference_mode():
                        after = model.get_decoder().norm(after)
                for found, expected in zip((before, after), states[layer : layer + 2], strict=True):
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


class BringBack(LeaveAfter):
    def __call__(self, layer: int, reads: Sequence[int], before: Tensor, after: Tensor) -> list[int]:
        return [[1, 2], [0, 1]][layer]


def test_a_rule_cannot_bring_a_read_back() -> None:
    model, prompts = model_of("gemma3_text"), two_levels()
    model.set_attn_implementation(ATTENTION)
    (pack,) = make_plan(prompts, ONE_PACK).packs
    with closing(LayerWalk(model, chunk_tokens=50)) as walk, pytest.raises(ValueError, match="have left"):
        list(walk.read_logits(pack, exits=BringBack({})))


few_words = st.lists(st.lists(st.integers(3, 5), min_size=1, max_size=12), min_size=1, max_size=9)


@settings(deadline=None, max_examples=40)
@given(few_words, st.sampled_from([ONE_PACK, Limits(25, 10**6, held_tokens=10**6)]), st.booleans(), st.data())
def test_the_layers_computed_are_those_of_the_formula(
    words: list[list[int]], limits: Limits, peek: bool, data: st.DataObject
) -> None:
    model, layers = model_of("gemma3_text"), 7
    prompts = [np.asarray(each, dtype=np.int32) for each in words]
    exits = data.draw(st.dictionaries(st.integers(0, len(prompts) - 1), st.integers(0, layers - 2)))
    rule = LeaveAfter(exits, peek=peek)
    found = walked(model, prompts, rule, chunk=16, limits=limits)
    full = sum(found.full[:-1])
    wanted = alone = 0.0
    for pack, done in found.done:
        last = [rule.exit_of(read, pack) for read in range(len(pack.reads))]
        through = [None if layer == NEVER else layer + (not peek) for layer in last]
        needed = layers_needed(pack, through, layers)
        wanted += (np.floor(needed) * np.diff(pack.offsets)).sum()
        alone += peek * sum(min(layer, layers - 2) + 1 for layer in last)  # last tokens that go first
        assert done.full.tolist() == np.floor(needed).tolist()
        if not peek:
            assert done.work.tolist() == needed.tolist()
    assert full == wanted + alone
    assert sum(found.keys) == sum(int(done.keys @ np.diff(pack.offsets)) for pack, done in found.done)


@cache
def without_exits(family: str, chunk: int, limits: Limits) -> dict[int, Tensor]:
    return walked(model_of(family), three_levels(), None, chunk=chunk, limits=limits).logits


@pytest.mark.sampled(1)
@each_family
@settings(deadline=None, max_examples=6)
@given(st.data())
def test_whoever_stays_is_not_disturbed_by_those_who_leave(family: str, data: st.DataObject) -> None:
    prompts, layers = three_levels(), model_of(family).config.num_hidden_layers
    exits = st.dictionaries(st.integers(0, len(prompts) - 1), st.integers(0, layers - 2), max_size=len(prompts) - 1)
    chunk = data.draw(st.sampled_from([19, 64, 1000]))
    limits = data.draw(st.sampled_from([ONE_PACK, HELD]))
    cost = data.draw(st.sampled_from([0.0, 0.5, 3.0, float("inf")]))
    rule = LeaveAfter(data.draw(exits), peek=data.draw(st.booleans()), regroup_cost=cost)
    found = walked(model_of(family), prompts, rule, chunk=chunk, limits=limits).logits
    plain = without_exits(family, chunk, limits)
    assert limits == ONE_PACK or any(pack.keep for pack in make_plan(prompts, limits).packs)
    assert found.keys() == plain.keys() - rule.leaving.keys()
    for prompt, logits in found.items():
        torch.testing.assert_close(logits, plain[prompt], atol=1e-5, rtol=1e-5)


def test_the_rest_is_laid_out_anew_once_that_saves_more_than_it_costs() -> None:
    """Two of four prompts leave after the first of seven layers, and one after the fourth."""
    model, rng = model_of("gemma3_text"), np.random.default_rng(9)
    prompts = [tokens(rng, 50) for _ in range(4)]
    leaving = {0: 0, 1: 0, 2: 3}
    layers = {  # that each prompt goes through
        0.0: [1, 1, 4, 6],
        2.1: [1, 1, 4, 6],  # 50 tokens go, 50 are left: 2.125 layers are saved for each
        5.1: [1, 1, 6, 6],  # 100 go, 100 are left: 5.125 layers for each
        5.2: [4, 4, 4, 6],  # 150 go, 50 are left: 2.125 layers for each of three times as many
        6.4: [6, 6, 6, 6],
    }
    for cost, expected in layers.items():
        found = walked(model, prompts, LeaveAfter(leaving, regroup_cost=cost), chunk=64)
        ((pack, done),) = found.done
        by_prompt = {prompt: done.full[node] for node, (prompt,) in pack.reads}
        assert [by_prompt[prompt] for prompt in range(4)] == expected, cost
        assert done.regroupings == len({*expected}) - 1, cost
        assert set(found.logits) == {3}


def test_nobody_goes_on_alone_for_the_sake_of_those_who_have_left() -> None:
    rule = LeaveAfter(dict.fromkeys(range(6), 1), regroup_cost=float("inf"))
    found = walked(model_of("gemma3_text"), two_levels(), rule, chunk=50)
    assert found.full == [trie_tokens(two_levels())] * 2 + [0] * 5


class LeaveAtOnce:
    """A rule by which a prompt leaves after the last layer but one, or never."""

    reads_logits = True

    def __init__(self, layer: int, leaves: bool) -> None:
        self.layers = (layer,)
        self._leaves = leaves

    def peeks(self, layer: int) -> bool:
        return False

    def decide(self, layer: int, readings: Readings) -> tuple[np.ndarray, np.ndarray]:
        return np.full(len(readings.logits), self._leaves), np.zeros_like(readings.logits)


def test_labels_of_several_tokens_stay_behind_their_prompts_where_nothing_is_laid_out_anew() -> None:
    rng, model = np.random.default_rng(4), model_of("llama")
    model.set_attn_implementation("eager")
    prompts = [tokens(rng, 40) for _ in range(6)]
    labels = [LabelSet.of([[rng.integers(3, 90, 3).tolist()] for _ in range(2 + number % 2)]) for number in range(6)]
    wanted = answer_requests(
        HfEngine(model.eval(), max_length=512),
        [Request(Prompted(row, own, labels[row])) for row, own in enumerate(prompts)],
    )
    model.set_attn_implementation(ATTENTION)
    layer = len(model.get_decoder().layers) - 2
    rules = {number: LeaveAtOnce(layer, leaves=number == 0) for number in range(6)}
    with closing(TorchEngine(LayerWalk(model, chunk_tokens=64), limits=ONE_PACK)) as engine:
        (pack,) = make_plan(prompts, ONE_PACK, labels=labels).packs
        (found,) = engine.answer(pack, labels.__getitem__, lambda _: None, Treatment(EarlyExits(rules)))
    for own in found:
        assert own.exit_layer == (layer if own.prompt == 0 else None)
        if own.prompt:
            assert np.abs(own.logprobs - wanted[own.prompt].logprobs).max() < 1e-4


@each_device
@pytest.mark.parametrize(("peek", "hidden_on_host"), [(False, True), (True, False)])
def test_on_any_device_those_that_stay_have_the_logits_of_the_eager_forward(
    peek: bool, hidden_on_host: bool, device: str
) -> None:
    register()
    there, prompts = make_model("llama").to(device), mixed()
    leaving = {number: number % 2 for number in range(len(prompts)) if number % 3}
    rule = LeaveAfter(leaving, peek=peek)
    found = walked(there, prompts, rule, chunk=41, limits=HELD, hidden_on_host=hidden_on_host).logits
    stay = [number for number in range(len(prompts)) if number not in leaving]
    assert_equal(torch.stack([found[number].cpu() for number in stay]), wanted("llama", mixed)[stay])
