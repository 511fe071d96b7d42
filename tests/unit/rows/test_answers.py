"""Answers to questions: written as typed columns, and read back as what a job of labels has."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prefillcli.rows.output.answers import AnswerColumns, answers_of, described
from prefillcli.rows.output.destination import ANSWERS, Destination
from prefillcli.rows.records import ScoredRow, joined_row
from prefillcli.stats.labels import label_probabilities
from tests.unit.rows.outputs import FINGERPRINT, make_window, open_sink, read

QUESTIONS = (
    AnswerColumns(labels=("Yes", "No"), name="fox", type="predicate", options=(True, False)),
    AnswerColumns(labels=("calm", "a 'b' \"c\"", "é.f"), name="tone", type="choice", options=("calm", "b", "f")),
    AnswerColumns(labels=("1", "2", "3"), name="stars", type="score", options=("1", "2", "3"), values=(1.0, 2.0, 5.0)),
    AnswerColumns(labels=("true", "false"), name="told", type="choice", options=(True, False)),
)
ASKED = st.lists(
    st.tuples(*(st.lists(st.floats(-40, 0), min_size=len(own.labels), max_size=len(own.labels)) for own in QUESTIONS)),
    min_size=1,
    max_size=6,
)


def answers(temperature: float = 1.0) -> list[AnswerColumns]:
    return [replace(own, temperature=temperature) for own in QUESTIONS]


class Written:
    """An output with these answers; the third question is not asked about the second row, and one row is wrong."""

    def __init__(self, output: str, logprobs: list[Any], temperature: float) -> None:
        self.output, count = output, len(logprobs)
        asked = [QUESTIONS[0], QUESTIONS[1], self.some(), QUESTIONS[3]]
        rows = [
            joined_row([ScoredRow(row, np.array(own), 1, 2, 3, 0.5) for own in each])
            for row, each in enumerate(logprobs)
        ]
        fingerprint = FINGERPRINT | {ANSWERS: described(answers(temperature))}
        with open_sink(
            output,
            questions=tuple(asked),
            fingerprint=fingerprint,
        ) as sink:
            sink.write(make_window(0, list(range(count + 1)), bad=(count,)), rows, {}, temperature=temperature)
            sink.finish(1)
        self.shares = [[label_probabilities(np.array(own), temperature).tolist() for own in each] for each in logprobs]
        for each in self.shares[1:2]:
            each[2] = None
        self.shares.append([None] * len(QUESTIONS))

    @staticmethod
    def some() -> AnswerColumns:
        return replace(QUESTIONS[2], when=lambda rows: set(rows.numbers.tolist()) - {1})


def asked(shares: Any) -> list[Any]:
    return [None if np.isnan(each).any() else each for each in shares.tolist()]


def assert_near(found: Any, wanted: Any) -> None:
    assert [each is None for each in found] == [each is None for each in wanted]
    known = [each for each in wanted if each is not None]
    assert np.array([each for each in found if each is not None]) == pytest.approx(np.array(known), abs=1e-12)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    logprobs=ASKED, temperature=st.sampled_from([0.5, 1.0, 3.0]), form=st.sampled_from(["parquet", "jsonl"]),
)  # fmt: skip
def test_what_is_read_back_is_what_was_answered(logprobs: list[Any], temperature: float, form: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        written = Written(f"{folder}/o.{form}", logprobs, temperature)
        rows = read(written.output)
        destination = Destination.parse(written.output)
        for number, (own, columns) in enumerate(zip(QUESTIONS, answers(temperature), strict=True)):
            wanted = [each[number] for each in written.shares]
            told = [row[columns.told[0]] for row in rows]
            for values in (told, [None if value is None else json.dumps(value) for value in told]):
                assert_near(asked(columns.shares(values)), wanted)
            names = dict.fromkeys([*columns.told, *(columns.column(each) for each in ("", "label_mass"))])
            table = pa.concat_tables(destination.tables([*names]))
            assert_near(asked(columns.shares_in(table)), wanted)
            table = columns.with_answer(table)
            assert_near(table[f"{own.name}.score"].to_pylist(), [each and each[0] for each in wanted])
            said = table[f"{own.name}.prediction"].to_pylist()
            assert said == [each and own.labels[int(np.argmax(each))] for each in wanted]
            logs = columns.logs_in(table)
            logs = logs[~np.isnan(logs).any(axis=1)]  # at a temperature of 1, but for a constant of each row
            known = [each for each in wanted if each is not None]
            sure = np.array([min(each) > 1e-6 for each in known])
            original = np.array([each[number] for each, s in zip(logprobs, wanted, strict=False) if s is not None])
            apart = logs[sure] - original[sure] if len(known) else np.zeros((0, 1))
            assert np.ptp(apart, axis=1) == pytest.approx(0, abs=1e-8)
            answers_said = [row[own.name] for row in rows]
            assert table[own.name].to_pylist() == pytest.approx(answers_said)  # of its own type in every format
        errors = pa.concat_tables(destination.tables(["error"]))["error"].to_pylist()
        assert errors == [None] * len(logprobs) + ["prompt_too_long"]


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_columns_have_the_types_of_their_answers(tmp_path: Path, form: str) -> None:
    logprobs = [[np.log([0.3, 0.1]), np.log([0.1, 0.2, 0.3]), np.log([0.1, 0.1, 0.2]), np.log([0.1, 0.4])]] * 2
    output = str(tmp_path / f"o.{form}")
    Written(output, logprobs, 1.0)
    row, second, wrong = read(output)
    assert row["fox"] == pytest.approx(0.75)
    assert row["tone"] == "é.f"
    assert row["tone.probabilities"] == pytest.approx({"calm": 1 / 6, "a 'b' \"c\"": 1 / 3, "é.f": 1 / 2})
    assert row["tone.confidence"] == pytest.approx(0.25)  # (1/2 - 1/3) / (2/3)
    assert row["stars"] == pytest.approx(0.25 * 1 + 0.25 * 2 + 0.5 * 5)
    assert row["stars.confidence"] == 0  # 1 - (1/4 * 2 + 1/4 * 1) / (2/3) is less
    assert row["told"] is False  # all options are booleans
    assert row["told.probabilities"] == pytest.approx({"true": 0.2, "false": 0.8})
    assert row["told.confidence"] == pytest.approx(0.6)
    assert row["tone.label_mass"] == pytest.approx(0.6)
    assert {second[key] for key in ("stars", "stars.probabilities", "stars.confidence", "stars.label_mass")} == {None}
    assert {wrong[key] for key in row if key.partition(".")[0] in ("fox", "tone", "stars", "told")} == {None}
    if form == "parquet":
        types = {field.name: str(field.type) for field in pq.read_schema(output)}
        struct = "struct<true: double, false: double>"
        assert [types[key] for key in ("fox", "tone", "stars", "told")] == ["double", "string", "double", "bool"]
        assert (types["told.probabilities"], types["told.confidence"]) == (struct, "double")


def test_a_fingerprint_describes_the_answers() -> None:
    assert answers_of(described(answers(2.0))) == [replace(own, options=()) for own in answers(2.0)]
    assert answers_of("") == []
