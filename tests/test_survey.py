"""What a survey counts, against brute force, and what a forecast makes of a profile."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prefillcli.forecast.survey import (
    Cost,
    InputStatistics,
    KeepCost,
    Lengths,
    Survey,
    SurveyRows,
    lengths_of,
)
from prefillcli.models.find import read_model_files
from prefillcli.models.weights import weight_bytes
from prefillcli.plan.behind import LabelSet
from prefillcli.plan.pack import Limits
from prefillcli.plan.plan import Plan, make_plan
from prefillcli.report.section import bar
from prefillcli.rows.records import Prompt, RowError, Window
from prefillcli.runtime.clock import Expected, duration
from prefillcli.scoring.dry_run import DryRunReport
from prefillcli.scoring.recorder import RemainingTime

some_lengths = st.lists(st.integers(1, 40_000), min_size=1, max_size=60)
some_prompts = st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=24).map(lambda ids: np.asarray(ids, dtype=np.int32)),
    min_size=1,
    max_size=20,
)


def window_of(prompts: list[np.ndarray], first_row: int = 0, errors: dict[int, RowError] | None = None) -> Window:
    numbered = [Prompt(first_row + number, tokens, LabelSet(())) for number, tokens in enumerate(prompts)]
    rows = np.arange(first_row, first_row + len(prompts) + len(errors or {}))
    return Window(0, rows, numbered, errors or {}, pa.table({}))


@given(some_lengths)
def test_lengths_are_exact(lengths: list[int]) -> None:
    found = lengths_of(Counter(lengths))
    assert found is not None
    assert (found.least, found.most) == (min(lengths), max(lengths))
    assert found.mean == pytest.approx(np.mean(lengths))
    for share, tokens in found.percentiles.items():
        assert tokens == np.percentile(lengths, float(share), method="inverted_cdf")


@given(some_lengths)
def test_every_length_falls_into_one_bin(lengths: list[int]) -> None:
    found = lengths_of(Counter(lengths))
    assert found is not None
    bins = found.histogram
    for each in bins:
        assert each["rows"] == sum(each["low"] <= length < each["high"] for length in lengths)
    assert sum(each["rows"] for each in bins) == len(lengths)
    assert all(one["high"] == other["low"] for one, other in itertools.pairwise(bins))
    assert bins[0]["rows"]
    assert bins[-1]["rows"]


@given(some_prompts)
def test_duplicates_are_rows_with_the_prompt_of_an_earlier_one(prompts: list[np.ndarray]) -> None:
    contents = InputStatistics()
    for number, prompt in enumerate(prompts):
        contents.add(window_of([prompt], number))  # in windows of their own
    assert contents.duplicates == len(prompts) - len({tuple(prompt.tolist()) for prompt in prompts})


def test_rows_are_counted_by_what_happens_to_them() -> None:
    contents = InputStatistics()
    errors = {
        1: RowError("null_prompt", ""), 2: RowError("skipped_too_long", ""), 3: RowError("prompt_too_long", ""),
    }  # fmt: skip
    contents.add(window_of([np.ones(3, dtype=np.int32)], errors=errors))
    rows = contents.rows(Counter(exceeds_memory=0))
    assert (rows.total, rows.prompts, rows.errors, rows.skipped, rows.too_long) == (4, 1, 2, 1, 2)
    assert rows.errors_by_code == {"null_prompt": 1, "prompt_too_long": 1}


def test_every_key_is_documented() -> None:
    text = (Path(__file__).parent.parent / "docs" / "score.md").read_text()
    kinds = (DryRunReport, Survey, SurveyRows, Lengths, Cost, KeepCost)
    for kind in kinds:
        for key in kind.model_fields:
            assert f"`{key}`" in text, (kind, key)


def test_bars_and_durations() -> None:
    assert bar(10, 10, width=4) == "████"
    assert bar(5, 10, width=4) == "██"
    assert bar(1, 1000, width=4) == "▏"
    assert bar(0, 10) == bar(0, 0) == ""
    assert [duration(s) for s in (1.25, 300, 7200)] == ["1.2 s", "5.0 min", "2.0 h"]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time as the forecast sees it."""
    now = [100.0]
    monkeypatch.setattr("prefillcli.scoring.recorder.time.monotonic", lambda: now[0])
    return now


def ten_tokens() -> Any:
    (pack,) = make_plan([np.arange(10, dtype=np.int32)], Limits(10, 10)).packs
    return pack


def seconds_of(plan: Plan) -> float:
    """Ten seconds a pack."""
    return float(sum(len(pack.tokens) for pack in plan.packs))


def test_a_forecast_is_scaled_by_what_was_measured(clock: list[float]) -> None:
    forecast, pack = RemainingTime(seconds_of, rows=lambda: Expected(40)), ten_tokens()
    assert forecast.seconds_left() is None
    forecast.skip(10)  # found done
    forecast.plan([pack, pack], rows=10, draft_seconds=0.0)  # 20 more rows will come
    assert forecast.seconds_left() == pytest.approx(20 + 40)
    forecast.begin(pack)
    clock[0] += 10
    forecast.step(pack, 0.5)  # 5 predicted seconds took 10
    assert forecast.seconds_left() == pytest.approx(2 * (15 + 40))
    forecast.step(pack, 0.5)
    clock[0] += 10
    forecast.end(pack)
    assert forecast.ran == 10
    clock[0] += 1000  # between packs no time of the model passes
    assert forecast.seconds_left() == pytest.approx(2 * (10 + 40))
    for _ in range(2):
        forecast.plan([pack, pack], rows=10, draft_seconds=0.0)
    assert forecast.seconds_left() == pytest.approx(2 * 50)


def test_a_forecast_counts_the_draft_and_needs_the_number_of_rows() -> None:
    pack = ten_tokens()
    forecast = RemainingTime(seconds_of, rows=lambda: Expected(20))
    forecast.plan([pack], rows=10, draft_seconds=7.0)
    assert forecast.seconds_left() == pytest.approx(10 + 10 + 7)
    forecast = RemainingTime(seconds_of, rows=lambda: None)
    forecast.plan([pack], rows=10, draft_seconds=0.0)
    assert forecast.seconds_left() is None


@pytest.mark.parametrize(("dtype", "on_cpu"), [("float32", 0), ("bfloat16", 2)])
def test_weights_take_what_the_device_must_hold(tmp_path: Path, dtype: str, on_cpu: int) -> None:
    from transformers import AutoModelForCausalLM

    from tests.jobs.models import save_model

    files = read_model_files(save_model(tmp_path), dtype=dtype)
    numbers = sum(weight.numel() for weight in AutoModelForCausalLM.from_pretrained(tmp_path).parameters())
    assert weight_bytes(files, torch.device("cuda")) == numbers * files.dtype.itemsize
    assert weight_bytes(files, torch.device("cpu")) == numbers * on_cpu
    (tmp_path / "consolidated.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes())
    assert weight_bytes(files, torch.device("cuda")) == numbers * files.dtype.itemsize, "a second copy is not loaded"
