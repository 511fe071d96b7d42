"""The benchmark measures what it says."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from typer.testing import CliRunner

from prefillcli.bench.flops import plain_flops, walk_flops
from prefillcli.bench.measure import interleaved, peak_bytes
from prefillcli.bench.methods import layer_walk, plain_loop
from prefillcli.bench.models import random_llama
from prefillcli.bench.workloads import post_recommendation, single
from prefillcli.plan.pack import Limits
from prefillcli.plan.plan import make_plan


def test_both_methods_give_the_same_logits() -> None:
    model = random_llama("25M", torch.float32)
    prompts = post_recommendation(2, 3, 40, 12, 8_000) + single(130, 8_000)
    torch.testing.assert_close(layer_walk(model, prompts, 64), plain_loop(model, prompts), atol=1e-4, rtol=0)


def test_flops_of_a_single_prompt_are_those_of_its_layers() -> None:
    config = LlamaConfig(
        hidden_size=8, intermediate_size=16, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1
    )
    prompt = [np.arange(5, dtype=np.int32)]
    projections, rest, pair = 2 * 8 * (8 + 4 + 4), 2 * (8 * 8 + 3 * 8 * 16), 4 * 8
    layer = 5 * (projections + rest) + 15 * pair
    assert plain_flops(config, prompt) == 3 * layer
    assert walk_flops(config, make_plan(prompt, Limits(99, 99))) == 2 * layer + 5 * projections


def test_methods_take_turns() -> None:
    turns: list[str] = []
    seconds = interleaved({"a": lambda: turns.append("a"), "b": lambda: turns.append("b")}, rounds=2)
    assert turns == ["a", "b"] * 3
    assert [len(s) for s in seconds.values()] == [2, 2]


def ready_to_fill(size: int):
    return lambda: np.ones(size, dtype=np.uint8)


@pytest.mark.slow
def test_peak_memory_is_that_of_the_step() -> None:
    size = 200 << 20
    assert 0.95 * size <= peak_bytes(ready_to_fill, size) <= 1.1 * size


@pytest.mark.slow
def test_the_command_prints_a_table_and_a_line_of_json() -> None:
    import typer

    from prefillcli.bench.__main__ import main

    app = typer.Typer()
    app.command()(main)
    words = "--model 25M --case single --case post-recommendation --rounds 1 --scale 0.02"
    result = CliRunner().invoke(app, words.split())
    assert result.exit_code == 0, result.output
    line = json.loads(result.stdout.splitlines()[-1])
    assert [row["goal"] for row in line["rows"]] == [">= 1.2", ">= 12"]
