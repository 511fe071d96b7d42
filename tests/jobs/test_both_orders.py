"""`swap`: a question about two values is asked in both orders, and its answer is the mean of both."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import binomtest

from tests.jobs.answers import confidence_of, likeliest, shares_of
from tests.jobs.jobs import TOLERANCE, read_output, read_report, score, write_parquet
from tests.jobs.test_questions import Eager

ROWS = 40
ONE = [f"the fox number {at} {'was quick ' * (at % 4)}" for at in range(ROWS)]
OTHER = [f"{'a brown ' * (at * 7 % 5)}dog of {at * 13 % 11}" for at in range(ROWS)]
PAIR = "Two texts.\nOne: {{ one }}\nOther: {{ other }}\nThe better one is"
NAMES = ("yes", "no", "fox")
LONG = ("brown dog", "quick fox", "lazy")
FILE = """
document: "Two texts.\\nOne: {{ one }}\\nOther: {{ other }}"
questions:
  - name: better
    text: "\\nThe better one is"
    labels: [yes, no, fox]
    values: [1, 2, 4]
    swap: [one, other]
  - name: fox
    text: "\\nIs there a fox? Answer:"
    labels: [Yes, No]
  - name: unsure
    text: "\\nIs that certain? Answer:"
    labels: [Yes, No]
    swap: [other, one]
    when: better.order_decided
"""


def make_input() -> Path:
    Path("q.yaml").write_text(FILE)
    return write_parquet("in.parquet", one=ONE, other=OTHER, id=range(ROWS))


def single_job(model: Path, one: list[str], other: list[str], **flags: Any) -> list[dict[str, Any]]:
    """The rows of a job that asks the one question in one order."""
    source = write_parquet("single.parquet", one=one, other=other)
    flags = {"template": PAIR, "labels": list(NAMES), "output": "single.out.parquet", "overwrite": True} | flags
    assert score(source, model=model, **flags)["exit_code"] == 0
    return read_output("single.out.parquet")


def shares(logprobs: np.ndarray) -> np.ndarray:
    weights = np.exp(logprobs)
    return weights / weights.sum(axis=1, keepdims=True)


def logprobs_of(rows: list[dict[str, Any]]) -> np.ndarray:
    return np.array([[row[f"logprob_{label}"] for label in NAMES] for row in rows])


@pytest.fixture(scope="module")
def orders(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[np.ndarray, np.ndarray]:
    """The label log-probabilities of two jobs over swapped files, those of the second in the first one's terms."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("orders"))
        first, second = (logprobs_of(single_job(model, *files)) for files in ((ONE, OTHER), (OTHER, ONE)))
    return first, second[:, [1, 0, 2]]


def assert_means(rows: list[dict[str, Any]], orders: tuple[np.ndarray, np.ndarray]) -> int:
    """All rows have the means of both orders. Returns the number of rows that the order decided."""
    first, second = orders
    assert [row["error"] for row in rows] == [None] * ROWS
    mass = (np.exp(first) + np.exp(second)).sum(axis=1) / 2
    assert [row["better.label_mass"] for row in rows] == pytest.approx(mass, rel=TOLERANCE)
    mean = (shares(first) + shares(second)) / 2
    assert np.array([shares_of(row, "better", NAMES) for row in rows]) == pytest.approx(mean, abs=TOLERANCE)
    assert [row["better"] for row in rows] == pytest.approx(mean @ [1, 2, 4], abs=4 * TOLERANCE)
    sure = [confidence_of(own, scale=True) for own in mean.tolist()]
    assert [row["better.confidence"] for row in rows] == pytest.approx(sure, abs=10 * TOLERANCE)
    decided = first.argmax(axis=1) != second.argmax(axis=1)
    assert [row["better.order_decided"] for row in rows] == decided.tolist()
    assert [row["unsure"] is not None for row in rows] == decided.tolist()
    assert [row["unsure.order_decided"] is not None for row in rows] == decided.tolist()
    assert 0 < decided.sum() < ROWS, "the order must decide some rows, and leave others"
    assert not any(key.startswith("fox.order") for key in rows[0])
    return int(decided.sum())


@pytest.mark.parametrize("flags", [{"workers": 2, "pack_tokens": 64, "keep_columns": "one"}, {"engine": "hf"}])
def test_the_answer_is_the_mean_of_two_jobs_over_swapped_files(
    model: Path, orders: tuple[np.ndarray, np.ndarray], flags: dict[str, Any]
) -> None:
    assert score(make_input(), model=model, questions="q.yaml", **flags)["exit_code"] == 0
    rows = read_output("out.parquet")
    assert_means(rows, orders)
    if "keep_columns" in flags:
        assert [row["one"] for row in rows] == ONE


