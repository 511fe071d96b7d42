"""Jobs with models that are walked with their own attention and cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.jobs.jobs import (
    TOLERANCE,
    Reference,
    assert_scored,
    read_output,
    read_report,
    score,
    texts,
    write_parquet,
)
from tests.jobs.models import save_model

ROWS = 40
MODELS: dict[str, dict[str, Any]] = {"bloom": {"layers": 3}, "doge": {"layers": 3}}


@pytest.fixture(scope="module", params=MODELS)
def own_cached(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / request.param, family=request.param, **MODELS[request.param])


@pytest.fixture(autouse=True)
def _rows() -> None:
    write_parquet("in.parquet", prompt=texts(ROWS))


def test_rows_have_transformers_scores_and_shared_prefixes_are_computed_once(
    own_cached: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert score("in.parquet", model=own_cached, pack_tokens=128, chunk_tokens=64)["exit_code"] == 0
    assert capsys.readouterr().err.count("is walked with its own cache") == 1
    reference = Reference(own_cached)
    assert_scored(read_output("out.parquet"), [reference.answer(text) for text in texts(ROWS)])
    report = read_report()
    assert report["weights"]["own_cache"]
    assert report["packs"] > 3
    assert report["tokens"]["computed"] <= 1.01 * report["tokens"]["unique"]


@pytest.mark.sampled(1)
def test_scores_do_not_depend_on_packs_or_the_prefix_cache(own_cached: Path) -> None:
    assert score("in.parquet", "a.parquet", model=own_cached)["exit_code"] == 0
    wanted = [row["score"] for row in read_output("a.parquet")]
    for place in ("discard", "offload"):
        flags = {"pack_tokens": 200, "prefix_kv": place}
        assert score("in.parquet", "b.parquet", model=own_cached, overwrite=True, **flags)["exit_code"] == 0
        assert [row["score"] for row in read_output("b.parquet")] == pytest.approx(wanted, abs=TOLERANCE)


def test_such_a_model_chooses_no_tokens(own_cached: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = save_model(tmp_path / "plain")
    for flags in ({"model": plain, "draft": own_cached}, {"model": own_cached, "draft": "self"}):
        assert score("in.parquet", "b.parquet", keep=0.5, overwrite=True, **flags)["exit_code"] == 2
        error = capsys.readouterr().err
        assert "walked with its own attention and cache" in error
        assert "take another draft" in error
    assert not Path("b.parquet").exists()


def test_what_cannot_be_walked_is_refused_with_the_reason_and_scored_by_another_engine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, plain = save_model(tmp_path / "gpt", family="openai-gpt"), save_model(tmp_path / "plain")
    for flags in ({"model": model}, {"model": plain, "draft": model, "keep": 0.5}):
        assert score("in.parquet", **flags)["exit_code"] == 2
        error = capsys.readouterr().err
        assert "a model of type openai-gpt cannot be walked layer by layer: it keeps no cache" in error
        assert ("--engine hf" in error) == ("draft" not in flags)
    assert score("in.parquet", model=model, engine="hf")["exit_code"] == 0
    reference = Reference(model)
    assert_scored(read_output("out.parquet"), [reference.answer(text) for text in texts(ROWS)])
