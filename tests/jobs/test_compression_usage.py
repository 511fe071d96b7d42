"""Options of compression that make no sense together, and drafts that do not fit: told before any weight is read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prefillcli.errors import UsageError
from prefillcli.options.commands import ScoreSettings
from prefillcli.options.load import load_settings
from prefillcli.reading.compress.settings import compression_of
from tests.jobs.jobs import read_report, score, texts, write_parquet

Json = dict[str, Any]


class WeightsAreRead(Exception):
    """The job got beyond its checks."""


@pytest.fixture(autouse=True)
def _no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_model(*_: object, **__: object) -> None:
        raise WeightsAreRead

    monkeypatch.setattr("prefillcli.models.load.load_model", load_model)


@pytest.fixture
def source() -> Path:
    return write_parquet("in.parquet", prompt=texts(3), answer=["Yes", "No", "Yes"], score=[0.5] * 3)


def settings(recipe: str | None = None, environment: dict[str, str] | None = None, **flags: Any) -> ScoreSettings:
    return load_settings(
        ScoreSettings, {"inputs": ["x.parquet"], **flags}, recipe=recipe, environment=environment or {}
    )


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"keep": 0.5}, ["--keep 0.5", "--draft"]),
        ({"keep": 0}, ["--keep 0"]),
        ({"keep": 1.5, "draft": "d"}, ["--keep 1.5"]),
        ({"keep": "nan", "draft": "d"}, ["--keep nan"]),
        ({"keep": "half", "draft": "d"}, ["--keep", "'half'"]),
        ({"audit": 10}, ["--audit", "--draft"]),
        ({"audit": -1, "draft": "d"}, ["--audit"]),
        ({"pool": 4}, ["--set pool", "odd"]),
        (
            {"paper": True, "query_window": 8, "keep_private": True},
            ["--set paper", "--set query_window", "--set keep_private"],
        ),
        ({"lookahead": 0}, ["--set lookahead"]),
        ({"query_window": -1}, ["--set query_window"]),
        ({"query_reduce": "median"}, ["--set query_reduce", "mean"]),
        ({"select_chunk": 0}, ["--set select_chunk"]),
        ({"compress_above": -1}, ["--set compress_above"]),
        ({"keep_last": -1}, ["--set keep_last"]),
        ({"max_flips": 1}, ["--max-flips"]),
    ],
    ids=lambda value: " ".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_options_that_make_no_sense(flags: Json, named: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        settings(**flags)
    assert caught.value.exit_code == 2
    for name in named:
        assert name in str(caught.value)


def test_the_command_ends_with_2_and_says_so(capsys: pytest.CaptureFixture[str], source: Path) -> None:
    from prefillcli.cli import app

    for words, named in (
        (["--keep", "0.5"], "--draft"),
        (["--set", "compress_above=some"], "--set compress_above"),
        (["--set", "paper=true", "--set", "pool=5"], "--set pool"),
    ):
        with pytest.raises(SystemExit) as ended:
            app(["score", str(source), *words])
        assert ended.value.code == 2
        message = capsys.readouterr().err
        assert named in message
        assert len(message.splitlines()) <= 3


def test_the_papers_setting_is_one_flag() -> None:
    """Values of the paper's published code: eight queries, pooling over 13, chunks of 32, and nothing beyond it."""
    found = compression_of(settings(draft="d", keep=0.5, paper=True, keep_last=5).compression)
    assert (found.lookahead, found.query_window, found.queries) == (8, 0, 8)
    assert (found.query_reduce, found.pool, found.select_chunk) == ("mean", 13, 32)
    assert not found.keep_private
    assert found.keep_last == 5, "what the paper does not say stays as it is asked for"


def test_a_draft_without_a_rate_is_refused_before_it_is_loaded(
    model: Path, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert score(source, model=model, draft=model)["exit_code"] == 2
    message = capsys.readouterr().err
    assert message.startswith("prefill: --draft has nothing to compress")
    assert len(message.splitlines()) <= 3
    rows = write_parquet("rates.parquet", prompt=texts(3), keep=[0.5, None, 1.0])
    for given in ({"inputs": rows}, {"inputs": source, "keep": 1}):  # the rows say it, or it is meant
        assert "WeightsAreRead" in score(**given, output="o.parquet", model=model, draft=model)["error"]


def test_the_rate_comes_from_recipe_environment_or_flag() -> None:
    recipe = Path("job.yaml")
    for text, rate in (("keep: auto", "auto"), ("keep: 0.25", 0.25), ("keep: 1", 1.0), ("keep: '0.5'", 0.5)):
        recipe.write_text(f"{text}\ndraft: d\n")
        assert settings("job.yaml").compression.keep == rate
        assert type(settings("job.yaml").compression.keep) is type(rate)
    assert settings("job.yaml", {"PREFILL_KEEP": "0.75"}).compression.keep == 0.75
    assert settings("job.yaml", {"PREFILL_KEEP": "auto"}, keep="0.125").compression.keep == 0.125


def test_a_draft_with_another_tokenizer_is_refused(
    model: Path, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draft = shutil.copytree(model, tmp_path / "draft")
    tokenizer = json.loads((draft / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (draft / "tokenizer.json").write_text(json.dumps(tokenizer))
    summary = score(source, model=model, draft=draft, keep=0.5)
    message = capsys.readouterr().err
    assert (summary["status"], summary["exit_code"]) == ("failed", 2)
    for name in ("--draft", str(draft), "2 tokens have other ids, 'a'"):
        assert name in message
    assert len(message.splitlines()) <= 3
    assert read_report()["exit_code"] == 2
    assert not Path("out.parquet.prefill").exists()


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda path, model: None, ["--draft", "no such directory"]),
        (lambda path, model: (shutil.copytree(model, path), (path / "model.safetensors").unlink()), ["safetensors"]),
    ],
    ids=["not there", "no weights"],
)
def test_a_draft_that_cannot_be_used(
    model: Path,
    source: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    make: Callable[[Path, Path], object],
    named: list[str],
) -> None:
    make(tmp_path / "draft", model)
    summary = score(source, model=model, draft=tmp_path / "draft", keep=0.5)
    message = capsys.readouterr().err
    assert summary["exit_code"] == 2
    for name in ("draft", *named):
        assert name in message


@pytest.mark.parametrize(
    ("truth", "named"), [("color", ["'color'", "available"]), ("score", ["--truth score"])], ids=["absent", "taken"]
)
def test_a_column_of_right_answers_that_cannot_be_taken(
    model: Path, source: Path, capsys: pytest.CaptureFixture[str], truth: str, named: list[str]
) -> None:
    summary = score(source, model=model, draft=model, keep=0.5, audit=2, truth=truth)
    message = capsys.readouterr().err
    assert summary["exit_code"] == 2
    for name in named:
        assert name in message
