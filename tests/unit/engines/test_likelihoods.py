"""Log-probabilities of texts, token by token, against the model's own eager forward."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prefillcli.core.request import Request, answer_requests
from prefillcli.engines.base import Answer
from prefillcli.engines.hf import HfEngine
from prefillcli.plan.behind import LabelSet
from prefillcli.plan.pack import Limits
from prefillcli.rows.records import Prompt
from prefillcli.stats.arrays import Int32Array
from tests.unit.engines.test_label_sequences import RELATIVE, engine_for, log_softmax, model_of
from tests.unit.walk.families import FAMILIES, VOCABULARY


def target(tokens: Int32Array) -> LabelSet:
    return LabelSet(((tokens,),), by_token=True)


def random_questions(rng: np.random.Generator, rows: int) -> list[Request]:
    """Documents behind one token and targets behind shared prompts, of 1 to 300 tokens; some targets begin alike, some
    are equal, and what is likeliest begins some."""
    history, trunk = (rng.integers(3, VOCABULARY, 60) for _ in range(2))
    questions: list[Request] = []
    for row in range(rows):
        before = history[: rng.choice([1, 30, 60])]
        if rng.random() < 0.3:
            before = np.concatenate([before, rng.integers(3, VOCABULARY, rng.integers(1, 20))])
        length = int(rng.choice([1, 2, 8, 63, 64, 65, 66, 300]))
        shared = trunk[: rng.integers(0, 20)]
        tokens = np.concatenate([shared, rng.integers(3, VOCABULARY, length)])[:length]
        if questions and rng.random() < 0.2:
            own = questions[rng.integers(len(questions))].prompt.labels.sequences[0]
            tokens = own[: rng.integers(1, len(own) + 1)]
        questions.append(Request(Prompt(row, before.astype(np.int32), target(tokens.astype(np.int32)))))
    return questions


def assert_answered(family: str, questions: list[Request], answers: list[Answer]) -> None:
    for question, answer in zip(questions, answers, strict=True):
        before, (own,) = question.prompt.tokens, question.prompt.labels.sequences
        found = log_softmax(family, (*before.tolist(), *own.tolist()))[len(before) - 1 : -1]
        wanted = found[torch.arange(len(own)), torch.from_numpy(own).long()].numpy()
        assert answer.by_token is not None
        np.testing.assert_allclose(answer.by_token.logprobs, wanted, rtol=RELATIVE, atol=1e-5)
        np.testing.assert_allclose(answer.logprobs, [wanted.sum()], rtol=RELATIVE, atol=1e-5)
        best = found.topk(2).values
        if float((best[:, 0] - best[:, 1]).min()) > 1e-4:  # else either token may be the likeliest
            assert answer.by_token.greedy == (found.argmax(-1).numpy() == own).all()


@pytest.mark.parametrize("family", ["llama", *(pytest.param(name, marks=pytest.mark.matrix) for name in FAMILIES)])
@settings(max_examples=30)
@given(seed=st.integers(0, 10**6), most=st.integers(400, 3000))
def test_every_token_of_a_target_is_read(family: str, seed: int, most: int) -> None:
    questions = random_questions(np.random.default_rng(seed), 6)
    with closing(engine_for(family, Limits(tokens=most, max_tokens=10**6))) as engine:
        answers = answer_requests(engine, questions)
    assert_answered(family, questions, answers)


@settings(max_examples=15)
@given(seed=st.integers(0, 10**6))
def test_the_plain_loop_reads_the_same(seed: int) -> None:
    questions = random_questions(np.random.default_rng(seed), 3)
    model = model_of("llama")
    model.set_attn_implementation("eager")
    assert_answered("llama", questions, answer_requests(HfEngine(model, max_length=4096), questions))


def test_what_greedy_decoding_writes_is_known() -> None:
    ids = (5, 9, 11)
    for _ in range(70):
        ids = (*ids, int(log_softmax("llama", ids)[-1].argmax()))
    written = np.array(ids[3:], np.int32)
    other = np.where(np.arange(70) == 69, written - 1, written).astype(np.int32)
    prompts = [Prompt(row, np.array(ids[:3], np.int32), target(own)) for row, own in enumerate((written, other))]
    with closing(engine_for("llama", Limits(tokens=1000, max_tokens=1000))) as engine:
        answers = answer_requests(engine, [Request(prompt) for prompt in prompts])
    assert [each.by_token.greedy for each in answers if each.by_token] == [True, False]
