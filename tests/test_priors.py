"""`prefill calibrate --prior rows`: the mean of an output's rows by numpy, what it does to right answers, and what is
refused, without a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.special import log_softmax, softmax
from sklearn.metrics import accuracy_score, log_loss
from sklearn.model_selection import StratifiedKFold
from typer.testing import CliRunner

from prefillcli.cli import app
from prefillcli.errors import UsageError
from prefillcli.judging.calibration import Calibration, CalibrationSet, read_calibrations
from tests.jobs.jobs import write_jsonl, write_parquet
from tests.test_calibrate import columns, rows_of
from tests.unit.stats.test_calibration import sampled

ABC = ("a", "b", "c")


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(*words: str, scores: str = "s.parquet") -> tuple[dict[str, Any], str]:
    """The summary, and what was said on stderr."""
    done = CliRunner().invoke(app, ["calibrate", scores, "-o", "prior.json", *words])
    line = json.loads(done.stdout.splitlines()[-1])
    assert line["exit_code"] == done.exit_code
    return line, done.stderr


def take(*words: str, scores: str = "s.parquet") -> tuple[dict[str, Any], str]:
    return run("--prior", "rows", *words, scores=scores)


def made() -> Calibration:
    (found,) = read_calibrations("prior.json", None)
    return found


def logs_of(table: dict[str, list[Any]], labels: tuple[str, ...]) -> np.ndarray:
    return np.array([table[f"logprob_{label}"] for label in labels]).T


def leaning(rows: int, labels: tuple[str, ...], *, bias: Any, seed: int = 0) -> dict[str, list[Any]]:
    """Rows with right answers, by a model that also leans to some labels."""
    table = columns(rows, labels, seed=seed)
    own = log_softmax(logs_of(table, labels) + np.array(bias), axis=1)
    shares = np.exp(own)
    table |= {f"logprob_{label}": own[:, at].tolist() for at, label in enumerate(labels)}
    return table | {"score": shares[:, 0].tolist()}


@pytest.mark.parametrize("labels", [("Yes", "No"), ABC])
@pytest.mark.parametrize("ending", ["parquet", "jsonl"])
def test_the_mean_log_share_of_the_rows_is_taken_out(labels: tuple[str, ...], ending: str) -> None:
    table = leaning(60, labels, bias=[2.0, 0.5, -1.0][: len(labels)])
    del table["answer"]
    if ending == "parquet":
        write_parquet("s.parquet", **table)
    else:
        write_jsonl("s.jsonl", rows_of(table))
    line, said = take(scores=f"s.{ending}")
    assert line["exit_code"] == 0
    shares = log_softmax(logs_of(table, labels), axis=1)
    means = shares.mean(axis=0)  # Zhou et al.: the mean of the scores over the rows, subtracted from each of them
    found = made()
    assert list(line["questions"]["answer"]["prior"].values()) == pytest.approx(softmax(means), rel=1e-9)
    assert line["questions"]["answer"]["rows"] == 60
    np.testing.assert_allclose(found.probabilities(logs_of(table, labels)), softmax(shares - means, axis=1), rtol=1e-9)
    fitted = found.fitted_on
    assert fitted is not None
    assert (fitted.truth, fitted.rows, found.held_out, found.folds) == (None, 60, {}, None)
    own = np.bincount(shares.argmax(axis=1), minlength=len(labels))
    assert list(fitted.rows_by_label.values()) == own.tolist()
    for label, share in zip(labels, softmax(means), strict=True):
        assert any(text.split()[:3] == ["answer", label, f"{share:.4f}"] for text in said.splitlines())


def test_no_other_row_changes_what_a_row_gets() -> None:
    write_parquet("s.parquet", **leaning(60, ABC, bias=[2, 0, 0]))
    take()
    logs, _ = sampled(20, 3, seed=5)
    together = made().probabilities(logs)
    for at in range(20):
        assert np.array_equal(made().probabilities(logs[at : at + 1])[0], together[at])


def test_a_label_without_probability_weighs_no_more_than_a_column_can_tell() -> None:
    table = leaning(40, ("Yes", "No"), bias=[0, 0])
    table["logprob_Yes"][0], table["logprob_No"][0], table["score"][0] = -0.5, -np.inf, 1.0
    write_parquet("s.parquet", **table)
    assert take()[0]["exit_code"] == 0
    shares = log_softmax(logs_of(table, ("Yes", "No"))[1:], axis=1)
    least = np.array([0, -53 * np.log(2)])  # below 2^-53, 1 - p is 1
    wanted = softmax((shares.sum(axis=0) + least) / 40)
    assert list((made().prior or {}).values()) == pytest.approx(wanted, rel=1e-9)


def test_rows_without_an_answer_are_left_out_and_counted() -> None:
    table = leaning(30, ("Yes", "No"), bias=[1, 0])
    good = rows_of(table)
    none = dict.fromkeys(("score", "logprob_Yes", "logprob_No"))
    bad = [{**good[0], **none, "error": "null_prompt"}, {**good[0], "logprob_Yes": np.nan}, {**good[0], "score": 2.0}]
    write_parquet("s.parquet", **{name: [row[name] for row in [*bad, *good]] for name in good[0]})
    line, said = take()
    assert line["questions"]["answer"]["rows"] == 30
    assert made().fitted_on.left_out == {"whose answer has no probabilities": 2, "without an answer": 1}  # type: ignore[union-attr]
    left_out = "answer: 30 rows; left out: 2 whose answer has no probabilities; left out: 1 without an answer"
    assert left_out in " ".join(said.split())
    write_parquet("s.parquet", **table)
    scaling = made().scaling
    take()
    assert made().scaling == scaling


def test_right_answers_measure_it_on_rows_that_it_was_not_fitted_on() -> None:
    table = leaning(300, ("Yes", "No"), bias=[5, 0])
    answers = table["answer"]
    table["answer"] = [None if at % 3 == 0 else answer for at, answer in enumerate(answers)]
    write_parquet("s.parquet", **table)
    line, said = take("--truth", "answer", "--folds", "4", "--seed", "2")
    known = [at for at in range(300) if at % 3]
    shares = log_softmax(logs_of(table, ("Yes", "No")), axis=1)
    own, truth = shares[known], np.array([("Yes", "No").index(answers[at]) for at in known])
    held, losses = np.empty_like(own), []
    for fitted, rest in StratifiedKFold(4, shuffle=True, random_state=2).split(own, truth):
        held[rest] = softmax(own[rest] - own[fitted].mean(axis=0), axis=1)
        losses.append(log_loss(truth[rest], held[rest], labels=[0, 1]))
    found = made()
    batch, none = found.held_out["batch"], found.held_out["none"]
    assert batch.log_loss == pytest.approx(np.mean(losses), rel=1e-9)
    assert batch.log_loss_spread == pytest.approx(np.std(losses, ddof=1), rel=1e-9)
    assert batch.rows == none.rows == 200
    assert batch.accuracy == accuracy_score(truth, held.argmax(axis=1))
    assert batch.brier == pytest.approx(np.mean((held[:, 1] - truth) ** 2), rel=1e-9)
    assert none.accuracy == accuracy_score(truth, own.argmax(axis=1))
    assert batch.accuracy > none.accuracy + 0.1
    assert batch.log_loss < none.log_loss
    assert (line["questions"]["answer"]["before"], line["questions"]["answer"]["after"]) == (
        none.model_dump(), batch.model_dump())  # fmt: skip
    # The file has the prior of all rows, the table every method.
    assert list((found.prior or {}).values()) == pytest.approx(softmax(shares.mean(axis=0)), rel=1e-9)
    assert list(found.held_out) == ["none", "temperature", "platt", "isotonic", "batch"]
    for name, words in {"none": "scores as is", "platt": "platt", "batch": "prior taken out *"}.items():
        (shown,) = [text for text in said.splitlines() if text.startswith(words)]
        assert f"{found.held_out[name].log_loss:.4f}" in shown
    assert "hurts" not in said


def test_an_answer_that_really_is_common_is_warned_of_and_measured() -> None:
    logs = log_softmax(np.random.default_rng(0).normal([2, 0], 1, (200, 2)), axis=1)
    table = {"row": list(range(200)), "score": np.exp(logs[:, 0]).tolist()}
    table |= {"logprob_Yes": logs[:, 0].tolist(), "logprob_No": logs[:, 1].tolist()}
    share = np.mean(logs[:, 0] > logs[:, 1])
    assert share > 0.75
    write_parquet("s.parquet", **table)
    line, said = take()
    assert line["exit_code"] == 0
    assert f"the model answers Yes in {share:.0%} of rows; if Yes really is that common" in said
    assert "measure it on rows with right answers: --truth COLUMN" in said
    # No row is right with No, so there are too few right answers for the other methods.
    write_parquet("s.parquet", **table, answer=["Yes"] * 200)
    line, said = take("--truth", "answer")
    assert line["exit_code"] == 0
    before, after = (line["questions"]["answer"][name] for name in ("before", "after"))
    assert before["accuracy"] == pytest.approx(share)
    assert after["accuracy"] < 0.6
    falls = f"accuracy falls from {before['accuracy']:.4f} to {after['accuracy']:.4f}"
    assert f"taking the prior out hurts: on 200 held-out rows {falls}" in said
    assert list(made().held_out) == ["none", "batch"]
    write_parquet("s.parquet", **leaning(200, ("Yes", "No"), bias=[0, 0]))
    assert "really is that common" not in take()[1]


def without(name: str) -> dict[str, list[Any]]:
    return {key: values for key, values in columns().items() if key != name}


def constant(rows: int, **given: Any) -> dict[str, list[Any]]:
    return {key: values[:rows] for key, values in columns().items()} | {
        name: [value] * rows for name, value in given.items()
    }


@pytest.mark.parametrize(
    ("table", "words", "said"),
    [
        (constant(1), [], "s.parquet: 1 row with an answer\na prior is of at least 10 rows: score more"),
        (constant(0), [], "0 rows with an answer\n"),
        (constant(40, score=np.nan), [], "0 rows with an answer (40 whose answer has no probabilities)"),
        (constant(40, logprob_No=np.nan), [], "(40 whose answer has no probabilities)"),
        (constant(40, score=None, logprob_Yes=None, logprob_No=None), [], "(40 without an answer)"),
        (without("logprob_Yes"), [], "not an output of prefill score with the probabilities of answers"),
        (constant(40, exit_layer=3), [], "rows left early (--exit)"),
        (columns(), ["--method", "platt"], "--method has no effect beside --prior, which fits nothing to right"),
        (columns(), ["--seed", "1"], "--seed needs right answers"),
        (columns(), ["--accuracy", "0.9", "--truth", "answer"], "--prior has no effect beside --accuracy"),
        (columns(), ["--truth", "nothing"], "no column 'nothing'"),
        (constant(40, answer=None), ["--truth", "answer"], "no row has an answer and a right one"),
        (columns(), ["--truth", "answer", "--folds", "100"], None),
        (constant(40), ["--truth", "answer", "--folds", "50"], "40 rows with an answer and a right one"),
    ],
)  # fmt: skip
def test_what_has_no_prior_is_refused_and_nothing_is_written(
    table: dict[str, Any], words: list[str], said: str | None
) -> None:
    write_parquet("s.parquet", **table)
    line, _ = take(*words)
    assert line["exit_code"] == (0 if said is None else 2)
    assert said is None or said in line["error"]
    assert len(line.get("error", "").splitlines()) <= 3
    assert Path("prior.json").exists() == (said is None)


def test_a_copy_with_questions_has_no_prior() -> None:
    write_parquet("s.parquet", **{"fox": [0.5] * 20, "fox.label_mass": [1.0] * 20})
    line, _ = take()
    assert line["exit_code"] == 2
    assert line["error"] == (
        "s.parquet: a copy of an output does not say what its questions are\ngive the output itself"
    )


def test_without_right_answers_the_prior_is_named() -> None:
    write_parquet("s.parquet", **columns())
    line, _ = run()
    assert line["exit_code"] == 2
    assert line["error"].startswith("no --truth given: name the column with the right answers, or take")


def test_a_file_with_a_question_twice_is_refused() -> None:
    write_parquet("s.parquet", **columns())
    take()
    Path("c.json").write_text(CalibrationSet.model_construct(calibrations=(made(), made())).model_dump_json())
    with pytest.raises(UsageError, match="Value error, a question has two"):
        read_calibrations("c.json", None)
