"""A job whose model hardly ever answers with a label says so, once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import prefillcli
from tests.score import jobs
from tests.score.jobs import read_output, score, texts, write_parquet
from tests.score.models import save_model

LABELS = "Yes= Yes,No= No"


@pytest.fixture(scope="module")
def sure(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose next token is nearly certain, and no label."""
    folder = save_model(tmp_path_factory.mktemp("models") / "sure")
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] *= 12
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def warnings_of(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().err.splitlines() if "of the probability on average" in line]


def mean_mass(rows: list[dict[str, Any]]) -> float:
    return sum(row["label_mass"] for row in rows) / len(rows)


@pytest.mark.parametrize("flags", [{}, {"workers": 2}, {"engine": "hf"}])
def test_labels_that_the_model_never_says_are_told_once(
    sure: Path, flags: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "granularity", jobs.Granularity(window_rows=4))
    source = write_parquet("in.parquet", prompt=texts(12))
    assert score(source, model=sure, labels=LABELS, **flags)["exit_code"] == 0
    assert mean_mass(read_output("out.parquet")) < 1e-3
    (warning,) = warnings_of(capsys)
    assert "check that the model is the right one" in warning
    assert "the template" in warning
    assert "--labels" in warning


def test_a_model_that_says_the_labels_is_not_warned_of(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_parquet("in.parquet", prompt=texts(12))
    assert score(source, model=model, labels=LABELS)["exit_code"] == 0
    assert mean_mass(read_output("out.parquet")) > 1e-3
    assert warnings_of(capsys) == []


def test_a_scorer_tells_it_once(sure: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with prefillcli.Scorer(sure, labels=LABELS) as scorer:
        assert mean_mass(scorer.score(texts(4)).to_pylist()) < 1e-3
        scorer.score(texts(4))
    assert len(warnings_of(capsys)) == 1


def test_rows_of_errors_alone_do_not_count_as_the_first_window(
    sure: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "granularity", jobs.Granularity(window_rows=4))
    source = write_parquet("in.parquet", prompt=[None] * 4 + texts(4))
    score(source, model=sure, labels=LABELS, max_error_rate=1.0)
    assert len(warnings_of(capsys)) == 1


def test_classes_of_a_head_have_no_such_mass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_model(tmp_path / "model", classifies=True, num_labels=40)
    tensors = load_file(folder / "model.safetensors")
    tensors["score.weight"] *= 100
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    source = write_parquet("in.parquet", prompt=texts(4))
    for number in range(0, 40, 8):
        score(source, model=folder, labels=f"LABEL_{number},LABEL_{number + 1}", overwrite=True)
        if mean_mass(read_output("out.parquet")) < 1e-3:
            break
    else:
        pytest.fail("no two classes are improbable")
    assert warnings_of(capsys) == []
