"""The first lines of page and terminal: did the night go well, and what must a person look at."""

from __future__ import annotations

import html
import io
import re
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from prefillcli.judging.evaluation import Evaluations, RunEvaluation
from prefillcli.judging.review import ReviewUse
from prefillcli.report.run import (
    FailedRow,
    FirstAnswers,
    LikelyToken,
    QuestionAnswers,
    RunReport,
    UnsureRow,
    run_html,
    run_lines,
)
from prefillcli.report.section import pairs_table
from prefillcli.stats.evaluation import Evaluation, evaluate

ANSWERS = {
    "refund": {"Yes": 40, "No": 17},
    "topic": {"billing": 30, "technical": 20, "other": 7},
    "anger": {"calm": 57},
}


def report_of(masses: tuple[float, ...] = (0.9, 0.8, 0.7), answers: Any = ANSWERS, **given: Any) -> RunReport:
    """A complete run of questions about 60 tickets, of which three are errors."""
    report = RunReport(
        status="complete",
        exit_code=0,
        output="out.parquet",
        fingerprint={"questions": "digest"},
        **given,
    )
    report.rows.total, report.rows.scored, report.rows.errors = 60, 57, 3
    report.rows.errors_by_code = {"empty_prompt": 3}
    report.failed = [FailedRow(row=4, id="t-4", code="empty_prompt", detail="no text")]
    for (name, own), mass in zip(answers.items(), masses, strict=False):
        unsure = [UnsureRow(row=at, id=f"{name}-{at}", answer=next(iter(own)), probability=0.5) for at in range(5)]
        report.answers[name] = QuestionAnswers(rows=57, answers=own, label_mass=mass, close=12, least_sure=unsure)
        tokens = [LikelyToken(id=1, text="The", share=0.34)]
        report.first_answers.append(
            FirstAnswers(question=name, rows=57, label_mass=mass, begins=0.1, tokens=tokens, prompt=f"PROMPT {name}")
        )
    return report


def terminal(report: RunReport, width: int = 100) -> list[str]:
    """The lines of a terminal of this width."""
    file = io.StringIO()
    Console(file=file, width=width, markup=False, highlight=False).print(pairs_table(run_lines(report)))
    return [line.rstrip() for line in file.getvalue().splitlines()]


def page(report: RunReport) -> str:
    body = run_html(report).partition("<body>")[2]
    return " ".join(html.unescape(re.sub("<[^>]+>", " ", body)).split())


def verdict_class(report: RunReport) -> str:
    return run_html(report).partition('<span class="verdict ')[2].partition('"')[0]


def in_order(text: str, *words: str) -> None:
    at = -1
    for word in words:
        found = text.find(word, at + 1)
        assert found >= 0, f"{word!r} is not there, or not in its place"
        at = found


def varied() -> dict[str, dict[str, int]]:
    return ANSWERS | {"anger": {"calm": 50, "angry": 7}}


def evaluated(found: Evaluation) -> Evaluations:
    return Evaluations({"refund": RunEvaluation.model_validate({**dict(found), "truth": "refund"})})


def test_a_good_night_is_green_and_says_no_more() -> None:
    report = report_of(answers=varied())
    assert verdict_class(report) == "good"
    assert terminal(report)[0].split(maxsplit=1) == ["verdict", "complete"]
    assert report.summary()["verdict"] == {"kind": "good", "text": "complete", "reasons": []}


def test_a_model_that_answers_none_of_the_questions_is_told_in_the_first_line_with_what_to_try() -> None:
    report = report_of(masses=(0.095, 0.0005, 0.002), answers=varied())
    assert verdict_class(report) == "poor"
    first, *rest = terminal(report)
    assert first.endswith("complete, but the model does not answer these questions")
    said = " ".join(" ".join(rest).split())
    each = ["refund: its answers have 0.095", "topic: its answers have 0.0005", "anger: its answers have 0.002"]
    in_order(said, each[0], "the model says", "(34 %)", *each[1:], "try a larger model")
    in_order(page(report), "does not answer these questions", "refund: its answers have 0.095", "try a larger model")
    assert report.summary()["verdict"]["text"] == "complete, but the model does not answer these questions"


def test_a_question_that_is_not_answered_is_named_among_others() -> None:
    report = report_of(masses=(0.9, 0.02, 0.7), answers=varied())
    assert terminal(report)[0].endswith("complete, but the model does not answer topic")


