"""Jobs with `--label-values`: labels that stand for numbers, and the expected value of the answer."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import pearsonr, spearmanr

from prefillcli.errors import UsageError
from tests.jobs.jobs import read_output, read_report, score, texts, write_jsonl, write_parquet
from tests.jobs.models import save_model
from tests.jobs.processes import cut_small_windows
from tests.jobs.test_questions import Eager
from tests.jobs.test_shards import merge

ROWS = 30
LABELS = ("1", "2", "3", "4", "5")
VALUES = (1.0, 2.0, 3.0, 4.0, 7.5)
ORDERED: dict[str, Any] = {"labels": ",".join(LABELS), "label_values": "1,2,3,4,7.5"}


@pytest.fixture(scope="module")
def eager(model: Path) -> Eager:
    return Eager(model)


def make_input() -> Path:
    return write_parquet("in.parquet", prompt=texts(ROWS), id=[f"r{at}" for at in range(ROWS)])


def expected(eager: Eager, temperature: float = 1.0) -> list[float]:
    """The expected value of each row's answer under transformers' eager forward."""
    found = []
    for text in texts(ROWS):
        logprobs = np.array([*eager.answer(text, {label: [f" {label}"] for label in LABELS}).values()]) / temperature
        found.append(float(np.exp(logprobs - np.logaddexp.reduce(logprobs)) @ VALUES))
    return found


@pytest.mark.parametrize("flags", [{}, {"engine": "hf"}, {"temperature": 2.0, "output": "out.jsonl"}])
def test_the_mean_is_the_expected_value_under_the_eager_forward(
    model: Path, eager: Eager, flags: dict[str, Any]
) -> None:
    done = score(make_input(), model=model, **{"output": "out.parquet", **ORDERED, **flags})
    found = [row["mean"] for row in read_output(done["output"])]
    wanted = expected(eager, flags.get("temperature", 1.0))
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    assert done["means"]["mean"] == pytest.approx(np.mean(found))
    assert read_report()["means"] == done["means"]
    assert f"{np.mean(found):.4f}" in Path("out.run.html").read_text()


def test_log_probabilities_that_are_divided_make_the_mean_as_they_make_the_score(model: Path) -> None:
    flags = {**ORDERED, "labels": "1,Yes,3 quick foxes,No,5", "label_norm": "bytes"}
    score(make_input(), model=model, **flags)
    for row in read_output("out.parquet"):
        labels = flags["labels"].split(",")
        divided = np.array([row[f"logprob_{label}"] / len(label) for label in labels])
        assert row["mean"] == pytest.approx(np.exp(divided - np.logaddexp.reduce(divided)) @ VALUES)


def test_shards_are_merged(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cut_small_windows(monkeypatch)
    flags = {"model": model, "id_column": "id", **ORDERED}
    whole = score(make_input(), "whole.parquet", **flags)
    for number in (1, 2):
        score("in.parquet", shard=f"{number}/2", **flags)
    merged = merge()
    assert merged["means"]["mean"] == pytest.approx(whole["means"]["mean"])
    wanted = [row["mean"] for row in read_output("whole.parquet")]
    assert [row["mean"] for row in read_output("out.parquet")] == pytest.approx(wanted)


#: Right answers as data has them, and the numbers that they stand for: labels, averages, and what is neither.
TRUTH: list[tuple[Any, float | None]] = [
    ("1", 1), ("5", 7.5), ("3.5", 3.5), (None, None), ("4", 4), ("good", None), ("-2e0", -2), ("nan", None), ("2", 2),
]  # fmt: skip


def truths() -> list[tuple[Any, float | None]]:
    return [TRUTH[at * 7 % len(TRUTH)] for at in range(ROWS)]


def assert_equals_scipy(found: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """The figures are those of the output's columns beside `truths`."""
    known = [(row, value) for row, (_, value) in zip(rows, truths(), strict=True) if value is not None]
    right = np.array([value for _, value in known])
    assert found["ordered"]["rows"] == len(known)
    assert found["rows"] == sum(answer in LABELS for answer, _ in truths())
    numbers = dict(zip(LABELS, VALUES, strict=True))
    for name, said in (
        ("mean", [row["mean"] for row, _ in known]),
        ("likeliest", [numbers[row["prediction"]] for row, _ in known]),
    ):
        own = {figure: each["value"] for figure, each in found["ordered"][name].items()}
        assert own["spearman"] == pytest.approx(spearmanr(said, right).statistic)
        assert own["pearson"] == pytest.approx(pearsonr(said, right).statistic)
        assert own["mean_error"] == pytest.approx(np.abs(said - right).mean())
        assert own["root_mean_square_error"] == pytest.approx(np.sqrt(((said - right) ** 2).mean()))
        assert all(each["interval"] is not None for each in found["ordered"][name].values())


