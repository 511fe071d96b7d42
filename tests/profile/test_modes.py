"""All modes compute the same thing."""

from __future__ import annotations

import json

import pytest
import torch
import typer
from typer.testing import CliRunner

from benchmarks.modes import MODES, main, prefill
from prefillcli.prefill.forest import register
from prefillcli.profile.measuring import random_prompt
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
    torch.testing.assert_close(prefill(model, mode, 32, PROMPT), wanted, atol=1e-4, rtol=0)


@pytest.mark.nightly
def test_the_benchmark_measures_every_mode() -> None:
    app = typer.Typer()
    app.command()(main)
    done = CliRunner().invoke(app, ["--tokens", "1024", "--chunk", "64"])
    assert done.exit_code == 0, done.output
    found = {mode: own["token_bytes"] for mode, own in json.loads(done.stdout).items()}
    assert found["hybrid"] < found["hybrid-copy"] < found["chunked"] < found["full"]
    assert found["hybrid"] < found["drop"] < found["full"]
