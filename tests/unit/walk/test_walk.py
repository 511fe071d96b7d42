"""The walk against the model's own eager forward, one prompt at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from prefillcli.plan import SCHEDULES
from prefillcli.plan.pack import Limits
from prefillcli.plan.plan import make_plan, packs_to_run
from prefillcli.walk import attention, forest
from prefillcli.walk.forest import ATTENTION, register
from prefillcli.walk.walk import LayerWalk
from tests.unit.walk.families import VOCABULARY, each_family, make_model

ONE_PACK = Limits(10**6, 10**6)
YES, NO = 5, 9

Prompt = np.typing.NDArray[np.int32]

needs_cuda = (pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"))
#: The same test on every kind of device; its reference is computed on the CPU.
each_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])


def tokens(rng: np.random.Generator, count: int) -> Prompt:
    return rng.integers(3, VOCABULARY, count).astype(np.int32)


def single() -> list[Prompt]:
    return [tokens(np.random.default_rng(1), 301)]


def two_levels() -> list[Prompt]:
    rng = np.random.default_rng(2)
    history = tokens(rng, 150)
    return [np.concatenate([history, tokens(rng, n)]) for n in (1, 2, 17, 33, 33, 70)]


def three_levels() -> list[Prompt]:
    rng = np.random.default_rng(3)
    task, prompts = tokens(rng, 29), []
    for user in range(3):
        history = np.concatenate([task, tokens(rng, 60 + 31 * user)])
        prompts += [np.concatenate([history, tokens(rng, int(n))]) for n in rng.integers(1, 80, 4)]
    return prompts


def mixed(seed: int = 4) -> list[Prompt]:
    """One long prompt, a shared tree, many short ones, a duplicate, and a prompt that another one begins with."""
    rng = np.random.default_rng(seed)
    prompts = [tokens(rng, 350), *three_levels(), *(tokens(rng, int(n)) for n in rng.integers(1, 40, 20))]
    return [*prompts, prompts[0].copy(), prompts[5][:-2].copy()]


@cache
def model_of(family: str) -> nn.Module:
    register()
    return make_model(family)


def eager(model: Any, prompts: list[Prompt]) -> torch.Tensor:
    """Float32 logits [prompts, vocabulary] of the model's own forward."""
    model.set_attn_implementation("eager")
    device = next(model.parameters()).device
    with torch.inference_mode():
        ids = [torch.as_tensor(p, dtype=torch.long, device=device)[None] for p in prompts]
        rows = [model(input_ids=each, use_cache=False).logits[0, -1] for each in ids]
    return torch.stack(rows).float()


@cache
def wanted(family: str, make: Callable[[], list[Prompt]]) -> torch.Tensor:
    return eager(model_of(family), make())


def set_forest_attention(model: Any) -> None:
    register()
    model.set_attn_implementation(ATTENTION)


def walked(
    model: nn.Module, prompts: Sequence[Prompt], *, chunk: int, limits: Limits = ONE_PACK,
    schedule: str = "prefix-tree", positions: Sequence[Prompt | None] | None = None, done: tuple[int, ...] = (),
    attention: Callable[[Any], None] = set_forest_attention, **how: Any,
) -> torch.Tensor:  # fmt: skip
    """Float32 logits [prompts, vocabulary or classes] of the walk; rows of `done` prompts may be 0.

    `how` goes to the walk.
    """
    attention(model)
    found: dict[int, torch.Tensor] = {}
    with closing(LayerWalk(model, chunk_tokens=chunk, **how)) as walk:
        for pack in packs_to_run(make_plan(prompts, limits, schedule, positions=positions), done):
            rows = torch.cat(list(walk.read_logits(pack))).cpu()
            for row, (_, numbers) in zip(rows, pack.reads, strict=True):
                found |= dict.fromkeys(numbers, row)
    nothing = torch.zeros_like(rows[0])
    return torch.stack([found.get(number, nothing) for number in range(len(prompts))])


def p_yes(logits: torch.Tensor) -> torch.Tensor:
    return torch.softmax(logits[:, [YES, NO]].double(), dim=-1)[:, 0]


def assert_equal(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert wanted.std() > 0.3, "logits must differ enough to tell a wrong answer"
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)
    torch.testing.assert_close(p_yes(found), p_yes(wanted), atol=1e-5, rtol=0)


@each_family
@pytest.mark.parametrize("make", [single, mixed])
def test_logits_equal_the_eager_forward(family: str, make: Callable[[], list[Prompt]]) -> None:
    assert_equal(walked(model_of(family), make(), chunk=97), wanted(family, make))


