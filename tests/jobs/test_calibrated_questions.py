"""`--calibrate-with` of typed questions: each has its own correction, Zhao et al.'s by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from scipy.special import softmax

from prefillcli import Choice, Predicate, Score, Scorer
from prefillcli.asking.forms import orders_of
from prefillcli.judging.calibration import read_calibrations
from prefillcli.options.commands import CalibrateSettings
from prefillcli.options.load import load_settings
from prefillcli.prompts.questions import Question
from prefillcli.tools.priors import priors_job
from tests.jobs.jobs import TOLERANCE, Reference, read_output, read_report, score, write_parquet
from tests.jobs.processes import Command, Hold, cut_small_windows, words_of
from tests.jobs.test_typed_questions import shares

FREE = ("N/A", "[MASK]")
TEXTS = [
    f"Order {at}: {'I want my money back. ' * (at % 4)}{'The parcel came.' * (at % 3)} Thanks" for at in range(40)
]
REFUND = Predicate("Does the customer ask for a refund?", name="refund")
TOPIC = Choice("What is it about?", ["delivery", "device", "payment"], name="topic")
ANGER = Score("How angry is the customer?", ["calm", "annoyed", "angry", "furious"], name="anger")


@pytest.fixture(scope="module")
def reference(model: Path) -> Reference:
    return Reference(model)


def asked(*questions: Question | dict[str, Any], rows: int = 6, **more: Any) -> Path:
    entries = [each.to_json() if isinstance(each, Question) else each for each in questions]
    Path("q.json").write_text(json.dumps({"questions": entries} | more))
    texts = TEXTS[:rows]
    return write_parquet("in.parquet", text=texts, other=texts[::-1], kind=["mail"] * rows, number=range(rows))


def corrected(given: Sequence[float], free: Sequence[Sequence[float]]) -> np.ndarray:
    """W p of Zhao et al., with W = diag(p_cf)^-1 and the mean of content-free inputs, scaled to add up to 1."""
    found = np.array(given) / np.mean(free, axis=0)
    return np.asarray(found / found.sum())


def means(reference: Reference, text: str, question: Question, orders: int = 1) -> list[float]:
    """The mean of the answers to a question in several orders of its options."""
    each = [shares(reference, text, question, order) for order in orders_of(question, orders)]
    return [sum(own) / len(each) for own in zip(*each, strict=True)]


def found(row: dict[str, Any], name: str) -> list[float]:
    """The calibrated probability of each option."""
    own = row[f"{name}.calibrated"]
    return list(own.values()) if isinstance(own, dict) else [own, 1 - own]


@pytest.mark.parametrize("flags", [{}, {"workers": 2}, {"engine": "hf"}], ids=["one", "workers", "hf"])
def test_each_question_has_its_own_correction(model: Path, reference: Reference, flags: dict[str, Any]) -> None:
    source = asked(REFUND, TOPIC, ANGER)
    assert (
        score(source, questions="q.json", calibrate_with=FREE, model=model, temperature=2, **flags)["exit_code"] == 0
    )
    largest = 0.0
    for row, text in zip(read_output("out.parquet"), TEXTS, strict=False):
        for question in (REFUND, TOPIC, ANGER):
            free = [shares(reference, each, question) for each in FREE]
            wanted = corrected(shares(reference, text, question), free)
            assert found(row, question.name) == pytest.approx(wanted, abs=TOLERANCE)
            largest = max(largest, float(np.abs(wanted - shares(reference, text, question)).max()))
    assert largest > 0.01
    report = read_report()
    assert list(report["calibrations"]) == ["refund", "topic", "anger"]
    for each, question in zip(report["calibrations"].values(), (REFUND, TOPIC, ANGER), strict=True):
        wanted = np.mean([shares(reference, text, question) for text in FREE], axis=0)
        assert list(each["prior"].values()) == pytest.approx(wanted, abs=TOLERANCE)


def test_the_mean_over_orders_is_corrected_by_the_mean_without_content(model: Path, reference: Reference) -> None:
    source = asked(TOPIC, ANGER)
    assert score(source, questions="q.json", calibrate_with=FREE, orders=3, model=model)["exit_code"] == 0
    for row, text in zip(read_output("out.parquet"), TEXTS, strict=False):
        for question in (TOPIC, ANGER):
            free = [means(reference, each, question, 3) for each in FREE]
            wanted = corrected(means(reference, text, question, 3), free)
            assert found(row, question.name) == pytest.approx(wanted, abs=TOLERANCE)


SWAPPED = {
    "name": "better",
    "template": "{{ kind }}: {{ text }} or {{ other }}? The better one is",
    "labels": ["yes", "no", "fox"],
    "swap": ["text", "other"],
}
OWN = {
    "name": "own",
    "template": "{{ text }} ({{ kind }})\nAnswer:",
    "labels": ["Yes", "No"],
    "when": "better.confidence > 0.1",
}


def test_questions_with_labels_of_their_own_have_it_too(model: Path, reference: Reference) -> None:
    source = asked(SWAPPED, OWN)
    flags = {"calibrate_with": FREE, "calibrate_columns": "text,other", "label_norm": "bytes", "model": model}
    assert score(source, questions="q.json", **flags)["exit_code"] == 0
    spelled, sizes = [[" yes"], [" no"], [" fox"]], np.array([3, 2, 3])

    def answered(text: str, other: str) -> np.ndarray:
        # The mean of both orders; in the second, "yes" stands for what "no" stands for in the first
        each = [
            np.exp(np.array(reference.answer(f"mail: {one} or {two}? The better one is", own).logprobs) / sizes)
            for one, two, own in ((text, other, spelled), (other, text, spelled))
        ]
        each[1] = each[1][[1, 0, 2]]
        return np.mean([own / own.sum() for own in each], axis=0)

    def single(text: str) -> np.ndarray:
        own = np.exp(np.array(reference.answer(f"{text} (mail)\nAnswer:").logprobs) / [3, 2])
        return np.asarray(own / own.sum())

    rows, unasked = read_output("out.parquet"), 0
    for row, text, other in zip(rows, TEXTS, TEXTS[: len(rows)][::-1], strict=False):
        wanted = corrected(answered(text, other), [answered(each, each) for each in FREE])
        assert found(row, "better") == pytest.approx(wanted, abs=TOLERANCE)
        if row["better.confidence"] <= 0.1:
            assert row["own.calibrated"] is None
            unasked += 1
        else:
            wanted = corrected(single(text), [single(each) for each in FREE])
            assert found(row, "own") == pytest.approx(wanted, abs=TOLERANCE)
    assert 0 < unasked < len(rows)


def test_a_question_of_the_command_line_is_calibrated(model: Path, reference: Reference) -> None:
    flags = {"ask": ANGER.instructions, "levels": "calm,annoyed,angry,furious", "calibrate_with": "N/A"}
    assert score(asked(), model=model, **flags)["exit_code"] == 0
    for row, text in zip(read_output("out.parquet"), TEXTS, strict=False):
        wanted = corrected(shares(reference, text, ANGER), [shares(reference, "N/A", ANGER)])
        assert found(row, "answer") == pytest.approx(wanted, abs=TOLERANCE)
    assert list(read_report()["calibrations"]) == ["answer"]


def test_a_calibrated_answer_depends_on_no_other_question(model: Path) -> None:
    flags = {"questions": "q.json", "calibrate_with": FREE, "model": model}
    assert score(asked(REFUND, TOPIC, ANGER, rows=12), **flags)["exit_code"] == 0
    together = read_output("out.parquet")
    for question in (ANGER, TOPIC, REFUND):
        assert score(asked(question, rows=12), overwrite=True, **flags)["exit_code"] == 0
        for row, alone in zip(together, read_output("out.parquet"), strict=True):
            assert found(row, question.name) == pytest.approx(found(alone, question.name), abs=1e-6)


def test_a_killed_job_goes_on_with_the_same_probabilities(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cut_small_windows(monkeypatch)
    source = asked(REFUND, TOPIC, rows=40)
    given: dict[str, Any] = {"questions": "q.json", "calibrate_with": "N/A", "orders": 2, "model": model}
    given |= {"memory": "64MiB", "pack_tokens": 128}
    assert score(source, "whole.parquet", **given)["exit_code"] == 0
    command = Command(
        *("score", str(source), "-o", "out.parquet"),
        *words_of(given),
        hold=Hold("prefillcli.engines.torch:TorchEngine.answer", 8),
    )
    command.wait_until_held()
    command.kill()
    assert list(Path("out.parquet.prefill").glob("part-*"))
    again = "prefillcli.judging.calibration.contextual_calibrations"
    monkeypatch.setattr(again, lambda *_: pytest.fail("prompts without content are scored once for a job"))
    assert score(source, resume=True, **given)["exit_code"] == 0
    both = [pq.read_table(path).drop(["seconds"]) for path in ("out.parquet", "whole.parquet")]
    assert both[0].equals(both[1])


def test_python_calibrates_as_the_command(model: Path) -> None:
    source = asked(REFUND, TOPIC)
    assert score(source, questions="q.json", calibrate_with=FREE, model=model)["exit_code"] == 0
    with Scorer(model, questions=[REFUND, TOPIC], calibrate_with=list(FREE)) as scorer:
        for table in (scorer.score(source), scorer.score(pq.read_table(source))):
            for row, wanted in zip(table.to_pylist(), read_output("out.parquet"), strict=True):
                for name in ("refund", "topic"):
                    assert found(row, name) == pytest.approx(found(wanted, name), abs=TOLERANCE)


NEVER = {"name": "never", "template": "{{ text }} Never:", "labels": ["Yes", "No"], "when": "refund > 1"}


def take_prior(scores: str, **flags: Any) -> dict[str, Any]:
    given = {"scores": scores, "prior": "rows", "output": "prior.json", **flags}
    return priors_job(load_settings(CalibrateSettings, given, environment={}))


def told(rows: Sequence[dict[str, Any]], name: str) -> np.ndarray:
    """The probability of each option in each row."""
    each = [row[name] if f"{name}.probabilities" not in row else row[f"{name}.probabilities"] for row in rows]
    return np.array([list(own.values()) if isinstance(own, dict) else [own, 1 - own] for own in each])


@pytest.mark.parametrize("orders", [1, 2])
def test_the_prior_of_a_night_is_taken_out_of_every_question_of_later_ones(
    model: Path, capsys: pytest.CaptureFixture[str], orders: int
) -> None:
    flags: dict[str, Any] = {"questions": "q.json", "model": model, "orders": orders}
    assert score(asked(REFUND, NEVER, TOPIC, ANGER, rows=30), "s.parquet", **flags)["exit_code"] == 0
    capsys.readouterr()
    done = take_prior("s.parquet")
    assert done["exit_code"] == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "0 rows with an answer to never (30 without an answer), and a prior is of at least 10: this q" in said
    assert "--calibration prior.json adds refund.calibrated, topic.calibrated, anger.calibrated" in said
    rows = read_output("s.parquet")
    means = {name: np.log(told(rows, name)).mean(axis=0) for name in ("refund", "topic", "anger")}
    for name, mean in means.items():
        assert list(done["questions"][name]["prior"].values()) == pytest.approx(softmax(mean), abs=1e-9)

    # Fitted methods stand beside it where they may: not for a mean over orders.
    write_parquet("right.parquet", right=["delivery", "device", "payment"] * 10)
    measured = take_prior("s.parquet", truth_from="right.parquet", truth="topic=right", output="measured.json")
    assert ["before" in own for own in measured["questions"].values()] == [False, True, False]
    methods = ["none", *(["temperature", "platt"] if orders == 1 else []), "batch"]
    (topic,) = [each for each in read_calibrations("measured.json", None) if each.question == "topic"]
    assert list(topic.held_out) == methods

    # Another night has other rows: what its rows get is of the file alone.
    write_parquet("in.parquet", text=TEXTS[30:34], other=TEXTS[:4], kind=["mail"] * 4, number=range(4))
    assert score("in.parquet", calibration="prior.json", **flags)["exit_code"] == 0
    later = read_output("out.parquet")
    assert sum(name.endswith(".calibrated") for name in later[0]) == 3
    for name, mean in means.items():
        wanted = softmax(np.log(told(later, name)) - mean, axis=1)
        assert np.array([found(row, name) for row in later]) == pytest.approx(wanted, abs=1e-6)
        assert np.abs(wanted - told(later, name)).max() > 0.01
    uses = read_report()["calibrations"]
    assert {name: (each["method"], each["rows"]) for name, each in uses.items()} == dict.fromkeys(means, ("batch", 30))

    assert score("in.parquet", calibration="prior.json", **flags | {"orders": 3 - orders})["exit_code"] == 2
    assert "it was fitted on scores with another" in capsys.readouterr().err
    assert score("in.parquet", "hot.parquet", temperature=2, **flags)["exit_code"] == 0
    if orders == 2:
        assert "asked in several orders with --temperature" in take_prior("hot.parquet")["error"]


@pytest.mark.parametrize("asked", [{"ask": REFUND.instructions}, {"prompt_column": "text"}])
def test_divided_answers_have_no_prior(model: Path, asked: dict[str, Any]) -> None:
    source = write_parquet("in.parquet", text=TEXTS[:12])
    assert score(source, "s.parquet", model=model, label_norm="tokens", **asked)["exit_code"] == 0
    assert "--label-norm divides" in take_prior("s.parquet")["error"]
    assert not Path("prior.json").exists()


NUMBER = {"name": "number", "template": "{{ number }}:", "labels": ["Yes", "No"]}
LONG = {"name": "long", "template": "{{ 1 / (text | length - 3) }}", "labels": ["Yes", "No"], "when": "refund > 0.5"}


@pytest.mark.parametrize(
    ("questions", "flags", "said"),
    [
        ([REFUND, NUMBER], {}, "no column of the prompt of the question number holds text"),
        ([OWN | {"when": None}], {"calibrate_columns": "kind"}, "column text keeps its value, but it differs"),
        ([REFUND], {"calibrate_columns": "prose"}, "the prompt has no such column\nit has: text"),
        (
            [REFUND],
            {"calibrate_with": ""},
            "--calibrate-with '': no prompt can be made of it: question refund: the prompt is empty",
        ),
        ([REFUND, LONG], {}, "--calibrate-with 'N/A': no prompt can be made of it: question long: "),
    ],
)
@pytest.mark.parametrize("dry_run", [False, True])
def test_a_question_without_content_is_refused(
    model: Path, questions: list[Any], flags: dict[str, Any], said: str, dry_run: bool
) -> None:
    given = {"questions": "q.json", "calibrate_with": "N/A", "model": model, "dry_run": dry_run} | flags
    done = score(asked(*questions), **given)
    assert done["exit_code"] == 2
    assert said in done["error"]
