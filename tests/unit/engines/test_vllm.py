"""vLLM as an engine: `make test-vllm`.

A vLLM takes half a minute to start, so most jobs of this module share one. Those that are killed have their own.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

try:
    import psutil  # comes with vLLM
except ImportError:
    psutil = None

from prefillcli.core.request import Request, answer_requests
from prefillcli.engines.base import Answer
from prefillcli.engines.hf import HfEngine, last_logits
from prefillcli.engines.torch import TorchEngine
from prefillcli.plan.behind import LabelSet
from prefillcli.plan.pack import Limits
from prefillcli.plan.plan import make_plan
from prefillcli.rows.records import Prompt
from prefillcli.walk.continuations import Beginning, Writing
from prefillcli.walk.forest import ATTENTION, register
from prefillcli.walk.walk import LayerWalk
from tests.jobs.jobs import Reference, read_output, read_report, score, texts, write_jsonl, write_parquet
from tests.jobs.models import save_model
from tests.unit.engines.written import Given, answers

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed here; make test-vllm brings its own"),
    pytest.mark.filterwarnings("ignore"),  # vLLM's own
]

ROOT = Path(__file__).parents[3]
HIDDEN = 128  # heads of 32, the smallest that vLLM has kernels for on CPUs
FAST = {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 30}
FLOAT32, BFLOAT16 = 1e-3, 3e-2
FAMILIES = ("llama", "qwen3")
ROWS = 600


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory."""
    return save_model(tmp_path_factory.mktemp("models") / request.param, hidden=HIDDEN, family=request.param)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "llama", hidden=HIDDEN)


@pytest.fixture(scope="module")
def shared(llama: Path) -> Iterator[Any]:
    """One vLLM for all jobs with `llama`."""
    from prefillcli.engines.vllm import VllmEngine

    options = {**FAST, "block_size": 32}
    with closing(VllmEngine(llama, dtype="float32", max_length=2048, options=options)) as engine:
        yield engine


