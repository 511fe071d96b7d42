"""Jobs whose texts are guessed ahead: by the model over a part of its prompts, by the draft model, by both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.jobs.jobs import read_output, read_report, score, texts, write_parquet

ROWS = 20
LONG = " ".join(texts(12))
EXACT = ("score", "rationale", "rationale_tokens", "finish_reason")
HYBRID, TARGET = (Path(__file__).parents[2] / "samples" / "models" / name for name in ("hybrid", "target"))


def job(model: Path, output: str = "out.parquet", **flags: Any) -> dict[str, Any]:
    """A job whose every second prompt is long."""
    prompts = [f"{LONG} {text}" if number % 2 else text for number, text in enumerate(texts(ROWS))]
    rows = write_parquet("in.parquet", prompt=prompts)
    given = {"model": model, "rationale": 10} | flags
    if given["speculation"] in ("retrieval", "hierarchy"):
        given["retrieval_budget"] = 48
    return score(rows, output, **given)


def written(output: str = "out.parquet") -> list[tuple[Any, ...]]:
    return [tuple(row[name] for name in EXACT[1:]) for row in read_output(output)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("speculation", "more"),
    [
        ("retrieval", {}),
        ("draft", {}),
        ("hierarchy", {}),
        ("hierarchy", {"rationale_temperature": 0.8, "retrieval_chunk": 4}),
        ("hierarchy", {"workers": 2}),
        ("lookup", {}),
    ],
)
def test_texts_are_the_same_however_they_are_guessed(
    model: Path, draft: Path, speculation: str, more: dict[str, Any]
) -> None:
    sampled = {name: value for name, value in more.items() if name == "rationale_temperature"}
    assert job(model, "plain.parquet", speculation="off", **sampled)["exit_code"] == 0
    small = {"draft": draft} if speculation in ("draft", "hierarchy") else {}
    assert job(model, speculation=speculation, **small, **more)["exit_code"] == 0
    assert written() == written("plain.parquet")
    for row, before in zip(read_output("out.parquet"), read_output("plain.parquet"), strict=True):
        assert row["score"] == pytest.approx(before["score"], abs=1e-6)
    if speculation != "lookup":  # which may find nothing to guess
        assert speculation in str(read_report()["rationales"])


def test_a_draft_that_cannot_forget_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    assert job(TARGET, speculation="draft", draft=HYBRID)["exit_code"] == 2
    said = capfd.readouterr().err
    assert "--speculation draft" in said
    assert "recurrent layers cannot forget" in said
