"""Jobs with fitted heads beside everything else that a job may do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

import prefillcli
from prefillcli.errors import UsageError
from prefillcli.options.commands import BenchSettings, InspectSettings
from prefillcli.options.load import load_settings
from prefillcli.reading.heads.head import head_file_at
from prefillcli.tools.bench.bench_job import bench_job
from prefillcli.tools.inspect import inspect_job
from tests.jobs.jobs import TOLERANCE, read_output, read_report, score, write_jsonl, write_parquet
from tests.jobs.models import save_model
from tests.jobs.test_dry_run import PER_PACK, PER_TOKEN, save_profile
from tests.jobs.test_fitted_heads import QUESTIONS, as_documents, fit, refused, rows

LAYERS = 4  # of the model


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("deep") / "deep", layers=LAYERS, words="fox dog cat number")


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose products can be computed in int8."""
    return save_model(tmp_path_factory.mktemp("wide") / "wide", layers=4, hidden=128, words="fox dog cat number")


@pytest.fixture(scope="module")
def fitted(deep: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head of `is_fox`."""
    folder = tmp_path_factory.mktemp("fitted")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert fit(rows(40), model=deep, truth="is_fox", most_layers=2)["exit_code"] == 0
    return folder / "a.head"


@pytest.mark.parametrize("weights", ["resident", "stream"])
def test_one_layer_is_read_of_a_model_with_more(deep: Path, weights: str) -> None:
    flags = {"model": deep, "dtype": "bfloat16"}
    assert fit(rows(40), truth="is_fox", most_layers=1, **flags)["exit_code"] == 0
    source = write_parquet("in.parquet", **rows(3))
    assert score(source, head="a.head", weights=weights, **flags)["exit_code"] == 0
    assert read_report()["heads"]["loaded_layers"] == 1


# Other clients of the parts of a job.


def test_a_scorer_in_python_refuses_heads_of_another_model_or_wording(deep: Path, model: Path, fitted: Path) -> None:
    asked, head = rows(2)["prompt"], {"head": str(fitted)}
    with pytest.raises(UsageError, match="another model"):
        prefillcli.Scorer(str(model), **head).score(asked)
    other: dict[str, Any] = {"model": str(deep), "template": "Say {{ prompt }}", **head}
    with pytest.raises(UsageError, match="words around"), prefillcli.Scorer(**other) as scorer:
        scorer.score([{"prompt": each} for each in asked])
    with pytest.raises(UsageError, match="bfloat16"), prefillcli.Scorer(str(deep), dtype="bfloat16", **head) as scorer:
        scorer.score(asked)
    source = write_parquet("in.parquet", prompt=asked)
    with pytest.raises(UsageError, match="words around"):
        prefillcli.score(str(source), **other)
    with prefillcli.Scorer(**other, any_wording=True) as scorer:
        assert scorer.score([{"prompt": each} for each in asked]).num_rows == 2


def inspect(source: Path, **flags: Any) -> dict[str, Any]:
    given = {"inputs": [str(source)], "quiet": True, **flags}
    own = {name: str(value) if isinstance(value, Path) else value for name, value in given.items()}
    return inspect_job(load_settings(InspectSettings, own, environment={}))


def test_inspect_shows_the_answer_of_the_head(deep: Path, model: Path, fitted: Path) -> None:
    source = write_parquet("in.parquet", **rows(2))
    score(source, model=deep, head=fitted)
    shown = inspect(source, model=deep, head=fitted)
    assert shown["method"] == "head"
    assert shown["score"] == pytest.approx(read_output("out.parquet")[0]["score"], abs=TOLERANCE)
    refused(inspect(source, model=model, head=fitted), "another model")
    refused(inspect(source, model=deep, head=fitted, template="Say {{ prompt }}"), "words around")


def bench(source: Path, **flags: Any) -> dict[str, Any]:
    given = {"inputs": [str(source)], "quiet": True, "rounds": 0, **flags}
    own = {name: str(value) if isinstance(value, Path) else value for name, value in given.items()}
    return bench_job(load_settings(BenchSettings, own, environment={}))


def test_bench_compares_the_answers_of_heads_with_the_models(deep: Path, model: Path, fitted: Path) -> None:
    data = rows(20)
    source = write_parquet("in.parquet", **data)
    score(source, "own.parquet", model=deep)
    score(source, "head.parquet", model=deep, head=fitted)
    own, by_head = ([row["score"] > 0.5 for row in read_output(f"{name}.parquet")] for name in ("own", "head"))
    found = bench(source, model=deep, head=fitted, truth="is_fox")
    methods = found["workloads"]["in.parquet"]
    assert methods.keys() == {"hf", "hybrid", "head"}
    assert methods["hf"]["flips"] == 0  # it reads the model's own answers
    assert methods["head"]["flips"] == sum(one != other for one, other in zip(own, by_head, strict=True)) > 0
    refused(bench(source, model=model, head=fitted), "another model")
    refused(bench(source, model=deep, head=fitted, template="Say {{ prompt }}"), "words around")
    with pytest.raises(UsageError, match="needs --head"):
        bench(source, model=deep, method=("head",))


# Rows that are compared with those of the fit.


def test_questions_that_wait_are_compared_too(deep: Path) -> None:
    waits = [QUESTIONS[0], {**QUESTIONS[1], "when": "fox >= 0"}]
    Path("asked.json").write_text(json.dumps({"questions": waits}))
    fit(as_documents(rows(40)), model=deep, questions="asked.json", truth="fox=is_fox,kind=kind", most_layers=2)
    source = write_parquet("in.parquet", **as_documents(rows(25, seed=1)))
    assert score(source, model=deep, questions="asked.json", head="a.head")["exit_code"] == 0
    found = read_report()["heads"]["questions"]
    assert {name: own["compared"] for name, own in found.items()} == {"fox": 25, "kind": 25}


def test_a_few_rows_are_not_compared(deep: Path, fitted: Path) -> None:
    source = write_parquet("in.parquet", prompt=["Le renard saute encore:"] * 3)
    assert score(source, model=deep, head=fitted, max_shift=0.5)["exit_code"] == 0
    found = read_report()["heads"]["questions"][""]
    assert (found["compared"], found["shift"], found["spread"]) == (3, None, None)


# A model that computes in low precision.


def test_a_head_in_low_precision_needs_no_other_rows(wide: Path) -> None:
    flags: dict[str, Any] = {"model": wide, "compute": "int8"}
    Path("asked.json").write_text(json.dumps({"questions": QUESTIONS[:1]}))
    assert fit(as_documents(rows(40)), truth="fox=is_fox", questions="asked.json", **flags)["exit_code"] == 0
    asked = as_documents(rows(6, seed=1))
    source, own = write_parquet("in.parquet", **asked), {"questions": "asked.json", "head": "a.head", **flags}
    assert score(source, **own)["exit_code"] == 0
    assert score(source, "parts.parquet", shard="1/2", **own)["exit_code"] == 0
    questions = {"fox": {"type": "noul", "instructions": QUESTIONS[0]["instructions"]}}
    lines = write_jsonl("in.jsonl", [{"state": text, "questions": questions} for text in asked["document"]])
    assert score(lines, "out.jsonl", head="a.head", format="systemone", **flags)["exit_code"] == 0
    for row, line in zip(read_output("out.parquet"), read_output("out.jsonl"), strict=True):
        assert line["response"]["body"]["answers"]["fox"]["noul"] == pytest.approx(row["fox"], abs=TOLERANCE)


def test_what_low_precision_cannot_do_with_a_head_is_refused(wide: Path, fitted: Path) -> None:
    source = write_parquet("in.parquet", **rows(4))
    flags: dict[str, Any] = {"model": wide, "compute": "int8"}
    for other, text in (({"deterministic": True}, "beside it"), ({"weights": "stream"}, "loaded whole")):
        with pytest.raises(UsageError, match=text):
            score(source, head=fitted, **flags, **other)
    with pytest.raises(UsageError, match="loaded whole"):
        fit(rows(40), truth="is_fox", weights="stream", **flags)


# Rows that heads are fitted to.


def test_rows_with_one_prompt_stay_together_when_heads_are_compared(deep: Path) -> None:
    rng = np.random.default_rng(3)
    data = rows(60)
    data["is_fox"] = rng.permutation(data["is_fox"]).tolist()  # of what no head can know
    often = {name: values * 6 for name, values in data.items()}
    once, found = (fit(each, model=deep, truth="is_fox", most_layers=1)["heads"][0] for each in (data, often))
    right = [each["held_out"]["the head"]["accuracy"] for each in (once, found)]
    assert found["rows"] == 360
    assert right[1] < right[0] + 0.1  # it would be right in nearly all, as it has seen the others with the same prompt


def test_answers_of_few_rows_and_rows_left_out_are_told(deep: Path, capfd: pytest.CaptureFixture[str]) -> None:
    data = rows(44)
    data["kind"][:3] = ["dog"] * 3
    data |= {"kind": [{"cat": "dog"}.get(each, each) for each in data["kind"]]}
    data["kind"][5], data["prompt"][7], data["kind"][9] = "cat", "fox " * 3000, None
    found = fit(data, model=deep, truth="kind", labels="fox,dog,cat", quiet=False)["heads"][0]
    assert found["left_out"] == {"that cannot be read": 1, "without a right answer": 1}
    err = " ".join(capfd.readouterr().err.split())
    assert "few rows have the right answer cat (1)" in err
    assert "left out: 1 without a right answer, 1 that cannot be read" in err


def test_no_more_rows_are_read_than_memory_is_given_to(
    deep: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("prefillcli.tools.fit.fit_job.MOST_ROWS", 40)
    assert fit(rows(60), model=deep, truth="is_fox")["heads"][0]["rows"] == 40
    assert "the first 40 rows with a right answer are used" in capfd.readouterr().err
    assert fit(rows(60), model=deep, truth="is_fox", sample=40)["heads"][0]["rows"] == 40
    assert "the first 40 rows" not in capfd.readouterr().err


def test_rows_for_another_head_are_refused_before_they_are_read(
    deep: Path, model: Path, fitted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prefillcli.tools.fit.fit_job.load_here", None)
    more = {"truth": "is_fox", "add": str(fitted)}
    refused(fit(rows(40), model=model, **more), "another model")
    refused(fit(rows(40), model=deep, template="Say {{ prompt }}", **more), "other words around")


# Before a run.


def bytes_below(model: Path, layers: int) -> int:
    """The bytes of the weights of a model's lower layers, and of all that are in no layer."""
    found = 0
    for name, tensor in load_file(model / "model.safetensors").items():
        number = int(name.split(".")[2]) if name.startswith("model.layers.") else -1
        found += tensor.nbytes if number < layers else 0
    return found


def test_a_dry_run_forecasts_the_layers_below_heads(deep: Path, fitted: Path) -> None:
    deepest = head_file_at(str(fitted)).deepest
    assert deepest < LAYERS
    source = write_parquet("in.parquet", **rows(40))
    save_profile(deep)
    flags = {"model": deep, "head": fitted}
    assert score(source, dry_run=True, **flags)["exit_code"] == 0
    report = read_report("out.dry-run.json")
    plan = report["survey"]["plan"]
    whole = PER_PACK * plan["packs"] + PER_TOKEN * plan["computed_tokens"]
    assert plan["seconds"] == pytest.approx(whole * deepest / LAYERS)
    layers = {"model_layers": LAYERS, "read_layers": deepest, "loaded_layers": deepest}
    every, below = bytes_below(deep, LAYERS), bytes_below(deep, deepest)
    assert report["outlooks"]["heads"] == {**layers, "model_bytes": every, "loaded_bytes": below}
    score(source, **flags)
    ran = read_report()
    assert {name: ran["heads"][name] for name in layers} == layers
    assert ran["predicted_seconds"] == pytest.approx(plan["seconds"])
    assert score(source, dry_run=True, audit=5, **flags)["exit_code"] == 0  # the model answers, too
    report = read_report("out.dry-run.json")
    assert report["survey"]["plan"]["seconds"] == pytest.approx(whole)
    assert report["outlooks"]["heads"]["loaded_bytes"] == every


def test_a_dry_run_says_which_layers_are_loaded(deep: Path, fitted: Path, capsys: pytest.CaptureFixture[str]) -> None:
    deepest = head_file_at(str(fitted)).deepest
    score(write_parquet("in.parquet", **rows(4)), dry_run=True, quiet=False, model=deep, head=fitted)
    said = " ".join(capsys.readouterr().err.split())
    assert f"head {deepest} of {LAYERS} layers computed; those above are not loaded: " in said
