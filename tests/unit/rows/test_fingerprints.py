"""Digests of models and tokenizers change with every part that matters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from prefillcli.errors import UsageError
from prefillcli.rows.proof import ModelContents, hash_model, hash_value


@pytest.fixture
def model(tmp_path: Path, byte_level: Any) -> Path:
    byte_level.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"hidden_size": 8}')
    for shard in ("1", "2"):
        save_file({"w": np.arange(100_000, dtype=np.float32)}, tmp_path / f"model-{shard}.safetensors")
    return tmp_path


def test_the_same_folder_gives_the_same_digests(model: Path) -> None:
    assert hash_model(model) == hash_model(str(model))
    assert ModelContents(model).tokenizer() == ModelContents(model).tokenizer()
    assert hash_model(model) != ModelContents(model).tokenizer()


@pytest.mark.parametrize("change", ["config", "last byte", "shard"])
def test_the_model_digest_changes_with(model: Path, change: str) -> None:
    before, tokenizer = hash_model(model), ModelContents(model).tokenizer()
    weights = model / "model-2.safetensors"
    if change == "config":
        (model / "config.json").write_text('{"hidden_size": 9}')
    elif change == "last byte":
        weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    else:
        weights.unlink()
    assert hash_model(model) != before
    assert ModelContents(model).tokenizer() == tokenizer


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "vocab.txt", "preprocessor_config.json"]
)
def test_the_tokenizer_digest_changes_with_every_file(model: Path, name: str) -> None:
    before, weights = ModelContents(model).tokenizer(), hash_model(model)
    (model / name).write_text("changed")
    assert ModelContents(model).tokenizer() != before
    assert hash_model(model) == weights


def test_a_folder_without_a_config_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=str(tmp_path)):
        hash_model(tmp_path)


def test_values_are_compared_by_content() -> None:
    assert hash_value({"a": 1, "b": [2]}) == hash_value({"b": [2], "a": 1})
    assert hash_value({"a": 1}) != hash_value({"a": 2})
    assert hash_value(None) != hash_value("")
