"""Early exit among the methods of `prefill bench`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from prefillcli.bench.contenders import Equipment, Hybrid
from prefillcli.features.exits.contender import EarlyExit, class_flips, learn_exits

from benchmarks.score_runs import SAMPLES
from prefillcli.bench.bench_job import bench_job
from prefillcli.bench.contest import compare
from prefillcli.bench.material import Material, made_material
from prefillcli.bench.report import BenchReport, workload_remarks
from prefillcli.data.prompts.labels import Labels, parse_labels
from prefillcli.engines.base import Readings
from prefillcli.features.exits import Exits
from prefillcli.features.exits.policy import ExitLayer, ExitPolicy, Float64Array
from prefillcli.jobs.load import load_walk
from prefillcli.models.open import open_models
from prefillcli.models.shape import answer_flops, walk_flops
from prefillcli.options.commands import BenchSettings

MODELS = SAMPLES / "models"
ROWS = 24


class LensProbe:
    """Takes a layer's label logits as the final ones."""

    kind = "lens"

    def logits(self, readings: Readings) -> Float64Array:
        return readings.logits


def policy_after(layer: int, threshold: float) -> ExitPolicy:
    return ExitPolicy((ExitLayer(layer, LensProbe(), (threshold, threshold), peek=False),))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def stage() -> Iterator[tuple[Equipment, Material]]:
    """The sample target of four layers, and short prompts."""
    settings = BenchSettings(model=str(MODELS / "target"), rows=ROWS, tokens=200, method=("early-exit",), exit_rows=20)
    opened = open_models(settings)
    labels = Labels(opened.tokenizer, parse_labels(settings.labels))
    material = made_material(settings, opened, labels)
    with closing(load_walk(opened, settings)) as loaded:
        yield Equipment(loaded, labels), material


def test_where_no_row_is_decided_the_answers_are_those_of_the_walk(stage: tuple[Equipment, Material]) -> None:
    equipment, material = stage
    never = EarlyExit(equipment, policy_after(1, math.inf), 0)
    whole = Hybrid("hybrid", equipment)
    result = compare(material, [whole, never], equipment, rounds=0, temperature=1.0)
    full, early = result.methods
    assert early.answers.audit.max_difference < 1e-6
    assert early.exits.left == {"full": ROWS}
    assert early.exits.layers_saved == 0
    assert early.flops == full.flops
    assert sum(each.flips for each in early.exits.classes) == 0
    assert sum(each.rows for each in early.exits.classes) == ROWS


def test_where_all_rows_leave_the_layers_behind_the_exit_are_spared(stage: tuple[Equipment, Material]) -> None:
    equipment, material = stage
    always = EarlyExit(equipment, policy_after(1, -math.inf), 300)
    whole = Hybrid("hybrid", equipment)
    result = compare(material, [whole, always], equipment, rounds=0, temperature=1.0)
    full, early = result.methods
    assert early.exits.left == {"2": ROWS}
    assert early.exits.rows_read == 300
    assert early.exits.layers_saved == pytest.approx(1 - 2 / (3 + 1 / 8))  # of the last of four layers, K,V alone
    plan = equipment.plan(whole.run(material.prompts).questions)
    everything = walk_flops(equipment.config, plan) + answer_flops(equipment.config, plan)
    assert early.predicted.flops == pytest.approx(full.flops / (everything * 2 / (3 + 1 / 8)))
    assert early.answers.audit.flips == sum(each.flips for each in early.exits.classes)
    (said,) = [text for text in workload_remarks(result) if "after layer 2" in text]
    assert "100% of the rows left" in said


def test_flips_are_counted_among_the_rows_of_each_full_answer() -> None:
    full = np.log([[0.9, 0.1], [0.8, 0.2], [0.6, 0.4], [0.3, 0.7]])
    early = np.log([[0.9, 0.1], [0.2, 0.8], [0.7, 0.3], [0.6, 0.4]])
    yes, no = class_flips(["Yes", "No"], full, early)
    assert (yes.label, yes.rows, yes.flips) == ("Yes", 3, 1)
    assert (no.label, no.rows, no.flips) == ("No", 1, 1)
    assert yes.interval == pytest.approx((0.00840, 0.90570), abs=1e-4)  # Clopper-Pearson, as scipy has it
    assert class_flips(["Yes", "No"], full[:3], early[:3])[1].interval is None


def test_too_few_rows_leave_the_method_out_with_the_reason(stage: tuple[Equipment, Material]) -> None:
    equipment, material = stage
    own = Material(material.name, True, list(material.prompts), list(material.truths))
    assert learn_exits(["early-exit"], equipment, own, Exits) == []
    assert own.notes[-1].startswith("early-exit is left out: ")
    assert len(own.prompts) == ROWS  # it was learnt on others


def test_rows_of_a_file_are_set_apart_by_seed(stage: tuple[Equipment, Material]) -> None:
    _, material = stage
    taken = []
    for seed in (0, 0, 1):
        own = Material("file", False, list(material.prompts), list(material.truths))
        apart = own.set_apart(8, seed)
        rows = [prompt.row for prompt in apart]
        assert rows == sorted(rows)
        assert sorted(rows + [prompt.row for prompt in own.prompts]) == list(range(ROWS))
        assert own.truths == [material.truths[prompt.row] for prompt in own.prompts]
        taken.append(rows)
    assert taken[0] == taken[1] != taken[2]


@pytest.mark.nightly
def test_the_command_learns_on_some_rows_and_compares_on_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("prefillcli.models.dtype.times_as_long", lambda form, *_: 0.4)  # a processor made for int8
    settings = BenchSettings(
        inputs=(str(SAMPLES / "labeling.parquet"),), model=str(MODELS / "deep"), limit=400, exit_rows=200,
        method=("early-exit", "first", "first-exit", "int8"), first=(str(MODELS / "draft"),), max_flips=0.1, rounds=1,
        truth="answer", quiet=True,
    )  # fmt: skip
    summary = bench_job(settings)
    assert summary["exit_code"] == 0
    report = BenchReport.model_validate_json(Path("bench.json").read_text(), strict=False)
    (workload,) = report.workloads
    walk, early, first, both, *int8 = workload.methods  # so small a model gains nothing by int8, which may be left out
    assert [each.method for each in workload.methods[:4]] == ["hybrid", "early-exit", "first", "first-exit"]
    assert (workload.rows, workload.truth_rows) == (200, 200)
    assert early.exits.rows_read == 200
    assert early.exits.left.get("full", 0) < 100
    assert early.exits.layers_saved > 0.3
    assert early.predicted.flops == pytest.approx(1 / (1 - early.exits.layers_saved), rel=0.01)
    assert sum(early.exits.left.values()) == sum(each.rows for each in early.exits.classes) == 200
    for own in (early, first, both, *int8):
        assert own.answers.audit.flip_rate <= 0.1
        assert sum(own.exits.left.values()) == 200
    assert first.exits.left["-1"] == 200 - first.exits.left.get("full", 0) > 100
    assert both.exits.left.get("full", 0) < 100  # by either, as their costs are
    assert all(own.exits.left["0"] > 100 for own in int8)
    assert first.target_tokens < walk.target_tokens / 2
    assert first.draft_tokens > 0
    assert first.predicted.flops is None
    assert any("before layer 1)" in text for text in workload_remarks(workload))
    assert any("learnt on 200 rows: others of the file" in note for note in workload.notes)
    assert "of the layers" in Path("bench.html").read_text()
