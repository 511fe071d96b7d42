"""Labels of any length against the model's own eager forward, one label at a time."""

from __future__ import annotations

from contextlib import closing
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from prefillcli.core.request import Request, answer_requests, plan_requests
from prefillcli.engines.hf import HfEngine
from prefillcli.engines.torch import TorchEngine
from prefillcli.plan.behind import LabelSet
from prefillcli.plan.pack import Limits
from prefillcli.rows.records import Prompt
from prefillcli.stats.arrays import Int32Array
from prefillcli.walk.forest import ATTENTION, register
from prefillcli.walk.walk import LayerWalk
from tests.unit.walk.families import FAMILIES, VOCABULARY, make_model
from tests.unit.walk.test_length_tables import SWITCH
from tests.unit.walk.test_length_tables import model_of as model_with_switch

#: Sums of 40 tokens are near -240: the step of float32.
RELATIVE = float(np.finfo(np.float32).eps)


@cache
def model_of(family: str) -> nn.Module:
    register()
    sizes = FAMILIES[family]
    experts = sizes.get("num_experts", sizes.get("num_local_experts"))
    # All experts work: of nearly equal ones, the last bit would choose.
    return make_model(family, **{} if experts is None else {"num_experts_per_tok": experts})


@cache
def log_softmax(family: str, tokens: tuple[int, ...]) -> torch.Tensor:
    model = model_of(family)
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].double().log_softmax(-1)


def expected(family: str, prompt: Int32Array, labels: LabelSet) -> np.ndarray:
    found = []
    for spellings in labels.spellings:
        sums = []
        for own in spellings:
            logprobs = log_softmax(family, (*prompt.tolist(), *own.tolist()))[len(prompt) - 1 : -1]
            sums.append(float(logprobs[torch.arange(len(own)), torch.from_numpy(own).long()].sum()))
        found.append(np.logaddexp.reduce(sums))
    return np.array(found)


def random_labels(rng: np.random.Generator) -> LabelSet:
    """Labels of 1 to 40 tokens, many of which begin alike, and some of which begin others."""
    trunk = rng.integers(3, VOCABULARY, 40)
    labels = []
    for _ in range(rng.integers(2, 6)):
        spellings = []
        for _ in range(rng.integers(1, 3)):
            own = rng.integers(3, VOCABULARY, rng.choice([1, 1, 2, 3, 8, 40]))
            shared = min(int(rng.integers(0, 20)), len(own) - 1)
            spellings.append([*trunk[:shared].tolist(), *own[shared:].tolist()])
        labels.append(spellings)
    return LabelSet.of(labels)


