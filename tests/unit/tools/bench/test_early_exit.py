"""Early exit among the methods of `prefill bench`."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.score_runs import SAMPLES
from prefillcli.options.commands import BenchSettings
from prefillcli.tools.bench.bench_job import bench_job
from prefillcli.tools.bench.report import BenchReport, WorkloadResult, workload_remarks

MODELS = SAMPLES / "models"


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def compared(limit: int, **given: object) -> WorkloadResult:
    words = {"inputs": (str(SAMPLES / "labeling.parquet"),), "model": str(MODELS / "deep"), "limit": limit}
    words |= {"max_flips": 0.1, "truth": "answer", "quiet": True}
    assert bench_job(BenchSettings.model_validate(words | given))["exit_code"] == 0
    (workload,) = BenchReport.model_validate_json(Path("bench.json").read_text(), strict=False).workloads
    return workload


@pytest.mark.nightly
def test_exits_are_learnt_on_some_rows_and_compared_on_the_others() -> None:
    workload = compared(400, exit_rows=200, method=("early-exit",), rounds=0)
    walk, early = workload.methods
    assert (walk.method, early.method) == ("hybrid", "early-exit")
    assert (workload.rows, workload.truth_rows) == (200, 200)
    assert early.exits.rows_read == 200
    assert sum(early.exits.left.values()) == sum(each.rows for each in early.exits.classes) == 200
    assert early.answers.audit.flips == sum(each.flips for each in early.exits.classes) <= 20
    assert early.exits.layers_saved > 0.3
    assert any("learnt on 200 rows, drawn at random" in note for note in workload.notes)
    assert any("of answers left" in text for text in workload_remarks(workload))


def test_too_few_rows_leave_the_method_out_with_the_reason() -> None:
    workload = compared(40, method=("early-exit",), rounds=0)
    assert [each.method for each in workload.methods] == ["hybrid"]
    assert workload.notes[0].startswith("early-exit is left out: ")
    assert "exit_rows and --max-flips decide" in workload.notes[0]


@pytest.mark.nightly
def test_chains_of_first_readers_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefillcli.models.dtype.times_as_long", lambda form, *_: 0.4)  # a processor made for int8
    workload = compared(
        400, exit_rows=200, method=("early-exit", "first", "first-exit", "int8"), first=str(MODELS / "draft"),
        rounds=1,
    )  # fmt: skip
    walk, early, first, both, *int8 = workload.methods  # so small a model gains nothing by int8, which may be left out
    assert [each.method for each in workload.methods[:4]] == ["hybrid", "early-exit", "first", "first-exit"]
    for own in (early, first, both, *int8):
        assert own.answers.audit.flip_rate <= 0.1
        assert sum(own.exits.left.values()) == 200
    assert first.exits.left["0"] == 200 - first.exits.left.get("full", 0) > 100
    assert both.exits.left.get("full", 0) < 100  # by either, as their costs are
    assert all(own.exits.left["0"] > 100 for own in int8)
    assert first.target_tokens < walk.target_tokens / 2
    assert first.draft_tokens > 0
    assert any("before layer 1)" in text for text in workload_remarks(workload))
