"""A finished output that is not what was expected ends the run with exit code 3, and the report says what is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from scipy.stats import ks_2samp

from prefillcli.errors import UsageError
from prefillcli.judging.gates import Gates, judge
from prefillcli.options.commands import MergeSettings
from prefillcli.options.load import load_settings
from prefillcli.report.run import QuestionAnswers, Rows, RunReport
from prefillcli.tools.merge import merge_job
from tests.jobs.jobs import read_report, score, texts, write_parquet

ROWS = 60


def night(model: Path, name: str, prompts: list[str], **flags: Any) -> dict[str, Any]:
    """One night's run: its own input and output."""
    return score(write_parquet(f"{name}.parquet", prompt=prompts), f"{name}.scores.parquet", model=model, **flags)


@pytest.mark.parametrize(
    ("wanted", "passed"),
    [("60", 1), ("50-60", 1), ("-60", 1), ("61-", 0), ("-59", 0)],
)
def test_a_number_of_rows_is_in_a_range_or_not(wanted: str, passed: bool) -> None:
    settings = load_settings(MergeSettings, {"output": "o.parquet", "expect_rows": wanted}, environment={})
    report = RunReport(rows=Rows(total=ROWS, scored=55, errors=5))
    gates = Gates(settings.gates)
    assert bool(gates.judge(report)) is not bool(passed)
    (gate,) = report.findings["gates"].root
    assert (gate.name, gate.value, gate.passed) == ("expect_rows", ROWS, passed)


def test_rows_that_are_missing_end_the_run_with_3(model: Path) -> None:
    summary = night(model, "in", texts(ROWS), expect_rows="61-")
    report = read_report("in.scores.run.json")
    assert (summary["exit_code"], summary["status"]) == (3, "complete")
    assert "61-" in report["error"]
    assert pq.read_metadata("in.scores.parquet").num_rows == ROWS


def test_an_empty_night_where_rows_are_expected_is_not_skipped(model: Path) -> None:
    assert night(model, "a", [], skip_empty=True)["exit_code"] == 99
    assert night(model, "b", [], skip_empty=True, expect_rows="1-")["exit_code"] == 3


@pytest.mark.parametrize("wanted", ["", "-", "9-3", "1-2-3", "1.5", True])
def test_a_range_that_is_none_is_refused(wanted: object) -> None:
    with pytest.raises(UsageError, match="range"):
        load_settings(MergeSettings, {"output": "o.parquet", "expect_rows": wanted}, environment={})


def test_a_prompt_that_the_model_does_not_answer_ends_the_run_with_3(model: Path) -> None:
    assert night(model, "a", texts(ROWS), labels=" yes, no")["exit_code"] == 0
    mass = float(np.mean(pq.read_table("a.scores.parquet")["label_mass"].to_numpy()))
    assert read_report("a.scores.run.json")["answers"]["answer"]["label_mass"] == pytest.approx(mass)
    flags = {"labels": " yes, no", "overwrite": True}
    assert night(model, "a", texts(ROWS), min_label_mass=mass * 0.999, **flags)["exit_code"] == 0
    summary = night(model, "a", texts(ROWS), min_label_mass=min(mass * 1.01, 1.0), **flags)
    assert summary["exit_code"] == 3
    assert "label mass" in summary["error"]


def test_the_least_answered_of_several_questions_is_judged() -> None:
    report = RunReport()
    for name, mass in (("refund", 0.9), ("topic", 0.02)):
        report.answers[name] = QuestionAnswers(rows=5, answers={"Yes": 5}, label_mass=mass, close=0, least_sure=[])
    options = SimpleNamespace(row_range=None, min_label_mass=0.5, max_drift=None)
    (gate,) = judge(options, report)
    assert (gate.passed, gate.value) == (False, 0.02)
    assert gate.text == "the mean label mass of topic is 0.02; --min-label-mass is 0.5"


def shifted(count: int) -> list[str]:
    """Prompts whose scores lie elsewhere than those of `texts`."""
    return [f"yes yes yes {at}" for at in range(count)]


