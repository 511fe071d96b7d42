"""What else is done with a model that is asked in a layout of its own: cheaper readings, and work on its answers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from gguf import GGMLQuantizationType as Kind

import prefillcli
from prefillcli.options.commands import BenchSettings, CalibrateSettings
from prefillcli.options.load import load_settings
from prefillcli.reading.exits.first import FirstModel, FirstPrompt
from prefillcli.tools.bench.bench_job import bench_job
from prefillcli.tools.calibrate import calibrate_job
from tests.gguf_files import write_gguf
from tests.jobs.jobs import read_output, read_report, score, write_parquet
from tests.jobs.models import CHAT_TEMPLATE, save_model
from tests.jobs.test_layouts import Asked, options

ASK = "Is it late?"
HEAT = {"noul": 1.5}
# The state is the last word before the answer, which depends on it.
TEMPLATE = (
    "{% set letters = 'AB' %}{{ instructions }}{% for o in options %} {{ letters[loop.index0] }} {{ o.key }}"
    "{% endfor %}{{ '\\n' }}{{ state }}"
)
ROWS = 400


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose layers change little, so that its answer follows from the last word."""
    path = tmp_path_factory.mktemp("models") / "plain"
    return save_model(path, chat_template=CHAT_TEMPLATE, seed=3, layers=6, steady=True)


