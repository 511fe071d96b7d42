"""The methods of `prefill bench` are jobs that answer the same rows."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.flops import answer_flops
from benchmarks.methods import compressed_walk, compressor_for, layer_walk, plain_loop
from benchmarks.models import random_draft, random_llama
from benchmarks.needles import make_needles
from benchmarks.score_runs import SAMPLES
from benchmarks.workloads import random_prompt
from prefillcli.options.commands import BenchSettings
from prefillcli.plan.behind import LabelSet
from prefillcli.plan.pack import Limits
from prefillcli.plan.plan import make_plan
from prefillcli.prompts.encoding import spans_of
from prefillcli.reading.compress.settings import Compression
from prefillcli.rows.records import Prompt
from prefillcli.tools.bench.bench_job import bench_job
from prefillcli.tools.bench.methods import METHODS, REFERENCE, method_names, score_settings
from prefillcli.tools.bench.report import BenchReport, WorkloadResult
from tests.jobs.jobs import write_parquet

TARGET, DRAFT = SAMPLES / "models" / "target", SAMPLES / "models" / "draft"
DROPPING = ("specprefill", "self-draft", "random", "bm25")


def settings_with(**given: object) -> BenchSettings:
    words = {"model": str(TARGET), "draft": str(DRAFT), "keep": (0.3, 1.0), "quiet": True}
    return BenchSettings.model_validate({"lookahead": 1, "keep_last": 16, "keep_private": False} | words | given)


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> WorkloadResult:
    """The sample pair, and six prompts about six readers."""
    output = tmp_path_factory.mktemp("bench") / "bench.json"
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    prompts, answers = make_needles(rows=6, tokens=300, seed=0, count=lambda text: len(tokenizer(text)["input_ids"]))
    inputs = str(write_parquet(output.with_name("needles.parquet"), prompt=prompts, answer=answers))
    given = {"inputs": (inputs,), "truth": "answer", "output": str(output)}
    settings = settings_with(method=("hf", "full", *DROPPING), rounds=2, **given)
    assert bench_job(settings)["exit_code"] == 0
    (found,) = BenchReport.model_validate_json(output.read_text(), strict=False).workloads
    return found


def test_every_method_runs_at_every_rate(result: WorkloadResult) -> None:
    rated = [f"{name}@{keep}" for name in DROPPING for keep in ("0.3", "1")]
    assert [each.method for each in result.methods] == ["hf", "full", "hybrid", *rated]
    assert result.truth_rows == result.rows == 6
    assert not [note for note in result.notes if "busy" not in note]
    for each in result.methods:
        assert each.seconds.low <= each.seconds.median <= each.seconds.high
        assert each.rows_per_second == pytest.approx(6 / each.seconds.median)
        assert each.peak_bytes is None or each.peak_bytes > 0
        assert not each.fallbacks


def test_what_keeps_all_flips_nothing(result: WorkloadResult) -> None:
    for each in result.methods:
        if each.keep in (None, 1.0):
            assert each.kept == 1
            if each.method != REFERENCE:
                assert each.answers.audit.flips == 0
                assert each.answers.audit.max_difference < 1e-4
        else:
            assert 0.2 < each.kept < 0.5  # the ends come on top; a prompt's last chunk may be short
    assert next(each for each in result.methods if each.method == REFERENCE).answers.audit is None


def test_only_the_draft_reads_in_the_drafts_name(result: WorkloadResult) -> None:
    by_name = {each.method: each for each in result.methods}
    assert by_name["specprefill@0.3"].draft_tokens == by_name["hybrid"].target_tokens
    assert by_name["specprefill@1"].draft_tokens == by_name["random@0.3"].draft_tokens == 0
    assert by_name["hf"].target_tokens == by_name["full"].target_tokens == result.prompt_tokens
    assert by_name["hybrid"].target_tokens < result.prompt_tokens  # the instruction is shared


def test_the_reference_answers_as_transformers_does(tmp_path: Path) -> None:
    output = tmp_path / "bench.json"
    rows = SAMPLES / "labeling.parquet"
    settings = settings_with(inputs=(str(rows),), method=("hybrid",), limit=9, rounds=0, truth="answer")
    assert bench_job(settings.with_options({"output": str(output)}))["exit_code"] == 0
    (found,) = BenchReport.model_validate_json(output.read_text(), strict=False).workloads
    import pyarrow.parquet as pq

    table = pq.read_table(rows).slice(0, 9)
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    model = AutoModelForCausalLM.from_pretrained(TARGET, attn_implementation="eager", dtype=torch.float32).eval()
    labels = [tokenizer.convert_tokens_to_ids(token) for token in ("ĠYes", "ĠNo")]
    right = 0
    for text, answer in zip(table["prompt"].to_pylist(), table["answer"].to_pylist(), strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([tokenizer(text)["input_ids"]])).logits[0, -1, labels]
        right += ("Yes", "No")[int(logits.argmax())] == answer
    assert found.methods[0].answers.accuracy == pytest.approx(right / 9)


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({}, ["hf", "hybrid", "specprefill", "random"]),
        ({"draft": "self"}, ["hf", "hybrid", "self-draft", "random"]),
        ({"draft": None}, ["hf", "hybrid"]),
        ({"full": True}, ["hf", "full", "hybrid", *DROPPING]),
        ({"method": ("int8", "random")}, ["hybrid", "random", "int8"]),
    ],
)
def test_the_usual_methods_are_those_that_can_run(given: dict[str, object], names: list[str]) -> None:
    assert method_names(settings_with(**given)) == names


def test_a_method_is_the_settings_of_a_job() -> None:
    settings = settings_with(first="words", seed=3, max_flips=0.05, method=tuple(METHODS))
    found = {name: score_settings(settings, name) for name in METHODS}
    assert {name: own.engine.engine for name, own in found.items() if own.engine.engine != "torch"} == {
        "hf": "hf",
        "vllm": "vllm",
    }
    drafts = {name: own.compression.draft for name, own in found.items() if own.compression.draft is not None}
    assert drafts == {"specprefill": str(DRAFT), "self-draft": "self", "random": "random", "bm25": "bm25"}
    assert {name for name, own in found.items() if own.compression.keep == 0.3} == set(DROPPING)
    assert {name for name, own in found.items() if own.exits.exit} == {"early-exit", "first-exit"}
    assert {name for name, own in found.items() if own.exits.first} == {"first", "first-exit"}
    assert found["int8"].exits.compute == "int8"
    assert {(own.input.seed, own.compression.keep_last) for own in found.values()} == {(3, 16)}
    bounded = {name: own.flips.max_flips for name, own in found.items() if "max_flips" in own.given}
    assert bounded == dict.fromkeys(("early-exit", "first", "first-exit", "int8"), 0.05)  # alone it means more
    assert score_settings(settings, "random", 0.7).compression.keep == 0.7


def test_the_ends_of_prompts_are_counted_by_hand() -> None:
    config = random_draft(8_000, torch.float32).config
    prefix = np.arange(10, dtype=np.int32)
    plan = make_plan([np.append(prefix, np.int32(99 + n)) for n in range(2)], Limits(99, 99))
    token = 6 * 256 * 512 + 2 * 256 * 64 * 6 + 2 * 256 * 128
    pair, head = 4 * 64 * 2, 2 * 256 * 8_000
    assert answer_flops(config, plan) == 2 * (token + 11 * pair + head)
    decoded = 2 * token + 2 * 12 * pair + head
    assert answer_flops(config, plan, ahead=1) == 2 * (token + 11 * pair + head) + 2 * decoded


def test_the_case_walks_what_is_kept() -> None:
    model, draft = random_llama("25M", torch.float32), random_draft(8_000, torch.float32)
    prompts = [random_prompt(400, 8_000)]
    compressor = compressor_for(draft, Compression(lookahead=1, compress_above=0, keep_last=8, keep_private=False))
    with closing(compressor):
        logits, kept = compressed_walk(model, compressor, prompts, 1.0)
        torch.testing.assert_close(logits, plain_loop(model, prompts), atol=1e-4, rtol=0)
        assert kept == [400]
        logits, kept = compressed_walk(model, compressor, prompts, 0.2)
    assert 0.2 * 400 <= kept[0] < 0.35 * 400
    assert not torch.allclose(logits, layer_walk(model, prompts), atol=1e-3)


def test_texts_give_the_tokens_they_were_made_of() -> None:
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    text = "New post: Ünïcode, 3 min.\nWould Anna read this? Answer:"
    ids = np.array(tokenizer(text)["input_ids"], np.int32)
    found = spans_of(tokenizer, [Prompt(7, ids, LabelSet(()))])
    assert found is not None
    spans = found[7]
    assert spans.text.endswith(text)
    assert spans.offsets.shape == (len(ids), 2)
    assert "".join(spans.text[a:b] for a, b in spans.offsets[-2:].tolist()).strip().endswith(":")
    assert spans_of(object(), [Prompt(0, ids, LabelSet(()))]) is None