def test_scores_that_drift_from_the_last_night_end_the_run_with_3(model: Path) -> None:
    night(model, "monday", texts(ROWS))
    flags = {"max_drift": 0.3, "drift_from": "monday.scores.run.json"}
    assert night(model, "tuesday", texts(ROWS), **flags)["exit_code"] == 0
    summary = night(model, "wednesday", shifted(ROWS), **flags)
    report = read_report("wednesday.scores.run.json")
    scores = [pq.read_table(f"{day}.scores.parquet")["score"].to_numpy() for day in ("monday", "wednesday")]
    bins = [np.floor(each * 50) for each in scores]
    assert report["drift"]["distance"] == pytest.approx(ks_2samp(*bins).statistic)
    assert report["drift"]["distance"] > 0.3, "the prompts must differ for this test to say anything"
    assert summary["exit_code"] == 3
    assert "monday.scores.run.json" in summary["error"]


def test_a_night_that_failed_is_not_what_the_next_one_is_compared_with(model: Path) -> None:
    flags = {"max_drift": 0.3, "overwrite": True, "report": "run.json"}
    night(model, "in", texts(ROWS), **flags)  # there is no report yet: a warning
    first = read_report("run.json")
    assert first["gates"][0]["value"] is None
    assert night(model, "in", shifted(ROWS), **flags)["exit_code"] == 3
    assert night(model, "in", shifted(ROWS), **flags)["exit_code"] == 3, "it is still compared with the first night"
    assert read_report("run.json")["drift"]["scores"] == [
        sum(bins) for bins in zip(*first["histograms"]["score"]["counts"].values(), strict=True)
    ]
    assert night(model, "in", texts(ROWS), **flags)["exit_code"] == 0


def test_a_resumed_job_is_compared_with_what_it_was_compared_with_before(model: Path) -> None:
    flags = {"max_drift": 0.3, "report": "run.json"}
    night(model, "monday", texts(ROWS), **flags)
    night(model, "tuesday", texts(40), **flags)
    before = read_report("run.json")["drift"]
    assert night(model, "tuesday", texts(40), resume=True, **flags)["exit_code"] == 0
    assert read_report("run.json")["drift"] == before


@pytest.mark.parametrize("content", [None, b"no report", b"{}"])
def test_what_is_no_report_is_refused_before_anything_is_loaded(model: Path, content: bytes | None) -> None:
    if content is not None:
        Path("old.json").write_bytes(content)
    summary = night(model, "in", texts(4), max_drift=0.1, drift_from="old.json")
    assert summary["exit_code"] == 2
    assert "--drift-from old.json" in summary["error"]
    assert not Path("in.scores.parquet.prefill").exists()


def test_shards_are_judged_when_they_are_merged(model: Path) -> None:
    source = write_parquet("in.parquet", prompt=texts(ROWS))
    for shard in ("1/2", "2/2"):
        assert score(source, "out.parquet", model=model, shard=shard)["exit_code"] == 0
    with pytest.raises(UsageError, match="prefill merge"):
        score(source, "o.parquet", model=model, shard="1/2", expect_rows="60")
    settings = load_settings(
        MergeSettings, {"output": "out.parquet", "expect_rows": "61-", "quiet": True}, environment={}
    )
    assert merge_job(settings)["exit_code"] == 3
    assert read_report()["gates"][0]["passed"] is False


@pytest.mark.nightly
@pytest.mark.parametrize("workers", ["1", "2"])
def test_each_line_of_a_json_log_is_an_object_of_its_run(model: Path, workers: str) -> None:
    write_parquet("in.parquet", prompt=[*texts(ROWS), None])
    line = [
        "score",
        "in.parquet",
        "-o",
        "o.parquet",
        "-m",
        str(model),
        "--log-format",
        "json",
        "--run-id",
        "night 7",
        "--empty-text",
        "error",
    ]
    line += ["--progress-interval", "0.001", "--workers", workers, "--threads", "1", "--max-drift", "0.5"]
    run = subprocess.run([sys.executable, "-m", "prefillcli", *line], capture_output=True, text=True, timeout=300)
    assert run.returncode == 3, run.stderr
    found = [json.loads(each) for each in run.stderr.splitlines()]
    assert {each["run_id"] for each in found} == {"night 7"}
    assert all(each.keys() >= {"time", "level", "event", "message"} for each in found)
    events = [each["event"] for each in found]
    assert (events[0], events[-1]) == ("started", "ended")
    assert {"progress", "gates"} <= set(events)
    progress = [each for each in found if each["event"] == "progress"]
    assert all({"rows", "total", "rows_per_second", "seconds_left"} <= each.keys() for each in progress)
    assert any(each["level"] == "warning" and "--max-drift" in each["message"] for each in found)
    summary = json.loads(run.stdout.splitlines()[-1])
    assert found[-1]["summary"] == summary
    assert summary["run_id"] == "night 7" == read_report("o.run.json")["run_id"]
