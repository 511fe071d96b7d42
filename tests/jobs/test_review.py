"""`--review-below` and `--review`: the answers in doubt, and the rows that have some."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from prefillcli.cli import app
from prefillcli.errors import UsageError
from prefillcli.judging.review import floors_of, read_floors
from prefillcli.options.commands import ScoreSettings
from prefillcli.options.load import load_settings
from tests.jobs.jobs import read_output, read_report, score, texts, write_jsonl, write_parquet
from tests.jobs.processes import cut_small_windows
from tests.jobs.test_shards import merge

ROWS = 60
FILE = """
document: "{{ prompt }}"
questions:
  - name: fox
    text: "\\nIs it a fox? Answer:"
    labels: [Yes, No]
  - name: tone
    text: "\\nThe dog was"
    labels: [quick, brown, lazy]
    when: "fox > 0.5"
"""


@pytest.fixture(autouse=True)
def _small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    cut_small_windows(monkeypatch)


def flags(model: Path, **more: Any) -> dict[str, Any]:
    return {"model": model, "id_column": "id", "keep_columns": ("seen",), "max_error_rate": 0.5} | more


def make_input(kind: str = "parquet") -> str:
    """Rows of which one is an error."""
    prompts: list[str | None] = [*texts(ROWS - 1), None]
    Path("q.yaml").write_text(FILE)
    table: dict[str, list[Any]] = {"id": [f"r{at}" for at in range(ROWS)], "prompt": list(prompts)}
    table |= {"seen": [at / 2 for at in range(ROWS)], "truth": ["Yes", "No"] * (ROWS // 2)}
    if kind == "jsonl":
        return str(
            write_jsonl("in.jsonl", [dict(zip(table, r, strict=True)) for r in zip(*table.values(), strict=True)])
        )
    return str(write_parquet("in.parquet", **table))


def middle(rows: list[dict[str, Any]]) -> float:
    """A floor that half of the answers are below."""
    return sorted(max(row["score"], 1 - row["score"]) for row in rows if row["error"] is None)[ROWS // 2]


def test_answers_below_the_floor_are_in_doubt_and_nothing_else_changes(model: Path) -> None:
    source = make_input()
    assert score(source, "plain.parquet", **flags(model))["exit_code"] == 0
    plain = read_output("plain.parquet")
    floor = middle(plain)
    assert score(source, review_below=str(floor), **flags(model))["exit_code"] == 0
    rows = read_output("out.parquet")
    doubted = 0
    for row, before in zip(rows, plain, strict=True):
        review = row.pop("review")
        if row["error"] is not None:
            assert review is None
        else:
            assert review == (["answer"] if max(row["score"], 1 - row["score"]) < floor else [])
            doubted += bool(review)
        assert {k: v for k, v in row.items() if k != "seconds"} == {k: v for k, v in before.items() if k != "seconds"}
    assert doubted == ROWS // 2
    assert read_report("out.run.json")["review"] == {
        "rows": doubted, "questions": {"answer": doubted}, "file": None, "unanswered": 1,
    }  # fmt: skip
    assert "review" not in read_report("plain.run.json")


@pytest.mark.parametrize("given", ["0.7", "fox=0.6,tone=0.7", "tone=0.7"])
def test_each_question_has_its_floor(model: Path, given: str) -> None:
    floors = {"fox": 0.7, "tone": 0.7} if given == "0.7" else {k: float(v) for k, v in
              (pair.split("=") for pair in given.split(","))}  # fmt: skip
    more = {"questions": "q.yaml", "review_below": given, "review": "r.jsonl"}
    assert score(make_input(), "plain.parquet", **flags(model, **more))["exit_code"] == 0
    rows = read_output("plain.parquet")
    seen = set()
    for row in (row for row in rows if row["error"] is None):
        top = {"fox": max(row["fox"], 1 - row["fox"])}
        if row["tone"] is not None:
            top["tone"] = max(row["tone.probabilities"].values())
        wanted = [name for name, own in top.items() if name in floors and own < floors[name]]
        assert row["review"] == wanted
        seen.update(wanted)
    assert seen == floors.keys()
    *looked, failed = [row["review"] for row in read_output("r.jsonl")]
    assert failed.startswith("no answer: template_error: ")
    asked = [[why.partition(":")[0] for why in each.split("; ")] for each in looked]
    assert asked == [row["review"] for row in rows if row["review"]]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
@pytest.mark.parametrize(("output", "file"), [("out.parquet", "look.jsonl"), ("out/", "look.parquet"),
                                              ("out.jsonl", "look.parquet"), ("out.jsonl", "look.jsonl")])  # fmt: skip
def test_the_rows_in_doubt_are_written_with_their_kept_columns(model: Path, kind: str, output: str, file: str) -> None:
    given = flags(model, review_below="0.8", review=file, questions="q.yaml")
    assert score(make_input(kind), output, **given)["exit_code"] == 0
    rows = [row for row in read_output(output) if row["review"] or row["error"]]
    found = read_output(file)
    assert 0 < len(found) < ROWS
    kept = [{name: row[name] for name in ("id", "seen")} for row in rows]
    assert [{name: row[name] for name in ("id", "seen")} for row in found] == kept
    assert read_report("out.run.json")["review"]["file"] == file
    assert score(make_input(kind), output, resume=True, **given)["exit_code"] == 0  # an earlier one is replaced
    assert read_output(file) == found


def test_rows_without_ids_have_their_numbers(model: Path) -> None:
    given = flags(model, id_column=None, sample=40, seed=2)
    assert score(make_input(), review_below="0.8", review="look.jsonl", **given)["exit_code"] == 0
    rows = {row["row"]: row["seen"] for row in read_output("look.jsonl")}
    assert rows
    assert all(seen == row / 2 for row, seen in rows.items())


def test_partitioned_outputs_have_a_review(model: Path) -> None:
    source = make_input()
    Path("days/day=1").mkdir(parents=True)
    Path(source).rename("days/day=1/in.parquet")
    given = flags(model, partition=True, review_below="0.8", review="look.jsonl")
    assert score("days", "out/", **given)["exit_code"] == 0
    assert read_output("look.jsonl")


def test_shards_have_the_column_too(model: Path) -> None:
    source = make_input()
    assert score(source, "whole.parquet", review_below="0.8", **flags(model))["exit_code"] == 0
    for shard in ("1/2", "2/2"):
        assert score(source, shard=shard, review_below="0.8", **flags(model))["exit_code"] == 0
    assert merge()["exit_code"] == 0
    wanted = [row["review"] for row in read_output("whole.parquet")]
    assert [row["review"] for row in read_output("out.parquet")] == wanted
    again = flags(model, resume=True, review="look.jsonl")
    assert score(source, review_below="0.8", **again)["exit_code"] == 0
    assert len(read_output("look.jsonl")) == sum(map(bool, wanted)) + 1  # and the error row


def calibrate(*words: str) -> dict[str, Any]:
    done = CliRunner().invoke(app, ["calibrate", *words])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_floors_of_labelled_rows_are_those_of_the_next_job(model: Path) -> None:
    source = make_input()
    assert score(source, "labelled.parquet", **flags(model))["exit_code"] == 0
    right = [{"id": row["id"], "truth": row["prediction"] if max(row["score"], 1 - row["score"]) > 0.7 else "No"}
             for row in read_output("labelled.parquet") if row["error"] is None]  # fmt: skip
    write_jsonl("right.jsonl", right)
    words = ("--truth", "truth", "--truth-from", "right.jsonl", "--accuracy", "0.75", "--per-answer", "-o", "f.json")
    done = calibrate("labelled.parquet", *words)
    floors = {each["answer"]: each["floor"] for each in done["questions"]["answer"]["floors"]}
    assert (floors["Yes"] or 0) > 0.5
    assert json.loads(Path("f.json").read_text())["job"]
    assert score(source, review_below="f.json", **flags(model))["exit_code"] == 0
    for row in read_output("out.parquet"):
        if row["error"] is None:
            own = floors.get(row["prediction"])
            doubt = own is None or max(row["score"], 1 - row["score"]) < own
            assert row["review"] == (["answer"] if doubt else [])


def test_floors_of_another_prompt_are_refused(model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = make_input()
    assert score(source, "labelled.parquet", truth="truth", **flags(model))["exit_code"] == 0
    assert calibrate("labelled.parquet", "--truth", "truth", "--accuracy", "0.3")["status"] == "complete"
    given = flags(model, template="{{ prompt }} Answer:", review_below="floors.json")
    assert score(source, **given)["exit_code"] == 2
    assert "it was fitted on scores with another prompt settings" in capfd.readouterr().err
    Path("floors.json").write_text(Path("floors.json").read_text().replace("0.3", "0.4"))
    assert score(source, **flags(model, review_below="floors.json"))["exit_code"] == 2
    assert "it is not as prefill wrote it" in capfd.readouterr().err


def test_reviewed_rows_come_back_as_right_answers(model: Path) -> None:
    source = make_input()
    assert score(source, review_below="0.8", review="look.jsonl", **flags(model))["exit_code"] == 0
    looked = [{"id": row["id"], "verdict": row["prediction"]} for row in read_output("look.jsonl")][:-1]
    write_jsonl("looked.jsonl", looked)
    done = calibrate("out.parquet", "--truth", "verdict", "--truth-from", "looked.jsonl", "--accuracy", "0.5")
    (entry,) = done["questions"]["answer"]["floors"]
    assert entry["rows"] == len(looked)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"review_below": "1.5"}, "--review-below 1.5: no such file"),
        ({"review_below": "fox=high"}, "with a number from 0 to 1"),
        ({"review_below": "fox=0.5,fox=0.6"}, "names each question once"),
        ({"review_below": "fox=0.5"}, "it has a floor for fox, which this job does not ask\nit asks answer"),
        ({"review_below": "fax=0.5", "questions": "q.yaml"}, "it has a floor for fax"),
        ({"review_below": "0.5", "review": "look.xlsx"}, "unknown ending of --review look.xlsx"),
        ({"review_below": "in.parquet"}, "neither a number from 0 to 1 nor a file of floors"),
    ],
)
def test_floors_that_mean_nothing_are_refused(
    model: Path, more: dict[str, Any], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert score(make_input(), **flags(model, **more))["exit_code"] == 2
    assert said in capfd.readouterr().err
    assert not Path("out.parquet").exists()


def test_a_file_for_answers_in_doubt_needs_a_floor() -> None:
    with pytest.raises(UsageError, match="--review needs --review-below"):
        load_settings(ScoreSettings, {"inputs": ["in.parquet"], "review": "look.jsonl"}, environment={})


def test_floors_are_for_the_answers_of_a_job() -> None:
    assert floors_of({"": {None: 0.9}}, {"a": ("x", "y"), "b": ("z",)}) == {"a": (0.9, 0.9), "b": (0.9,)}
    assert floors_of({"a": {"x": 0.9, "y": None}}, {"a": ("y", "x", "w")}) == {"a": (None, 0.9, None)}
    with pytest.raises(UsageError, match="a has no answer 'q'"):
        floors_of({"a": {"q": 0.9}}, {"a": ("x", "y")})
    assert read_floors("0.9") == ({"": {None: 0.9}}, None)
    assert read_floors("a=0.9, b=1") == ({"a": {None: 0.9}, "b": {None: 1.0}}, None)


def test_an_output_without_rows_in_doubt_has_an_empty_file(model: Path) -> None:
    given = flags(model, limit=ROWS - 1, review_below="0", review="look.parquet")
    assert score(make_input(), **given)["exit_code"] == 0
    assert pq.read_table("look.parquet").num_rows == 0
    assert pq.read_schema("look.parquet").names[-1] == "review"


def test_right_answers_are_those_that_the_job_names_and_of_a_copy_true_or_false(model: Path) -> None:
    words = ("fox", "dog")
    entry = {"name": "animal", "template": "{{ prompt }} The animal is a", "labels": list(words)}
    Path("q.json").write_text(json.dumps({"questions": [entry]}))
    given = {"questions": "q.json", "model": model, "truth": "animal=right", "output": "s.parquet"}
    source = write_parquet("in.parquet", prompt=texts(ROWS), right=[words[at % 2] for at in range(ROWS)])
    assert score(source, **given)["exit_code"] == 0
    pq.write_table(pq.read_table("s.parquet").replace_schema_metadata(None), "copy.parquet")
    found = {}
    for path in ("s.parquet", "copy.parquet"):
        done = CliRunner().invoke(app, ["calibrate", path, "--truth", "animal=right", "--accuracy", "0.6", "--quiet"])
        found[path] = json.loads(done.stdout.splitlines()[-1])
    (entry,) = found["s.parquet"]["questions"]["animal"]["floors"]
    rows = read_output("s.parquet")
    assert entry["rows"] == ROWS
    best = [max(row["animal"], 1 - row["animal"]) for row in rows]
    if entry["floor"] is not None:
        accepted = [row for row, top in zip(rows, best, strict=True) if top >= entry["floor"]]
        wrong = [row for row in accepted if words[row["animal"] < 0.5] != row["right"]]
        assert (entry["accepted"], entry["errors"]) == (len(accepted), len(wrong))
    said = "--truth animal=right: none of its values is a label: dog (30 rows); fox (30 rows)"
    assert said in found["copy.parquet"]["error"]
