"""The walk over windows that hand their last prefix on, against the model's own eager forward."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from prefillcli.plan import SCHEDULES
from prefillcli.plan.pack import Limits, free_packs
from prefillcli.plan.plan import Plan, make_plan, packs_to_run
from prefillcli.walk.forest import ATTENTION, register
from prefillcli.walk.walk import LayerWalk
from tests.unit.walk.families import VOCABULARY, each_family
from tests.unit.walk.test_walk import Prompt, assert_equal, eager, model_of, p_yes, tokens
from tests.unit.walk.tiny_models import make_tiny_model

BLOCK = 32
LIMITS = Limits(110, 10**6, held_tokens=10**6)
WHOLE = replace(LIMITS, whole_nodes=True, node_tokens=5)


def windows() -> list[list[Prompt]]:
    """Two users under one instruction; the first one's rows are in three windows, and one of them ends in a block."""
    rng = np.random.default_rng(8)
    task = tokens(rng, 45)
    users = [np.concatenate([task, tokens(rng, length)]) for length in (101, 60)]
    rows = [np.concatenate([users[0], tokens(rng, int(length))]) for length in rng.integers(1, 30, 8)]
    rows[5] = rows[5][:80]
    rows += [np.concatenate([users[1], tokens(rng, int(length))]) for length in rng.integers(1, 30, 4)]
    return [rows[:3], rows[3:6], rows[6:]]


def plans(limits: Limits = LIMITS, schedule: str = "prefix-tree") -> list[Plan]:
    found: list[Plan] = []
    for prompts in windows():
        carried = found[-1].carried if found else ()
        found.append(make_plan(prompts, limits, schedule, carried=carried, block_tokens=BLOCK))
    return found


def walked(
    model: nn.Module,
    plans: list[Plan],
    *,
    chunk: int = 64,
    afresh: tuple[int, ...] = (),
    done: tuple[int, ...] = (),
    offload_held: bool = False,
) -> tuple[list[torch.Tensor], int]:
    """Logits of each window, and the tokens that were computed; another process goes on with the windows `afresh`.

    Prompts that are `done` may stay 0 there.
    """
    model.set_attn_implementation(ATTENTION)
    walk = LayerWalk(model, chunk_tokens=chunk, offload_held=offload_held)
    found, computed = [], 0
    try:
        for number, (prompts, plan) in enumerate(zip(windows(), plans, strict=True)):
            if number in afresh:
                walk.close()
                walk = LayerWalk(model, chunk_tokens=chunk, offload_held=offload_held)
            logits = torch.zeros(len(prompts), VOCABULARY)
            at_hand = {pack.block for pack in plan.given if walk.holds(pack.block or "")}
            for pack in packs_to_run(plan, done if number in afresh else (), at_hand):
                rows = list(walk.read_logits(pack))
                for row, (_, numbers) in zip(torch.cat(rows) if rows else [], pack.reads, strict=True):
                    logits[list(numbers)] = row
                computed += len(pack.tokens)
            found.append(logits)
    finally:
        walk.close()
    return found, computed


@each_family
def test_logits_behind_carried_blocks_equal_the_eager_forward(family: str) -> None:
    model, chosen = model_of(family), plans()
    assert all(plan.carried for plan in chosen)
    assert [bool(plan.given) for plan in chosen] == [False, True, True]
    found, computed = walked(model, chosen, chunk=41)
    assert computed == sum(plan.computed_tokens for plan in chosen)
    assert_equal(torch.cat(found), eager(model, [prompt for prompts in windows() for prompt in prompts]))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", ["qwen3_next", "nemotron_h", "falcon_h1"])
def test_states_behind_carried_blocks_go_on_in_the_next_window(family: str) -> None:
    """Whether they are at hand or made again by another process."""
    register()
    model, chosen = make_tiny_model(family, vocab_size=VOCABULARY), plans(WHOLE)
    assert [bool(plan.given) for plan in chosen] == [False, True, True]
    found, computed = walked(model, chosen, chunk=41)
    assert computed == sum(plan.computed_tokens for plan in chosen)
    again, _ = walked(model, chosen, chunk=41, afresh=(1, 2))
    wanted = eager(model, [prompt for prompts in windows() for prompt in prompts])
    assert_equal(torch.cat(found), wanted)
    assert_equal(torch.cat(again), wanted)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_and_offloading_change_no_score(schedule: str) -> None:
    model = model_of("llama")
    base = p_yes(torch.cat(walked(model, plans())[0]))
    for limits in (LIMITS, replace(LIMITS, tokens=20), replace(LIMITS, held_tokens=80, max_tokens=400, held_cost=1.0)):
        found = walked(model, plans(limits, schedule), chunk=31, offload_held=True)[0]
        torch.testing.assert_close(p_yes(torch.cat(found)), base, atol=1e-5, rtol=0)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "mistral"])
def test_blocks_that_are_computed_again_give_the_same_bits(family: str) -> None:
    model, chosen = model_of(family), plans()
    whole, computed = walked(model, chosen)
    for afresh in ((1,), (2,), (1, 2)):
        again, more = walked(model, chosen, afresh=afresh)
        assert all(torch.equal(a, b) for a, b in zip(again, whole, strict=True))
        given = sum(len(pack.tokens) for number in afresh for pack in chosen[number].given)
        assert more == computed + given
    again, _ = walked(model, chosen, afresh=(1,), done=(0,))
    assert torch.equal(again[1][1:], whole[1][1:])
    assert torch.equal(again[2], whole[2])


def dealt(model: nn.Module, plans: list[Plan], workers: int, seed: int) -> tuple[torch.Tensor, int]:
    """Logits of all windows' prompts, and the tokens that were computed, if packs that stand alone go to several walks
    at random and in another order."""
    rng = np.random.default_rng(seed)
    model.set_attn_implementation(ATTENTION)
    models = [model, *(copy.deepcopy(model) for _ in range(workers - 1))]
    walks = [LayerWalk(each, chunk_tokens=64) for each in models]
    logits, computed, first, before = torch.zeros(sum(map(len, windows())), VOCABULARY), 0, 0, 0
    for prompts, plan in zip(windows(), plans, strict=True):
        packs = [pack.shifted(first) for pack in [*plan.given, *plan.packs]]
        free = list(free_packs(packs))
        for at in rng.permutation(len(free)):
            walk, each = walks[rng.integers(workers)], free[at]
            for refill in each.refills:
                if not walk.holds(refill.block):
                    assert not list(walk.read_logits(refill))
                    computed += len(refill.tokens)
            for row, (_, numbers) in zip(torch.cat(list(walk.read_logits(each.pack))), each.pack.reads, strict=True):
                logits[[before + number for number in numbers]] = row
            computed += len(each.pack.tokens)
        first, before = first + len(packs), before + len(prompts)
    for walk in walks:
        walk.close()
    return logits, computed


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss"])
@pytest.mark.parametrize("schedule", ["prefix-tree", "srjf"])
def test_packs_that_stand_alone_give_the_same_logits_wherever_they_run(family: str, schedule: str) -> None:
    model = model_of(family)
    limits = replace(LIMITS, tokens=80)
    chosen = plans(limits, schedule)
    assert any(node.start for plan in chosen for pack in plan.packs for node in pack.held)
    wanted = eager(model, [prompt for prompts in windows() for prompt in prompts])
    for seed in range(3):
        found, computed = dealt(model, chosen, 1 + seed, seed)
        assert_equal(found, wanted)
        assert computed >= sum(plan.computed_tokens for plan in chosen)
