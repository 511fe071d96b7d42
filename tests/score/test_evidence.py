"""Evidence: what each section of a prompt contributes to a score."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from prefillcli.core.question import Question
from prefillcli.data.prompts.builder import PromptBuilder, PromptSettings
from prefillcli.data.prompts.labels import Labels, parse_labels
from prefillcli.data.rows import Prompt, RowBatch, ScoredRow
from prefillcli.engines.base import Answer
from prefillcli.followup.evidence import Ablation, Weighing
from prefillcli.stats.evaluation import Measure
from tests.score.jobs import Reference

WHOLE = (0.8, 0.1)  # of the vocabulary
TEXT = "One.\n\nTwo.\n\nThree.\n\nAnswer:"


@pytest.fixture(scope="module")
def ablation(reference: Reference) -> Iterator[Ablation]:
    tokenizer = reference.tokenizer
    settings = PromptSettings(max_length=500, vocab_size=len(tokenizer), sections=True)
    found = Ablation(PromptBuilder(tokenizer, settings, ("prompt",)), Labels(tokenizer, parse_labels("Yes,No")))
    yield found
    found.close()


@pytest.fixture
def prompt(ablation: Ablation) -> Prompt:
    columns = {"prompt": [TEXT]}
    batch = RowBatch(7, np.array([7]), columns, pa.table({"": pa.nulls(1)}).select([]), {}, 0)
    (found,), _ = ablation._original.build(batch, ablation._labels)
    return found


def scored(prompt: Prompt, **changes: Any) -> ScoredRow:
    """A row that was read in full, with the probabilities `WHOLE`."""
    given = {"logprobs": np.log(WHOLE), "kept_tokens": len(prompt.tokens)} | changes
    return ScoredRow(row=prompt.row, shared_tokens=0, computed_tokens=0, seconds=0.0, **given)


def answered(*probabilities: float) -> Answer:
    return Answer(0, np.log(probabilities), 0, 0, 0.0)


def test_a_section_s_change_is_how_far_the_score_falls_without_it(ablation: Ablation, prompt: Prompt) -> None:
    weighed = Weighing(ablation).weigh(Question(prompt), scored(prompt))
    assert [len(each.tokens) < len(prompt.tokens) for each in weighed.questions] == [True] * 3
    for place, answer in enumerate([answered(0.9, 0.1), answered(0.1, 0.4), answered(0.3, 0.3)]):
        weighed.take(place, answer)
    whole = 0.8 / 0.9
    assert weighed.effects() == (
        ("paragraph 2", pytest.approx(whole - 0.2)),
        ("paragraph 3", pytest.approx(whole - 0.5)),
        ("paragraph 1", pytest.approx(whole - 0.9)),
    )


def test_changes_are_of_scores_after_the_temperature_and_in_their_measure(ablation: Ablation, prompt: Prompt) -> None:
    def first(evidence: Weighing) -> float:
        weighed = evidence.weigh(Question(prompt), scored(prompt))
        weighed.take(0, answered(0.2, 0.4))
        (effect,) = weighed.effects()
        return effect.change

    def sharpened(p: float, q: float) -> float:
        return p**2 / (p**2 + q**2)

    assert first(Weighing(ablation, temperature=0.5)) == pytest.approx(sharpened(*WHOLE) - sharpened(0.2, 0.4))
    assert first(Weighing(ablation, measure=Measure.CHANCES)) == pytest.approx(0.8 - 0.2)
    assert first(Weighing(ablation, measure=Measure.VALUES)) == pytest.approx(math.log(0.8) - math.log(0.2))


def test_equal_changes_come_in_the_order_of_the_sections(ablation: Ablation, prompt: Prompt) -> None:
    weighed = Weighing(ablation).weigh(Question(prompt), scored(prompt, logprobs=np.log((0.5, 0.5))))
    for place, answer in [(2, answered(0.25, 0.75)), (1, answered(0.5, 0.5)), (0, answered(0.25, 0.75))]:
        weighed.take(place, answer)
    assert [effect.section for effect in weighed.effects()] == ["paragraph 1", "paragraph 3", "paragraph 2"]


@pytest.mark.parametrize("how", [{"kept_tokens": 2}, {"exit_layer": 1}])
def test_a_row_that_was_not_read_to_the_end_is_read_once_more(
    ablation: Ablation, prompt: Prompt, how: dict[str, int]
) -> None:
    weighed = Weighing(ablation).weigh(Question(prompt), scored(prompt, **how))
    assert len(weighed.questions) == 4
    assert weighed.questions[-1].tokens.tolist() == prompt.tokens.tolist()
    weighed.take(0, answered(0.2, 0.2))
    assert weighed.effects() == ()
    weighed.take(3, answered(0.3, 0.1))
    assert weighed.effects() == (("paragraph 1", pytest.approx(0.25)),)


def test_an_audited_row_has_its_full_answer_already(ablation: Ablation, prompt: Prompt) -> None:
    row = scored(prompt, kept_tokens=2, audit=np.log((0.3, 0.1)))
    weighed = Weighing(ablation).weigh(Question(prompt), row)
    assert len(weighed.questions) == 3
    weighed.take(1, answered(0.2, 0.2))
    assert weighed.effects() == (("paragraph 2", pytest.approx(0.25)),)


def test_sections_without_a_finite_answer_are_left_out(ablation: Ablation, prompt: Prompt) -> None:
    weighed = Weighing(ablation).weigh(Question(prompt), scored(prompt))
    weighed.take(1, Answer(0, np.array([math.nan, 0.0]), 0, 0, 0.0))
    assert weighed.effects() == ()
    weighed.take(2, answered(0.2, 0.2))
    assert weighed.effects() == (("paragraph 3", pytest.approx(0.8 / 0.9 - 0.5)),)


def test_a_prompt_without_sections_needs_nothing(ablation: Ablation, prompt: Prompt) -> None:
    prompt.made_of = None
    weighed = Weighing(ablation).weigh(Question(prompt), scored(prompt, exit_layer=1))
    assert weighed.questions == ()
    assert weighed.effects() == ()
