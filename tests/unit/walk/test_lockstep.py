"""Texts written in lock step, against transformers' generate, whatever is guessed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from prefillcli.walk.continuations import Beginning, DecodingReport, Speculation, Writing
from prefillcli.walk.lockstep import Chooser, Drafter, write_texts
from tests.unit.walk.forward_drafter import ForwardDrafter
from tests.unit.walk.models import RandomGuesses, Recomputing, beginnings, generated, tiny_llama

ROWS = beginnings(6)


def writing(tokens: int = 20, guesses: int = 6, **how: Any) -> Writing:
    return Writing(tokens, speculation=Speculation(tokens=guesses), **how)


def drafter_over(model: Any, rows: list[Beginning], how: Writing, below: Drafter | None = None) -> ForwardDrafter:
    chooser = Chooser(how.temperature, how.seed)
    return ForwardDrafter("model", Recomputing(model, rows), chooser, how, DecodingReport(), below)


def drafter(kind: str, how: Writing, right: list[list[int]] | None = None) -> Drafter | None:
    return {
        "none": lambda: None,
        "random": lambda: RandomGuesses(1),
        "knowing": lambda: RandomGuesses(1, right),
        "other model": lambda: drafter_over(tiny_llama(1), ROWS, how),
        "itself": lambda: drafter_over(tiny_llama(), ROWS, how),
        "itself over another model": lambda: drafter_over(
            tiny_llama(), ROWS, how, drafter_over(tiny_llama(1), ROWS, how, RandomGuesses(1, right))
        ),
    }[kind]()


DRAFTERS = ["none", "random", "knowing", "other model", "itself", "itself over another model"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("guesses", [1, 4, 16])
@pytest.mark.parametrize("kind", DRAFTERS)
def test_greedy_text_is_that_of_generate_whatever_is_guessed(kind: str, guesses: int) -> None:
    expected = [generated(tiny_llama(), row, 20) for row in ROWS]
    how, forward, report = writing(20, guesses), Recomputing(tiny_llama(), ROWS), DecodingReport()
    texts = write_texts(forward, ROWS, how, drafter=drafter(kind, how, expected), report=report)
    assert [list(text.tokens) for text in texts] == expected
    assert {text.finish_reason for text in texts} == {"length"}
    assert not forward.texts  # every row was dropped
    assert (report.texts, report.tokens, report.passes) == (6, 120, len(forward.passes))
    assert report.row_passes == sum(map(len, forward.passes))
    if kind == "itself":
        counts = report.drafters["model"]
        assert counts.proposed == counts.accepted
        assert report.passes == -(-20 // (guesses + 1))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_text_ends_before_its_stop_token(kind: str, temperature: float) -> None:
    how = writing(30, temperature=temperature)
    plain = write_texts(Recomputing(tiny_llama(), ROWS), ROWS, how)
    stop = plain[0].tokens[4]
    how = writing(30, temperature=temperature, stop_tokens=frozenset({stop}))
    texts = write_texts(
        Recomputing(tiny_llama(), ROWS), ROWS, how, drafter=drafter(kind, how, [list(text.tokens) for text in plain])
    )
    for text, free in zip(texts, plain, strict=True):
        ended = free.tokens.index(stop) if stop in free.tokens else 30
        assert text.tokens == free.tokens[:ended]
        assert text.finish_reason == ("stop" if stop in free.tokens else "length")
        if not temperature:
            (row,) = (row for row, other in zip(ROWS, texts, strict=True) if other is text)
            assert generated(tiny_llama(), row, 30, stop) == [*text.tokens, *[stop] * (text.finish_reason == "stop")]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_text_and_gap_depend_neither_on_guesses_nor_on_the_rows_beside(kind: str, temperature: float) -> None:
    how = writing(16, temperature=temperature, seed=3)
    alone = [write_texts(Recomputing(tiny_llama(), [row]), [row], how)[0] for row in ROWS]
    together = write_texts(Recomputing(tiny_llama(), ROWS), ROWS, how, drafter=drafter(kind, how))
    backwards = write_texts(Recomputing(tiny_llama(), ROWS[::-1], piece=100), ROWS[::-1], how)[::-1]
    for one, other, third in zip(alone, together, backwards, strict=True):
        assert one.tokens == other.tokens == third.tokens
        assert one.gap == pytest.approx(other.gap, rel=1e-3, abs=1e-4)
        assert one.gap == pytest.approx(third.gap, rel=1e-3, abs=1e-4)


def test_the_gap_is_between_the_two_best_logits_of_the_text() -> None:
    import torch

    (text,) = write_texts(Recomputing(tiny_llama(), ROWS[:1]), ROWS[:1], writing(8))
    tokens = [*ROWS[0].prompt.tolist(), *ROWS[0].tokens, *text.tokens]
    with torch.no_grad():
        logits = tiny_llama()(torch.tensor([tokens])).logits[0, -9:-1].sort(descending=True).values
    assert text.gap == pytest.approx(float((logits[:, 0] - logits[:, 1]).min()), rel=1e-4)


@pytest.mark.parametrize(("longest", "expected"), [(None, 9), (100, 9), (14, 8), (9, 3), (6, 0), (3, 0)])
def test_a_text_ends_with_the_model(longest: int | None, expected: int) -> None:
    row = Beginning(np.arange(4, dtype=np.int32), (7, 8), "row")
    forward = Recomputing(tiny_llama(), [row])
    (text,) = write_texts(forward, [row], writing(9), longest=longest, drafter=RandomGuesses(0))
    assert (len(text.tokens), text.finish_reason) == (expected, "length")
    assert not forward.texts


def test_the_place_of_a_prompt_with_gaps_is_its_last_position() -> None:
    row = Beginning(np.arange(4, dtype=np.int32), (7, 8), "row", positions=np.array([0, 3, 4, 9], dtype=np.int32))
    (text,) = write_texts(Recomputing(tiny_llama(), [row]), [row], writing(9), longest=15)
    assert len(text.tokens) == 3


def test_nothing_is_guessed_for_a_model_that_cannot_go_back() -> None:
    expected = [generated(tiny_llama(), row, 10) for row in ROWS]
    forward = Recomputing(tiny_llama(), ROWS, can_forget=False)
    texts = write_texts(forward, ROWS, writing(10), drafter=RandomGuesses(1, expected))
    assert [list(text.tokens) for text in texts] == expected
    assert len(forward.passes) == 10


def test_rows_that_end_leave_the_batch() -> None:
    plain = write_texts(Recomputing(tiny_llama(), ROWS), ROWS, writing(20))
    stop = plain[2].tokens[3]
    ends = [text.tokens.index(stop) if stop in text.tokens else 19 for text in plain]
    forward = Recomputing(tiny_llama(), ROWS)
    write_texts(forward, ROWS, writing(20, stop_tokens=frozenset({stop})))
    for number, read in enumerate(forward.passes):
        assert [row for row, _ in read] == [row for row, end in enumerate(ends) if end >= number]
