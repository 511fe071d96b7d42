"""A job that was to read fewer tokens compresses what pays, and says so where it compresses next to nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.jobs.compression import lines_of, unrelated
from tests.jobs.jobs import Reference, read_output, read_report, score, write_jsonl
from tests.jobs.models import save_model


def told(capsys: pytest.CaptureFixture[str], inputs: Any, **flags: Any) -> tuple[list[str], float, list[str]]:
    """The methods of the rows, the share of the tokens that was read, and warnings of the job."""
    capsys.readouterr()
    assert score(inputs, "out.parquet", overwrite=True, **{"quiet": True, **flags})["exit_code"] == 0
    tokens = read_report()["tokens"]
    warnings = [line for line in capsys.readouterr().err.splitlines() if "--keep" in line]
    return [row["method"] for row in read_output("out.parquet")], tokens["kept"] / tokens["prompt"], warnings


def test_what_pays_is_compressed_without_another_option(
    reference: Reference, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_jsonl("in.jsonl", lines_of(unrelated(reference, [700, 900, 60])))
    large = save_model(tmp_path / "large", layers=8)
    small = save_model(tmp_path / "small", seed=3, layers=1)
    methods, read, warnings = told(capsys, source, model=large, draft=small, keep=0.2)
    assert (methods, warnings) == (["specprefill", "specprefill", "full"], [])
    assert 0.2 < read < 0.4


def test_a_draft_that_costs_as_much_as_the_model_is_named(
    model: Path, reference: Reference, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_jsonl("in.jsonl", lines_of(unrelated(reference, [300, 450])))
    methods, read, warnings = told(capsys, source, model=model, draft=model, keep=0.2)
    assert (methods, read, len(warnings)) == (["full", "full"], 1.0, 1)
    warning = warnings[0]
    assert "--keep 0.2 leaves 100% of the tokens of 2 rows, 2 of them are read in full; row 1, for one" in warning
    assert "its 450 tokens would be read at 0." in warning
    assert told(capsys, source, model=model, draft=model, keep=0.2, compress_above=0)[0] == ["specprefill"] * 2


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ({"compress_above": 450}, "its 450 tokens are not more than compress_above 450"),
        ({"compress_above": 0, "keep_last": 440}, "the chosen tokens, the first and last ones"),
        ({"compress_above": 0, "keep_last": 500}, "of its 450 tokens the first 4 and last 500 stay anyway"),
    ],
)
def test_other_reasons_are_named_too(
    flags: dict[str, Any],
    why: str,
    model: Path,
    draft: Path,
    reference: Reference,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = write_jsonl("in.jsonl", lines_of(unrelated(reference, [300, 450])))
    warnings = told(capsys, source, model=model, draft=draft, keep=0.97, **flags)[2]
    assert [why in warning for warning in warnings] == [True]