@pytest.mark.parametrize(("kind", "output"), [("parquet", "out.jsonl"), ("jsonl", "out.parquet")])
def test_means_are_held_against_right_numbers(
    model: Path, capsys: pytest.CaptureFixture[str], kind: str, output: str
) -> None:
    answers = [answer for answer, _ in truths()]
    if kind == "parquet":
        source = write_parquet("in.parquet", prompt=texts(ROWS), truth=answers)
    else:  # numbers stay numbers there
        typed = [answer if answer in (None, "good", "nan") else float(answer) for answer in answers]
        rows = zip(texts(ROWS), typed, strict=True)
        source = write_jsonl("in.jsonl", [{"prompt": text, "truth": answer} for text, answer in rows])
    done = score(source, output, model=model, truth="truth", quiet=False, **ORDERED)
    found = read_report()["evaluations"]["answer"]
    assert_equals_scipy(found, read_output(output))
    assert done["evaluations"]["answer"]["mean_error"] == found["ordered"]["mean"]["mean_error"]["value"]
    assert "mean, as a number rank correlation" in " ".join(capsys.readouterr().err.split())
    assert "<h3>Labels as numbers</h3>" in Path("out.run.html").read_text()


def test_right_numbers_that_are_no_labels_are_enough(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_parquet("in.parquet", prompt=texts(ROWS), truth=[at % 7 + 0.5 for at in range(ROWS)])
    assert score(source, model=model, truth="truth", **ORDERED)["exit_code"] == 0
    found = read_report()["evaluations"]["answer"]
    assert (found["rows"], found["without_truth"], found["ordered"]["rows"]) == (0, ROWS, ROWS)
    assert score(source, model=model, truth="truth", labels=ORDERED["labels"], overwrite=True)["exit_code"] == 2
    assert "none of its values is a label" in capsys.readouterr().err


def test_a_column_of_the_input_may_have_the_name_where_there_is_no_such_column(model: Path) -> None:
    write_jsonl("in.jsonl", [{"prompt": "Yes or no? Answer:", "mean": "rather"}])
    assert score("in.jsonl", model=model, keep_columns="mean")["exit_code"] == 0
    assert score("in.jsonl", "b.parquet", model=model, keep_columns="mean", **ORDERED)["exit_code"] == 2


def test_a_question_has_values_of_its_own_and_others_may_depend_on_its_expectation(model: Path, eager: Eager) -> None:
    Path("q.yaml").write_text(
        "questions:\n"
        "- {name: stars, template: '{{ prompt }}', labels: [1, 2, 3, 4, 5], values: [1, 2, 3, 4, 7.5]}\n"
        "- {name: fox, template: '{{ prompt }}', labels: [Yes, No], when: stars > MEAN}\n"
    )
    wanted = expected(eager)
    middle = float(np.median(wanted))
    Path("q.yaml").write_text(Path("q.yaml").read_text().replace("MEAN", str(middle)))
    done = score(make_input(), model=model, questions="q.yaml")
    rows = read_output("out.parquet")
    np.testing.assert_allclose([row["stars"] for row in rows], wanted, atol=1e-5)
    assert [row["fox"] is None for row in rows] == [mean <= middle for mean in wanted]
    assert "fox.confidence" not in rows[0]
    assert done["means"] == {"stars": pytest.approx(np.mean(wanted), abs=1e-5)}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"label_values": "1,2"}, "2 numbers for 5 labels: 1, 2, 3, 4, 5"),
        ({"label_values": "1,1,1,1,1"}, "not all the same"),
        ({"label_values": "1,2,3,4,nan"}, "finite"),
        ({"label_values": "low,high"}, "must be numbers, as in 1,2,3,4,5"),
    ],
    ids=lambda each: str(each)[:30],
)
def test_values_that_are_not_one_for_each_label_are_refused(
    model: Path, capsys: pytest.CaptureFixture[str], flags: dict[str, Any], said: str
) -> None:
    try:
        assert score(make_input(), model=model, **ORDERED | flags)["exit_code"] == 2
        message = capsys.readouterr().err
    except UsageError as error:
        message = str(error)
    assert said in message


def test_a_question_with_wrong_values_is_named(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    question = "{name: stars, template: '{{ prompt }}', labels: [Yes, No], values: [1, 2, 3]}"
    Path("q.yaml").write_text(f"questions: [{question}]")
    assert score(make_input(), model=model, questions="q.yaml")["exit_code"] == 2
    assert "question 'stars': values 1,2,3: 3 numbers for 2 labels" in capsys.readouterr().err


def test_a_head_of_values_has_no_labels_that_stand_for_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head = save_model(tmp_path / "head", classifies=True, num_labels=3)
    write_parquet("in.parquet", prompt=["a fox"])
    assert score("in.parquet", model=head, head="value", label_values="1,2,3")["exit_code"] == 2
    assert "--label-values: the model's head gives values" in capsys.readouterr().err
    assert score("in.parquet", model=head, label_values="1,2,4")["exit_code"] == 0
    (row,) = read_output("out.parquet")
    shares = [math.exp(row[f"logprob_{label}"]) for label in ("LABEL_0", "LABEL_1", "LABEL_2")]
    assert row["mean"] == pytest.approx(np.dot(shares, [1, 2, 4]))
