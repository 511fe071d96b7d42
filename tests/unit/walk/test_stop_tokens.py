"""Stop tokens, from a model's files and from the model."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from prefillcli.models.find import read_model_files
from prefillcli.models.open import stop_tokens, stop_tokens_of
from tests.unit.walk.families import make_model


@pytest.mark.parametrize(("given", "found"), [([2, 5], {2, 5}), (7, {2, 7}), (None, {2})])
def test_stop_tokens_of_files_are_those_of_the_loaded_model(tmp_path: Path, given: object, found: set[int]) -> None:
    model = make_model("llama")
    model.generation_config.eos_token_id = given
    model.save_pretrained(tmp_path)
    assert stop_tokens(read_model_files(tmp_path)) == found
    assert stop_tokens_of(AutoModelForCausalLM.from_pretrained(tmp_path)) == found
