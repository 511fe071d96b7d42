"""Answers to typed questions. The oracles are the packages `openai`, `typesafe-sdk` and `jevcompat`."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jevcompat.client import Response, parse_json
from jevcompat.validate import choice_confidence, score_confidence, validate_success
from openai.types import Decision
from pydantic import BaseModel
from typesafe_sdk import SystemOneResponse

from prefillcli.rows.output import batches
from prefillcli.rows.output.decisions import DECISIONS, SYSTEM_ONE, response_of
from prefillcli.rows.values import encode_json
from tests.unit.asking.decision_bodies import Body, openai_bodies, probabilities_for, systemone_bodies

SEEDS = st.integers(0, 2**32 - 1)
ASKED = {"type": "predicate", "instructions": "Is it late?"}
BOTH = {"type": "choice", "name": "b", "instructions": "Which?", "choices": [{"value": "true"}, {"value": True}]}
LEVELS = {"type": "score", "instructions": "How?", "levels": [{"label": each} for each in ("low", "mid", "high")]}


def further(value: Any) -> list[Any]:
    """What a model of pydantic has kept of fields that it does not know."""
    if isinstance(value, BaseModel):
        own = [value.model_extra] if value.model_extra else []
        return [*own, *(found for name in type(value).model_fields for found in further(getattr(value, name)))]
    return [found for each in value for found in further(each)] if isinstance(value, list) else []


@settings(max_examples=250)
@given(openai_bodies(), SEEDS)
def test_openai_reads_its_responses(body: Body, seed: int) -> None:
    answers = probabilities_for(body, seed)
    text = encode_json(response_of(body, answers, model="judge", input_tokens=7, cached_tokens=5))
    decision = Decision.model_validate_json(text, strict=True)
    assert further(decision) == []
    assert decision.model_dump() == json.loads(text)
    assert (decision.model, len(decision.answers)) == ("judge", len(body["questions"]))
    assert (decision.usage.total_tokens, decision.usage.input_tokens_details.cached_tokens) == (7, 5)
    for asked, own, answer in zip(body["questions"], answers, decision.answers, strict=True):
        assert (answer.type, answer.name) == (asked["type"], asked.get("name"))
        if answer.type == "predicate":
            assert answer.probability == own[0]
            continue
        assert answer.type in ("choice", "score")
        assert [each.probability for each in answer.probabilities] == own
        assert sum(own) == pytest.approx(1, abs=1e-12)
        if answer.type == "choice":
            values = [each["value"] for each in asked["choices"]]
            told = [each.value for each in answer.probabilities]
            assert [*map(repr, told)] == [*map(repr, values)]
            assert repr(answer.choice) == repr(values[own.index(max(own))])
            assert answer.confidence == pytest.approx(choice_confidence(own), abs=1e-12)
        else:
            levels = [(number, each["label"]) for number, each in enumerate(asked["levels"])]
            assert [(each.value, each.label) for each in answer.probabilities] == levels
            assert answer.score == pytest.approx(sum(number * share for number, share in enumerate(own)), abs=1e-9)
            assert answer.confidence == pytest.approx(score_confidence(own), abs=1e-12)


@settings(max_examples=250)
@given(systemone_bodies(), SEEDS)
def test_system_one_reads_its_responses(body: Body, seed: int) -> None:
    answers = probabilities_for(body, seed)
    raw = encode_json(response_of(body, answers, model="judge", input_tokens=7)).encode()
    data, error, infinite = parse_json(raw)
    response = Response(200, {"content-type": "application/json"}, raw, 0, data, error, infinite)
    assert [str(each) for each in validate_success(body, response)] == []
    read = SystemOneResponse.model_validate_json(raw)
    assert list(read.answers) == list(body["questions"])
    assert len(read.nouls) + len(read.choices) + len(read.scores) == len(answers)
    for own, answer in zip(answers, read.answers.values(), strict=True):
        if answer.type == "noul":
            assert answer.noul == own[0]
            continue
        assert answer.type in ("choice", "score")
        assert list(answer.probabilities.values()) == own
        formula = choice_confidence if answer.type == "choice" else score_confidence
        assert answer.confidence == pytest.approx(formula(own), abs=1e-12)


def test_a_share_that_is_rounded_above_one_is_one() -> None:
    above = 1 + 2**-52
    body = {"questions": [ASKED, BOTH]}
    first, second = response_of(body, [[above, 0], [above, -1e-17]], model="m", input_tokens=1)["answers"]
    assert first["probability"] == 1
    assert [each["probability"] for each in second["probabilities"]] == [1, 0]
    assert second["confidence"] == 1


def test_batch_lines_have_responses_and_errors_and_are_read_back() -> None:
    questions = {"q": {"type": "noul", "instructions": "Late?"}}
    bodies = [
        {"model": "judge", "input": "x", "questions": [ASKED, BOTH, LEVELS]},
        {"model": "other", "state": "x", "questions": questions},
        {"model": "judge", "input": "x", "questions": []},
    ]
    rows = pa.table(
        {
            "row": pa.array([0, 1, 2], pa.int64()),
            "custom_id": ['"a"', "7", '"c"'],
            "url": [encode_json(each) for each in (DECISIONS, SYSTEM_ONE, DECISIONS)],
            "body": [encode_json(each) for each in bodies],
            "decisions": [[[0.75, 0.25], [0.5, 0.5], [0.25, 0.25, 0.5]], [[0.25, 0.75]], None],
            "prompt_tokens": [12, 5, None],
            "shared_tokens": [3, 0, None],
            "error": [None, None, "invalid_request"],
            "error_detail": [None, None, "questions: 0 questions, at least 1"],
        }
    )
    table = batches.lines_of(rows, "row", "custom_id")
    decoded = ("custom_id", "response", "error")
    lines = [
        {name: json.loads(each[name] or "null") if name in decoded else each[name] for name in each}
        for each in table.to_pylist()
    ]
    first, second, third = lines
    assert [(each["id"], each["custom_id"]) for each in lines] == [
        ("batch_req_0", "a"),
        ("batch_req_1", 7),
        ("batch_req_2", "c"),
    ]
    assert first["response"] == {
        "status_code": 200,
        "request_id": "req_0",
        "body": {
            "model": "judge",
            "answers": [
                {"type": "predicate", "name": None, "probability": 0.75},
                {
                    "type": "choice",
                    "name": "b",
                    "choice": "true",
                    "confidence": 0.0,
                    "probabilities": [{"value": "true", "probability": 0.5}, {"value": True, "probability": 0.5}],
                },
                {
                    "type": "score",
                    "name": None,
                    "score": 1.25,
                    "confidence": 0.0,
                    "probabilities": [
                        {"value": 0, "label": "low", "probability": 0.25},
                        {"value": 1, "label": "mid", "probability": 0.25},
                        {"value": 2, "label": "high", "probability": 0.5},
                    ],
                },
            ],
            "usage": {
                "input_tokens": 12,
                "input_tokens_details": {"cache_write_tokens": 0, "cached_tokens": 3},
                "output_tokens": 0,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": 12,
            },
        },
    }
    assert second["response"]["body"] == {
        "model": "other",
        "answers": {"q": {"type": "noul", "noul": 0.25}},
        "usage": {"input_tokens": 5, "output_tokens": 0},
    }
    assert (third["response"], third["error"]) == (
        None,
        {"code": "invalid_request", "message": "questions: 0 questions, at least 1"},
    )
    back = batches.rows_of(lines, ["custom_id", "score", "error"], "custom_id").to_pydict()
    assert back == {
        "custom_id": ['"a"', "7", '"c"'],
        "score": [0.75, 0.25, None],
        "error": [None, None, "invalid_request"],
    }
