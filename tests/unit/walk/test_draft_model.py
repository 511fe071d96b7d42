"""The draft model as a drafter: what it sees, what it forgets, and texts that do not depend on it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

from prefillcli.walk.continuations import Beginning, DecodingReport, Speculation, Writing
from prefillcli.walk.draft_model import DraftModel, StreamingDrafter
from prefillcli.walk.forest import ATTENTION, UnsupportedModelError, register
from prefillcli.walk.lockstep import Chooser, RowText, write_texts
from prefillcli.walk.walk import LayerWalk
from tests.unit.walk.models import VOCABULARY, Recomputing, beginnings, tiny_llama
from tests.unit.walk.tiny_models import make_tiny_model

GREEDY = Chooser()
TEXT = 24


@contextmanager
def draft_of(model: Any, max_length: int = 256) -> Iterator[DraftModel]:
    """The model at work as a draft."""
    register()
    walked = deepcopy(model)
    walked.set_attn_implementation(ATTENTION)
    with closing(LayerWalk(walked, chunk_tokens=64)) as walk:
        yield DraftModel(walk, max_length)


def greedy(model: Any, tokens: list[int], count: int) -> list[int]:
    """What transformers generates behind these tokens alone."""
    ids = torch.tensor([tokens])
    how = GenerationConfig(max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0)
    return model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=how)[0, len(tokens) :].tolist()  # type: ignore[no-any-return]


def a_row(length: int, seed: int = 0) -> RowText:
    prompt = np.random.default_rng(seed).integers(0, VOCABULARY, length).astype(np.int32)
    return RowText(0, Beginning(prompt, (5, 9), key="a row"))


def test_it_sees_the_first_and_the_latest_tokens_as_one_short_sequence() -> None:
    row, model = a_row(90), tiny_llama()
    with draft_of(model) as draft:
        drafter = StreamingDrafter(draft, GREEDY, vocabulary=VOCABULARY, sinks=4, recent=11)
        drafter.begin([row])
        (guessed,) = drafter.propose([row], [6])
    context = [*row.beginning.prompt.tolist(), 5, 9]
    assert guessed == greedy(model, context[:4] + context[-11:], 6)


def test_a_short_prompt_is_seen_whole() -> None:
    row, model = a_row(9), tiny_llama()
    with draft_of(model) as draft:
        drafter = StreamingDrafter(draft, GREEDY, vocabulary=VOCABULARY, sinks=4, recent=11)
        drafter.begin([row])
        assert drafter.propose([row], [6]) == [greedy(model, [*row.beginning.prompt.tolist(), 5, 9], 6)]


def test_wrong_guesses_are_forgotten_and_the_text_is_read_instead() -> None:
    row, model = a_row(90), tiny_llama()
    with draft_of(model) as draft:
        drafter = StreamingDrafter(draft, GREEDY, vocabulary=VOCABULARY, sinks=4, recent=11)
        drafter.begin([row])
        (guessed,) = drafter.propose([row], [6])
        other = (guessed[2] + 1) % VOCABULARY
        row.written += [*guessed[:2], other]
        drafter.checked(row, guessed, 2)
        (again,) = drafter.propose([row], [5])
        del row.written[1:]  # a level above takes it back
        row.written.append(other)
        (back,) = drafter.propose([row], [5])
    context = [*row.beginning.prompt.tolist(), 5, 9]
    seen = context[:4] + context[-11:]
    assert again == greedy(model, [*seen, *guessed[:2], other], 5)
    assert back == greedy(model, [*seen, guessed[0], other], 5)


def test_a_full_sequence_is_read_anew_with_the_latest_tokens() -> None:
    row, model = a_row(40), tiny_llama()
    with draft_of(model, max_length=32) as draft:
        drafter = StreamingDrafter(draft, GREEDY, vocabulary=VOCABULARY, sinks=4, recent=12)
        drafter.begin([row])
        drafter.propose([row], [4])
        row.written += np.random.default_rng(1).integers(0, VOCABULARY, 14).tolist()
        (guessed,) = drafter.propose([row], [4])
    context = [*row.beginning.prompt.tolist(), 5, 9, *row.written]
    assert guessed == greedy(model, context[:4] + context[-12:], 4)


def test_nothing_is_guessed_where_the_draft_model_does_not_know_a_token() -> None:
    row = a_row(20)
    row.beginning.prompt[3] = VOCABULARY + 7
    other = RowText(1, a_row(20, seed=1).beginning)
    with draft_of(tiny_llama()) as draft:
        drafter = StreamingDrafter(draft, GREEDY, vocabulary=VOCABULARY + 20)
        drafter.begin([row, other])
        guessed = drafter.propose([row, other], [3, 3])
    assert [len(tokens) for tokens in guessed] == [0, 3]


def test_no_token_is_guessed_that_the_target_does_not_know() -> None:
    row = a_row(20)
    with draft_of(tiny_llama()) as draft:
        drafter = StreamingDrafter(draft, GREEDY, vocabulary=3)
        drafter.begin([row])
        assert max(drafter.propose([row], [8])[0]) < 3


@pytest.mark.sampled(4)
@pytest.mark.parametrize("guesses", [1, 3, 8])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("sinks", "recent"), [(2, 6), (16, 240)])
def test_texts_do_not_depend_on_the_draft_model(guesses: int, temperature: float, sinks: int, recent: int) -> None:
    rows, model = beginnings(5, longest=40), tiny_llama()
    writing = Writing(TEXT, frozenset({7}), temperature=temperature, speculation=Speculation(tokens=guesses))
    wanted = write_texts(Recomputing(model, rows), rows, writing)
    with draft_of(tiny_llama(seed=1)) as draft:
        chooser = Chooser(temperature)
        drafter = StreamingDrafter(draft, chooser, vocabulary=VOCABULARY, sinks=sinks, recent=recent)
        found = write_texts(Recomputing(model, rows), rows, writing, chooser=chooser, drafter=drafter)
    assert [text.tokens for text in found] == [text.tokens for text in wanted]
    assert [text.finish_reason for text in found] == [text.finish_reason for text in wanted]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_model_that_is_the_target_is_always_right(temperature: float) -> None:
    rows, model, report = beginnings(4, longest=40), tiny_llama(), DecodingReport()
    writing = Writing(TEXT, temperature=temperature, speculation=Speculation(tokens=5))
    with draft_of(model) as draft:
        chooser = Chooser(temperature)
        drafter = StreamingDrafter(draft, chooser, vocabulary=VOCABULARY)
        write_texts(Recomputing(model, rows), rows, writing, chooser=chooser, drafter=drafter, report=report)
    counts = report.drafters["draft"]
    assert counts.accepted == counts.proposed == 4 * (TEXT - TEXT // 6)
    assert report.passes == TEXT // 6


@pytest.mark.parametrize("family", ["gemma2", "mistral", "gpt_oss", "gemma3_text", "phi3"])
def test_draft_models_of_other_families_see_what_transformers_shows_them(family: str) -> None:
    model = make_tiny_model(family)
    model.set_attn_implementation("eager")
    draw = np.random.default_rng(0)
    rows = [RowText(n, Beginning(draw.integers(3, 200, 30 + 9 * n).astype(np.int32), (4,), str(n))) for n in range(3)]
    with draft_of(model) as draft:
        drafter = StreamingDrafter(draft, GREEDY, vocabulary=200, sinks=4, recent=26)
        drafter.begin(rows)
        first = drafter.propose(rows, [4, 2, 4])
        for row in rows:
            row.written += [8, 9, 10]
        second = drafter.propose(rows, [3, 4, 0])
    for row, one, two in zip(rows, first, second, strict=True):
        context = [*row.beginning.prompt.tolist(), 4]
        seen = context if len(context) <= 30 else context[:4] + context[-26:]
        assert one == _choices(model, seen, len(one))
        assert two == _choices(model, [*seen, 8, 9, 10], len(two))


def _choices(model: Any, tokens: list[int], count: int) -> list[int]:
    """Greedy tokens below 200, each by a forward pass of its own."""
    found: list[int] = []
    for _ in range(count):
        with torch.inference_mode():
            logits = model(torch.tensor([[*tokens, *found]])).logits[0, -1, :200]
        found.append(int(logits.argmax()))
    return found


def test_a_draft_model_with_recurrent_layers_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="cannot forget"), draft_of(make_tiny_model("qwen3_5_text")):
        pass
