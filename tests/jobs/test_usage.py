"""Wrong usage ends with exit code 2 and a message that names the thing, before any weight is loaded."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from prefillcli.errors import UsageError
from prefillcli.options.commands import ScoreSettings
from prefillcli.options.load import load_settings
from prefillcli.rows.input.discovery import would_find
from prefillcli.scoring.path_table import default_output
from tests.jobs.jobs import read_report, score, texts, write_jsonl, write_parquet


@pytest.fixture(autouse=True)
def _no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_model(*_: object, **__: object) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr("prefillcli.models.load.load_model", load_model)


@pytest.fixture
def source() -> Path:
    return write_parquet("in.parquet", prompt=texts(3), id=[1, 2, 3], score=[0.5] * 3, row=[1, 2, 3])


def assert_refused(summary: dict, stderr: str, *named: str, code: int = 2) -> None:
    assert (summary["status"], summary["exit_code"]) == ("failed", code), stderr
    for name in named:
        assert name in stderr
        assert name in summary["error"]
    assert stderr.startswith("prefill: ")
    assert "Traceback" not in stderr
    assert len(stderr.splitlines()) <= 3
    report = read_report(summary["report"])
    assert (report["status"], report["exit_code"], report["error"]) == ("failed", code, summary["error"])


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"prompt_column": "question"}, ["'question'", "available: prompt, id"]),
        ({"template": "{{ name }}?"}, ["'name'", "available: prompt, id"]),
        ({"template": "{{ id "}, ["--template", "line 1"]),
        ({"template": "missing.jinja"}, ["missing.jinja"]),
        ({"id_column": "key"}, ["'key'"]),
        ({"id_column": ""}, ["no column ''"]),
        ({"keep_columns": "id,color"}, ["'color'"]),
        ({"keep_columns": "score"}, ["--keep-columns", "score"]),
        ({"keep_columns": "row"}, ["--keep-columns", "row"]),
        ({"id_column": "score"}, ["--id-column", "score"]),
        ({"labels": "Yes"}, ["--labels", "'Yes'"]),
        ({"labels": "Yes,Yes"}, ["--labels", "'Yes'"]),
        ({"labels": "Yes,Yes sir"}, ["'Yes'", "begins label 'Yes sir'", "--label-end"]),
        ({"labels": "Yes= Yes,No= Yes"}, ["'Yes'", "'No'", "same token"]),
        ({"chat": True}, ["--chat", "no chat template"]),
        ({"system": "Be brief."}, ["--system"]),
    ],
    ids=lambda value: " ".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_a_setting_that_does_not_fit_the_input_or_the_model(
    model: Path, source: Path, capsys: pytest.CaptureFixture[str], flags: dict, named: list[str]
) -> None:
    summary = score(source, model=model, **flags)
    assert_refused(summary, capsys.readouterr().err, *named)
    assert not Path("out.parquet").exists()


def test_a_device_that_does_not_exist_is_refused_before_anything_is_written(model: Path, source: Path) -> None:
    before = sorted(Path().iterdir())
    with pytest.raises(UsageError, match="--device 'tpu': no such device; use auto, cpu, cuda, cuda:N or mps"):
        score(source, model=model, device="tpu")
    assert sorted(Path().iterdir()) == before


def test_an_output_of_an_unknown_ending_is_refused_before_anything_is_written(model: Path, source: Path) -> None:
    before = sorted(Path().iterdir())
    summary = score(source, "out.xlsx", model=model)
    assert (summary["exit_code"], summary["report"]) == (2, None)
    assert "unknown ending of --output out.xlsx" in summary["error"]
    assert sorted(Path().iterdir()) == before


def test_inputs_that_cannot_be_read(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("table.xlsx").write_text("prompt\nfox\n")
    Path("empty").mkdir()
    Path("notes.jsonl").write_text("these are\nnotes\n")
    write_parquet("a.parquet", prompt=["fox"])
    write_jsonl("b.jsonl", [{"prompt": "fox"}])
    for inputs, named in (
        ("nothing.parquet", "nothing.parquet"),
        ("data/*.parquet", "data/*.parquet"),
        ("table.xlsx", "table.xlsx"),
        ("empty", "empty"),
        ("notes.jsonl", "notes.jsonl"),
        (["a.parquet", "b.jsonl"], "b.jsonl"),
    ):
        summary = score(inputs, model=model)
        assert_refused(summary, capsys.readouterr().err, named)


@pytest.mark.parametrize(
    ("given", "flags", "named"),
    [
        ("in", {"output": "in/scores.parquet"}, ["--output in/scores.parquet", "beside in"]),
        ("in", {"output": "in/"}, ["--output in/"]),
        ("in/*.parquet", {"output": "in/scores.parquet"}, ["--output in/scores.parquet"]),
        ("in", {"report": "in/report.json"}, ["--report in/report.json"]),
        ("in/a.parquet", {"output": "in/a.parquet"}, ["over the input in/a.parquet"]),
    ],
)
def test_an_output_that_the_next_run_would_read_is_refused(
    model: Path, capsys: pytest.CaptureFixture[str], given: str, flags: dict, named: list[str]
) -> None:
    Path("in").mkdir()
    before = write_parquet("in/a.parquet", prompt=texts(3)).read_bytes()
    summary = score(given, model=model, **flags)
    assert summary["exit_code"] == 2
    message = capsys.readouterr().err
    assert all(name in message for name in named)
    assert Path("in/a.parquet").read_bytes() == before
    assert [path.name for path in Path("in").iterdir() if not path.name.endswith((".run.json", ".run.html"))] == [
        "a.parquet"
    ]


@pytest.mark.parametrize("given", ["a.parquet", "in", "in/", ".", "..", "*.parquet", "in/*.parquet", "**/*.parquet"])
def test_the_next_run_does_not_find_the_default_output(tmp_path: Path, given: str) -> None:
    Path("in").mkdir()
    assert not would_find(given, default_output(given), folder=False)


def test_scores_among_the_inputs_are_not_scored(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("in").mkdir()
    write_parquet("in/a.parquet", prompt=texts(3))
    schema = pa.schema([("prompt", pa.string())], metadata={b"prefillcli": b"{}"})
    pq.write_table(pa.table({"prompt": ["fox"]}, schema=schema), "in/a.scores.parquet")
    summary = score("in/*.parquet", model=model)
    assert_refused(summary, capsys.readouterr().err, "a.scores.parquet was written by prefill score")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission(model: Path, source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source.chmod(0)
    assert score(source, model=model)["exit_code"] in (1, 2)
    assert "in.parquet" in capsys.readouterr().err


@pytest.mark.parametrize("damage", ["no parquet", "cut", ""])
def test_a_damaged_parquet_file_fails_and_is_named(
    model: Path, source: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    data = source.read_bytes()
    source.write_bytes(data[: len(data) // 2] if damage == "cut" else damage.encode())
    assert_refused(score(source, model=model), capsys.readouterr().err, "in.parquet", code=1)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("only .bin", ["pytorch_model.bin", "safetensors"]),
        ("no weights", ["safetensors"]),
        ("truncated", ["model.safetensors", "truncated"]),
        ("pointer", ["model.safetensors", "Git LFS"]),
        ("no config", ["config.json"]),
        ("broken config", ["config.json"]),
        ("no tokenizer", ["tokenizer"]),
    ],
)
def test_a_model_directory_that_cannot_be_used(
    model: Path, source: Path, capsys: pytest.CaptureFixture[str], change: str, named: list[str]
) -> None:
    path = Path("model")
    shutil.copytree(model, path)
    weights = path / "model.safetensors"
    if change == "truncated":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif change == "pointer":
        weights.write_text("version https://git-lfs.github.com/spec/v1\n")
    elif change == "broken config":
        (path / "config.json").write_text("{")
    else:
        gone = {"no config": "config.json", "no tokenizer": "tokenizer*"}.get(change, "*.safetensors")
        for file in path.glob(gone):
            file.unlink()
        if change == "only .bin":
            (path / "pytorch_model.bin").write_bytes(b"\x80\x02")
    summary = score(source, model=path)
    assert_refused(summary, capsys.readouterr().err, *named)


def test_a_model_that_is_not_there(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused(score(source, model="./models/none"), capsys.readouterr().err, "./models/none")


def test_an_encoder_decoder_is_refused(model: Path, source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(model, "t5")
    Path("t5/config.json").write_text('{"model_type": "t5"}')
    summary = score(source, model="t5")
    assert summary["exit_code"] in (1, 2)
    assert "encoder-decoder" in capsys.readouterr().err


def test_values_are_refused_under_the_name_they_were_given_by() -> None:
    Path("job.yaml").write_text("temperature: hot\n")
    for flags, recipe, environment, named in (
        ({"temperature": -1.0}, None, {}, "--temperature"),
        ({"on_long": "crop"}, None, {}, "truncate-middle"),
        ({"memory": "lots"}, None, {}, "--memory"),
        ({"max_error_rate": 2.0}, None, {}, "--max-error-rate"),
        ({}, None, {"PREFILL_TEMPERATURE": "hot"}, "PREFILL_TEMPERATURE"),
        ({}, "job.yaml", {}, "job.yaml: temperature"),
        ({"resume": True, "overwrite": True}, None, {}, "--overwrite"),
        ({"limit": 1, "sample": 1}, None, {}, "--sample"),
    ):
        with pytest.raises(UsageError) as caught:
            load_settings(ScoreSettings, {"inputs": ["in.parquet"], **flags}, recipe=recipe, environment=environment)
        assert named in str(caught.value)


def test_no_input_at_all() -> None:
    with pytest.raises(UsageError, match="INPUT"):
        load_settings(ScoreSettings, {}, environment={})


@pytest.mark.parametrize(
    ("recipe", "named"),
    [
        ("lables: Yes,No\n", ["'lables'", "'labels'"]),
        ("keep-columns: id\n", ["'keep-columns'", "'keep_columns'"]),
        ("- labels\n", ["mapping"]),
        ("labels: [\n", ["not valid YAML"]),
    ],
)
def test_a_recipe_that_cannot_be_used(recipe: str, named: list[str]) -> None:
    Path("job.yaml").write_text(recipe)
    with pytest.raises(UsageError) as caught:
        load_settings(ScoreSettings, {"inputs": ["in.parquet"]}, recipe="job.yaml", environment={})
    for name in ("job.yaml", *named):
        assert name in str(caught.value)


def test_a_recipe_that_is_not_there() -> None:
    with pytest.raises(UsageError, match=r"none\.yaml"):
        load_settings(ScoreSettings, {}, recipe="none.yaml", environment={})


def test_recipe_then_environment_then_flag() -> None:
    recipe = {"input": "in.parquet", "temperature": 2.0, "model": "r", "max_length": 10, "keep_columns": ["a", "b"]}
    Path("job.yaml").write_text(json.dumps(recipe))
    environment = {"PREFILL_MODEL": "e", "PREFILL_MAX_LENGTH": "20", "PREFILL_LABELS": "A,B", "PREFILL_QUIET": "true"}
    given = {"model": "f", "inputs": ["x.parquet"]}
    settings = load_settings(ScoreSettings, given, recipe="job.yaml", environment=environment)
    assert (settings.answers.temperature, settings.prompts.max_length, settings.lm.model) == (2.0, 20, "f")
    assert (settings.input.inputs, settings.files.keep_columns, settings.answers.labels) == (
        ("x.parquet",),
        ("a", "b"),
        "A,B",
    )
    assert settings.run.quiet is True
    alone = load_settings(ScoreSettings, {}, recipe="job.yaml", environment={})
    assert (alone.input.inputs, alone.lm.model, alone.prompts.max_length) == (("in.parquet",), "r", 10)


def test_labels_in_a_recipe_are_the_words_they_look_like() -> None:
    for text, labels in (("[Yes, No]", ("Yes", "No")), ("[1, 0]", ("1", "0")), ("Yes,No", "Yes,No")):
        Path("job.yaml").write_text(f"labels: {text}\nquiet: yes\noverwrite: true\n")
        settings = load_settings(ScoreSettings, {"inputs": ["x"]}, recipe="job.yaml", environment={})
        assert (settings.answers.labels, settings.run.quiet, settings.files.overwrite) == (labels, True, True)
