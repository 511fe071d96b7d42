"""Options of rationales that cannot be obeyed are refused before any weight is loaded, and what is told of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from prefillcli.errors import PrefillError, UsageError
from prefillcli.options.commands import ScoreSettings
from prefillcli.options.load import load_settings
from prefillcli.prompts.templates import rationale_texts
from tests.jobs.jobs import score, texts, write_jsonl, write_parquet
from tests.jobs.models import save_model
from tests.jobs.test_usage import assert_refused

LOADED = "the weights are loaded"


@pytest.fixture(autouse=True)
def _no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_model(*_: object, **__: object) -> None:
        raise PrefillError(LOADED)

    monkeypatch.setattr("prefillcli.models.load.load_model", load_model)


@pytest.fixture
def source() -> Path:
    return write_parquet("in.parquet", prompt=texts(3), key=["a", "b", "c"], stars=[1, 2, 3])


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"rationale_when": "score >"}, ["--rationale-when", "unexpected"]),
        ({"rationale_when": "scor > 0.5"}, ["--rationale-when", "did you mean 'score'?"]),
        ({"rationale_when": "stars > 1"}, ["stars", "--keep-columns"]),
        ({"rationale_when": "stars > 'a'", "keep_columns": "stars"}, ["a number is compared with a text"]),
        ({"rationale_when": "row > 1", "id_column": "key"}, ["no column row"]),
        ({"rationale_when": "score + 1"}, ["not true or false"]),
        ({"rationale_when": "seconds > 1"}, ["seconds", "differs from run to run"]),
        ({"rationale_when": "rationale_tokens > 1"}, ["not known when a row is chosen"]),
        ({"rationale_when": "exit_layer > 1"}, ["no column exit_layer"]),
        ({"rationale_template": "{{ labl }} because"}, ["labl", "did you mean 'label'?"]),
        ({"rationale_template": "{{ label "}, ["--rationale-template", "line 1"]),
        ({"rationale_template": " {% if label == 'Yes' %}x{% endif %}"}, ["no text for the answer 'No'"]),
        ({"rationale_template": "{{ label * 10 ** 9 }}"}, ["cannot be rendered"]),
    ],
    ids=lambda value: " ".join(value.values()) if isinstance(value, dict) else "",
)
def test_a_condition_or_template_that_cannot_be_is_refused_before_anything_loads(
    model: Path, source: Path, capsys: pytest.CaptureFixture[str], flags: dict, named: list[str]
) -> None:
    summary = score(source, model=model, rationale=8, **flags)
    assert_refused(summary, capsys.readouterr().err, *named)
    assert not Path("out.parquet").exists()


def test_a_syntax_error_is_told_before_a_model_is_looked_for(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for flags in ({"rationale_when": "score >"}, {"rationale_template": "{{ no }}"}):
        summary = score(source, model="missing", rationale=8, **flags)
        assert_refused(summary, capsys.readouterr().err, "--rationale-")


def test_a_dry_run_refuses_the_same(model: Path, source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for condition in ("score >", "stars > 1"):
        assert score(source, model=model, rationale=8, dry_run=True, rationale_when=condition)["exit_code"] == 2
        assert "--rationale-when" in capsys.readouterr().err


def test_columns_of_json_lines_are_of_no_known_kind(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = write_jsonl("in.jsonl", [{"prompt": "a", "stars": 3}])
    flags: dict[str, Any] = {"model": model, "rationale": 8, "keep_columns": "stars"}
    assert score(lines, rationale_when="score > 'a' or stars > 1", **flags)["exit_code"] == 2
    assert "a number is compared with a text" in capsys.readouterr().err
    assert score(lines, rationale_when="stars > 1 and stars == 'many'", **flags)["error"] == LOADED


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"rationale": 8, "speculation": "draft"}, "--speculation draft needs --draft"),
        ({"rationale": 8, "speculation": "hierarchy", "draft": "self", "keep": 0.5}, "needs --draft"),
        ({"rationale": 8, "speculation": "auto"}, "should be 'off', 'lookup', 'retrieval', 'draft' or"),
        ({"rationale": 8, "engine": "hf", "speculation": "retrieval"}, "the hf engine has no speculation"),
        ({"rationale": 8, "engine": "vllm", "speculation": "retrieval"}, "speculative_config"),
    ],
    ids=lambda value: " ".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_options_that_contradict_one_another_are_refused(flags: dict, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_settings(ScoreSettings, {"inputs": ["in.parquet"], **flags}, environment={})
    assert said in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 3


def test_a_draft_that_guesses_tokens_is_not_idle(
    model: Path, draft: Path, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for flags in ({}, {"rationale": 8, "speculation": "lookup"}, {"evidence": True}):
        assert score(source, model=model, draft=draft, **flags)["exit_code"] == 2
        said = capsys.readouterr().err
        assert "--draft has nothing to compress" in said
        assert ("--speculation draft" in said) == ("rationale" in flags)
    for speculation in ("draft", "hierarchy"):
        assert score(source, model=model, draft=draft, rationale=8, speculation=speculation)["error"] == LOADED


def test_a_classification_head_is_not_asked_to_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    classifier = save_model(tmp_path / "classifier", classifies=True, num_labels=2)
    source = write_parquet("in.parquet", prompt=texts(2))
    summary = score(source, model=classifier, rationale=8)
    assert_refused(summary, capsys.readouterr().err, "--rationale", "classification head", "--evidence")


def test_the_template_is_rendered_for_each_label_and_cannot_run_away() -> None:
    assert rationale_texts("{{ label }} because", ("Yes", "No")) == {"Yes": "Yes because", "No": "No because"}
    both = "{{ label }}, not {{ labels|reject('equalto', label)|join(' or ') }}:"
    assert rationale_texts(both, ("a", "b", "c"))["b"] == "b, not a or c:"
    for hostile in ("{{ ''.__class__ }}", "{% for i in range(10**9) %}x{% endfor %}", "{% include 'x' %}"):
        with pytest.raises(UsageError, match="--rationale-template"):
            rationale_texts(hostile, ("Yes", "No"))
