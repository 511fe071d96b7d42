"""The hybrid sample in jobs: rows leave it early, and it is drafted for and drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from scipy.stats import binomtest

from benchmarks.score_runs import SAMPLES
from prefillcli.jobs import inspect
from prefillcli.options.commands import InspectSettings
from prefillcli.options.load import load_settings
from prefillcli.report.inspection import Inspection, facts
from tests.score.jobs import read_output, read_report, score

HYBRID, DRAFT = (SAMPLES / "models" / name for name in ("hybrid", "draft"))
LABELING, CREDIT = SAMPLES / "labeling.parquet", SAMPLES / "credit_verification.jsonl"
FLIPS = 0.05


@pytest.mark.nightly
def test_rows_leave_before_the_last_recurrent_layer_and_keep_their_answers() -> None:
    same: dict[str, Any] = {"limit": 700, "dtype": "float32"}
    assert score(LABELING, "full.parquet", model=HYBRID, **same)["status"] == "complete"
    flags = same | {"exit": True, "max_flips": FLIPS, "exit_rows": 350}
    assert score(LABELING, "out.parquet", model=HYBRID, **flags)["status"] == "complete"
    assert read_report()["exits"]["status"] == "calibrated"
    pairs = list(zip(read_output("out.parquet"), read_output("full.parquet"), strict=True))
    left = [row["exit_layer"] for row, _ in pairs if row["exit_layer"] is not None]
    assert len(left) > 100
    assert max(left) < 4
    for label in ("Yes", "No"):
        flips = [row["prediction"] != label for row, full in pairs if full["prediction"] == label]
        assert binomtest(sum(flips), len(flips)).proportion_ci(0.95).low <= FLIPS
    for row, full in pairs:
        if row["exit_layer"] is None:
            assert row["score"] == pytest.approx(full["score"], abs=1e-5)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("draft", [DRAFT, HYBRID], ids=["attention", "hybrid"])
def test_compressed_histories_are_answered_as_whole_ones(draft: Path) -> None:
    flags: dict[str, Any] = {"limit": 12, "keep": 0.3, "compress_above": 0, "audit": 12}
    assert score(CREDIT, model=HYBRID, draft=draft, **flags)["status"] == "complete"
    rows = read_output("out.parquet")
    assert all(row["method"] == "specprefill" for row in rows)
    assert all(row["kept_tokens"] < 0.5 * row["prompt_tokens"] for row in rows)
    assert read_report()["audit"]["flips"] <= 2


@pytest.mark.nightly
def test_the_layers_that_voted_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Inspection] = []
    monkeypatch.setattr(inspect, "print_inspection", lambda what, *given, **named: shown.append(what))
    given = {"inputs": [str(CREDIT)], "row": "0", "model": str(HYBRID), "keep": 0.3, "compress_above": 0}
    for draft in (HYBRID, DRAFT):
        settings = load_settings(InspectSettings, given | {"draft": str(draft)}, environment={})
        assert inspect.inspect_job(settings)["status"] == "complete"
    assert [dict(facts(each))["votes"] for each in shown] == [
        "1 of the draft's 4 layers: 2",
        "all 3 layers of the draft",
    ]
