"""The peers of the walk answer as they should, and the race says who was in it."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from benchmarks import details, peers
from benchmarks.contenders import padded_batches, questions
from benchmarks.methods import plain_loop
from benchmarks.models import random_llama
from benchmarks.reviews import ASKED, question_tokens
from benchmarks.runners import Runner
from benchmarks.serving import FEWEST_SHARED, batches, beginnings, groups, option_shares
from benchmarks.workloads import short_rows
from prefillcli.models.files import sample_model
from prefillcli.walk.narrow import int8_kernel
from recipes.real_model import Review


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


@pytest.mark.nightly
def test_the_race_prints_a_table_and_a_line_of_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "ROOT", tmp_path)  # no peer's environment is there
    monkeypatch.setitem(peers.CONTENDERS, "broken", peers.Contender("benchmarks.nowhere:nothing"))
    words = "--workload single --workload short --rounds 1 --scale 0.02 --dtype float32"
    app = typer.Typer()
    app.command()(peers.main)
    result = CliRunner().invoke(app, words.split())
    assert result.exit_code == 0, result.output
    assert "vLLM is left out: .venv-vllm is not made" in result.stderr
    workloads = json.loads(result.stdout.splitlines()[-1])["workloads"]
    assert list(workloads) == ["single", "short"]
    walks = {"torch walk": 1e-5, "torch walk int8": 0.05}  # what their scores may be off by
    if int8_kernel() is None:
        del walks["torch walk int8"]
        assert "torch walk int8 is left out" in result.stderr
    assert list(workloads["short"]["contenders"]) == [*walks, "padded batches"]
    assert list(workloads["single"]["contenders"]) == [*walks, "plain loop"]
    for workload in workloads.values():
        assert workload["left_out"]["broken"] == "the process ended with 1"
        for name, contender in workload["contenders"].items():
            assert contender["rows_per_second"]["median"] > 0
            assert contender["largest_difference"] < walks.get(name, 1e-5)
            assert contender["ready_bytes"] > 0


@pytest.mark.nightly
def test_ten_questions_race_without_the_peers_that_are_not_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "ROOT", tmp_path)
    monkeypatch.setattr(details, "reviews", lambda split: [Review("It helped at once, and I slept. " * 4, "positive")])
    words = f"questions --model {sample_model()} --documents 2 --characters 60 --rounds 1"
    result = CliRunner().invoke(details.app, words.split())
    assert result.exit_code == 0, result.output
    assert "llama.cpp is left out: .venv-llamacpp is not made" in result.stderr
    assert "│ ten questions" in result.stdout
    assert "2 texts; tokens of ten questions" in result.stdout


def test_peers_get_the_tokens_of_which_the_program_makes_its_probabilities() -> None:
    texts, asked = ["It helped at once.", "I slept badly and felt sick."], [each.to_json() for each in ASKED]
    prompts, options = question_tokens(sample_model(), asked, texts)
    assert len(prompts) == len(options) == 20
    network = AutoModelForCausalLM.from_pretrained(sample_model(), dtype=torch.float32)
    logprobs: list[list[float]] = []
    for prompt, own in zip(prompts, options, strict=True):
        found: dict[tuple[int, ...], float] = {}
        for before, following in beginnings(own).items():
            with torch.no_grad():
                logits = network(torch.tensor([[*prompt.tolist(), *before]])).logits[0, -1].double()
            found |= {(*before, token): float(logits.log_softmax(-1)[token]) for token in following}
        logprobs.append([sum(found[tuple(each[:end])] for end in range(1, len(each) + 1)) for each in own])
    with questions(sample_model(), "float32", prompts, (0, 0), asked, texts) as (run, _):
        np.testing.assert_allclose(run(), option_shares(logprobs), atol=1e-5)


SUMS = """
from contextlib import contextmanager
import numpy as np

@contextmanager
def sums(model, dtype, prompts, labels, scale):
    print("noise of a library")
    found = np.array([prompt.sum() for prompt in prompts], np.float64)
    yield lambda: found * scale + labels[1], {"dtype": dtype, "model": model.name}
"""


def test_a_contender_with_its_own_interpreter_gets_rows_and_settings_and_gives_scores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "made_contender.py").write_text(SUMS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    prompts = [np.arange(count, dtype=np.int32) for count in (3, 1, 5)]
    own, here = "made_contender:sums", Path(sys.prefix)
    with closing(Runner(own, tmp_path, "x", prompts, {"scale": 0.5}, labels=(5, 7), environment=here)) as runner:
        assert runner.about == {"dtype": "x", "model": tmp_path.name}
        assert runner.run().tolist() == [8.5, 7.0, 12.0]
        assert runner.run().tolist() == [8.5, 7.0, 12.0]
        assert runner.processor_seconds() > 0


def test_a_contender_that_cannot_start_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="ended with 1"):
        Runner("benchmarks.nowhere:nothing", tmp_path, "x", [], labels=(5, 7))


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1), st.booleans()), min_size=2, max_size=30))
def test_quality_is_the_mean_difference_and_the_area_of_scikit_learn(rows: list[tuple[float, float, bool]]) -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    scores, wanted, truths = (list(each) for each in zip(*rows, strict=True))
    found = peers.quality(np.array(scores), np.array(wanted), truths, range(len(rows)))
    assert found["mean_difference"] == pytest.approx(
        sum(abs(a - b) for a, b in zip(scores, wanted, strict=True)) / len(rows)
    )
    if len(set(truths)) == 2:
        assert found["auc"] == pytest.approx(metrics.roc_auc_score(truths, scores))
    some = peers.quality(np.array(scores[1:]), np.array(wanted), None, range(1, len(rows)))
    assert some["largest_difference"] == max(abs(a - b) for a, b in zip(scores[1:], wanted[1:], strict=True))
    assert some["auc"] is None


TEXTS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 60), st.integers(1, 20)), max_size=12)


@given(TEXTS)
def test_groups_hold_every_row_once_in_order_with_tokens_that_all_of_them_share(
    texts: list[tuple[int, int, int]],
) -> None:
    rows = [[kind] * head + [100 + number] * tail for number, (kind, head, tail) in enumerate(texts)]
    found = groups([np.array(row, np.int32) for row in rows])
    assert [row for _, own in found for row in own] == list(range(len(rows)))
    for shared, own in found:
        assert shared == 0 or (shared >= FEWEST_SHARED and len(own) > 1)
        assert len({tuple(rows[row][:shared]) for row in own}) == 1
        assert all(len(rows[row]) > shared or not shared for row in own)
