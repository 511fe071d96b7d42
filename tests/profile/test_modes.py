"""All modes compute the same thing."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from prefillcli.forecast.profile import MODES
from prefillcli.plan.pack import Limits
from prefillcli.plan.plan import make_plan
from prefillcli.prefill.forest import ATTENTION, register
from prefillcli.prefill.walk import LayerWalk
from prefillcli.profile.children import random_prompt
from prefillcli.profile.modes import CopyingWalk, Prefill
from tests.prefill.families import VOCABULARY, make_model

PROMPT = random_prompt(150, VOCABULARY)


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    register()
    return make_model("llama")


@pytest.mark.parametrize("mode", MODES)
def test_logits_are_those_of_the_eager_forward(model: torch.nn.Module, mode: str) -> None:
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        wanted = model(input_ids=torch.as_tensor(PROMPT, dtype=torch.long)[None], use_cache=False).logits[0, -1]
    torch.testing.assert_close(Prefill(model, mode, 32)(PROMPT), wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("mode", MODES)
def test_steps_add_up_to_the_prompt(model: torch.nn.Module, mode: str) -> None:
    steps: list[float] = []
    Prefill(model, mode, 32)(PROMPT, steps.append)
    assert sum(steps) == pytest.approx(len(PROMPT))


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_a_copying_walk_gives_the_same_logits(layers: int) -> None:
    register()
    model = make_model("llama", num_hidden_layers=layers)
    model.set_attn_implementation(ATTENTION)
    prompts = [np.concatenate([PROMPT[:60], random_prompt(n, VOCABULARY)]) for n in (5, 30, 70)]
    packs = make_plan(prompts, Limits(80, 10**6, held_tokens=10**6)).packs
    assert len(packs) > 1

    def walked(kind: type[LayerWalk]) -> torch.Tensor:
        walk = kind(model, chunk_tokens=16)
        try:
            return torch.cat([logits for pack in packs for logits in walk.read_logits(pack)])
        finally:
            walk.close()

    assert torch.equal(walked(CopyingWalk), walked(LayerWalk))
