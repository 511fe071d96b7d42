"""All modes compute the same thing."""

from __future__ import annotations

import pytest
import torch

from prefillcli.tools.profile.measuring import prefill, random_prompt
from prefillcli.walk.forest import register
from tests.unit.walk.families import VOCABULARY, make_model

PROMPT = random_prompt(150, VOCABULARY)


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    register()
    return make_model("llama")


@pytest.mark.parametrize("mode", ["full", "chunked", "hybrid"])
def test_logits_are_those_of_the_eager_forward(model: torch.nn.Module, mode: str) -> None:
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        wanted = model(input_ids=torch.as_tensor(PROMPT, dtype=torch.long)[None], use_cache=False).logits[0, -1]
    torch.testing.assert_close(prefill(model, mode, 32, PROMPT), wanted, atol=1e-4, rtol=0)
