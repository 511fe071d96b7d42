"""`--estimate`: some rows are read by the model, and a small one reads all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from prefillcli.errors import UsageError
from prefillcli.models.files import sample_draft, sample_model
from tests.jobs import jobs
from tests.jobs.jobs import read_output, read_report, score, write_jsonl

ROWS = 500
pytestmark = pytest.mark.usefixtures("_in_folder")


@pytest.fixture
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = pq.read_table(Path(jobs.__file__).parents[2] / "samples" / "labeling.parquet").slice(0, ROWS)
    path = tmp_path_factory.mktemp("data") / "in.jsonl"
    lines: list[Any] = rows.select(["prompt"]).to_pylist()
    lines[7] = {"other": 1}  # a row that cannot be scored
    return write_jsonl(path, lines)


@pytest.fixture(scope="module")
def in_full(data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    path = tmp_path_factory.mktemp("full") / "full.jsonl"
    score(data, path, model=sample_model(), max_error_rate=0.1)
    return read_output(path)


def test_a_small_model_narrows_the_shares_of_a_file(data: Path, in_full: list[dict[str, Any]]) -> None:
    given = {"model": sample_model(), "first": str(sample_draft()), "max_error_rate": 0.1}
    assert score(data, "out.jsonl", estimate=150, **given)["exit_code"] == 0
    rows = read_output("out.jsonl")
    assert len(rows) == 150
    by_row = {row["row"]: row for row in in_full}
    assert all(row["prediction"] == by_row[row["row"]]["prediction"] for row in rows)
    found = read_report()["estimate"]
    assert (found["rows"], found["guessed_rows"]) == (ROWS - 1, ROWS - 1)
    scored = [row for row in in_full if row["error"] is None]
    for each in found["shares"]:
        low, high = each["interval"]
        true = sum(row["prediction"] == each["label"] for row in scored) / len(scored)
        assert low <= true <= high
        assert high - low < 0.9 * (each["plain_interval"][1] - each["plain_interval"][0])
        assert each["weight"] > 0.5


def test_without_a_small_model_the_shares_are_those_of_its_rows(data: Path) -> None:
    score(data, "out.jsonl", model=sample_model(), estimate=60, max_error_rate=0.1)
    found, rows = read_report()["estimate"], read_output("out.jsonl")
    scored = [row["prediction"] for row in rows if row["error"] is None]
    assert [each["plain_share"] for each in found["shares"]] == [
        scored.count(each["label"]) / len(scored) for each in found["shares"]
    ]
    assert all(each["interval"] == each["plain_interval"] and not each["weight"] for each in found["shares"])
    score(data, "same.jsonl", model=sample_model(), sample=60, max_error_rate=0.1)
    assert [row["row"] for row in read_output("same.jsonl")] == [row["row"] for row in rows]


@pytest.mark.parametrize("step", ["prefillcli.rows.output.sink.Sink.finish", "prefillcli.scoring.score.estimate"])
def test_a_run_that_ended_behind_its_last_row_is_finished_by_the_next(
    data: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    given = {"model": sample_model(), "first": sample_draft(), "estimate": 40, "max_error_rate": 0.2}
    score(data, "whole.jsonl", **given)

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(step, stop)
        assert score(data, "out.jsonl", **given)["exit_code"] != 0
    assert score(data, "out.jsonl", resume=True, **given)["exit_code"] == 0
    found, wanted = (read_report(f"{name}.run.json")["estimate"] for name in ("out", "whole"))
    assert found["shares"][0]["interval"] == pytest.approx(wanted["shares"][0]["interval"], abs=1e-6)
    monkeypatch.setattr("prefillcli.scoring.score.estimate", stop)
    assert score(data, "out.jsonl", resume=True, **given)["estimate"]["Yes"][0] == found["shares"][0]["share"]


ASKED = {"same": ("{{ prompt }}", "Yes,No"), "other": ("{{ prompt }} Yes\nAnswer:", "Yes,No,Maybe")}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("output", ["out.jsonl", "out.parquet"])
def test_each_question_has_the_shares_that_it_has_alone(data: Path, output: str) -> None:
    given = {"model": sample_model(), "first": str(sample_draft()), "estimate": 60, "max_error_rate": 0.2}
    entries = [{"name": name, "template": text, "labels": labels.split(",")} for name, (text, labels) in ASKED.items()]
    Path("q.json").write_text(json.dumps({"questions": entries}))
    assert score(data, output, questions="q.json", **given)["exit_code"] == 0
    found = read_report("out.run.json")["estimate"]
    assert [each["question"] for each in found["shares"]] == ["same"] * 2 + ["other"] * 3
    for name, (text, labels) in ASKED.items():
        score(data, "alone.jsonl", template=text, labels=labels, overwrite=True, **given)
        alone = read_report("alone.run.json")["estimate"]
        assert alone["rows"] == found["rows"]
        own = [each for each in found["shares"] if each["question"] == name]
        for one, other in zip(own, alone["shares"], strict=True):
            for field in ("share", "plain_share", "interval", "plain_interval"):
                assert one[field] == pytest.approx(other[field], abs=1e-6)


def test_an_audit_corrects_the_shares_of_each_question(data: Path, in_full: list[dict[str, Any]]) -> None:
    entries = [{"name": name, "template": "{{ prompt }}", "labels": ["Yes", "No"]} for name in ("one", "two")]
    Path("q.json").write_text(json.dumps({"questions": entries}))
    given = {"model": sample_model(), "first": str(sample_draft()), "max_flips": 0.2, "audit": 100}
    assert score(data, "out.jsonl", questions="q.json", max_error_rate=0.1, **given)["exit_code"] == 0
    found, exits = read_report()["estimate"], read_report()["exits"]
    assert exits["by_layer"]["0"]["rows"] > 0, exits
    assert [(each["question"], each["label"]) for each in found["shares"]] == [
        (question, label) for question in ("one", "two") for label in ("Yes", "No")
    ]
    scored = [row for row in in_full if row["error"] is None]
    for each in found["shares"]:
        low, high = each["interval"]
        assert low <= sum(row["prediction"] == each["label"] for row in scored) / len(scored) <= high


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"sample": 50}, "leave --sample out"),
        ({"target_column": "prompt"}, "--estimate: it is about answers that all rows may have"),
        ({"estimate": 5}, "--estimate"),
    ],
)
def test_what_cannot_go_with_it_is_refused(data: Path, flags: dict[str, Any], said: str) -> None:
    try:
        error = score(data, "out.jsonl", **{"model": sample_model(), "estimate": 40, **flags})["error"]
    except UsageError as raised:
        error = str(raised)
    assert said in error
