"""`--keep auto`: the smallest rate that a sample of the job's own rows allows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from prefillcli.compress.auto import RATES
from prefillcli.stats.audit import flip_bound
from tests.score.compression import SAME, assert_close, compressed, full_rows, lines_of, unrelated
from tests.score.jobs import Reference, read_output, read_report, write_jsonl
from tests.score.models import save_model

ROWS = 40


def make_input(reference: Reference, rows: int = ROWS, **columns: list[Any]) -> Path:
    lengths = [150 + 2 * number if number % 4 else 50 for number in range(rows)]
    return write_jsonl("in.jsonl", lines_of(unrelated(reference, lengths), **columns))


def test_many_allowed_flips_give_the_smallest_rate(
    model: Path, draft: Path, reference: Reference, capsys: pytest.CaptureFixture[str]
) -> None:
    source = make_input(reference)
    compressed(source, model=model, draft=draft, keep="auto", max_flips=0.999, audit=20)
    rows, report = read_output("out.parquet"), read_report()
    assert (report["keep"], report["keep_auto"]["keep"]) == (RATES[0], RATES[0])
    (trial,) = report["keep_auto"]["trials"]
    assert (trial["keep"], trial["rows"]) == (RATES[0], 20)
    assert trial["bound"] == pytest.approx(flip_bound(trial["flips"], 20))
    assert trial["bound"] <= 0.999
    compressed(source, "fixed.parquet", model=model, draft=draft, keep=RATES[0], audit=20)
    assert_close(rows, read_output("fixed.parquet"))
    assert [row["audit_score"] for row in rows] == pytest.approx(
        [row["audit_score"] for row in read_output("fixed.parquet")], abs=SAME, nan_ok=True
    )
    assert "auto" not in capsys.readouterr().err


def test_a_rate_is_taken_only_if_its_flips_allow_it(model: Path, draft: Path, reference: Reference) -> None:
    """Every rate that was tried has the flips that a job with this rate and an audit of all rows has."""
    source = make_input(reference)
    compressed(source, model=model, draft=draft, keep="auto", max_flips=0.3, audit=1000)
    report = read_report()
    trials = report["keep_auto"]["trials"]
    assert [trial["keep"] for trial in trials] == list(RATES[: len(trials)])
    assert len(trials) > 1
    for trial in trials:
        compressed(source, "fixed.parquet", model=model, draft=draft, keep=trial["keep"], audit=1000)
        audit = read_report("fixed.run.json")["audit"]
        assert (trial["rows"], trial["flips"]) == (audit["rows"], audit["flips"])
        assert trial["bound"] == pytest.approx(flip_bound(audit["flips"], audit["rows"]))
    assert all(trial["bound"] > 0.3 for trial in trials[:-1])
    passed = trials[-1]["bound"] <= 0.3
    assert report["keep"] == (trials[-1]["keep"] if passed else 1.0)


def test_where_no_rate_passes_all_rows_are_read_in_full(model: Path, draft: Path, reference: Reference) -> None:
    source = make_input(reference)
    compressed(source, model=model, draft=draft, keep="auto", max_flips=0.1)
    report = read_report()
    assert [trial["keep"] for trial in report["keep_auto"]["trials"]] == list(RATES)
    assert report["keep"] == 1.0
    assert_close(read_output("out.parquet"), full_rows(source, model))
    assert {row["method"] for row in read_output("out.parquet")} == {"full"}


def test_too_few_rows_prove_nothing(
    model: Path, draft: Path, reference: Reference, capsys: pytest.CaptureFixture[str]
) -> None:
    source = make_input(reference)
    compressed(source, model=model, draft=draft, keep="auto", max_flips=0.01)
    report, rows = read_report(), read_output("out.parquet")
    assert (report["keep"], report["keep_auto"]) == (1.0, {"keep": 1.0, "trials": [], "rows_needed": 299})
    assert {row["method"] for row in rows} == {"full"}
    assert_close(rows, full_rows(source, model))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("prefill: warning: --keep auto: 30 rows")
    assert "1.00%" in line
    assert "299" in line


def test_rows_with_a_wish_of_their_own_have_no_part_in_the_choice(
    model: Path, draft: Path, reference: Reference
) -> None:
    keep = [0.5 if number % 2 else ... for number in range(ROWS)]
    wish = [False if number % 3 == 0 else ... for number in range(ROWS)]
    source = make_input(reference, keep=keep, specprefill=wish)
    compressed(source, model=model, draft=draft, keep="auto", max_flips=0.999, audit=100)
    (trial,) = read_report()["keep_auto"]["trials"]
    free = [number for number in range(ROWS) if number % 2 == 0 and number % 3 and number % 4]
    assert trial["rows"] == len(free)
    rows = read_output("out.parquet")
    own = [number for number in range(ROWS) if number % 2 and number % 3]
    for number in free + own:
        rate = 0.5 if number in own else RATES[0]
        assert rows[number]["method"] == "specprefill"
        assert rate <= rows[number]["kept_tokens"] / rows[number]["prompt_tokens"] < rate + 0.25


def test_a_prompt_that_does_not_fit_in_full_is_not_tried(model: Path, reference: Reference, tmp_path: Path) -> None:
    """It can be scored compressed, but there is nothing to compare it with."""
    draft = save_model(tmp_path / "narrow", seed=3, layers=1, hidden=32)
    prompts = unrelated(reference, [300, 900, 200])
    source = write_jsonl("in.jsonl", lines_of(prompts))
    compressed(source, model=model, draft=draft, keep="auto", max_flips=0.999, memory="48.5MiB", chunk_tokens=16)
    (trial,) = read_report()["keep_auto"]["trials"]
    assert trial["rows"] == 2
    assert [row["method"] for row in read_output("out.parquet")] == ["specprefill"] * 3


def test_a_job_without_a_long_row_chooses_nothing(
    model: Path, draft: Path, reference: Reference, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_jsonl("in.jsonl", lines_of(unrelated(reference, [30, 40, 50])))
    assert compressed(source, model=model, draft=draft, keep="auto")["exit_code"] == 0
    assert (read_report()["keep"], read_report()["keep_auto"]) == (1.0, None)
    assert capsys.readouterr().err == ""