@pytest.fixture
def started(shared: Any, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Jobs with `--engine vllm` use the shared vLLM; what they would have started theirs with is noted."""
    asked = []

    def engine(model: Path, **how: Any) -> Any:
        asked.append({"model": model, **how})
        return shared

    monkeypatch.setattr("prefillcli.engines.vllm.VllmEngine", engine)
    monkeypatch.setattr(shared, "close", lambda: None)
    return asked


def sharing(count: int) -> list[str]:
    """Prompts of which each ten share some hundred tokens."""
    return [f"{'fox dog ' * 40}user {i // 10} {'yes no ' * 30}" + text for i, text in enumerate(texts(count))]


def likeliest_word(model: Path, prompt: str) -> tuple[str, str] | None:
    """A prompt and the text of its likeliest next token; None if that text has other tokens behind the prompt."""
    reference = Reference(model)
    ids = reference.ids(prompt)
    token = int(reference._probabilities(tuple(ids)).argmax())
    word = reference.tokenizer.decode(token)
    return (prompt, word) if reference.ids(prompt + word) == [*ids, token] else None


# ---------------------------------------------------------------------------------------------------------- scores


def test_float32_scores_are_those_of_the_walk_and_of_the_eager_forward(
    family: Path, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    if family.name == "llama":
        request.getfixturevalue("started")  # the same weights
    prompts = texts(20) + sharing(20)
    source = write_parquet("in.parquet", prompt=prompts)
    score(source, "torch.parquet", model=family)
    assert score(source, model=family, engine="vllm", engine_options=FAST)["exit_code"] == 0
    reference = Reference(family)
    rows = read_output("out.parquet")
    largest = 0.0
    for row, other, text in zip(rows, read_output("torch.parquet"), prompts, strict=True):
        wanted = reference.answer(text)
        largest = max(largest, abs(row["score"] - other["score"]), abs(row["score"] - wanted.score))
        assert abs(row["label_mass"] - wanted.label_mass) < FLOAT32
        for name, logprob in zip(("Yes", "No"), wanted.logprobs, strict=True):
            assert abs(row[f"logprob_{name}"] - logprob) < 10 * FLOAT32
    with capsys.disabled():
        print(f" {largest:.1e}", end="")
    assert largest < FLOAT32
    spread = [row["score"] for row in rows]
    assert max(spread) - min(spread) > 0.1, "scores must differ enough to tell a wrong one"


def test_bfloat16_scores_are_close(family: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = texts(20) + sharing(10)
    source = write_parquet("in.parquet", prompt=prompts)
    job = {"model": family, "dtype": "bfloat16"}
    score(source, "torch.parquet", **job)
    assert score(source, engine="vllm", engine_options=FAST, **job)["exit_code"] == 0
    pairs = zip(read_output("out.parquet"), read_output("torch.parquet"), strict=True)
    largest = max(abs(row["score"] - other["score"]) for row, other in pairs)
    with capsys.disabled():
        print(f" {largest:.1e}", end="")
    assert largest < BFLOAT16


def test_variants_of_a_label_are_summed_over_the_whole_vocabulary(started: list[Any], llama: Path) -> None:
    source = write_parquet("in.parquet", prompt=texts(9))
    score(source, model=llama, engine="vllm", labels="Yes= Yes|Yes|yes,No= No")
    reference = Reference(llama)
    for row, text in zip(read_output("out.parquet"), texts(9), strict=True):
        wanted = reference.answer(text, ((" Yes", "Yes", "yes"), (" No",)))
        assert abs(row["score"] - wanted.score) < FLOAT32
        assert abs(row["label_mass"] - wanted.label_mass) < FLOAT32


def test_labels_of_several_tokens_are_those_of_the_walk_and_of_the_plain_loop(
    shared: Any, llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(5)
    trunk = rng.integers(3, 300, 12).tolist()
    unlike = [rng.integers(3, 300, 12).tolist() for _ in range(4)]
    history = rng.integers(3, 300, 90)
    prompts = [np.append(history[: 20 * number], [7, 8, 9 + number]).astype(np.int32) for number in range(5)]
    hf = HfEngine(AutoModelForCausalLM.from_pretrained(llama).eval(), max_length=2048)
    likeliest = int(last_logits(hf.model, np.append(prompts[4], trunk[:5]).astype(np.int32)).argmax())
    sets = [
        LabelSet.of([[trunk], [[*trunk[:5], *unlike[0][:4]]], [unlike[1][0]]]),  # they part inside
        LabelSet.of([[trunk[:1]], [[*trunk[:3], 4], [*trunk[:3], 5]], [[*trunk[:3], 6, 7]]]),  # they part at the end
        replace(LabelSet.of([[unlike[2]], [unlike[3][:7]]]), sizes=(12.0, 7.0)),
        LabelSet.of([[8], [9, 10]]),
        replace(LabelSet.of([[[*trunk[:5], likeliest]]]), by_token=True),
    ]
    register()
    model = AutoModelForCausalLM.from_pretrained(llama, attn_implementation=ATTENTION).eval()
    walk = TorchEngine(LayerWalk(model, chunk_tokens=64), limits=Limits(tokens=1 << 20, max_tokens=2048))
    questions = [
        Request(Prompt(row, own, labels)) for row, (own, labels) in enumerate(zip(prompts, sets, strict=True))
    ]
    shared.forget()
    found, wanted, others = (answer_requests(each, questions) for each in (shared, hf, walk))
    largest = 0.0
    for own, one, other in zip(found, wanted, others, strict=True):
        largest = max(largest, *np.abs(own.logprobs - one.logprobs), *np.abs(own.logprobs - other.logprobs))
    read, plain = found[4].by_token, wanted[4].by_token
    largest = max(largest, *np.abs(read.logprobs - plain.logprobs))
    with capsys.disabled():
        print(f" {largest:.1e}", end="")
    assert read.greedy == plain.greedy
    assert largest < 1e-5


def test_a_document_is_computed_once_for_all_options_of_several_questions(shared: Any) -> None:
    rng = np.random.default_rng(6)
    document = rng.integers(3, 300, 640)
    questions = [
        Request(
            Prompt(
                row, np.append(document, [7, row]).astype(np.int32), LabelSet.of([[own] for own in options.tolist()])
            )
        )
        for row, options in enumerate(rng.integers(3, 300, (4, 4, 3)))
    ]
    shared.forget()
    found = answer_requests(shared, questions)
    assert sum(each.computed_tokens for each in found) < 1.6 * len(document)


@pytest.mark.parametrize("stride", [None, "5"])
def test_targets_and_documents_have_the_numbers_of_the_walk(
    started: list[Any], llama: Path, stride: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    greedy = next(filter(None, (likeliest_word(llama, prompt) for prompt in texts(50))))
    prompts = [greedy[0], "The fox:", "", "The fox: \n", *sharing(4), ""]
    targets = [greedy[1], " Yes, no", "A fox saw a dog. " * 12, "No", *texts(4), "é"]
    source = write_parquet("in.parquet", prompt=prompts, target=targets)
    job = {"model": llama, "target_column": "target", "token_logprobs": True, "on_long": "truncate-left"}
    job |= {"max_length": 120, "stride": stride}
    assert score(source, "torch.parquet", **job)["exit_code"] == 0
    assert score(source, engine="vllm", **job)["exit_code"] == 0
    rows, wanted = read_output("out.parquet"), read_output("torch.parquet")
    largest = 0.0
    for row, other in zip(rows, wanted, strict=True):
        for name in ("error", "truncated", "target_tokens", "target_bytes", "greedy"):
            assert row[name] == other[name]
        assert row["logprob"] == pytest.approx(sum(row["token_logprobs"]))
        pairs = zip(row["token_logprobs"], other["token_logprobs"], strict=True)
        largest = max(largest, *(abs(own - each) for own, each in pairs))
        assert row["bits_per_byte"] == pytest.approx(other["bits_per_byte"], abs=1e-5)
    with capsys.disabled():
        print(f" {largest:.1e}", end="")
    assert largest < 1e-5
    assert [row["greedy"] for row in rows][:2] == [True, False]
    assert max(row["target_tokens"] for row in rows) > 120


def test_typed_questions_and_requests_have_the_answers_of_the_walk(llama: Path) -> None:
    late = {"name": "late", "type": "predicate", "instructions": "Is it late?"}
    kind = {"name": "kind", "type": "choice", "instructions": "Which?", "choices": [{"value": each} for each in "abc"]}
    bodies = [{"input": text, "questions": [late, kind]} for text in texts(9)]
    requests, rows = write_jsonl("requests.jsonl", bodies), write_parquet("in.parquet", text=texts(9))
    Path("q.json").write_text(json.dumps({"questions": [late, kind]}))
    job = {"questions": "q.json", "orders": 2, "calibrate_with": "N/A"}
    for engine in ("torch", "vllm"):
        given: dict[str, Any] = {"model": llama, "engine": engine}
        assert score(requests, f"{engine}.jsonl", **given)["exit_code"] == 0
        assert score(rows, f"{engine}.parquet", **given, **job)["exit_code"] == 0
    for row, other in zip(read_output("vllm.jsonl"), read_output("torch.jsonl"), strict=True):
        (yes, choice), (wanted, told) = (each["response"]["body"]["answers"] for each in (row, other))
        assert yes["probability"] == pytest.approx(wanted["probability"], abs=1e-5)
        shares = [[each["probability"] for each in own["probabilities"]] for own in (choice, told)]
        assert shares[0] == pytest.approx(shares[1], abs=1e-5)
    for row, other in zip(read_output("vllm.parquet"), read_output("torch.parquet"), strict=True):
        assert row["late.calibrated"] == pytest.approx(other["late.calibrated"], abs=1e-5)
        assert row["kind.calibrated"] == pytest.approx(other["kind.calibrated"], abs=1e-5)


# ----------------------------------------------------------------------------------------------------------- texts


@pytest.fixture(scope="module")
def asked() -> tuple[list[Any], dict[int, Beginning]]:
    """Prompts that repeat themselves, of which each second is written on."""
    generator = np.random.default_rng(1)
    parts = [generator.integers(3, 300, 60 + number).astype(np.int32) for number in range(10)]
    prompts = [np.tile(part, 2 + number % 3) for number, part in enumerate(parts)]
    beginnings = {n: Beginning(prompts[n], (5 + n, 7), key=f"row {n}") for n in range(0, 10, 2)}
    return prompts, beginnings


@pytest.fixture(scope="module")
def written(llama: Path, asked: tuple[list[Any], dict[int, Beginning]]) -> tuple[Writing, dict[int, Answer]]:
    """Texts of at most 24 tokens by transformers, and how: one of them ends before that."""
    engine = HfEngine(AutoModelForCausalLM.from_pretrained(llama).eval(), max_length=2048)
    prompts, beginnings = asked
    longest = answers(engine, prompts, Given(Writing(24), beginnings))
    writing = Writing(24, frozenset({longest[4].continuation.tokens[9]}))
    return writing, answers(engine, prompts, Given(writing, beginnings))


def assert_same_texts(found: dict[int, Answer], wanted: dict[int, Answer]) -> None:
    assert found.keys() == wanted.keys()
    for prompt, answer in found.items():
        assert np.abs(answer.logprobs - wanted[prompt].logprobs).max() < FLOAT32
        text, other = answer.continuation, wanted[prompt].continuation
        assert (text is None) == (other is None)
        if text is not None:
            assert (text.tokens, text.finish_reason) == (other.tokens, other.finish_reason)
            assert text.gap == pytest.approx(other.gap, abs=FLOAT32)


def test_greedy_texts_are_those_of_transformers(shared: Any, asked: Any, written: Any) -> None:
    writing, wanted = written
    shared.forget()
    assert_same_texts(answers(shared, asked[0], Given(writing, asked[1])), wanted)
    assert {each.continuation.finish_reason for each in wanted.values() if each.continuation} == {"stop", "length"}
    report = shared.decoded()
    assert report.texts == report.kept_prompts == 5, "prompts are in the cache when their texts begin"
    assert report.row_passes == sum(
        len(each.continuation.tokens) + (each.continuation.finish_reason == "stop")
        for each in wanted.values()
        if each.continuation
    )


def test_drawn_texts_follow_from_seed_and_key(shared: Any, asked: Any) -> None:
    prompts, beginnings = asked
    drawn = Writing(24, temperature=1.0, seed=1)
    first, again, other = (
        {prompt: each.continuation for prompt, each in answers(shared, prompts, Given(how, beginnings)).items()}
        for how in (drawn, drawn, replace(drawn, seed=2))
    )
    for prompt in beginnings:
        assert first[prompt].tokens == again[prompt].tokens != other[prompt].tokens
        assert math.isnan(first[prompt].gap)


def test_texts_end_where_the_model_does(shared: Any) -> None:
    prompts = [np.full(length, 5, dtype=np.int32) for length in (2040, 2047)]
    beginnings = {number: Beginning(prompt, (7,), key="") for number, prompt in enumerate(prompts)}
    found = answers(shared, prompts, Given(Writing(24), beginnings))
    assert [len(found[number].continuation.tokens) for number in range(2)] == [7, 0]
    assert {each.continuation.finish_reason for each in found.values()} == {"length"}


def test_its_own_speculation_changes_neither_scores_nor_texts(llama: Path, asked: Any, written: Any) -> None:
    from prefillcli.engines.vllm import VllmEngine

    speculation = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    options = {**FAST, "block_size": 32, "speculative_config": speculation}
    writing, wanted = written
    with closing(VllmEngine(llama, dtype="float32", max_length=2048, options=options)) as engine:
        assert_same_texts(answers(engine, asked[0], Given(writing, asked[1])), wanted)
        report = engine.decoded()
    counts = report.drafters["ngram"]
    assert counts.proposed >= counts.accepted > 0
    chosen = sum(
        len(each.continuation.tokens) + (each.continuation.finish_reason == "stop")
        for each in wanted.values()
        if each.continuation
    )
    assert report.row_passes < chosen


# ----------------------------------------------------------------------------------------------------------- heads


@pytest.mark.parametrize(
    ("family", "flags"), [("llama", {"head": "value"}), ("qwen3", {"labels": "LABEL_2,LABEL_0"})], ids=FAMILIES
)
def test_a_head_gives_the_outputs_of_the_walk(
    family: str, flags: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save_model(tmp_path / "m", hidden=HIDDEN, family=family, classifies=True, num_labels=3)
    source = write_parquet("in.parquet", prompt=texts(10) + sharing(20))
    score(source, "torch.parquet", model=model, **flags)
    assert score(source, model=model, engine="vllm", engine_options=FAST, **flags)["exit_code"] == 0
    rows, wanted = read_output("out.parquet"), read_output("torch.parquet")
    assert rows[0].keys() == wanted[0].keys()
    names = [name for name in rows[0] if name.startswith(("score", "value_", "logprob_", "label_mass"))]
    largest = max(abs(row[name] - other[name]) for row, other in zip(rows, wanted, strict=True) for name in names)
    with capsys.disabled():
        print(f"\n{family} head {flags}: largest difference {largest:.1e}")
    assert largest < FLOAT32
    assert sum(row["shared_tokens"] for row in rows) > 0


# ------------------------------------------------------------------------------------------------------------- rows


def test_shared_prefixes_are_taken_from_the_cache_and_accounted_for(started: list[Any], llama: Path) -> None:
    source = write_parquet("in.parquet", prompt=sharing(60))
    assert score(source, model=llama, engine="vllm")["exit_code"] == 0
    rows, report = read_output("out.parquet"), read_report()
    for row in rows:
        assert row["computed_tokens"] == row["prompt_tokens"] - row["shared_tokens"] > 0
    assert report["tokens"]["computed"] == sum(row["computed_tokens"] for row in rows)
    assert report["tokens"]["computed"] < 0.4 * report["tokens"]["prompt"]
    assert sum(row["seconds"] for row in rows) == pytest.approx(report["seconds"]["model"], rel=0.2)


@pytest.mark.parametrize(("on_long", "max_length"), [("error", None), ("skip", 40), ("truncate-middle", None)])
def test_over_long_rows_follow_on_long_before_vllm_sees_them(
    started: list[Any], llama: Path, on_long: str, max_length: int | None
) -> None:
    ids = [[5 + i % 300 for i in range(length)] for length in (2047, 2048, 2049, 3000, 12)]
    rows = [{"prompt_token_ids": own} for own in ids]
    source = write_jsonl("in.jsonl", [*rows, {"prompt_token_ids": [1, 999]}, {"prompt_token_ids": []}])
    job = {"model": llama, "on_long": on_long, "max_length": max_length}
    wanted = score(source, "torch.parquet", **job)
    found = score(source, engine="vllm", **job)
    assert found["rows"] == wanted["rows"]
    for row, other in zip(read_output("out.parquet"), read_output("torch.parquet"), strict=True):
        for name in ("error", "truncated", "prompt_tokens"):
            assert row[name] == other[name]
        assert (row["score"] is None) == (other["score"] is None)
        assert row["score"] is None or abs(row["score"] - other["score"]) < FLOAT32
    assert started[0]["max_length"] == max_length or 2048


def test_vllm_has_no_room_beyond_the_length_where_position_encodings_change(
    started: list[Any], llama: Path, tmp_path: Path
) -> None:
    """It reads all prompts with the encodings of long ones where `max_model_len` exceeds that length."""
    twin = shutil.copytree(llama, tmp_path / "longrope")
    config = json.loads((twin / "config.json").read_text())
    pairs = config["hidden_size"] // config["num_attention_heads"] // 2
    config["rope_parameters"] = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * pairs,
        "long_factor": [4.0] * pairs,
        "original_max_position_embeddings": 100,
        "factor": 20.0,
    }
    (twin / "config.json").write_text(json.dumps(config))
    source = write_jsonl("in.jsonl", [{"prompt_token_ids": [5] * length} for length in (99, 100)])
    score(source, model=twin, engine="vllm")
    assert [row["error"] for row in read_output("out.parquet")] == [None, "prompt_too_long"]
    assert started[0]["max_length"] == 99, "vLLM gets one more as max_model_len"


def test_max_model_len_bounds_the_prompts(started: list[Any], llama: Path) -> None:
    source = write_jsonl("in.jsonl", [{"prompt_token_ids": [5] * length} for length in (63, 64)])
    score(source, model=llama, engine="vllm", engine_options={"max_model_len": 64})
    assert [row["error"] for row in read_output("out.parquet")] == [None, "prompt_too_long"]
    assert started[0]["max_length"] == 63


def test_options_are_checked_before_the_weights(
    started: list[Any], llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_parquet("in.parquet", prompt=texts(2))
    for options, named in (
        ({"gpu_memory_utilisation": 0.8}, "'gpu_memory_utilization'"),
        ({"dtype": "half"}, "--dtype"),
        ({"load_format": "pt"}, "safetensors"),
        ({"max_model_len": "long"}, "max_model_len"),
    ):
        assert score(source, model=llama, engine="vllm", engine_options=options)["exit_code"] == 2
        assert named in capsys.readouterr().err
    assert not started
    assert score(source, model=llama, engine="vllm", device="cuda")["exit_code"] in (2, 5)


def test_a_signal_stops_the_run(started: list[Any], shared: Any, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_parquet("in.parquet", prompt=texts(50))
    step = shared._engine.step
    monkeypatch.setattr(shared, "_room", 4)
    calls = 0

    def signalled() -> Any:
        nonlocal calls
        calls += 1
        if calls == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return step()

    with monkeypatch.context() as patch:
        patch.setattr(shared._engine, "step", signalled)
        assert score(source, model=llama, engine="vllm")["exit_code"] == 143
    while shared._engine.has_unfinished_requests():
        step()
    assert 0 < read_report()["rows"]["scored"] < 50
    assert score(source, model=llama, engine="vllm", resume=True)["rows"]["scored"] == 50


# --------------------------------------------------------------------------------------------------------- commands

#: The command, every step's rows written at once.
COMMAND = """from functools import partial
import prefillcli.scoring.score as job
from prefillcli.cli import main
from prefillcli.core.scorer import Granularity

job.score_job = partial(job.score_job, granularity=Granularity(flush_seconds=0.0))
main()
"""


@contextmanager
def command(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    words = [sys.executable, "-c", COMMAND, "score", *map(str, arguments)]
    environment = {name: value for name, value in os.environ.items() if name != "VLLM_LOGGING_LEVEL"}
    with (
        open("stderr", "w") as stderr,
        subprocess.Popen(words, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment) as running,
    ):
        try:
            yield running
        finally:
            running.kill()


def test_the_sample_model_runs_and_stdout_has_one_line() -> None:
    import pyarrow.parquet as pq

    pq.write_table(pq.read_table(ROOT / "samples" / "labeling.parquet").slice(0, 200), "in.parquet")
    with command("in.parquet", "--engine", "vllm", "--engine-options", "enforce_eager=true", "--debug") as done:
        stdout, _ = done.communicate(timeout=300)
    stderr = Path("stderr").read_text()
    assert done.returncode == 0, stderr
    (line,) = stdout.splitlines()
    summary = json.loads(line)
    assert summary["rows"]["scored"] == 200
    assert "INFO" in stderr, "vLLM's log is on stderr"
    assert "Initializing a V1 LLM engine" in stderr
    score("in.parquet", "torch.parquet")
    pairs = zip(read_output("in.scores.parquet"), read_output("torch.parquet"), strict=True)
    assert max(abs(row["score"] - other["score"]) for row, other in pairs) < FLOAT32
    assert read_report("in.scores.run.json")["versions"]["vllm"]


@pytest.mark.parametrize("victim", ["engine core", "command"])
def test_a_vllm_killed_in_the_middle_loses_no_row(started: list[Any], llama: Path, victim: str) -> None:
    source = write_parquet("in.parquet", prompt=texts(ROWS), id=[f"r{i}" for i in range(ROWS)])
    job = {"model": llama, "id_column": "id", "engine": "vllm"}
    assert score(source, "whole.parquet", **job)["exit_code"] == 0
    options = ["-m", llama, "--id-column", "id", "--engine", "vllm", "-o", "out.parquet"]
    options += ["--engine-options", "enforce_eager=true", "--engine-options", "max_num_seqs=2"]
    with command(source, *options) as running:
        work = Path("out.parquet.prefill")
        while len(list(work.glob("part-*.parquet"))) < 5:
            assert running.poll() is None, Path("stderr").read_text()
            time.sleep(0.002)
        core, *others = processes(running.pid)
        os.kill(core.pid if victim == "engine core" else running.pid, signal.SIGKILL)
        stdout, _ = running.communicate(timeout=120)
        _, alive = psutil.wait_procs([core, *others], timeout=30)
    assert not alive, "no process of vLLM stays behind"
    stderr = Path("stderr").read_text()
    assert running.returncode == (5 if victim == "engine core" else -signal.SIGKILL), stderr
    assert not Path("out.parquet").exists()
    if victim == "engine core":
        summary, report = json.loads(stdout), read_report()
        assert (summary["status"], summary["exit_code"], report["exit_code"]) == ("failed", 5, 5)
        assert "vLLM exited" in report["error"]
        assert "--resume" in stderr
        assert 0 < report["rows"]["scored"] < ROWS
    assert score(source, resume=True, **job)["exit_code"] == 0
    assert read_report()["resumed"]
    rows, whole = read_output("out.parquet"), read_output("whole.parquet")
    for row, other in zip(rows, whole, strict=True):
        for name in ("seconds", "shared_tokens", "computed_tokens"):  # a new vLLM has an empty cache
            del row[name], other[name]
        for name in ("score", "label_mass", "logprob_Yes", "logprob_No"):
            assert abs(row.pop(name) - other.pop(name)) < 1e-5
    assert rows == whole


def test_nothing_stays_of_a_vllm_whose_run_is_killed_while_it_starts(llama: Path) -> None:
    source = write_parquet("in.parquet", prompt=texts(5))
    with command(source, "-m", llama, "--engine", "vllm") as running:
        starting: list[Any] = []
        while not starting:
            assert running.poll() is None, Path("stderr").read_text()
            with suppress(StopIteration, psutil.NoSuchProcess):
                starting = processes(running.pid)
            time.sleep(0.02)
        running.kill()
        _, alive = psutil.wait_procs(starting, timeout=30)
    assert not alive


def processes(pid: int) -> list[Any]:
    """vLLM's processes below `pid`, the engine core first."""
    below = psutil.Process(pid).children(recursive=True)
    core = next(process for process in below if "EngineCore" in " ".join(process.cmdline()))
    return [core, *core.children(recursive=True)]


# ------------------------------------------------------------------------------------------------------------ bench


def test_every_run_of_the_bench_begins_with_an_empty_cache(shared: Any, llama: Path) -> None:
    prompts = [np.arange(5, 205, dtype=np.int32)]
    computed, labels = [], LabelSet.of([[5], [6]])
    for _ in range(2):
        shared.forget()
        (answers,) = shared.answer_all(make_plan(prompts, shared.limits).packs, lambda _: labels, lambda _: None)
        computed.append(answers[0].computed_tokens)
    assert computed == [200, 200]
