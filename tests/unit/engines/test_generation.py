"""Texts by transformers' `generate` are what its own forward, asked again for each token, would choose."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from prefillcli.engines.hf import generate
from prefillcli.walk.continuations import Beginning, Continuation, DecodingReport, Writing
from prefillcli.walk.lockstep import Chooser

LENGTHS = (9, 23, 4)


@pytest.fixture(scope="module")
def network(model: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(model).eval()


@pytest.fixture(scope="module")
def beginnings(network: PreTrainedModel) -> list[Beginning]:
    generator = np.random.default_rng(0)
    prompts = [generator.integers(3, network.config.vocab_size, length).astype(np.int32) for length in LENGTHS]
    return [Beginning(prompt, (5 + row, 7), key=f"row {row}") for row, prompt in enumerate(prompts)]


def logits_behind(network: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """One forward without cache."""
    with torch.inference_mode():
        return network(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].float()


def written(network: PreTrainedModel, beginning: Beginning, writing: Writing) -> Continuation:
    """The likeliest tokens, one forward for each."""
    context, text, gap = [*beginning.prompt.tolist(), *beginning.tokens], [], float("inf")
    for _ in range(writing.tokens):
        best = logits_behind(network, context + text).topk(2)
        gap = min(gap, float(best.values[0] - best.values[1]))
        if int(best.indices[0]) in writing.stop_tokens:
            return Continuation(tuple(text), "stop", gap)
        text.append(int(best.indices[0]))
    return Continuation(tuple(text), "length", gap)


def generated(network: PreTrainedModel, beginnings: list[Beginning], writing: Writing) -> list[Continuation]:
    return generate(network, beginnings, writing, max_length=1 << 20, report=DecodingReport())


def assert_same(found: Continuation, wanted: Continuation) -> None:
    assert (found.tokens, found.finish_reason) == (wanted.tokens, wanted.finish_reason)
    assert found.gap == pytest.approx(wanted.gap, abs=1e-4)


@pytest.fixture(scope="module")
def stop(network: PreTrainedModel, beginnings: list[Beginning]) -> int:
    """A token in the middle of the second text."""
    return written(network, beginnings[1], Writing(12)).tokens[5]


@pytest.mark.parametrize("together", [False, True], ids=["alone", "padded"])
def test_each_token_is_the_likeliest_up_to_a_stop_token(
    network: PreTrainedModel, beginnings: list[Beginning], stop: int, together: bool
) -> None:
    writing = Writing(12, frozenset({stop, 2}))
    groups = [beginnings] if together else [[each] for each in beginnings]
    found = [text for group in groups for text in generated(network, group, writing)]
    for text, beginning in zip(found, beginnings, strict=True):
        assert_same(text, written(network, beginning, writing))
    assert found[1].finish_reason == "stop"
    assert len(found[1].tokens) <= 5


def test_a_text_ends_where_the_model_has_read_all_it_can(
    network: PreTrainedModel, beginnings: list[Beginning]
) -> None:
    report = DecodingReport()
    room = LENGTHS[1] + 2 + 4
    found = generate(network, beginnings, Writing(12), max_length=room, report=report)
    assert [len(text.tokens) for text in found] == [12, 4, 12]
    assert {text.finish_reason for text in found} == {"length"}
    for text, beginning in zip(found, beginnings, strict=True):
        assert text.tokens == written(network, beginning, Writing(len(text.tokens))).tokens
    (none,) = generate(network, beginnings[1:2], Writing(12), max_length=LENGTHS[1], report=report)
    assert none == Continuation((), "length", float("inf"))
    assert (report.texts, report.tokens) == (3, 28)


def test_what_the_model_says_of_generation_changes_nothing(
    network: PreTrainedModel, beginnings: list[Beginning], monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = generated(network, beginnings, Writing(8))
    own = GenerationConfig(repetition_penalty=5.0, eos_token_id=usual[0].tokens[1], max_length=40, do_sample=True)
    monkeypatch.setattr(network, "generation_config", own)
    assert generated(network, beginnings, Writing(8)) == usual
    assert network.generation_config is own


def test_texts_are_drawn_with_the_noise_of_their_keys(network: PreTrainedModel, beginnings: list[Beginning]) -> None:
    writing = Writing(10, temperature=0.8, seed=3)
    chooser = Chooser(0.8, 3)
    texts = generated(network, beginnings, writing)
    for text, beginning in zip(texts, beginnings, strict=True):
        context = [*beginning.prompt.tolist(), *beginning.tokens]
        for place, token in enumerate(text.tokens):
            logits = logits_behind(network, context)[None]
            assert chooser.choose(logits, [beginning.key], [place]).tokens == [token]
            context.append(token)
    assert [generated(network, [each], writing)[0].tokens for each in beginnings] == [text.tokens for text in texts]
    assert generated(network, beginnings, replace(writing, seed=4)) != texts


def test_passes_are_counted(network: PreTrainedModel, beginnings: list[Beginning], stop: int) -> None:
    report = DecodingReport()
    texts = generate(network, beginnings, Writing(12, frozenset({stop})), max_length=1 << 20, report=report)
    lengths = [len(text.tokens) + (text.finish_reason == "stop") for text in texts]
    assert (report.texts, report.tokens) == (3, sum(len(text.tokens) for text in texts))
    assert (report.passes, report.row_passes) == (max(lengths), sum(lengths))
    assert (report.again_prompts, report.prompt_tokens) == (3, sum(LENGTHS) + 6)
    assert report.seconds > 0
    assert report.prompt_seconds > 0