@each_family
def test_a_tree_over_several_packs_keeps_or_recomputes_its_prefix(family: str) -> None:
    model, prompts = model_of(family), mixed()
    kept = Limits(110, 10**6, held_tokens=10**6)
    again = Limits(110, 10**6)
    assert len(make_plan(prompts, kept).packs) > 5
    assert make_plan(prompts, kept).computed_tokens < make_plan(prompts, again).computed_tokens
    assert_equal(walked(model, prompts, chunk=41, limits=kept), wanted(family, mixed))
    assert_equal(walked(model, prompts, chunk=53, limits=again), wanted(family, mixed))


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_chunk_sizes_that_divide_nothing(family: str) -> None:
    for chunk in (7, 4096):
        assert_equal(walked(model_of(family), mixed(), chunk=chunk), wanted(family, mixed))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_order_packing_and_offloading_change_no_score(family: str) -> None:
    model, prompts = model_of(family), mixed()
    base = p_yes(walked(model, prompts, chunk=64))
    order = np.random.default_rng(5).permutation(len(prompts))
    shuffled = p_yes(walked(model, [prompts[i] for i in order], chunk=64))
    torch.testing.assert_close(shuffled, base[torch.as_tensor(order)], atol=1e-5, rtol=0)
    held = Limits(90, 10**6, held_tokens=200)
    for other in (
        walked(model, prompts, chunk=31, limits=held),
        walked(model, prompts, chunk=31, limits=held, offload_held=True),
        *(walked(model, prompts, chunk=64, limits=held, schedule=schedule) for schedule in SCHEDULES),
    ):
        torch.testing.assert_close(p_yes(other), base, atol=1e-5, rtol=0)


def test_a_held_prefix_that_is_a_prompt_too_changes_no_score() -> None:
    """It is computed again for its own answer, in a pack where others already read the held one."""
    model, words = model_of("llama"), np.sort(tokens(np.random.default_rng(6), 4))
    prompts = [words[ids] for ids in ([1, 2, 1, 0], [1, 2, 2, 0, 0, 0, 0, 0], [1, 2], [1, 2, 1, 1])]
    found = walked(model, prompts, chunk=64, limits=Limits(9, 10**6, held_tokens=20), schedule="fifo")
    assert_equal(found, eager(model, prompts))


def test_a_resumed_window_gives_identical_scores() -> None:
    model, prompts = model_of("llama"), three_levels()
    limits = Limits(60, 10**6, held_tokens=10**6)
    whole = walked(model, prompts, chunk=32, limits=limits)
    packs = make_plan(prompts, limits).packs
    done = tuple(n for pack in packs[: len(packs) // 2] for n in pack.prompts)
    rest = [n for n in range(len(prompts)) if n not in done]
    assert done
    assert rest
    resumed = walked(model, prompts, chunk=32, limits=limits, done=done)
    assert torch.equal(resumed[rest], whole[rest])


@each_device
@each_family
def test_bfloat16_is_near_the_eager_forward(family: str, device: str) -> None:
    register()
    half = make_model(family, torch.bfloat16)
    # The reference is float32 over the same rounded weights: two bfloat16 runs would both be off.
    rounded = make_model(family)
    rounded.load_state_dict({name: weight.float() for name, weight in half.state_dict().items()})
    reference = p_yes(eager(rounded, three_levels()))
    half = half.to(device)
    found = {chunk: p_yes(walked(half, three_levels(), chunk=chunk)) for chunk in (64, 97, 1000)}
    torch.testing.assert_close(found[97], reference, atol=2e-2, rtol=0)
    for scores in found.values():
        assert (scores - reference).abs().mean() <= 6e-3


@each_family
def test_products_over_moved_keys_give_the_same_scores(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, so that nothing is lost to rounding: the way that bfloat16 takes on CPUs which are fast at it."""
    for module in (attention, forest):
        monkeypatch.setattr(module, "fast_products", lambda device, dtype: True)
    monkeypatch.setattr(attention, "FEWEST_SCORES", 100)
    limits = Limits(110, 10**6, held_tokens=10**6)
    assert_equal(walked(model_of(family), mixed(), chunk=97, limits=limits), wanted(family, mixed))


@each_device
@each_family
def test_any_device_equals_the_eager_forward_on_the_cpu(family: str, device: str) -> None:
    register()
    there = make_model(family).to(device)
    limits = Limits(110, 10**6, held_tokens=10**6)
    found = walked(there, mixed(), chunk=97, limits=limits, offload_held=True)
    torch.testing.assert_close(p_yes(found), p_yes(wanted(family, mixed)), atol=1e-4, rtol=0)


def test_a_walk_that_is_given_up_may_be_closed_by_another_thread() -> None:
    model: Any = model_of("llama")
    prompts = [tokens(np.random.default_rng(1), 9)]
    model.set_attn_implementation(ATTENTION)
    walk = LayerWalk(model, chunk_tokens=16)
    (pack,) = make_plan(prompts, ONE_PACK).packs
    given_up = walk.watch(pack, [8])
    next(given_up)
    failed: list[BaseException] = []

    def close() -> None:
        try:
            given_up.close()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=close)
    thread.start()
    thread.join()
    assert not failed
    found = torch.cat(list(walk.read_logits(pack)))
    walk.close()
    assert_equal(found, eager(model, prompts))