def test_both_orders_equal_the_eager_forward(model: Path) -> None:
    eager = Eager(model)
    make_input()
    Path("q.yaml").write_text(FILE.replace("[yes, no, fox]", f"[{', '.join(LONG)}]"))
    assert score("in.parquet", model=model, questions="q.yaml")["exit_code"] == 0
    rows = read_output("out.parquet")
    for at, row in enumerate(rows[:8]):
        found = []
        for one, other, names in ((ONE, OTHER, LONG), (OTHER, ONE, (LONG[1], LONG[0], LONG[2]))):
            prompt = f"Two texts.\nOne: {one[at]}\nOther: {other[at]}\nThe better one is"
            found.append([math.exp(eager.logprob(prompt, f" {name}")) for name in names])
        assert abs(row["better.label_mass"] - sum(map(sum, found)) / 2) < TOLERANCE
        mean = [sum(own[place] / sum(own) for own in found) / 2 for place in range(3)]
        assert shares_of(row, "better", LONG) == pytest.approx(mean, abs=TOLERANCE)
        assert row["better"] == pytest.approx(np.dot(mean, [1, 2, 4]), abs=4 * TOLERANCE)


def test_the_temperature_and_the_norm_are_those_of_each_order(model: Path) -> None:
    flags = {"temperature": 20.0, "label_norm": "tokens"}
    make_input()
    Path("q.yaml").write_text(FILE.replace("[yes, no, fox]", f"[{', '.join(LONG)}]"))
    assert score("in.parquet", model=model, questions="q.yaml", **flags)["exit_code"] == 0
    rows = read_output("out.parquet")
    first = [row["score"] for row in single_job(model, ONE, OTHER, labels=list(LONG), **flags)]
    second = single_job(model, OTHER, ONE, labels=[LONG[1], LONG[0], LONG[2]], **flags)
    mean = (np.array(first) + [row["score"] for row in second]) / 2
    assert 0.01 < mean.min() < mean.max() < 0.99
    assert [row["better.probabilities"][LONG[0]] for row in rows] == pytest.approx(mean, abs=TOLERANCE)


def test_the_report_says_how_often_the_order_decided(
    model: Path, orders: tuple[np.ndarray, np.ndarray], capsys: pytest.CaptureFixture[str]
) -> None:
    flags = {"quiet": False, "metrics_file": "run.prom"}
    assert score(make_input(), model=model, questions="q.yaml", **flags)["exit_code"] == 0
    rows = read_output("out.parquet")
    decided = assert_means(rows, orders)
    report = read_report()
    found, unsure = report["orders"]
    assert (found["question"], found["rows"], found["decided"]) == ("better", ROWS, decided)
    assert found["share"]["value"] == decided / ROWS
    interval = binomtest(decided, ROWS).proportion_ci(method="exact")
    assert found["share"]["interval"] == pytest.approx([interval.low, interval.high])
    assert (unsure["question"], unsure["rows"]) == ("unsure", decided)
    said = f"decided {decided} of {ROWS} rows"
    assert said in " ".join(capsys.readouterr().err.split())
    assert said in Path("out.run.html").read_text()
    assert f'prefill_order_decided_share{{question="better"}} {decided / ROWS!r}' in Path("run.prom").read_text()
    # what a report says of a row's score, it says of the first question
    first = [shares_of(row, "better", NAMES)[0] for row in rows]
    assert report["mean_score"] is None
    best = [likeliest(row, "better", NAMES) for row in rows]
    assert report["answers"]["better"]["answers"] == {name: best.count(name) for name in set(best)}
    mass = np.mean([row["better.label_mass"] for row in rows])
    assert report["answers"]["better"]["label_mass"] == pytest.approx(mass)
    bins = report["histograms"]["score"]["counts"]
    for label in NAMES:
        own = [each for each, row in zip(first, rows, strict=True) if likeliest(row, "better", NAMES) == label]
        assert bins.get(label, [0] * 50) == np.histogram(own, 50, (0, 1))[0].tolist()


def test_without_a_swap_there_is_nothing_to_report(model: Path) -> None:
    make_input()
    Path("q.yaml").write_text(FILE.partition("    swap:")[0])
    assert score("in.parquet", model=model, questions="q.yaml")["exit_code"] == 0
    assert "orders" not in read_report()
    assert "order of better" not in Path("out.run.html").read_text()


PLAIN = "questions: [{name: a, template: '{{ one }} {{ other }}', labels: [Yes, No], swap: %s}]"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (PLAIN % "[one, one]", "question 'a': swap ['one', 'one']: name two different columns"),
        (PLAIN % "[one]", "question 'a': swap ['one']: name two different columns"),
        (PLAIN % "one", "question 'a': swap \"one\": should be a list"),
        (PLAIN % "[one, othr]", "question 'a': swap: the input has no column 'othr'; did you mean 'other'?"),
        (PLAIN % "[one, id]", "question 'a': swap: its prompt does not use the column 'id'"),
        (PLAIN.replace("[Yes, No]", "[Yes]") % "[one, other]", "question 'a': labels ('Yes',): at least two"),
    ],
)
def test_a_wrong_swap_is_refused_with_its_question(
    model: Path, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    make_input()
    Path("q.yaml").write_text(text)
    assert score("in.parquet", model=model, questions="q.yaml")["exit_code"] == 2
    assert said in capsys.readouterr().err
