"""The tokens that end a text, by a model's configuration and its generation configuration."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from prefillcli.models.files import read_json
from prefillcli.models.find import ModelFiles


def stop_tokens(files: ModelFiles) -> frozenset[int]:
    """The stop tokens of a model whose weights are not loaded. Raises UsageError for a file that is no JSON."""
    generation = files.path / "generation_config.json"
    content = read_json(generation) if generation.is_file() else None
    return _ids(files.config, content)


def stop_tokens_of(model: PreTrainedModel) -> frozenset[int]:
    """The stop tokens of a loaded model."""
    return _ids(model.config.get_text_config(), getattr(model, "generation_config", None))


def _ids(*configurations: Any) -> frozenset[int]:
    ids: set[int] = set()
    for each in configurations:
        given = each.get("eos_token_id") if isinstance(each, dict) else getattr(each, "eos_token_id", None)
        ids.update([given] if isinstance(given, int) else given or ())
    return frozenset(ids)
