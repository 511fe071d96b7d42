"""`--questions-as rows`: the output has a row for each question, and what counts rows counts those of the input."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from prefillcli.rows.output.target import Target
from prefillcli.tools.status import status_job
from prefillcli.tools.verify import verify_job
from tests.jobs.answers import likeliest, shares_of
from tests.jobs.jobs import read_output, read_report, score, write_jsonl, write_parquet
from tests.jobs.processes import Command, Hold, cut_small_windows
from tests.jobs.test_shards import merge

ROWS = 25
FILE = """
document: "{{ one }} or {{ other }}"
questions:
  - name: fox
    text: "\\nIs it a fox? Answer:"
    labels: [Yes, No]
  - name: better
    text: "\\nThe better one is"
    labels: [quick, brown, fox]
    swap: [one, other]
    values: [1, 2, 4]
  - name: dog
    text: "\\nThe dog was"
    labels: [very quick, not quick at all]
    when: "fox > 0.14"
  - name: tone
    text: "\\nThe dog was"
    labels: [very quick, not quick at all, brown]
"""
LABELS = {
    "fox": ["Yes", "No"],
    "better": ["quick", "brown", "fox"],
    "dog": ["very quick", "not quick at all"],
    "tone": ["very quick", "not quick at all", "brown"],
}
TYPES = {"fox": "predicate", "better": "score", "dog": "predicate", "tone": "choice"}
SUMS = ("prompt_tokens", "shared_tokens", "kept_tokens", "computed_tokens", "seconds")
REPEATED = ("method", "truncated", "error", "error_detail")
BESIDE = ("confidence", "label_mass", "order_decided")
FLAGS = {"questions": "q.yaml", "questions_as": "rows"}


def make_rows(bad: int | None = None) -> list[dict[str, Any]]:
    """Rows of an input; the prompts of one are too long."""
    Path("q.yaml").write_text(FILE)
    return [
        {
            "one": "fox " * 3000 if at == bad else f"the fox {at} {'was quick ' * (at % 4)}",
            "other": f"{'a brown ' * (at * 7 % 5)}dog",
            "id": f"r{at}",
            "kind": ["a", "b"][at // 10 % 2],
        }
        for at in range(ROWS)
    ]


def make_input(bad: int | None = None, kind: str = "parquet") -> Path:
    rows = make_rows(bad)
    if kind == "jsonl":
        return write_jsonl("in.jsonl", rows)
    return write_parquet("in.parquet", **{name: [row[name] for row in rows] for name in rows[0]})


def unpivoted(wide: list[dict[str, Any]], kept: tuple[str, ...] = ("row",)) -> list[dict[str, Any]]:
    """The rows of an output with columns for each question as rows for each question."""
    found = []
    for row in wide:
        for number, (name, labels) in enumerate(LABELS.items()):
            told = row[name] is not None
            answer = {
                "answer": likeliest(row, name, labels) if told else None,
                "value": None if TYPES[name] == "choice" else row[name],
                "probabilities": shares_of(row, name, labels) if told else None,
            }
            found.append(
                {key: row[key] for key in kept}
                | {"question": name, "type": TYPES[name], "labels": labels, **answer}
                | {key: row.get(f"{name}.{key}") for key in BESIDE}
                | {key: None if number else row[key] for key in SUMS}
                | {key: row[key] for key in REPEATED}
            )
    return found


def assert_rows(
    found: list[dict[str, Any]], model: Path, source: Path, varying: tuple[str, ...] = ("seconds",), **flags: Any
) -> None:
    """These are the rows of the output with columns, which is tested elsewhere."""
    kept = (flags.get("id_column", "row"), *filter(None, [flags.get("keep_columns")]))
    done = score(source, model=model, questions="q.yaml", **flags | {"output": "wide.parquet"})
    assert done["exit_code"] == 0
    wide = read_output("wide.parquet")
    assert {row["dog"] is None for row in wide} == {True, False}
    wanted = unpivoted(wide, kept)
    assert [row.keys() for row in found] == [row.keys() for row in wanted]
    for row, own in zip(found, wanted, strict=True):
        for key, value in own.items():
            assert row[key] == pytest.approx(value) or (key in varying and None not in (row[key], value)), key


IDS = {"id_column": "id", "keep_columns": "kind"}


@pytest.mark.parametrize(
    ("kind", "output", "ids"), [("parquet", "out.parquet", {}), ("parquet", "out/", IDS), ("jsonl", "out.jsonl", IDS)]
)
def test_each_question_has_a_row_in_the_order_of_rows_and_questions(
    model: Path, kind: str, output: str, ids: dict[str, Any]
) -> None:
    source, same = make_input(bad=7, kind=kind), {"max_error_rate": 0.1, **ids}
    assert score(source, output, model=model, **FLAGS, **same)["exit_code"] == 0
    found = read_output(output)
    assert_rows(found, model, source, **same)
    assert [row["error"] for row in found if row["error"]] == ["prompt_too_long"] * len(LABELS)
    report, wide = read_report("out.run.json"), read_report("wide.run.json")
    counted = ("rows", "answers", "mean_label_mass", "orders", "methods", "histograms", "failed")
    assert {key: report[key] for key in counted} == {key: wide[key] for key in counted}
    verified = verify_job(output, [str(source)], quiet=True)
    assert (verified["exit_code"], verified["problems"]) == (0, [])
    assert verified["rows"] == {"total": ROWS, "scored": ROWS - 1, "errors": 1}


def test_columns_of_the_output_have_their_types(model: Path) -> None:
    assert score(make_input(), model=model, **FLAGS)["exit_code"] == 0
    schema = pq.read_schema("out.parquet")
    texts, numbers = pa.list_(pa.string()), pa.list_(pa.float64())
    assert schema.names[:7] == ["row", "question", "type", "labels", "answer", "value", "probabilities"]
    assert schema.field("labels").type.equals(texts)
    assert schema.field("probabilities").type.equals(numbers)
    assert {schema.field(name).type for name in ("value", "confidence", "label_mass")} == {pa.float64()}
    assert {schema.field(name).type for name in ("question", "type", "answer")} == {pa.string()}
    assert schema.field("order_decided").type == pa.bool_()
    assert not any("." in name for name in schema.names)


def test_a_killed_job_goes_on_and_loses_nothing(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cut_small_windows(monkeypatch)
    make_input()
    words = ["score", "in.parquet", "-m", model, "--questions", "q.yaml", "--questions-as", "rows"]
    words += ["-o", "out.parquet", "--pack-tokens", 128]
    command = Command(*words, hold=Hold("prefillcli.engines.torch:TorchEngine.answer", 12))
    command.wait_until_held()
    assert list(Path("out.parquet.prefill").glob("part-*.parquet"))
    command.kill()
    assert 0 < status_job("out.parquet", quiet=True)["rows"]["done"] < ROWS
    flags = {"pack_tokens": 128, "resume": True}
    other = score("in.parquet", model=model, questions="q.yaml", **flags)
    assert other["exit_code"] == 4, "another form of the output"
    assert score("in.parquet", model=model, **FLAGS, **flags)["exit_code"] == 0
    assert read_report()["rows"]["total"] == ROWS
    assert [(row["row"], row["question"]) for row in read_output("out.parquet")] == [
        (at, name) for at in range(ROWS) for name in LABELS
    ]
    assert verify_job("out.parquet", ["in.parquet"], quiet=True)["exit_code"] == 0
    rows = status_job("out.parquet", quiet=True)["rows"]
    assert (rows["done"], rows["saved"], rows["total"]) == (ROWS, ROWS, ROWS)


def test_shards_make_the_same_output(model: Path) -> None:
    source = make_input()
    for shard in ("1/2", "2/2"):
        assert score(source, model=model, shard=shard, **FLAGS)["exit_code"] == 0
    done = merge()
    assert (done["exit_code"], done["rows"]["total"]) == (0, ROWS)
    assert_rows(read_output("out.parquet"), model, source, varying=("shared_tokens", "computed_tokens", "seconds"))
    assert verify_job("out.parquet", ["in.parquet"], quiet=True)["exit_code"] == 0


def test_an_output_without_its_work_folder_is_counted_by_rows_of_the_input(model: Path) -> None:
    source = make_input(bad=7)
    assert score(source, model=model, max_error_rate=0.1, **FLAGS)["exit_code"] == 0
    shutil.rmtree("out.parquet.prefill")
    done = score(source, model=model, max_error_rate=0.1, resume=True, **FLAGS)
    assert (done["rows"]["total"], done["rows"]["scored"], done["rows"]["errors"]) == (ROWS, ROWS - 1, 1)
    assert verify_job("out.parquet", ["in.parquet"], quiet=True)["exit_code"] == 0


def test_rejects_have_each_row_once(model: Path) -> None:
    flags = {"max_error_rate": 0.1, "rejects": "bad.parquet"}
    assert score(make_input(bad=7), model=model, **FLAGS, **flags)["exit_code"] == 0
    assert [(row["row"], row["id"]) for row in pq.read_table("bad.parquet").to_pylist()] == [(7, "r7")]


@pytest.mark.parametrize("output", ["out.parquet", "out.jsonl"])
def test_evaluations_and_correlations_are_those_of_columns(
    model: Path, monkeypatch: pytest.MonkeyPatch, output: str
) -> None:
    monkeypatch.setattr("prefillcli.rows.output.target._BLOCK", 700)  # pieces end between the rows of a row
    source = make_input(bad=7)
    rows = pq.read_table(source).append_column("right", pa.array(["quick", "brown", "fox", None, "fox"] * (ROWS // 5)))
    pq.write_table(rows.append_column("is_fox", pa.array([at % 2 for at in range(ROWS)])), source)
    flags = {"truth": "better=right,fox=is_fox", "max_error_rate": 0.1}
    assert score(source, output, model=model, **FLAGS, **flags)["exit_code"] == 0
    assert score(source, "wide.parquet", model=model, questions="q.yaml", **flags)["exit_code"] == 0
    report, wide = read_report(), read_report("wide.run.json")
    assert wide["correlations"]["rows"][0][1] == ROWS - 1
    assert wide["evaluations"]["better"]["rows"] > 10
    for key in ("correlations", "evaluations"):
        assert report[key] == wide[key]


def test_an_output_with_rows_left_over_is_a_problem(model: Path) -> None:
    assert score(make_input(), "out.jsonl", model=model, **FLAGS)["exit_code"] == 0
    target = Target.parse("out.jsonl")
    lines = Path("out.jsonl").read_bytes().splitlines(keepends=True)
    Path("out.jsonl").write_bytes(b"".join(lines[:-1]))
    with pytest.raises(ValueError, match="its rows are not 4 for each row of the input"):
        list(target.tables(["row"]))


@pytest.mark.parametrize("name", ["question", "score", "prediction", "fox", "fox.score", "tone.probabilities"])
def test_a_kept_column_cannot_have_the_name_of_another(
    model: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    rows = [row | {name: 1} for row in make_rows()]
    source = write_jsonl("in.jsonl", rows)
    assert score(source, model=model, keep_columns=name, **FLAGS)["exit_code"] == 2
    assert f"the output has a column {name} already" in capsys.readouterr().err
