"""A job whose device runs out of memory is finished all the same, and says what it was finished with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from prefillcli.plan.pack import Pack
from prefillcli.walk.walk import LayerWalk
from tests.jobs.jobs import read_output, read_report, score, texts, write_parquet

CALL, READ = LayerWalk.call, LayerWalk.read_logits


def limit_calls(patches: pytest.MonkeyPatch, most: int, *, at_most: int | None = None) -> list[int]:
    """Layers run out of memory beyond `most` tokens, and beyond `at_most` calls in any case. Their tokens so far."""
    sizes: list[int] = []

    def call(walk: LayerWalk, layer: Any, rows: torch.Tensor, *others: Any) -> torch.Tensor:
        sizes.append(rows.shape[1])
        if rows.shape[1] > most or (at_most is not None and len(sizes) > at_most):
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return CALL(walk, layer, rows, *others)

    patches.setattr(LayerWalk, "call", call)
    return sizes


@pytest.mark.nightly
def test_every_row_is_scored_and_the_report_tells_the_sizes(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_parquet("in.parquet", prompt=texts(60))
    assert score(source, "whole.parquet", model=model)["exit_code"] == 0
    assert read_report("whole.run.json")["reduced"] is None
    capsys.readouterr()
    sizes = limit_calls(monkeypatch, 100)
    assert score(source, model=model)["exit_code"] == 0
    assert capsys.readouterr().err.count("memory ran out") == 1
    reduced = read_report()["reduced"]
    assert reduced["failures"] >= 2
    assert reduced["pack_tokens"] < max(sizes)
    for found, wanted in zip(read_output("out.parquet"), read_output("whole.parquet"), strict=True):
        assert abs(found["score"] - wanted["score"]) <= 1e-5


@pytest.mark.nightly
def test_another_attempt_does_not_repeat_the_plan_that_failed(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_parquet("in.parquet", prompt=texts(60))
    with monkeypatch.context() as patches:
        limit_calls(patches, 100, at_most=9)
        assert score(source, model=model)["exit_code"] == 5
    assert "cannot be made smaller" in capsys.readouterr().err
    failed = read_report()["reduced"]
    sizes = limit_calls(monkeypatch, 100)
    assert score(source, model=model, resume=True)["exit_code"] == 0
    assert max(sizes) <= failed["chunk_tokens"] <= 100
    assert "memory ran out" not in capsys.readouterr().err
    assert read_report()["reduced"] == failed
    with monkeypatch.context() as patches:
        patches.setattr(LayerWalk, "call", CALL)
        assert score(source, "other.parquet", model=model)["exit_code"] == 0
    assert read_report("other.run.json")["reduced"] is None


def refuse_long_prompts(patches: pytest.MonkeyPatch, most: int) -> None:
    """Layers run out of memory on packs of more than `most` tokens."""

    def read(walk: LayerWalk, pack: Pack, *others: Any) -> Any:
        if pack.held_tokens + len(pack.tokens) > most:
            raise RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory")
        return READ(walk, pack, *others)

    patches.setattr(LayerWalk, "read_logits", read)


def test_a_row_that_does_not_fit_is_an_error_row_and_the_others_keep_their_scores(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = texts(40)
    prompts[17] = "fox " * 500 + "yes or no\nAnswer:"
    source = write_parquet("in.parquet", prompt=prompts)
    assert score(source, "whole.parquet", model=model)["exit_code"] == 0
    refuse_long_prompts(monkeypatch, 300)
    assert score(source, model=model)["exit_code"] == 3
    rows, whole = read_output("out.parquet"), read_output("whole.parquet")
    assert [number for number, row in enumerate(rows) if row["error"]] == [17]
    assert rows[17]["error"] == "exceeds_memory"
    assert "can't allocate memory" in rows[17]["error_detail"]
    for found, wanted in zip(rows, whole, strict=True):
        assert found["error"] or abs(found["score"] - wanted["score"]) <= 1e-5
