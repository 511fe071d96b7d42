"""The peers of the walk answer as they should, and the race says who was in it."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from benchmarks import peers
from benchmarks.methods import plain_loop
from benchmarks.models import random_llama
from benchmarks.padded import batches, padded_batches
from benchmarks.workloads import short_rows


@pytest.mark.sampled(2)
@pytest.mark.parametrize("tokens", [1, 64, 200, 10_000])
def test_padded_batches_give_the_logits_of_the_plain_loop(tokens: int) -> None:
    model = random_llama("25M", torch.float32)
    prompts = short_rows(12, 1, 60, 8_000)
    wanted = plain_loop(model, prompts)
    torch.testing.assert_close(padded_batches(model, prompts, tokens), wanted, atol=1e-4, rtol=0)


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 200))
def test_batches_hold_every_row_once_and_keep_to_the_budget(lengths: list[int], tokens: int) -> None:
    made = list(batches(lengths, tokens))
    assert sorted(row for batch in made for row in batch) == list(range(len(lengths)))
    assert all(len(batch) == 1 or len(batch) * max(lengths[row] for row in batch) <= tokens for batch in made)


def test_sampled_rows_are_evenly_spaced_and_the_walk_scores_all() -> None:
    workload = peers.shared(100, 0.5)
    assert workload.rows(peers.PLAIN) == [0, 10, 20, 30]
    assert workload.rows(peers.WALK) == workload.rows(peers.VLLM) == list(range(40))


@pytest.mark.nightly
def test_the_race_prints_a_table_and_a_line_of_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "find_spec", lambda name: None)  # vLLM takes a minute to start
    words = "--workload single --workload short --rounds 1 --scale 0.02 --dtype float32"
    app = typer.Typer()
    app.command()(peers.main)
    result = CliRunner().invoke(app, words.split())
    assert result.exit_code == 0, result.output
    assert "vLLM is not installed here" in result.stderr
    workloads = json.loads(result.stdout.splitlines()[-1])["workloads"]
    assert list(workloads) == ["single", "short"]
    assert list(workloads["short"]["contenders"]) == ["torch walk", "plain loop", "padded batches"]
    assert list(workloads["single"]["left_out"]) == ["padded batches"]
    for workload in workloads.values():
        for contender in workload["contenders"].values():
            assert contender["rows_per_second"]["median"] > 0
            assert contender["largest_difference"] < 1e-5
            assert contender["ready_bytes"] > 0


def test_a_trial_takes_the_fastest_and_survives_what_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fake:
        def __init__(self, settings: dict[str, int]) -> None:
            if settings["b"] == 3:
                raise RuntimeError("no")

        def run(self) -> np.ndarray:
            return np.zeros(1)

        def close(self) -> None: ...

    monkeypatch.setitem(peers.TRIALS, "fake", {"a": (1, 2), "b": (3, 4)})
    seconds = {(1, 4): 3.0, (2, 4): 2.0}
    seen = []

    def timed(methods, rounds):
        seen.append(dict(settings_now))
        return {"fake": [seconds[tuple(settings_now.values())]]}

    settings_now: dict[str, int] = {}

    def open_one(name: str, settings: dict[str, int]) -> Fake:
        settings_now.update(settings)
        return Fake(settings)

    monkeypatch.setattr(peers, "interleaved", timed)
    assert peers._best("fake", {"a": 1, "b": 4}, open_one) == {"a": 2, "b": 4}
    assert seen == [{"a": 1, "b": 4}, {"a": 2, "b": 4}]
