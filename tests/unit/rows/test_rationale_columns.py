"""What an output says of rows that were written about: columns, counts, and values for conditions."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from prefillcli.core.condition import LimitedCondition, RowCondition, row_values
from prefillcli.core.further import RowSelection
from prefillcli.rows.output.answers import AnswerColumns
from prefillcli.rows.output.columns import COLUMNS, Group, ResultRows
from prefillcli.rows.output.schema import OutputSchema
from prefillcli.rows.output.shards import of_schema, to_schema
from tests.unit.rows.outputs import LABELS, finished, make_window, open_sink, read, scored


def test_an_output_without_rationales_has_the_columns_that_it_always_had(tmp_path: Path) -> None:
    plain, asked = str(tmp_path / "a.parquet"), str(tmp_path / "b.parquet")
    finished(plain)
    finished(asked, groups=frozenset())
    assert Path(plain).read_bytes() == Path(asked).read_bytes()
    names = pq.read_schema(plain).names
    assert not {"rationale", "rationale_tokens", "finish_reason", "evidence"} & set(names)
    assert [*schema_with().results.names, "evidence"] == schema_with("evidence").results.names


def test_every_group_is_remembered_by_a_shard(tmp_path: Path) -> None:
    for group in get_args(Group):
        with open_sink(tmp_path / f"{group}.parquet", groups=frozenset({group})) as sink:
            schema = sink.schema
            assert to_schema(of_schema(schema), json_text=schema.json_text) == schema
    assert {column.group for column in COLUMNS} - {None} == set(get_args(Group))


def schema_with(*groups: Group, **more: Any) -> OutputSchema:
    own = AnswerColumns(labels=LABELS, groups=frozenset(groups))
    return OutputSchema(questions=(own,), groups=own.groups, **more)


def schema_of(*, json_carried: bool = False, id_name: str | None = "id") -> OutputSchema:
    kept = pa.string() if json_carried else pa.int64()
    return schema_with(
        "exits",
        "label_scores",
        "rationales",
        id_name=id_name,
        carried=pa.schema([("id", pa.string()), ("kept", kept)]),
        json_carried=json_carried,
    )


def choice(condition: str, **of: Any) -> LimitedCondition:
    found = LimitedCondition(RowCondition(condition), schema_of(**of))
    return pickle.loads(pickle.dumps(found))  # noqa: S301 - it goes to workers


@pytest.mark.parametrize("json_carried", [False, True])
def test_rows_are_chosen_by_what_their_columns_will_say(tmp_path: Path, json_carried: bool) -> None:
    window = make_window(0, list(range(3, 12)), bad=(7,), json_text=json_carried)
    numbers = [prompt.row for prompt in window.prompts if prompt.row != 5]  # one is not scored yet
    schema = schema_with("exits", "label_scores")
    rows = ResultRows.of(window, [scored(row) for row in numbers], {}, schema, 2.0)
    output = tmp_path / "o.parquet"
    kept = pa.string() if json_carried else pa.int64()
    carried = pa.schema([("id", pa.string()), ("kept", kept)])
    with open_sink(output, groups=schema.groups, carried=carried, json_carried=json_carried) as sink:
        sink.write(window, [scored(row) for row in (*numbers, 5)], {}, temperature=2.0)
        sink.finish(1)
    written = dict(zip(range(3, 12), read(str(output)), strict=True))
    conditions = {
        "score > 0.42": lambda row: row["score"] > 0.42,
        "columns['score_Maybe'] < 0.25 and logprob_No > -3": lambda row: row["score_Maybe"] < 0.25,
        "prediction == 'Yes' or truncated": lambda row: row["prediction"] == "Yes" or row["truncated"],
        "kept > 50 and id != 'id-9'": lambda row: (row["kept"] or 0) > 50 and row["id"] != "id-9",
        "kept is none": lambda row: row["kept"] is None,
        "exit_layer is none and method == 'full' and prompt_tokens > 3": lambda row: row["prompt_tokens"] > 3,
    }
    for text, wanted in conditions.items():
        found = choice(text, json_carried=json_carried).chosen(window, rows)
        assert found == [number for number in numbers if wanted(written[number])], text
        assert 0 < len(found) < len(numbers), text


def test_a_row_without_an_id_has_its_number() -> None:
    window = make_window(0, [4, 9])
    rows = ResultRows.of(window, [scored(4), scored(9)], {}, schema_with(), 1.0)
    assert choice("row > 4", id_name=None).chosen(window, rows) == [9]
    schema = schema_of(id_name=None)
    assert row_values(window, rows, schema, {"row", "kept"}) == [{"kept": 40, "row": 4}, {"kept": 90, "row": 9}]


def test_a_number_that_is_not_finite_is_no_reason_to_write() -> None:
    window = make_window(0, [4, 9])
    broken = scored(9)
    broken.logprobs = np.array([np.nan, 0.0, 0.0])
    rows = ResultRows.of(window, [scored(4), broken], {}, schema_with(), 1.0)
    assert [*RowSelection(schema_of()).wanted(window, [scored(4), broken])] == [4]
    assert choice("not (score > 2)").chosen(window, rows) == [4]
