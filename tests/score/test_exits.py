"""Rows that leave early: the same answers for less work, each time the same rows, and none where nothing is proven."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from prefillcli.jobs.inputs import Granularity
from tests.score import jobs
from tests.score.jobs import read_output, read_report, score, write_jsonl
from tests.score.models import save_model

WORDS = ("fox", "dog", "brown", "quick", "number", "saw", "yes", "no")
ROWS = 360
LAYERS = 6
FLIPS = 0.1  # proven by 29 rows of an answer, or 46 with one flip
LABELS = "n,t"
EXITS: dict[str, Any] = {"exit": True, "max_flips": FLIPS, "exit_rows": 200, "labels": LABELS, "dtype": "float32"}


def prompts(rows: int = ROWS) -> list[str]:
    """Texts that share a beginning with some others."""
    draws = np.random.default_rng(7)
    heads = [" ".join(draws.choice(WORDS, 12)) for _ in range(rows // 20)]
    return [f"{draws.choice(heads)} {' '.join(draws.choice(WORDS, 8))} {row}\nAnswer:" for row in range(rows)]


@pytest.fixture(scope="session")
def deep_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its last layers change little: the answer is nearly there after the third of six."""
    path = save_model(tmp_path_factory.mktemp("models") / "deep", layers=LAYERS, seed=5)
    model = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        for layer in model.model.layers[3:]:
            layer.self_attn.o_proj.weight.mul_(0.02)
            layer.mlp.down_proj.weight.mul_(0.02)
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("data") / "rows.jsonl", [{"prompt": text} for text in prompts()])


@pytest.fixture(autouse=True)
def _small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "granularity", Granularity(batch_rows=64, window_rows=64))


@pytest.fixture(scope="session")
def in_full(data: Path, deep_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The rows of a job without exits."""
    output = tmp_path_factory.mktemp("full") / "full.jsonl"
    assert score(data, output, model=deep_model, labels=LABELS, dtype="float32")["status"] == "complete"
    return read_output(output)


@pytest.fixture(scope="session")
def exited(data: Path, deep_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a job with exits: `out.jsonl` and what lies beside it."""
    folder = tmp_path_factory.mktemp("exited")
    assert score(data, folder / "out.jsonl", model=deep_model, **EXITS)["status"] == "complete"
    return folder


def assert_same(rows: list[dict[str, Any]], others: list[dict[str, Any]]) -> None:
    """Two jobs let the same rows leave at the same layers, with the same answers."""
    for row, other in zip(rows, others, strict=True):
        for name in ("exit_layer", "method", "prediction", "error"):
            assert row[name] == other[name], row
        assert row["score"] == pytest.approx(other["score"], abs=1e-5)


def test_most_rows_leave_and_keep_their_answers(exited: Path, in_full: list[dict[str, Any]]) -> None:
    rows = read_output(exited / "out.jsonl")
    left = [row for row in rows if row["exit_layer"] is not None]
    assert len(left) > (ROWS - EXITS["exit_rows"] // 1) / 2
    for row, full in zip(rows, in_full, strict=True):
        if row["exit_layer"] is None:
            assert row["method"] == "full"
            assert row["score"] == pytest.approx(full["score"], abs=1e-5)
            assert row["label_mass"] == pytest.approx(full["label_mass"], rel=1e-4)
        else:
            assert row["method"] == "early-exit"
            assert 1 <= row["exit_layer"] < LAYERS
            assert row["label_mass"] is row["logprob_n"] is None
            assert row["score"] == pytest.approx(full["score"], abs=0.25)
    for label in LABELS.split(","):
        own = [(row, full) for row, full in zip(rows, in_full, strict=True) if full["prediction"] == label]
        assert len(own) > ROWS / 10
        assert sum(row["prediction"] != label for row, _ in own) <= FLIPS * len(own)


def test_the_report_says_what_left_where(exited: Path) -> None:
    report, rows = read_report(exited / "out.run.json"), read_output(exited / "out.jsonl")
    exits = report["exits"]
    left = [row for row in rows if row["exit_layer"] is not None]
    assert report["methods"]["early-exit"] == len(left)
    assert report["tokens"]["skipped"] > 0
    assert exits["status"] == "calibrated"
    assert exits["calibration_rows"] == ROWS // 2 == sum(each["fitted"] + each["judged"] for each in exits["classes"])
    assert {int(name) for name in exits["by_layer"] if name != "full"} == {row["exit_layer"] for row in left}
    assert exits["predicted_gain"] > 1
    assert exits["measured_gain"] > 0


def test_a_stopped_job_goes_on_with_the_same_exits(
    exited: Path, data: Path, deep_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prefillcli.data.output.sink import Sink

    write, windows = Sink.write, []

    def stop_in_the_third(sink: Sink, window: Any, *args: Any, **kwargs: Any) -> None:
        windows.append(window.index)
        if len(windows) == 3:
            raise KeyboardInterrupt
        write(sink, window, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Sink, "write", stop_in_the_third)
        assert score(data, "out.jsonl", model=deep_model, **EXITS)["status"] != "complete"
    learnt = Path("out.jsonl.prefill/exits.json").read_bytes()
    assert score(data, "out.jsonl", model=deep_model, resume=True, **EXITS)["status"] == "complete"
    assert_same(read_output("out.jsonl"), read_output(exited / "out.jsonl"))
    assert json.loads(learnt)["profile"] == json.loads((exited / "out.exit.json").read_text())
