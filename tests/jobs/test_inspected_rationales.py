"""`prefill inspect` writes about a row and weighs its sections as `prefill score` does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from prefillcli.options.commands import InspectSettings
from prefillcli.options.load import load_settings
from prefillcli.tools import inspect
from prefillcli.tools.inspection import Inspection
from tests.jobs.jobs import read_output, score, write_parquet
from tests.jobs.test_evidence_jobs import parts, text_of


def inspected(source: Path, row: object, monkeypatch: pytest.MonkeyPatch, **flags: Any) -> Inspection:
    """What is shown of a row, as data."""
    shown: list[Inspection] = []
    monkeypatch.setattr(inspect, "print_inspection", lambda what, *_, **__: shown.append(what))
    given = {"inputs": [str(source)], "row": str(row), **flags}
    texts = {key: str(value) if isinstance(value, Path) else value for key, value in given.items()}
    line = inspect.inspect_job(load_settings(InspectSettings, texts, environment={}))
    assert line["exit_code"] == 0
    return shown[0]


def assert_as_scored(shown: Inspection, row: dict[str, Any]) -> None:
    assert shown.scored is not None
    assert shown.scored.rationale is not None
    assert shown.scored.rationale.text == row["rationale"]
    assert shown.scored.rationale.tokens == row["rationale_tokens"]
    assert shown.scored.rationale.finish_reason == row["finish_reason"]
    assert shown.scored.rationale.source == row["rationale_source"]
    assert shown.scored.rationale.gap == pytest.approx(row["rationale_gap"], abs=1e-4)
    assert shown.further[-1].parts[0].text.startswith(f"{row['prediction']} because ")
    assert shown.scored.evidence is not None
    assert len(shown.scored.evidence) == len(row["evidence"]) > 0
    wanted = {each["section"]: each["change"] for each in row["evidence"]}
    assert dict(shown.scored.evidence) == pytest.approx(wanted, abs=1e-5)


def test_a_row_is_explained_as_score_explains_it(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_parquet("in.parquet", prompt=[text_of(parts(row)) for row in range(6)])
    flags = {"model": model, "rationale": 8, "evidence": True, "temperature": 1.5}
    assert score(source, **flags)["exit_code"] == 0
    shown = inspected(source, 4, monkeypatch, html="row.html", **flags)
    row = read_output("out.parquet")[4]
    assert_as_scored(shown, row)
    page = Path("row.html").read_text()
    assert "paragraph 2" in page
    assert "It is not the reason for the score" in page


def test_a_compressed_row_is_written_about_compressed_and_weighed_in_full(
    model: Path, draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_parquet("in.parquet", prompt=[text_of(parts(row)) for row in range(3)])
    flags: dict[str, Any] = {"model": model, "draft": draft, "keep": 0.4, "compress_above": 0, "keep_last": 8}
    flags |= {"select_chunk": 4, "rationale": 6, "evidence": True}
    assert score(source, **flags)["exit_code"] == 0
    row = read_output("out.parquet")[1]
    assert row["rationale_source"] == "specprefill"
    assert_as_scored(inspected(source, 1, monkeypatch, **flags), row)
