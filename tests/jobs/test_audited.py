"""`--audit N`: some compressed rows are read in full as well, and the report says what compression did to them."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import binomtest

from tests.jobs.compression import SAME, Prompt, assert_close, compressed, full_rows, lines_of, unrelated
from tests.jobs.jobs import Reference, read_output, read_report, write_jsonl, write_parquet

ROWS = 30
LONG = [number for number in range(ROWS) if number % 5]
AUDIT = 12


def prompts_of(reference: Reference) -> list[Prompt]:
    """Rows of which every fifth is too short to be compressed."""
    return unrelated(reference, [70 + 3 * number if number % 5 else 40 for number in range(ROWS)])


def make_input(reference: Reference, kind: str = "jsonl", truth: list[Any] | None = None) -> Path:
    prompts = prompts_of(reference)
    if kind == "parquet":
        return write_parquet("in.parquet", prompt_token_ids=prompts, **({"truth": truth} if truth else {}))
    return write_jsonl("in.jsonl", lines_of(prompts, **({"truth": truth} if truth else {})))


def audited(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if row["audit_score"] is not None]


def assert_report_sums_up(rows: list[dict[str, Any]], report: dict[str, Any]) -> None:
    """The numbers of run.json follow from the columns of the audit."""
    chosen = audited(rows)
    flips = sum(row["prediction"] != row["audit_prediction"] for row in chosen)
    exact = binomtest(flips, len(chosen)).proportion_ci(0.95, method="exact")
    differences = [abs(row["score"] - row["audit_score"]) for row in chosen]
    assert (report["rows"], report["flips"]) == (len(chosen), flips)
    assert report["flip_rate"] == pytest.approx(flips / len(chosen))
    assert report["interval"] == pytest.approx([exact.low, exact.high], abs=1e-9)
    assert report["mean_difference"] == pytest.approx(np.mean(differences))
    assert report["max_difference"] == pytest.approx(max(differences))


def auc(rows: list[dict[str, Any]], column: str, positive: list[bool]) -> float:
    """The share of pairs of a right and a wrong row that the score puts in order."""
    pairs = [
        (one[column] > other[column]) + 0.5 * (one[column] == other[column])
        for (one, right), (other, wrong) in product(zip(rows, positive, strict=True), repeat=2)
        if right and not wrong
    ]
    return float(np.mean(pairs))


@pytest.mark.parametrize(("kind", "name"), [("jsonl", "out.parquet"), ("parquet", "out.jsonl")])
def test_audited_rows_have_the_answer_of_the_whole_prompt_too(
    model: Path, draft: Path, reference: Reference, kind: str, name: str
) -> None:
    source = make_input(reference, kind)
    full = full_rows(source, model)
    compressed(source, "plain.parquet", model=model, draft=draft)
    plain = read_output("plain.parquet")
    assert "audit_score" not in plain[0]
    summary = compressed(source, name, model=model, draft=draft, audit=AUDIT)
    rows, report = read_output(name), read_report(summary["report"])
    chosen = [number for number, row in enumerate(rows) if row["audit_score"] is not None]
    assert len(chosen) == AUDIT
    assert set(chosen) < set(LONG)
    assert chosen[0] < 10 < 20 < chosen[-1], "they come from all over"
    for number, row in enumerate(rows):
        if number in chosen:
            assert row["method"] == "specprefill"
            assert row["audit_score"] == pytest.approx(full[number]["score"], abs=SAME)
            assert row["audit_prediction"] == full[number]["prediction"]
        else:
            assert row["audit_score"] is row["audit_prediction"] is None
    assert_close(rows, plain)
    assert [row["method"] for row in rows] == [row["method"] for row in plain]
    assert [row["kept_tokens"] for row in rows] == [row["kept_tokens"] for row in plain]
    assert_report_sums_up(rows, report["audits"]["answer"])
    assert 0 < report["audits"]["answer"]["flips"] < AUDIT
    assert report["audits"]["answer"]["auc_full"] is None
    assert 0 < report["tokens"]["audit"] <= sum(rows[number]["prompt_tokens"] for number in chosen)
    assert report["tokens"]["prompt"] == sum(row["prompt_tokens"] for row in rows)


def test_fewer_compressed_rows_than_asked_for_are_all_audited(model: Path, draft: Path, reference: Reference) -> None:
    compressed(make_input(reference), model=model, draft=draft, audit=1000)
    rows = read_output("out.parquet")
    assert [number for number, row in enumerate(rows) if row["audit_score"] is not None] == LONG
    assert read_report()["audits"]["answer"]["rows"] == len(LONG)


def test_an_audit_of_rows_that_are_all_read_in_full_shows_nothing(
    model: Path, draft: Path, reference: Reference, capsys: pytest.CaptureFixture[str]
) -> None:
    compressed(make_input(reference), model=model, draft=draft, audit=5, keep=1.0, quiet=False)
    assert audited(read_output("out.parquet")) == []
    report = read_report()["audits"]["answer"]
    assert (report["rows"], report["flip_rate"], report["interval"]) == (0, None, None)
    assert "no row was scored in full as well" in capsys.readouterr().err


def test_error_rows_are_not_audited(model: Path, draft: Path, reference: Reference) -> None:
    rows = lines_of(prompts_of(reference)[1:5], keep=[None, 3, None, None])
    compressed(write_jsonl("in.jsonl", [*rows, {"prompt_token_ids": []}, b"{"]), model=model, draft=draft, audit=10)
    found = read_output("out.parquet")
    assert [row["error"] for row in found] == [None, "invalid_keep", None, None, "invalid_token_ids", "invalid_json"]
    assert [row["audit_score"] is not None for row in found] == [True, False, True, True, False, False]


@pytest.mark.parametrize(
    ("kind", "right"), [("jsonl", (True, False)), ("parquet", ("Yes", "No")), ("parquet", (1.0, 0.0))]
)
def test_right_answers_give_the_area_under_the_curve(
    model: Path, draft: Path, reference: Reference, kind: str, right: tuple[Any, Any]
) -> None:
    truth = [None if number % 7 == 3 else right[number % 3 == 0] for number in range(ROWS)]
    source = make_input(reference, kind, truth)
    compressed(source, model=model, draft=draft, audit=20, truth="truth")
    rows, report = read_output("out.parquet"), read_report()["audits"]["answer"]
    assert [row["truth"] for row in rows] == truth
    known = [row for row in audited(rows) if row["truth"] is not None]
    positive = [row["truth"] == right[0] for row in known]
    assert 0 < sum(positive) < len(known) < 20
    assert report["truth_rows"] == len(known)
    assert report["auc_compressed"] == pytest.approx(auc(known, "score", positive))
    assert report["auc_full"] == pytest.approx(auc(known, "audit_score", positive))
    assert_report_sums_up(rows, report)


def test_answers_of_a_form_of_their_own_are_not_counted(model: Path, draft: Path, reference: Reference) -> None:
    answers = ["Yes", "perhaps", 2, None, ["Yes"], {"answer": "Yes"}, "No", " Yes ", True, "", ...]
    truth = [answers[number % len(answers)] for number in range(ROWS)]
    compressed(make_input(reference, "jsonl", truth), model=model, draft=draft, audit=1000, truth="truth")
    known = [number for number in LONG if truth[number] in ("Yes", "No", " Yes ", True)]
    assert read_report()["audits"]["answer"]["truth_rows"] == len(known)


def test_the_table_tells_the_flips(
    model: Path, draft: Path, reference: Reference, capsys: pytest.CaptureFixture[str]
) -> None:
    truth = [("Yes", "No")[number % 2] for number in range(ROWS)]
    compressed(
        make_input(reference, "jsonl", truth), model=model, draft=draft, audit=AUDIT, truth="truth", quiet=False
    )
    table, report = " ".join(capsys.readouterr().err.split()), read_report()["audits"]["answer"]
    assert f"{AUDIT} rows also in full: {report['flips']} flip" in table
    assert f"{report['auc_compressed']:.3f} as scored, {report['auc_full']:.3f} in full" in table
    assert "computed by the draft" in table
