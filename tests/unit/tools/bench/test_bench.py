"""The benchmark measures what it says."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from benchmarks.memory import peak_in_child
from benchmarks.methods import layer_walk, plain_loop
from benchmarks.models import random_llama
from benchmarks.workloads import prompts_with_histories, random_prompt
from prefillcli.tools.bench.contest import interleaved


def test_both_methods_give_the_same_logits() -> None:
    model = random_llama("25M", torch.float32)
    prompts = [*prompts_with_histories(2, 3, 40, 12, 8_000), random_prompt(130, 8_000)]
    torch.testing.assert_close(layer_walk(model, prompts, 64), plain_loop(model, prompts), atol=1e-4, rtol=0)


def test_methods_take_turns() -> None:
    turns: list[str] = []
    seconds = interleaved({"a": lambda: turns.append("a"), "b": lambda: turns.append("b")}, rounds=2)
    assert turns == ["a", "b"] * 3
    assert [len(s) for s in seconds.values()] == [2, 2]


def ready_to_fill(size: int):
    return lambda: np.ones(size, dtype=np.uint8)


@pytest.mark.nightly
def test_peak_memory_is_that_of_the_step() -> None:
    size = 200 << 20
    assert 0.95 * size <= peak_in_child(ready_to_fill, size) <= 1.1 * size


@pytest.mark.nightly
@pytest.mark.slow
def test_the_command_prints_a_table_and_a_line_of_json() -> None:
    import typer

    from benchmarks.__main__ import main

    app = typer.Typer()
    app.command()(main)
    words = "--model 25M --case single --case post-recommendation --rounds 1 --scale 0.02"
    result = CliRunner().invoke(app, words.split())
    assert result.exit_code == 0, result.output
    line = json.loads(result.stdout.splitlines()[-1])
    assert [row["goal"] for row in line["rows"]] == [">= 1.2", ">= 12"]