def random_prompts(rng: np.random.Generator) -> list[Prompt]:
    """Prompts with shared prefixes, some equal, some that begin others; some share a label set."""
    history = rng.integers(3, VOCABULARY, 60)
    sets = [random_labels(rng) for _ in range(3)] + [LabelSet.of([[5], [9, 11]])]
    prompts: list[Prompt] = []
    for row in range(12):
        tokens = np.concatenate([history[: rng.integers(0, 60)], rng.integers(3, VOCABULARY, rng.integers(1, 30))])
        if prompts and rng.random() < 0.3:
            other = prompts[rng.integers(len(prompts))].tokens
            tokens = other if rng.random() < 0.5 else other[: len(other) // 2 + 1]
        prompts.append(Prompt(row, tokens.astype(np.int32), sets[rng.integers(len(sets))]))
    return prompts


def engine_for(family: str, limits: Limits) -> TorchEngine:
    model = model_of(family)
    model.set_attn_implementation(ATTENTION)
    return TorchEngine(LayerWalk(model, chunk_tokens=48), limits=limits)


@pytest.mark.parametrize("family", ["llama", *(pytest.param(name, marks=pytest.mark.matrix) for name in FAMILIES)])
@settings(max_examples=40)
@given(seed=st.integers(0, 10**6), most=st.integers(120, 2000), held=st.sampled_from([0, 100]))
def test_labels_of_any_length_get_their_log_probabilities(family: str, seed: int, most: int, held: int) -> None:
    prompts = random_prompts(np.random.default_rng(seed))
    limits = Limits(tokens=most, max_tokens=10**6, held_tokens=held, held_cost=1.0 if held else 0.0)
    with closing(engine_for(family, limits)) as engine:
        answers = answer_requests(engine, [Request(prompt) for prompt in prompts])
    for prompt, answer in zip(prompts, answers, strict=True):
        wanted = expected(family, prompt.tokens, prompt.labels)
        np.testing.assert_allclose(answer.logprobs, wanted, rtol=RELATIVE, atol=1e-5)


@settings(max_examples=20)
@given(seed=st.integers(0, 10**6))
def test_the_plain_loop_gives_the_same(seed: int) -> None:
    prompts = random_prompts(np.random.default_rng(seed))[:3]
    model = model_of("llama")
    model.set_attn_implementation("eager")
    answers = answer_requests(HfEngine(model, max_length=4096), [Request(prompt) for prompt in prompts])
    for prompt, answer in zip(prompts, answers, strict=True):
        wanted = expected("llama", prompt.tokens, prompt.labels)
        np.testing.assert_allclose(answer.logprobs, wanted, rtol=RELATIVE, atol=1e-5)


def questions_at_the_switch(rng: np.random.Generator) -> list[Request]:
    """Prompts that are longer than `SWITCH` with some labels, with all or with none; some have lost tokens."""
    history = rng.integers(3, VOCABULARY, SWITCH - 50)
    sets = [random_labels(rng) for _ in range(3)] + [LabelSet.of([[rng.integers(3, VOCABULARY, 30)]])]
    found = []
    for row in range(10):
        own = rng.integers(3, VOCABULARY, rng.integers(5, 55))
        tokens = np.concatenate([history, own]).astype(np.int32)
        kept = np.sort(rng.choice(len(tokens) - 1, len(tokens) // 2, replace=False))
        prompt = Prompt(row, tokens, sets[rng.integers(len(sets))])
        found.append(Request(prompt, np.append(kept, len(tokens) - 1) if rng.random() < 0.3 else None))
    return found


def read_apart(model: nn.Module, question: Request) -> np.ndarray:
    """Each spelling of a label by a forward of its own, over the prompt and the spelling's tokens but the last."""
    model.set_attn_implementation("eager")
    prompt, found = question.prompt, []
    at = np.arange(len(prompt.tokens)) if question.kept is None else question.kept
    for spellings in prompt.labels.spellings:
        sums = []
        for own in spellings:
            ids = torch.as_tensor(np.concatenate([prompt.tokens[at], own[:-1]])).long()[None]
            places = torch.as_tensor(np.concatenate([at, at[-1] + 1 + np.arange(len(own) - 1)])).long()[None]
            with torch.inference_mode():
                logits = model(
                    input_ids=ids, position_ids=places, attention_mask=torch.ones_like(ids), use_cache=False
                ).logits[0, len(at) - 1 :]
            sums.append(float(logits.double().log_softmax(-1)[torch.arange(len(own)), own.tolist()].sum()))
        found.append(np.logaddexp.reduce(sums))
    return np.array(found)


@pytest.mark.parametrize("family", ["phi3", "llama"])
@settings(max_examples=8)
@given(seed=st.integers(0, 10**6), most=st.integers(150, 2000), held=st.sampled_from([0, 100]))
def test_each_label_is_read_at_the_positions_of_its_own_length(family: str, seed: int, most: int, held: int) -> None:
    model, asked = model_with_switch(family), questions_at_the_switch(np.random.default_rng(seed))
    wanted = [read_apart(model, question) for question in asked]
    model.set_attn_implementation(ATTENTION)
    limits = Limits(most, 10**6, held_tokens=held, held_cost=1.0 if held else 0.0, switch=SWITCH)
    with closing(TorchEngine(LayerWalk(model, chunk_tokens=48), limits=limits)) as engine:
        answers = answer_requests(engine, asked)
    for answer, own in zip(answers, wanted, strict=True):
        np.testing.assert_allclose(answer.logprobs, own, rtol=RELATIVE, atol=2e-5)


@settings(max_examples=5)
@given(seed=st.integers(0, 10**6))
def test_so_does_the_plain_loop(seed: int) -> None:
    model = model_with_switch("phi3")
    asked = [each for each in questions_at_the_switch(np.random.default_rng(seed)) if each.kept is None][:4]
    wanted = [read_apart(model, question) for question in asked]
    answers = answer_requests(HfEngine(model, max_length=4096), asked)
    for answer, own in zip(answers, wanted, strict=True):
        np.testing.assert_allclose(answer.logprobs, own, rtol=RELATIVE, atol=2e-5)


def test_progress_adds_up_to_the_tokens_of_prompts() -> None:
    prompts = [Prompt(row, np.array([7], np.int32), LabelSet.of([[[row + 3] * 90], [[5] * 3]])) for row in range(4)]
    ticks: list[float] = []
    with closing(engine_for("llama", Limits(tokens=10**6, max_tokens=10**6))) as engine:
        (pack,) = plan_requests([Request(prompt) for prompt in prompts], engine.limits).packs
        list(engine.answer(pack, lambda number: prompts[number].labels, ticks.append))
    assert sum(ticks) == pytest.approx(len(pack.tokens)) == pytest.approx(1)


def test_labels_of_equal_prompts_that_begin_alike_are_computed_and_counted_once() -> None:
    trunk = list(range(20, 50))
    sets = [LabelSet.of([[[*trunk, row, 5]], [[*trunk[:9], 6, row]]]) for row in range(3, 8)]
    prompts = [Prompt(row, np.arange(60, 80, dtype=np.int32), own) for row, own in enumerate(sets)]
    with closing(engine_for("llama", Limits(tokens=10**6, max_tokens=10**6))) as engine:
        answers = answer_requests(engine, [Request(prompt) for prompt in prompts])
    whole = [[*p.tokens.tolist(), *own[:-1].tolist()] for p in prompts for own in p.labels.sequences]
    distinct = {tuple(each[: end + 1]) for each in whole for end in range(len(each))}
    assert sum(answer.computed_tokens for answer in answers) == len(distinct)
