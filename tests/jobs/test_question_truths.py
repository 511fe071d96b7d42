"""Jobs with `--questions` and `--truth`: what the scores of each question are worth, and how they go together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scipy.special import softmax
from scipy.stats import spearmanr
from sklearn.metrics import accuracy_score, roc_auc_score

from prefillcli.errors import UsageError
from prefillcli.judging.calibration import Calibration, PlattScaling
from prefillcli.options.commands import CalibrateSettings
from prefillcli.options.load import load_settings
from prefillcli.tools.calibrate import calibrate_job
from tests.jobs.answers import likeliest, shares_of
from tests.jobs.jobs import read_output, read_report, score, write_jsonl, write_parquet
from tests.jobs.processes import cut_small_windows
from tests.jobs.test_questions import FILE, TEXTS
from tests.jobs.test_shards import merge

FOX = ("Yes", "No")
TONES = ("very quick", "not quick at all", "brown")
STARS = """
  - name: rating
    text: "\\nStars:"
    labels: [1, 2, 3]
    values: [1, 2, 5]
"""
TRUTH = "fox=is_fox, tone=right_tone,rating=stars"


def make_input(kind: str = "parquet") -> Path:
    Path("q.yaml").write_text(FILE.replace("fox > 0.5", "fox > 0.1") + STARS)
    rows = [
        {
            "text": text,
            "kind": "fable" if at % 3 else "news",
            "is_fox": None if at == 7 else at % 4 != 0,
            "right_tone": TONES[at % 3],
            "stars": [1.0, 2.0, 3.5, 5.0][at % 4],
        }
        for at, text in enumerate(TEXTS)
    ]
    if kind == "jsonl":
        return write_jsonl("in.jsonl", rows)
    return write_parquet("in.parquet", **{name: [row[name] for row in rows] for name in rows[0]})


def assert_evaluated(report: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """The figures of each question are those of its columns; `tone` is asked of some rows alone."""
    found = report["evaluations"]
    assert list(found) == ["fox", "tone", "rating"]
    known = [row for row in rows if row["is_fox"] is not None]
    truth = [row["is_fox"] for row in known]
    assert found["fox"]["auc"]["value"] == pytest.approx(roc_auc_score(truth, [row["fox"] for row in known]))
    assert (found["fox"]["rows"], found["fox"]["without_truth"]) == (29, 1)
    asked = [row for row in rows if row["tone"] is not None]
    assert (found["tone"]["rows"], found["tone"]["errors"]) == (len(asked), 30 - len(asked))
    predicted = [row["tone"] for row in asked]
    wanted = accuracy_score([row["right_tone"] for row in asked], predicted)
    assert found["tone"]["accuracy"]["value"] == pytest.approx(wanted)
    means = [row["rating"] for row in rows]
    ordered = found["rating"]["ordered"]
    assert ordered["rows"] == 30
    right = np.array([row["stars"] for row in rows])
    assert ordered["mean"]["spearman"]["value"] == pytest.approx(spearmanr(means, right).statistic)
    numbers = np.array([{"1": 1, "2": 2, "3": 5}[likeliest(row, "rating", ("1", "2", "3"))] for row in rows])
    assert ordered["likeliest"]["mean_error"]["value"] == pytest.approx(np.abs(numbers - right).mean())


def assert_correlated(found: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    names = ["fox", "tone", "genre", "rating"]
    labels = {"fox": FOX, "tone": TONES, "genre": FOX, "rating": ("1", "2", "3")}
    first = {
        name: [None if row[name] is None else shares_of(row, name, labels[name])[0] for row in rows] for name in names
    }
    assert found["questions"] == names
    for at, one in enumerate(names):
        for other_at, other in enumerate(names):
            known = np.array([pair for pair in zip(first[one], first[other], strict=True) if None not in pair])
            assert found["rows"][at][other_at] == len(known)
            assert found["spearman"][at][other_at] == pytest.approx(spearmanr(*known.T).statistic)
    assert found["rows"][0][1] < found["rows"][0][2] == 30


@pytest.mark.parametrize(("kind", "output"), [("parquet", "out.jsonl"), ("jsonl", "out.parquet")])
def test_each_question_is_held_against_its_own_right_answers(
    model: Path, capsys: pytest.CaptureFixture[str], kind: str, output: str
) -> None:
    flags = {"questions": "q.yaml", "truth": TRUTH, "quiet": False}
    done = score(make_input(kind), output, model=model, **flags)
    assert done["exit_code"] == 0
    report, rows = read_report(), read_output(output)
    assert_evaluated(report, rows)
    assert_correlated(report["correlations"], rows)
    assert done["evaluations"]["fox"]["auc"] == report["evaluations"]["fox"]["auc"]["value"]
    shown = " ".join(capsys.readouterr().err.split())
    for said in ("fox accuracy", "tone accuracy", "rating mean, as a number", "strongest correlation"):
        assert said in shown
    page = Path("out.run.html").read_text()
    for title in ("Evaluation of fox", "Evaluation of tone", "Correlation between questions"):
        assert title in page


def test_merged_shards_are_evaluated_question_by_question(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cut_small_windows(monkeypatch)
    source = make_input()
    for number in (1, 2):
        flags = {"shard": f"{number}/2", "questions": "q.yaml", "truth": TRUTH, "label_norm": "tokens"}
        assert score(source, model=model, **flags)["exit_code"] == 0
    for _ in range(2):  # the output of a merge is evaluated again
        merge()
        assert_evaluated(read_report(), read_output("out.parquet"))
        assert_correlated(read_report()["correlations"], read_output("out.parquet"))


def test_the_rows_that_are_named_have_the_text_of_their_question(model: Path) -> None:
    assert score(make_input(), model=model, questions="q.yaml", truth=TRUTH, show_text=True)["exit_code"] == 0
    found = read_report()["evaluations"]
    for name, end in (("fox", "Is it a fox? Answer:"), ("tone", "The dog was"), ("rating", "Stars:")):
        assert found[name]["surest_wrong"]
        for row in found[name]["surest_wrong"]:
            assert row["text"].endswith(end)


@pytest.mark.parametrize(
    ("truth", "said"),
    [
        ("is_fox", "there are fox, tone, genre, rating: write it like fox=is_fox"),
        ("fox=is_fox,fox=right_tone", "the column of each question once"),
        ("fox=is_fox,right_tone", "the column of each question once"),
        ("fox=", "the column of each question once"),
        ("", "must be a column"),
        ("fax=is_fox", "no question 'fax'; did you mean 'fox'?"),
        ("fox=nowhere", "'nowhere'"),
        ("fox=right_tone", "--truth fox=right_tone: none of its values is a label"),
    ],
)
def test_a_truth_that_is_of_no_question_is_refused(
    model: Path, capsys: pytest.CaptureFixture[str], truth: str, said: str
) -> None:
    try:
        assert score(make_input(), model=model, questions="q.yaml", truth=truth)["exit_code"] == 2
        message = capsys.readouterr().err
    except UsageError as error:
        message = str(error)
    assert said in message


def test_a_question_in_both_orders_is_evaluated_by_its_mean_scores(model: Path) -> None:
    make_input()
    question = "{name: better, template: '{{ text }} or {{ kind }}:', labels: [A, B, tie], swap: [text, kind]}"
    Path("q.yaml").write_text(f"questions: [{question}]")
    table = pq.read_table("in.parquet")
    truth = ["A" if at % 2 else "tie" for at in range(len(table))]
    pq.write_table(table.append_column("right", pa.array(truth)), "in.parquet")
    assert score("in.parquet", model=model, questions="q.yaml", truth="better=right")["exit_code"] == 0
    report, rows = read_report(), read_output("out.parquet")
    found = report["evaluations"]["better"]
    assert found["accuracy"]["value"] == np.mean([row["better"] == row["right"] for row in rows])
    area = roc_auc_score([each == "tie" for each in truth], [row["better.probabilities"]["tie"] for row in rows])
    assert found["by_label"][2]["auc"]["value"] == pytest.approx(area)
    assert "correlations" not in report


def fit(scores: str, **flags: Any) -> dict[str, Any]:
    given = {"scores": scores, "quiet": True, **flags}
    return calibrate_job(load_settings(CalibrateSettings, given, environment={}))


def make_labelled() -> Path:
    """Twice the rows, which is enough for a calibration."""
    make_input()
    table = pq.read_table("in.parquet")
    pq.write_table(pa.concat_tables([table, table]), "in.parquet")
    return Path("in.parquet")


@pytest.mark.parametrize(
    ("question", "column", "output"), [("fox", "is_fox", "s.jsonl"), ("genre", "right_tone", "s.parquet")]
)
def test_the_scores_of_one_question_are_calibrated(model: Path, output: str, question: str, column: str) -> None:
    flags: dict[str, Any] = {"model": model, "questions": "q.yaml", "truth": TRUTH}
    source = make_labelled()
    tones = Path("q.yaml").read_text().replace('"Yes= Yes|yes,No"', "[very quick, not quick at all, brown]")
    Path("q.yaml").write_text(tones)
    assert score(source, output, **flags)["exit_code"] == 0
    assert fit(output, truth=f"{question}={column}", method="platt")["exit_code"] == 0
    rows = read_output(output)
    labels = ["Yes", "No"] if question == "fox" else list(TONES)
    found = json.loads(Path("calibration.json").read_text())
    assert (found["question"], found["labels"]) == (question, labels)
    assert found["fitted_on"]["rows"] == sum(row[column] is not None for row in rows)
    logprobs = np.log([shares_of(row, question, labels) for row in rows])
    wanted = softmax(found["scaling"]["slope"] * logprobs + found["scaling"]["biases"], axis=1)
    flags["truth"] = f"genre=right_tone,{TRUTH}"
    assert score(source, calibration="calibration.json", **flags)["exit_code"] == 0
    calibrated = read_output("out.parquet")
    told = [row[f"{question}.calibrated"] for row in calibrated]
    if question == "fox":
        assert told == pytest.approx(wanted[:, 0], abs=1e-6)
    else:
        assert [list(each) for each in told] == [labels] * len(told)
        assert np.array([list(each.values()) for each in told]) == pytest.approx(wanted, abs=1e-6)
    assert sum(name.endswith(".calibrated") for name in calibrated[0]) == 1
    known = [at for at, row in enumerate(calibrated) if row[column] is not None]
    answers = {True: "Yes", False: "No"}
    right = [labels.index(answers.get(rows[at][column], rows[at][column])) for at in known]
    report = read_report()
    accuracy = np.mean(wanted[known].argmax(axis=1) == right)
    assert report["evaluations"][question]["calibrated"]["accuracy"]["value"] == pytest.approx(accuracy)
    assert report["evaluations"]["rating"]["calibrated"] is None
    assert list(report["calibrations"]) == [question]


@pytest.mark.parametrize("question", ["fox", "genre"])
def test_the_temperature_of_the_scores_has_no_part_in_a_calibration(model: Path, question: str) -> None:
    source = make_labelled()
    tones = Path("q.yaml").read_text().replace('"Yes= Yes|yes,No"', "[very quick, not quick at all, brown]")
    Path("q.yaml").write_text(tones)
    column = "is_fox" if question == "fox" else "right_tone"
    flags = {"questions": "q.yaml", "truth": f"genre=right_tone,{TRUTH}"}
    scalings = []
    for at, temperature in enumerate((1.0, 3.0)):
        assert score(source, f"{at}.parquet", model=model, temperature=temperature, **flags)["exit_code"] == 0
        assert fit(f"{at}.parquet", truth=f"{question}={column}", method="platt")["exit_code"] == 0
        found = json.loads(Path("calibration.json").read_text())["scaling"]
        scalings.append([found["slope"], *found["biases"]])
    assert scalings[1] == pytest.approx(scalings[0], abs=1e-3)


def test_an_evaluation_is_of_the_probabilities_that_the_output_has(model: Path) -> None:
    flags = {"questions": "q.yaml", "truth": TRUTH, "temperature": 5.0}
    assert score(make_input(), model=model, **flags)["exit_code"] == 0
    asked = [row for row in read_output("out.parquet") if row["tone"] is not None]
    losses = [-np.log(row["tone.probabilities"][row["right_tone"]]) for row in asked]
    assert read_report()["evaluations"]["tone"]["log_loss"]["value"] == pytest.approx(np.mean(losses))


def test_a_calibration_is_for_its_question_and_for_these_questions(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags: dict[str, Any] = {"model": model, "questions": "q.yaml", "truth": TRUTH}
    source = make_labelled()
    assert score(source, "s.parquet", **flags)["exit_code"] == 0
    assert fit("s.parquet", truth="is_fox")["exit_code"] == 2
    said = "--truth is_fox: it is of one of several questions\nthere are fox, tone, genre, rating: write it like fox="
    assert said in capsys.readouterr().err
    assert fit("s.parquet", truth="fix=is_fox")["exit_code"] == 2
    assert "no question 'fix'; did you mean 'fox'?" in capsys.readouterr().err
    assert fit("s.parquet", truth="fox=is_fox,genre=right_tone")["exit_code"] == 2
    assert "a calibration is of one question\nname its column, like --truth fox=is_fox" in capsys.readouterr().err
    assert fit("s.parquet", truth="fox=is_fox")["exit_code"] == 0
    capsys.readouterr()
    alone = {"model": model, "template": "{{ text }}", "calibration": "calibration.json"}
    assert score(source, **alone)["exit_code"] == 2
    assert "it is for the question fox, which this job does not ask" in capsys.readouterr().err
    Path("q.yaml").write_text(Path("q.yaml").read_text().replace("Is it a fox?", "Is it a dog?"))
    assert score(source, calibration="calibration.json", **flags)["exit_code"] == 2
    said = "it was fitted on scores with another prompt settings and another set of questions"
    assert said in capsys.readouterr().err


def test_a_question_in_both_orders_has_no_calibration(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = make_labelled()
    question = "{name: fox, template: '{{ text }} or {{ kind }}:', labels: [Yes, No], swap: [text, kind]}"
    Path("q.yaml").write_text(f"questions: [{question}]")
    assert score(source, "s.parquet", model=model, questions="q.yaml", truth="fox=is_fox")["exit_code"] == 0
    assert fit("s.parquet", truth="fox=is_fox")["exit_code"] == 2
    assert "asked in both orders" in capsys.readouterr().err
    scaling = PlattScaling(slope=0.5, biases=(0.7, 0.0))
    made = Calibration(labels=("Yes", "No"), question="fox", scaling=scaling)
    Path("c.json").write_text(made.model_dump_json())
    assert score(source, model=model, questions="q.yaml", calibration="c.json")["exit_code"] == 2
    assert "the question fox is asked in both orders" in capsys.readouterr().err
