"""`--keep auto`: the smallest rate that a sample of the job's own rows allows."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from scipy.stats import binomtest

from prefillcli.reading.compress import compressor
from prefillcli.reading.compress.compressor import RATES
from prefillcli.stats.flips import flip_bound
from tests.jobs.compression import SAME, assert_close, compressed, full_rows, lines_of, unrelated
from tests.jobs.jobs import Reference, beside_answers, read_output, read_report, write_jsonl
from tests.jobs.models import save_model

ROWS = 40
SMALLEST = min(RATES)


def make_input(reference: Reference, rows: int = ROWS, **columns: list[Any]) -> Path:
    lengths = [150 + 2 * number if number % 4 else 50 for number in range(rows)]
    return write_jsonl("in.jsonl", lines_of(unrelated(reference, lengths), **columns))


def test_many_allowed_flips_give_the_smallest_rate(
    model: Path, draft: Path, reference: Reference, capsys: pytest.CaptureFixture[str]
) -> None:
    source = make_input(reference)
    compressed(source, model=model, draft=draft, keep="auto", max_flips=0.999, audit=20)
    rows, report = read_output("out.parquet"), read_report()
    assert (report["keep"], report["keep_auto"]["keep"]) == (SMALLEST, SMALLEST)
    trials = report["keep_auto"]["trials"]
    assert [trial["keep"] for trial in trials] == sorted(RATES, reverse=True)
    for trial in trials:
        assert trial["rows"] == 20
        assert trial["bound"] == pytest.approx(flip_bound(trial["flips"], 20))
        assert trial["bound"] <= 0.999
    compressed(source, "fixed.parquet", model=model, draft=draft, keep=SMALLEST, audit=20)
    assert_close(rows, read_output("fixed.parquet"))
    assert [row["audit_score"] for row in rows] == pytest.approx(
        [row["audit_score"] for row in read_output("fixed.parquet")], abs=SAME, nan_ok=True
    )
    assert "auto" not in capsys.readouterr().err


def test_rates_that_compression_does_not_pay_at_are_passed_over(
    model: Path, draft: Path, reference: Reference
) -> None:
    source = make_input(reference)
    flags = {"keep": "auto", "max_flips": 0.999, "audit": 20, "compress_above": "auto"}
    compressed(source, model=model, draft=draft, **flags)
    report = read_report()
    tried = {trial["keep"]: trial["rows"] for trial in report["keep_auto"]["trials"]}
    assert (tried[max(RATES)], tried[SMALLEST]) == (0, 20)  # the draft is half as large as the model
    assert report["keep"] == SMALLEST


def test_a_rate_is_taken_only_if_it_and_all_larger_ones_pass(model: Path, draft: Path, reference: Reference) -> None:
    """Every rate that was tried has the flips that a job with this rate and an audit of all rows has."""
    allowed = 0.6
    source = make_input(reference)
    compressed(source, model=model, draft=draft, keep="auto", max_flips=allowed, audit=1000)
    report = read_report()
    trials = report["keep_auto"]["trials"]
    assert [trial["keep"] for trial in trials] == list(RATES[: len(trials)])
    for trial in trials:
        compressed(source, "fixed.parquet", model=model, draft=draft, keep=trial["keep"], audit=1000)
        audit = read_report("fixed.run.json")["audits"]["answer"]
        assert (trial["rows"], trial["flips"]) == (audit["rows"], audit["flips"])
        assert trial["bound"] == pytest.approx(flip_bound(audit["flips"], audit["rows"]))
    assert all(trial["bound"] <= allowed for trial in trials[:-1])
    assert len(trials) == len(RATES) or trials[-1]["bound"] > allowed
    passed = [1.0, *(trial["keep"] for trial in trials if trial["bound"] <= allowed)]
    assert report["keep"] == passed[-1]


def test_where_the_safest_rate_fails_all_rows_are_read_in_full(
    model: Path, draft: Path, reference: Reference, capsys: pytest.CaptureFixture[str]
) -> None:
    source = make_input(reference)
    compressed(source, model=model, draft=draft, keep="auto", max_flips=0.1)
    report = read_report()
    (trial,) = report["keep_auto"]["trials"]
    assert trial["keep"] == max(RATES)
    assert report["keep"] == 1.0
    (line,) = beside_answers(capsys.readouterr().err)
    assert line.startswith("prefill: warning: --keep auto: keeping 0.7 does not prove that at most 10.00% flip")
    assert f"({trial['flips']} of {trial['rows']} rows did)" in line
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
    (line,) = beside_answers(capsys.readouterr().err)
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
    trials = read_report()["keep_auto"]["trials"]
    assert len(trials) == len(RATES)
    free = [number for number in range(ROWS) if number % 2 == 0 and number % 3 and number % 4]
    assert {trial["rows"] for trial in trials} == {len(free)}
    rows = read_output("out.parquet")
    own = [number for number in range(ROWS) if number % 2 and number % 3]
    for number in free + own:
        rate = 0.5 if number in own else SMALLEST
        assert rows[number]["method"] == "specprefill"
        assert rate <= rows[number]["kept_tokens"] / rows[number]["prompt_tokens"] < rate + 0.25


def test_a_prompt_that_does_not_fit_in_full_is_not_tried(model: Path, reference: Reference, tmp_path: Path) -> None:
    """It can be scored compressed, but there is nothing to compare it with."""
    draft = save_model(tmp_path / "narrow", seed=3, layers=1, hidden=32)
    prompts = unrelated(reference, [300, 900, 200])
    source = write_jsonl("in.jsonl", lines_of(prompts))
    compressed(source, model=model, draft=draft, keep="auto", max_flips=0.999, memory="48.5MiB", chunk_tokens=16)
    assert {trial["rows"] for trial in read_report()["keep_auto"]["trials"]} == {2}
    assert [row["method"] for row in read_output("out.parquet")] == ["specprefill"] * 3


def test_a_job_without_a_long_row_chooses_nothing(
    model: Path, draft: Path, reference: Reference, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_jsonl("in.jsonl", lines_of(unrelated(reference, [30, 40, 50])))
    assert compressed(source, model=model, draft=draft, keep="auto")["exit_code"] == 0
    assert read_report()["keep"] == 1.0
    assert "keep_auto" not in read_report()
    assert beside_answers(capsys.readouterr().err) == []


def test_the_choice_as_a_whole_is_wrong_in_one_of_twenty_jobs_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five rates that all flip just more than allowed: five tests at 5 % each would take one far more often."""
    allowed, rows, jobs = 0.03, 157, 400
    draws = np.random.default_rng(0).binomial(rows, allowed + 1e-6, (jobs, len(RATES)))
    wrong = sum(chosen_keep(flips.tolist(), rows, allowed, monkeypatch) < 1 for flips in draws)
    assert binomtest(wrong, jobs, 0.05, alternative="greater").pvalue > 0.01
    # So the test can fail: every rate by itself passes now and then.
    assert all(min(flip_bound(flips, rows) for flips in of_rate.tolist()) <= allowed for of_rate in draws.T)


def chosen_keep(flips: list[int], rows: int, allowed: float, monkeypatch: pytest.MonkeyPatch) -> float:
    """What `choose_keep` takes where the rates, in the order in which they are tried, have so many flips."""
    tried: list[float] = []

    def answers(engine: Any, requests: Any, tick: Any) -> Any:
        flipped = flips[len(tried) - 1] if tried else 0
        return [SimpleNamespace(logprobs=np.eye(2)[int(row < flipped)]) for row in range(rows)]

    compressing = SimpleNamespace(
        keeps=lambda prompts, keep: tried.append(keep),
        select=lambda *_: [SimpleNamespace(compressed=True)] * rows,
    )
    monkeypatch.setattr(compressor, "answer_requests", answers)
    monkeypatch.setattr(compressor, "Request", lambda prompt: prompt)
    found = compressor.choose_keep(cast(Any, compressing), cast(Any, None), [None] * rows, [], range(rows), allowed)  # type: ignore[list-item]
    return found.keep
