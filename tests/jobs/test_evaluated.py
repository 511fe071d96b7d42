"""`--truth COLUMN`: the report says what the scores are worth, by the figures that scikit-learn gives."""

from __future__ import annotations

import html
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import (
    accuracy_score,
    average_precision_score,
    brier_score_loss,
    confusion_matrix,
    log_loss,
    roc_auc_score,
)

from prefillcli.judging.calibration import PlattScaling
from tests.jobs.jobs import read_output, read_report, score, texts, write_jsonl, write_parquet
from tests.jobs.processes import Command, Hold, cut_small_windows
from tests.jobs.test_calibrated import save
from tests.jobs.test_shards import merge

ROWS = 70
BAD = (5, 30)  # rows without a prompt
UNKNOWN = (0, 7, 40)  # rows without a right answer
SECRET = "<b>account of Mrs Doe</b>\x1b[31m"
ANSWER = "prefillcli.engines.torch:TorchEngine.answer"


def answers(positive: Any = "Yes", negative: Any = "No", *, unknown: Any = None) -> list[Any]:
    rng = random.Random(1)
    drawn = [positive if rng.random() < 0.4 else negative for _ in range(ROWS)]
    return [unknown if at in UNKNOWN else value for at, value in enumerate(drawn)]


def prompts() -> list[str | None]:
    return [None if at in BAD else text for at, text in enumerate(texts(ROWS))]


def make_input(kind: str = "parquet", truth: Sequence[Any] | None = None, **columns: list[Any]) -> Path:
    given = {"prompt": prompts(), "id": [f"r{at}" for at in range(ROWS)], "truth": truth or answers(), **columns}
    if kind == "parquet":
        return write_parquet("in.parquet", **given)
    return write_jsonl("in.jsonl", [dict(zip(given, row, strict=True)) for row in zip(*given.values(), strict=True)])


def evaluated(source: Path, model: Path, output: str = "out.parquet", **more: Any) -> dict[str, Any]:
    """The evaluation of a job that came to its end."""
    summary = score(source, output, model=model, truth="truth", max_error_rate=0.5, **more)
    assert summary["exit_code"] == 0, summary
    found = read_report(summary["report"])["evaluations"]["answer"]
    line = {"rows": found["rows"], "accuracy": found["accuracy"]["value"], "auc": found["auc"]["value"]}
    rows = {value["label"]: 0 for value in found["truth_values"] if value["label"] is not None}
    for value in found["truth_values"]:
        if value["label"] is not None:
            rows[value["label"]] += value["rows"]
    commonest = summary["evaluations"]["answer"].pop("commonest", None)
    assert commonest == (pytest.approx(max(rows.values()) / found["rows"]) if found["rows"] else None)
    assert summary["evaluations"]["answer"] == line
    return found


def assert_equals_scikit_learn(found: dict[str, Any], rows: list[dict[str, Any]], positive: Sequence[Any]) -> None:
    known = [row for at, row in enumerate(rows) if at not in (*BAD, *UNKNOWN)]
    truth = np.array([row["truth"] in positive for row in known])
    scores = np.array([row["score"] for row in known])
    assert (found["rows"], found["without_truth"], found["errors"]) == (len(known), len(UNKNOWN), len(BAD))
    assert found["accuracy"]["value"] == pytest.approx(accuracy_score(truth, scores >= 0.5))
    assert found["auc"]["value"] == pytest.approx(roc_auc_score(truth, scores))
    assert found["average_precision"]["value"] == pytest.approx(average_precision_score(truth, scores))
    assert found["brier"]["value"] == pytest.approx(brier_score_loss(truth, scores))
    predicted = [row["prediction"] != "Yes" for row in known]
    assert found["confusion"] == confusion_matrix(~truth, predicted, labels=[False, True]).tolist()


@pytest.mark.parametrize(("kind", "output"), [("parquet", "out.jsonl.gz"), ("jsonl", "parts/")])
def test_the_figures_are_those_of_the_output(model: Path, kind: str, output: str) -> None:
    found = evaluated(make_input(kind), model, output, id_column="id")
    assert_equals_scikit_learn(found, read_output(output), ["Yes"])
    assert found["truth"] == "truth"
    assert found["labels"] == ["Yes", "No"]


@pytest.mark.parametrize(
    ("kind", "positive", "negative"),
    [("parquet", True, False), ("parquet", 1.0, 0.0), ("jsonl", 1, 0), ("jsonl", " Yes ", "No")],
)
def test_the_truth_may_be_a_label_a_truth_value_or_a_number(
    model: Path, kind: str, positive: Any, negative: Any
) -> None:
    found = evaluated(make_input(kind, answers(positive, negative)), model)
    assert_equals_scikit_learn(found, read_output("out.parquet"), [positive])
    assert {(value["value"], value["label"]) for value in found["truth_values"]} == {
        (json.dumps(positive), "Yes"),
        (json.dumps(negative), "No"),
    }