@pytest.fixture(scope="module")
def made(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes a model of a type, with a template and temperatures."""

    def write(heat: float = 1.5, template: str = TEMPLATE, type_: str = "openjev", model: Path = folder) -> Path:
        settings = {"decision.type": type_, "decision.temperature.noul": heat}
        path = tmp_path_factory.mktemp("gguf") / "m.gguf"
        return write_gguf(path, model, kind=Kind.F32, settings=settings, systemone=template)

    return write


@pytest.fixture(scope="module")
def file(made: Callable[..., Path]) -> Path:
    return made()


@pytest.fixture(scope="module")
def asked(file: Path) -> Callable[[str], Any]:
    reference = Asked(file, TEMPLATE)
    listed = options(true=None, false=None)
    return lambda text: reference.answer(1.5, state=text, type="noul", instructions=ASK, options=listed)[0]


@pytest.fixture(scope="module")
def texts() -> list[str]:
    draw, words = np.random.default_rng(0), ["fox", "dog", "saw", "no", "quick", "late", "x", "y7"]
    return [" ".join(draw.choice(words, int(draw.integers(1, 5)))) for _ in range(ROWS)]


@pytest.fixture(scope="module")
def given(file: Path) -> dict[str, Any]:
    return {"model": file, "ask": ASK, "max_flips": 0.2, "exit_rows": 150, "flips_of": "all", "dtype": "float32"}


@pytest.mark.parametrize("flags", [{"exit": True}, {"compute": "int8"}, {"first": "words"}], ids=str)
def test_cheaper_readings_have_the_answers_of_the_layout(
    texts: list[str], asked: Callable[[str], Any], given: dict[str, Any], flags: dict[str, Any]
) -> None:
    write_parquet("in.parquet", text=texts)
    assert score("in.parquet", **given, **flags)["exit_code"] == 0
    assert read_report("out.run.json")["exits"]["status"] == "learnt"
    rows = [(text, row) for text, row in zip(texts, read_output("out.parquet"), strict=True)]
    for text, row in [each for each in rows if each[1]["method"] == "full"][:5]:
        assert row["answer"] == asked(text)
    left = [(text, row) for text, row in rows if row["method"] != "full"]
    assert len(left) > 150
    assert sum((row["answer"] > 0.5) != (asked(text).expected > 0.5) for text, row in left[:20]) < 5


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[FirstPrompt, Any]]:
    """What a first model reads, and its readings."""
    found: list[tuple[FirstPrompt, Any]] = []
    read = FirstModel.read

    def spied(self: FirstModel, prompts: Any, *others: Any) -> Any:
        readings = read(self, prompts, *others)
        found.extend(zip(prompts, readings, strict=True))
        return readings

    monkeypatch.setattr(FirstModel, "read", spied)
    return found


def test_a_first_model_of_the_same_layout_reads_the_same_prompts(
    texts: list[str],
    asked: Callable[[str], Any],
    given: dict[str, Any],
    made: Callable[..., Path],
    reads: list[tuple[FirstPrompt, Any]],
) -> None:
    """It has the weights of the model here, and another temperature, which has no part in a first reading."""
    write_parquet("in.parquet", text=texts)
    assert score("in.parquet", first=made(0.5), **given)["exit_code"] == 0
    assert read_report("out.run.json")["exits"]["status"] == "learnt"
    assert len(reads) == ROWS
    shares = [float(np.exp(own - np.logaddexp.reduce(own))[0]) for own in (each.logprobs for _, each in reads)]
    assert sorted(shares)[::40] == pytest.approx(sorted(asked(text).expected for text in texts)[::40], abs=1e-5)


def test_a_first_model_with_other_tokens_reads_the_codes_in_its_own(
    texts: list[str], folder: Path, given: dict[str, Any], reads: list[tuple[FirstPrompt, Any]]
) -> None:
    small = Path(shutil.copytree(folder, "small"))
    vocabulary = json.loads((small / "tokenizer.json").read_text())
    ids = vocabulary["model"]["vocab"]
    ids["A"], ids["B"], ids["x"] = ids["x"], ids["A"], ids["B"]
    (small / "tokenizer.json").write_text(json.dumps(vocabulary))
    write_parquet("in.parquet", text=texts)
    assert score("in.parquet", first=small, **given)["exit_code"] == 0
    assert {prompt.labels.single for prompt, _ in reads} == {((ids["A"],), (ids["B"],))}


def test_a_first_model_of_another_layout_is_refused(
    file: Path, made: Callable[..., Path], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_parquet("in.parquet", text=["a"])
    wrong = {
        made(type_="nimble"): "of the type nimble (by llama.decision.type), which answers only in the layout that it "
        "was trained on, and the layout of --model is another",
        made(type_="laya"): "and that is not read",
        made(template=f"Sir, {TEMPLATE}"): "of the type openjev, whose prompts or codes are not as --model's",
    }
    for first, said in wrong.items():
        assert score("in.parquet", model=file, ask=ASK, first=first)["exit_code"] == 2
        assert said in capsys.readouterr().err
    assert score("in.parquet", model=folder, ask=ASK, first=file)["exit_code"] == 2
    assert "the layout of --model is another" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [{"keep": 0.5, "draft": "self"}, {"draft": "plain"}], ids=str)
def test_no_token_of_a_layout_is_left_out(
    file: Path, flags: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("prefillcli.scoring.opening.open_models")
    write_parquet("in.parquet", text=["a"], keep=[0.5])
    assert score("in.parquet", model=file, ask=ASK, **flags)["exit_code"] == 2
    assert "--draft: the model answers in a layout of its own (openjev), in which no token" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "column"),
    [({"rationale": 4}, "answer.rationale"), ({"estimate": 20}, "answer"), ({"deterministic": True}, "answer")],
    ids=str,
)
def test_other_work_leaves_the_answers_of_the_layout(
    file: Path, texts: list[str], asked: Callable[[str], Any], flags: dict[str, Any], column: str
) -> None:
    write_parquet("in.parquet", text=texts[:30])
    assert score("in.parquet", model=file, ask=ASK, dtype="float32", **flags)["exit_code"] == 0
    rows = read_output("out.parquet")
    assert all(row[column] is not None for row in rows)
    for row in rows[:3]:
        assert row["answer"] == asked(texts[row["row"]])


def test_evidence_asks_in_the_layout_without_a_section(
    file: Path, texts: list[str], asked: Callable[[str], Any]
) -> None:
    own = [f"{texts[0]}\n\n{texts[1]}", f"{texts[2]}\n\n{texts[3]}"]
    write_parquet("in.parquet", text=own)
    assert score("in.parquet", model=file, ask=ASK, dtype="float32", evidence=True)["exit_code"] == 0
    for row in read_output("out.parquet"):
        assert row["answer"] == asked(own[row["row"]])
        (found,) = row["answer.evidence"]
        without = asked(own[row["row"]].split("\n\n")[1]).expected
        assert found["change"] == pytest.approx(row["answer"] - without, abs=1e-5)


def test_bench_compares_the_layout_with_transformers(file: Path, texts: list[str]) -> None:
    write_parquet("in.parquet", text=texts[:20])
    words = {"inputs": ("in.parquet",), "ask": ASK, "model": str(file), "output": "bench.json", "quiet": True}
    done = bench_job(load_settings(BenchSettings, words | {"rounds": "1"}, environment={}))
    assert done["exit_code"] == 0
    assert done["workloads"]["in.parquet"]["hf"]["flips"] == 0


def test_answers_of_a_layout_are_calibrated_and_reviewed(
    file: Path, texts: list[str], asked: Callable[[str], Any]
) -> None:
    truth = ["yes" if each.split()[-1] in ("fox", "saw") else "no" for each in texts[:60]]
    write_parquet("in.parquet", text=texts[:60], truth=truth)
    named = {"model": file, "ask": ASK, "overwrite": True, "dtype": "float32"}
    assert score("in.parquet", truth="truth", keep_columns="truth", **named)["exit_code"] == 0
    words = {"scores": "out.parquet", "truth": "truth", "output": "c.json", "quiet": True, "method": "temperature"}
    assert calibrate_job(load_settings(CalibrateSettings, words, environment={}))["exit_code"] == 0
    heat = read_report("c.json")["scaling"]["temperature"]
    done = score("in.parquet", calibration="c.json", review_below="0.6", review="look.csv", **named)
    assert done["exit_code"] == 0
    for text, row in zip(texts[:5], read_output("out.parquet"), strict=False):
        odds = (asked(text).expected / (1 - asked(text).expected)) ** (1 / heat)
        assert row["answer.calibrated"] == pytest.approx(odds / (1 + odds), abs=1e-5)
    assert Path("look.csv").exists()


def test_python_asks_in_the_layout_too(file: Path, texts: list[str], asked: Callable[[str], Any]) -> None:
    with prefillcli.Scorer(str(file), ask=ASK, dtype="float32") as scorer:
        found = scorer(pa.table({"text": texts[:3]})).to_pylist()
    assert [row["answer"] for row in found] == [asked(text) for text in texts[:3]]
