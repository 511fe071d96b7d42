"""Jobs with `--choices-column`: each row has answers of its own."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prefillcli import Scorer
from prefillcli.errors import UsageError
from prefillcli.jobs.verify import verify_job
from tests.score.jobs import Reference, read_output, score, write_jsonl, write_parquet
from tests.score.test_likelihood import encoded_pair, likelihood

ROWS: list[dict[str, Any]] = [
    {"prompt": "The dog:", "choices": ["was helped by it", "was harmed by it", "No"]},
    {"prompt": "The dog:", "choices": ["Yes", "No"]},
    {"prompt": "The dog: \n", "choices": ["Yes it is", "a fox"]},
    {"prompt": "The fox says", "choices": [", é", " Yes"]},
    {"prompt": "Alone:", "choices": ["only this"]},
]
WRONG: list[tuple[Any, str]] = [
    ([], "an empty list"),
    (None, "null"),
    (["Yes", "Yes"], "the same"),
    (["Yes", ""], "choice 1 is empty"),
    (["Yes", None], "choice 1 is NoneType"),
    (["a fox", "a fox and a dog"], "begins"),
]


def expected(reference: Reference, row: dict[str, Any]) -> list[float]:
    """As lm-evaluation-harness has it: the choice behind a space, unless the prompt or the choice brings one."""
    prompt, found = row["prompt"], []
    for choice in row["choices"]:
        space = "" if prompt[-1].isspace() or choice[0].isspace() else " "
        before, behind = encoded_pair(reference, prompt, space + choice)
        found.append(sum(likelihood(reference, before, behind)[0]))
    return found


@pytest.mark.parametrize("engine", ["torch", "hf"])
@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_each_row_has_the_log_probabilities_of_its_own_choices(
    model: Path, reference: Reference, engine: str, kind: str
) -> None:
    data, output = f"d.{kind}", f"o.{kind}"
    if kind == "parquet":
        write_parquet(data, **{name: [row[name] for row in ROWS] for name in ROWS[0]})
    else:
        write_jsonl(data, ROWS)
    score(data, output, model=model, choices_column="choices", engine=engine)
    found = read_output(output)
    for row, own in zip(ROWS, found, strict=True):
        logprobs = expected(reference, row)
        np.testing.assert_allclose(own["logprobs"], logprobs, atol=1e-5, rtol=1e-6)
        shares = np.exp(np.array(logprobs) - np.logaddexp.reduce(logprobs))
        np.testing.assert_allclose(own["scores"], shares, atol=1e-5)
        assert own["score"] == own["scores"][0]
        assert own["prediction"] == int(np.argmax(logprobs))
        assert own["prediction_text"] == row["choices"][own["prediction"]]
    assert verify_job(output)["problems"] == []


def test_the_norm_divides_by_the_bytes_of_each_choice(model: Path, reference: Reference) -> None:
    write_jsonl("d.jsonl", ROWS)
    score("d.jsonl", "o.jsonl", model=model, choices_column="choices", label_norm="bytes")
    for row, own in zip(ROWS, read_output("o.jsonl"), strict=True):
        divided = [
            logprob / len(choice.strip().encode())
            for logprob, choice in zip(expected(reference, row), row["choices"], strict=True)
        ]
        assert own["prediction"] == int(np.argmax(divided))
        np.testing.assert_allclose(own["scores"], np.exp(divided - np.logaddexp.reduce(divided)), atol=1e-5)


def test_wrong_choices_are_error_rows_and_the_others_are_scored(model: Path) -> None:
    rows = [{"prompt": "The dog:", "choices": value} for value, _ in WRONG]
    write_jsonl("d.jsonl", [*rows, ROWS[0], {"prompt": "The dog:", "choices": "Yes"}])
    score("d.jsonl", "o.jsonl", model=model, choices_column="choices", max_error_rate=1.0)
    *wrong, right, text = read_output("o.jsonl")
    for own, (_, why) in zip(wrong, WRONG, strict=True):
        assert own["error"] == "invalid_labels"
        assert why in own["error_detail"]
    assert "no list" in text["error_detail"]
    assert right["error"] is None


def test_the_prompt_is_computed_once_for_all_its_choices(model: Path, reference: Reference) -> None:
    choices = ["was helped by it", "was harmed by it", "was neither"]
    write_jsonl("d.jsonl", [{"prompt": "The dog and the fox:", "choices": choices}])
    score("d.jsonl", "o.jsonl", model=model, choices_column="choices")
    pairs = [encoded_pair(reference, "The dog and the fox:", f" {choice}") for choice in choices]
    prefixes = {tuple(behind[:end]) for _, behind in pairs for end in range(1, len(behind))}
    (own,) = read_output("o.jsonl")
    assert own["computed_tokens"] == len(pairs[0][0]) + len(prefixes)


@pytest.mark.parametrize(
    "options",
    [{"labels": "Yes,No"}, {"truth": "right"}, {"exit": True}, {"evidence": True}],
    ids=lambda each: next(iter(each)),
)
def test_options_that_know_the_labels_of_all_rows_are_refused(model: Path, options: dict[str, Any]) -> None:
    write_jsonl("d.jsonl", [{**row, "right": 0} for row in ROWS])
    with pytest.raises(UsageError, match="choices-column"):
        score("d.jsonl", "o.jsonl", model=model, choices_column="choices", **options)


def test_an_end_tells_choices_apart_that_begin_alike(model: Path) -> None:
    write_jsonl("d.jsonl", [{"prompt": "The dog:", "choices": ["a fox", "a fox and a dog"]}])
    score("d.jsonl", "o.jsonl", model=model, choices_column="choices", label_end="eos")
    (row,) = read_output("o.jsonl")
    assert row["error"] is None
    assert math.isclose(sum(row["scores"]), 1.0)


def test_a_scorer_takes_rows_with_choices(model: Path, reference: Reference) -> None:
    with Scorer(model=model, choices_column="choices") as scorer:
        found = scorer.score(ROWS)
    for row, own in zip(ROWS, found.to_pylist(), strict=True):
        np.testing.assert_allclose(own["logprobs"], expected(reference, row), atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize("engine", ["torch", "hf"])
def test_a_prompt_may_be_as_long_as_its_longest_choice_allows(model: Path, reference: Reference, engine: str) -> None:
    row = {"prompt": "The dog and the fox:", "choices": ["was helped by it", "No, never"]}
    pairs = [encoded_pair(reference, row["prompt"], f" {choice}") for choice in row["choices"]]
    longest = max(len(before) + len(behind) - 1 for before, behind in pairs)
    write_jsonl("d.jsonl", [row])
    for most, error in ((longest, None), (longest - 1, "prompt_too_long")):
        options = {"engine": engine, "max_length": most, "overwrite": True, "max_error_rate": 1.0}
        found = score("d.jsonl", "o.jsonl", model=model, choices_column="choices", **options)
        assert found["exit_code"] == 0, found
        assert [own["error"] for own in read_output("o.jsonl")] == [error]


def test_a_window_of_wrong_choices_ends_no_job(model: Path) -> None:
    write_jsonl("d.jsonl", [{"prompt": "The dog:", "choices": []}] * 3)
    found = score("d.jsonl", "o.jsonl", model=model, choices_column="choices", max_error_rate=1.0)
    assert found["exit_code"] == 0
    assert [row["error"] for row in read_output("o.jsonl")] == ["invalid_labels"] * 3


def test_the_text_of_a_control_token_in_a_choice_stays_text(model: Path, reference: Reference) -> None:
    choices = ["a </s> fox", "No"]
    write_jsonl("d.jsonl", [{"prompt": "The dog:", "choices": choices}])
    score("d.jsonl", "o.jsonl", model=model, choices_column="choices")
    score("d.jsonl", "allowed.jsonl", model=model, choices_column="choices", literal=False)
    (row,), (allowed,) = read_output("o.jsonl"), read_output("allowed.jsonl")
    assert row["error"] is None, row["error_detail"]
    taken = expected(reference, {"prompt": "The dog:", "choices": choices})  # its tokenizer reads the control token
    np.testing.assert_allclose(allowed["logprobs"], taken, atol=1e-5, rtol=1e-6)
    assert abs(row["logprobs"][0] - taken[0]) > 1e-3
    assert row["logprobs"][1] == pytest.approx(taken[1], abs=1e-5)