def test_other_answers_are_left_out_and_counted(model: Path) -> None:
    found = evaluated(make_input("jsonl", answers(unknown="perhaps")), model)
    assert_equals_scikit_learn(found, read_output("out.parquet"), ["Yes"])
    assert found["truth_values"][-1] == {"value": '"perhaps"', "label": None, "rows": len(UNKNOWN)}


def test_of_many_values_of_the_truth_column_twenty_are_named(model: Path) -> None:
    many = [f"other {at}" if at < 40 else value for at, value in enumerate(answers())]
    found = evaluated(make_input("jsonl", many), model)
    assert len(found["truth_values"]) == 20
    assert {value["label"] for value in found["truth_values"][:2]} == {"Yes", "No"}


def test_a_column_without_a_label_is_refused_before_the_model_is_loaded(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("prefillcli.scoring.score.ScoreJob._load_models", None)
    source = make_input("jsonl", answers("positive", "negative"))
    assert score(source, model=model, truth="truth", max_error_rate=0.5)["exit_code"] == 2
    message = capsys.readouterr().err
    for part in ("--truth truth", "positive (", "negative (", "Yes, No"):
        assert part in message
    assert len(message.splitlines()) <= 3


def test_a_column_whose_later_windows_have_no_label_either_is_refused_at_the_end(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cut_small_windows(monkeypatch)
    monkeypatch.setattr("prefillcli.judging.evaluation._LOOKED_AT", 30)
    truth = [None if at < 40 else "perhaps" for at in range(ROWS)]
    summary = score(make_input("parquet", truth), model=model, truth="truth", max_error_rate=0.5)
    assert summary["exit_code"] == 2
    assert "perhaps (30 rows)" in capsys.readouterr().err
    assert len(read_output("out.parquet")) == ROWS, "the scores are there"


def test_without_any_answer_there_are_reasons(model: Path) -> None:
    found = evaluated(make_input("parquet", [None] * 69 + ["Yes"]), model, limit=60)
    assert (found["rows"], found["without_truth"]) == (0, 58)
    assert found["auc"] == {"value": None, "interval": None, "reason": "there are no such rows"}
    assert "there are no such rows" not in Path("out.run.html").read_text()


def test_answers_of_one_kind_have_no_area(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = evaluated(make_input("parquet", ["No"] * ROWS), model, quiet=False)
    assert found["auc"]["value"] is None
    assert found["auc"]["reason"] == "Yes is the right answer of no row"
    assert found["accuracy"]["value"] is not None
    assert "none: Yes is the right answer of no row" in " ".join(capsys.readouterr().err.split())


def test_several_labels_are_evaluated_each_against_the_rest(model: Path) -> None:
    labels = ["Yes", "No", "yes"]
    truth = [random.Random(at).choice(labels) for at in range(ROWS)]
    found = evaluated(make_input("jsonl", truth), model, labels="Yes,No,yes= yes", temperature=2.0)
    rows = [row for at, row in enumerate(read_output("out.parquet")) if at not in BAD]
    right = np.array([labels.index(row["truth"]) for row in rows])
    raw = np.array([[row[f"logprob_{label}"] / 2 for label in labels] for row in rows])
    probabilities = np.exp(raw) / np.exp(raw).sum(axis=1, keepdims=True)
    areas = [roc_auc_score(right == at, probabilities[:, at]) for at in range(3)]
    assert [each["auc"]["value"] for each in found["by_label"]] == pytest.approx(areas)
    assert found["auc"]["value"] == pytest.approx(np.mean(areas))
    predicted = [labels.index(row["prediction"]) for row in rows]
    assert found["confusion"] == confusion_matrix(right, predicted, labels=[0, 1, 2]).tolist()
    brier = brier_score_loss(right, probabilities, labels=[0, 1, 2], scale_by_half=False)
    assert found["brier"]["value"] == pytest.approx(brier)
    assert found["threshold"] is None
    assert {row["truth"] for row in found["near_threshold"]} <= set(labels)


def test_scores_of_divided_log_probabilities_are_evaluated_as_they_are(model: Path) -> None:
    labels = ["Yes", "a quick fox", "No"]
    truth = [labels[at % 3] for at in range(ROWS)]
    found = evaluated(make_input("jsonl", truth), model, labels=",".join(labels), label_norm="bytes")
    rows = [row for at, row in enumerate(read_output("out.parquet")) if at not in BAD]
    assert found["accuracy"]["value"] == np.mean([row["prediction"] == row["truth"] for row in rows])
    areas = [
        roc_auc_score([row["truth"] == name for row in rows], [row[f"score_{name}"] for row in rows])
        for name in labels
    ]
    assert [each["auc"]["value"] for each in found["by_label"]] == pytest.approx(areas)
    whole = [max(labels, key=lambda name: row[f"logprob_{name}"]) for row in rows]
    assert whole != [row["prediction"] for row in rows]


def test_the_named_rows_are_the_surest_wrong_ones_and_those_near_the_threshold(model: Path) -> None:
    found = evaluated(make_input(), model, id_column="id")
    rows = [row for at, row in enumerate(read_output("out.parquet")) if at not in (*BAD, *UNKNOWN)]
    sure = {row["id"]: max(row["score"], 1 - row["score"]) for row in rows if row["prediction"] != row["truth"]}
    best = sorted(sure.values(), reverse=True)[:20]
    assert [row["probability"] for row in found["surest_wrong"]] == pytest.approx(best)
    for row in found["surest_wrong"]:
        assert row["probability"] == pytest.approx(sure[row["id"]])
        assert row["truth"] != row["prediction"]
    near = sorted(abs(row["score"] - 0.5) for row in rows if 0.25 <= row["score"] <= 0.75)[:20]
    assert [abs(row["score"] - 0.5) for row in found["near_threshold"]] == pytest.approx(near)
    assert {row["row"] for row in found["near_threshold"]} == {None}


@pytest.mark.parametrize("reached", [True, False])
def test_the_wanted_precision_is_reached_or_not(
    model: Path, capsys: pytest.CaptureFixture[str], reached: bool
) -> None:
    rows = score(make_input(), model=model, max_error_rate=0.5) and read_output("out.parquet")
    scored = [row["score"] for row in rows if row["score"] is not None]
    middle = float(np.median(scored))
    better = [row["score"] is not None and (row["score"] > middle) == reached for row in rows]
    truth = ["Yes" if yes else "No" for yes in better]
    found = evaluated(make_input(truth=truth), model, overwrite=True, wanted_precision=1.0, quiet=False)
    shown = " ".join(capsys.readouterr().err.split())
    wanted = found["wanted_precision"]
    if reached:
        assert wanted["reached"]["threshold"] == min(each for each in scored if each > middle)
        assert (wanted["reached"]["precision"], wanted["reached"]["recall"]) == (1, 1)
        assert found["threshold"] == wanted["reached"]["threshold"]
        assert "precision 1 at scores from" in shown
    else:
        assert wanted["reached"] is None
        assert found["threshold"] == 0.5
        assert "not reached: the most precise threshold gives 0." in shown


@pytest.mark.parametrize(("kind", "id_column"), [("parquet", "id"), ("jsonl", None)])
def test_texts_are_shown_only_if_they_are_asked_for(model: Path, kind: str, id_column: str | None) -> None:
    shots = "One shot, which every row begins with. "
    own = [None if at in BAD else f"{shots}{at} {SECRET}\nAnswer:" for at in range(ROWS)]
    source = make_input(kind, prompt=own)
    flags = {"id_column": id_column}
    hidden = evaluated(source, model, **flags)
    assert "Mrs Doe" not in Path("out.run.json").read_text()
    page = Path("out.run.html").read_text()
    assert page.count("Mrs Doe") == 1, "one prompt as the model read it, and no other text"
    assert html.escape(f"{shots}0 {SECRET}").replace("\x1b", "␛") in page, "that of the first row"
    assert "<b>account" not in page
    assert "\x1b" not in page
    shown = evaluated(source, model, show_text=True, resume=True, **flags)
    assert {**hidden, "near_threshold": None, "surest_wrong": None} == {
        **shown, "near_threshold": None, "surest_wrong": None,
    }  # fmt: skip
    for row in (*shown["near_threshold"], *shown["surest_wrong"]):
        number = int(row["id"][1:]) if id_column else row["row"]
        assert row["text"].startswith("…")
        assert row["text"].removeprefix("…").replace(" ", "") in own[number].replace(" ", "")
        assert "Mrs Doe" in row["text"]
        assert "One shot" not in row["text"], "what all rows begin with is left out"
    page = Path("out.run.html").read_text()
    assert "Mrs Doe" in page
    assert "<b>account" not in page
    assert "\x1b" not in page


def test_a_job_that_was_killed_is_evaluated_whole(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cut_small_windows(monkeypatch)
    source = make_input()
    whole = evaluated(source, model, "whole.parquet", id_column="id", pack_tokens=64)
    arguments = ["score", source, "-m", model, "--id-column", "id", "--truth", "truth", "--max-error-rate", 0.5]
    command = Command(*arguments, "--pack-tokens", 64, "-o", "out.parquet", hold=Hold(ANSWER, 4))
    command.wait_until_held()
    command.kill()
    found = evaluated(source, model, id_column="id", pack_tokens=64, resume=True)
    assert found["auc"]["value"] == pytest.approx(whole["auc"]["value"])
    assert found["rows"] == whole["rows"]
    assert_equals_scikit_learn(found, read_output("out.parquet"), ["Yes"])


def test_merged_shards_are_evaluated_like_one_output(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cut_small_windows(monkeypatch)
    source = make_input("jsonl")
    flags = {"id_column": "id", "temperature": 1.5}
    whole = evaluated(source, model, "whole.parquet", **flags)
    for number in (1, 2):
        done = score(source, model=model, truth="truth", max_error_rate=0.5, shard=f"{number}/2", **flags)
        assert "evaluations" not in done
        assert "evaluations" not in read_report(done["report"])
    assert merge()["evaluations"]["answer"]["rows"] == whole["rows"]
    merged = read_report()["evaluations"]["answer"]
    for again in (merged, merge() and read_report()["evaluations"]["answer"]):
        assert again["confusion"] == whole["confusion"]
        assert again["auc"]["value"] == pytest.approx(whole["auc"]["value"])
        assert again["log_loss"]["value"] == pytest.approx(whole["log_loss"]["value"], abs=1e-5)
        assert [row["id"] for row in again["surest_wrong"]] == [row["id"] for row in whole["surest_wrong"]]


def test_calibrated_probabilities_are_evaluated_beside_the_scores(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = evaluated(make_input(), model, calibration=save(), quiet=False)
    known = [row for at, row in enumerate(read_output("out.parquet")) if at not in (*BAD, *UNKNOWN)]
    truth = np.array([row["truth"] == "Yes" for row in known])
    probabilities = np.array([row["probability"] for row in known])
    assert_equals_scikit_learn(found, read_output("out.parquet"), ["Yes"])
    calibrated = found["calibrated"]
    assert calibrated["brier"]["value"] == pytest.approx(brier_score_loss(truth, probabilities))
    assert calibrated["log_loss"]["value"] == pytest.approx(log_loss(truth, probabilities))
    assert calibrated["accuracy"]["value"] == pytest.approx(accuracy_score(truth, probabilities >= 0.5))
    assert sum(each["rows"] for each in calibrated["reliability"]) == len(known)
    assert calibrated["brier"]["value"] != found["brier"]["value"]
    assert "calibrated error 0." in " ".join(capsys.readouterr().err.split())
    assert "<h3>Reliability, calibrated</h3>" in Path("out.run.html").read_text()


def test_merged_shards_of_several_labels_are_evaluated_calibrated_too(model: Path) -> None:
    labels = ("Yes", "No", "yes")
    scaling = PlattScaling(slope=0.5, biases=(0.7, 0.0, -0.3))
    source, calibration = make_input(), save(scaling=scaling, labels=labels)
    for number in (1, 2):
        flags = {"labels": labels, "calibration": calibration, "shard": f"{number}/2"}
        assert score(source, model=model, truth="truth", max_error_rate=0.5, **flags)["exit_code"] == 0
    assert merge()["exit_code"] == 0
    known = [row for at, row in enumerate(read_output("out.parquet")) if at not in (*BAD, *UNKNOWN)]
    truth = [labels.index(row["truth"]) for row in known]
    probabilities = np.array([[row[f"probability_{label}"] for label in labels] for row in known])
    calibrated = read_report()["evaluations"]["answer"]["calibrated"]
    assert calibrated["accuracy"]["value"] == pytest.approx(accuracy_score(truth, probabilities.argmax(axis=1)))
    assert calibrated["log_loss"]["value"] == pytest.approx(log_loss(truth, probabilities, labels=[0, 1, 2]))


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"truth": "truth", "wanted_precision": 0.9, "labels": "Yes,No,yes"}, ["--wanted-precision", "two labels"]),
        ({"truth": "nowhere"}, ["'nowhere'", "available"]),
    ],
)
def test_what_has_no_effect_or_is_not_there_is_refused(
    model: Path, capsys: pytest.CaptureFixture[str], flags: dict[str, Any], named: list[str]
) -> None:
    assert score(make_input(), model=model, **flags)["exit_code"] == 2
    message = capsys.readouterr().err
    assert all(part in message for part in named), message