def test_right_answers_overrule_a_small_label_mass() -> None:
    report = report_of(masses=(0.02, 0.9, 0.9), answers=varied())
    truth = np.arange(200) % 2 == 0
    report.add(evaluated(evaluate(np.where(truth, 0.8, 0.3), truth)))
    assert terminal(report)[0].split(maxsplit=1) == ["verdict", "complete"]
    report.add(evaluated(evaluate(np.where(truth, 0.3, 0.2), truth)))
    assert "does not answer refund" in terminal(report)[0]


def test_one_answer_to_all_rows_is_told() -> None:
    report = report_of()
    assert terminal(report)[0].endswith("complete, but anger gets one answer in all rows")
    assert "anger: all 57 rows have the answer calm" in page(report)
    report.answers["anger"].rows = 12
    assert verdict_class(report) == "good", "of a few rows it means little"


@pytest.mark.parametrize("flip", [False, True])
def test_answers_worse_than_the_commonest_one_are_told(flip: bool) -> None:
    report, truth = report_of(answers=varied()), np.arange(100) < 30
    scores = np.where(truth, 0.6, 0.4)
    report.add(evaluated(evaluate(1 - scores if flip else scores, truth)))
    assert (verdict_class(report) == "poor") == flip
    said = page(report)
    assert "always No: 70.0%" in said
    assert ("refund is answered worse than by a guess" in said) == flip
    if flip:
        in_order(said, "right in 0.0% of the rows; always answering No is right in 70.0%", "AUC 0.000, below 0.5")


def test_warnings_of_stderr_and_errors_are_reasons() -> None:
    report = report_of(answers=varied(), warnings=["the profile is of another machine"])
    assert terminal(report)[0].endswith("complete, with 1 warning")
    in_order(page(report), "complete, with 1 warning", "the profile is of another machine")
    report = report_of(answers=varied(), error="3 of 60 rows are errors; --max-error-rate allows 0")
    report.exit_code = 3
    assert verdict_class(report) == "poor"
    in_order(page(report), "complete, exit code 3", "3 of 60 rows are errors")


def test_page_and_terminal_say_first_what_is_to_be_done_and_show_prompts_last() -> None:
    report = report_of(answers=varied())
    report.add(ReviewUse(rows=9, questions={"refund": 6, "topic": 4}, file="look.csv"))
    report.histograms.score.edges = [at / 50 for at in range(51)]
    report.histograms.score.counts = {"Yes": [1] * 50}
    in_order(
        page(report), "to review 9", "errors 3", "empty_prompt", "Answers", "Yes 40 (70 %)", "label mass 0.9",
        "in doubt 6 (11 %), below the floor", "topic", "billing 30 (53 %)", "Least sure, by question", "refund-0",
        "Scores of refund", "Settings, versions", "PROMPT refund",
    )  # fmt: skip
    lines = terminal(report)
    assert [line.split()[0] for line in lines if not line.startswith(" ")][:4] == ["verdict", "to", "rows", "refund"]
    in_order(
        " ".join(lines), "9 rows (6 refund, 4 topic)", "3 errors (empty_prompt 3)", "label mass 0.9; Yes 40 (70 %)",
        "in doubt 6 (11 %)", "billing 30 (53 %)", "least sure", "refund-0, refund-1, refund-2", "speed",
    )  # fmt: skip
    assert "mean score" not in " ".join(lines)


def test_no_answer_at_all_is_not_a_good_night() -> None:
    report = report_of(answers=varied())
    report.add(ReviewUse(rows=57, questions={"refund": 57}, file=None))
    assert terminal(report)[0].endswith("complete, but every row is to be reviewed")


def test_the_last_line_has_the_distribution_of_answers_and_no_mean_of_a_choice() -> None:
    summary = report_of(answers=varied()).summary()
    assert summary["answers"] == varied()
    assert "mean_score" not in summary
    labels = RunReport(mean_score=0.25).summary()
    assert labels["mean_score"] == 0.25
    assert "answers" not in labels


def test_half_the_mass_is_a_word_beside_the_number() -> None:
    assert "0.3: most of the probability is elsewhere" in page(report_of(masses=(0.3, 0.9, 0.9), answers=varied()))
