"""Batch outputs against vLLM's `run-batch` and the types of the package openai: `make test-vllm`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from prefillcli.rows.records import ErrorCode
from tests.jobs.jobs import read_output, score, write_jsonl
from tests.jobs.models import CHAT_TEMPLATE, save_model
from tests.jobs.test_batch_files import CHAT, COMPLETION, HELLO, PARTS, line
from tests.jobs.test_pair_requests import DOCUMENTS, LINES
from tests.unit.engines.encoder_models import save_encoder

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed here; make test-vllm brings its own"),
    pytest.mark.filterwarnings("ignore"),  # vLLM's own
]


def lines_of_vllm(model: Path, *options: str) -> dict[str, dict[str, Any]]:
    """What `run-batch` writes for batch.jsonl, by its ids."""
    words = ["-i", "batch.jsonl", "-o", "vllm.jsonl", "--model", str(model), "--served-model-name", "fox"]
    words += ["--dtype", "float32", "--enforce-eager", "--kv-cache-memory-bytes", str(1 << 30), *options]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3]), "VLLM_NO_USAGE_STATS": "1"}
    command = [sys.executable, "-m", "vllm.entrypoints.openai.run_batch", *words]
    subprocess.run(command, check=True, env=environment, capture_output=True, timeout=300)
    return {each["custom_id"]: each for each in map(json.loads, Path("vllm.jsonl").read_text().splitlines())}


def test_the_scores_of_pairs_are_those_of_run_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.entrypoints.pooling.scoring.protocol import RerankResponse, ScoreResponse

    monkeypatch.chdir(tmp_path)
    model = save_encoder(tmp_path / "cross", num_labels=1, hidden_size=128)
    write_jsonl("batch.jsonl", [*LINES, line("wrong", "/v1/score", text_1=["a", "b"], text_2=["c", "d", "e"])])
    others = lines_of_vllm(model)
    flags = {"model": model, "format": "openai", "served_model_name": "fox", "max_error_rate": 1}
    assert score("batch.jsonl", "out.jsonl", **flags)["exit_code"] == 0
    *rows, wrong = read_output("out.jsonl")
    assert wrong["error"]["code"] == ErrorCode.INVALID_REQUEST
    assert others["wrong"]["response"] is None or others["wrong"]["response"]["status_code"] == 400
    for row in rows:
        body, wanted = row["response"]["body"], others[row["custom_id"]]["response"]["body"]
        kind = ScoreResponse if "data" in body else RerankResponse
        kind.model_validate(body, strict=True)
        assert body.keys() == wanted.keys()
        assert body["usage"].items() <= wanted["usage"].items()
        assert "created" not in body or abs(body.pop("created") - wanted.pop("created")) < 1000
        for own, theirs in zip(*(each.get("data") or each["results"] for each in (body, wanted)), strict=True):
            name = "score" if "score" in own else "relevance_score"
            assert own.pop(name) == pytest.approx(theirs.pop(name), abs=1e-4)
            for each in (own, theirs):  # the fourth document is the first again: the last bit decides which is ahead
                each["index"] %= len(DOCUMENTS)
            assert own == theirs


def test_the_lines_are_those_of_run_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from openai.types import Completion
    from openai.types.chat import ChatCompletion

    monkeypatch.chdir(tmp_path)
    model = save_model(tmp_path / "fox", hidden=128, chat_template=CHAT_TEMPLATE)
    questions = [{"role": "user", "content": f"Is {number} odd?"} for number in range(20)]
    lines = [
        *(
            line(f"r{at}", CHAT, messages=[each], logprobs=True, top_logprobs=5, temperature=0)
            for at, each in enumerate(questions)
        ),
        line("parts", CHAT, messages=[{"role": "user", "content": PARTS}], logprobs=True, temperature=0),
        line("plain", CHAT, messages=HELLO, temperature=0),
        line("bear", CHAT, messages=HELLO, model="bear", temperature=0),
    ]
    source = write_jsonl("batch.jsonl", lines)
    others = lines_of_vllm(model)

    flags = {"model": model, "format": "openai", "served_model_name": "fox", "max_error_rate": 1}
    completion = line("completion", COMPLETION, prompt="Is a fox quick?", logprobs=5)
    assert score(write_jsonl("more.jsonl", [*lines, completion]), "out.jsonl", **flags)["exit_code"] == 0
    *rows, last = read_output("out.jsonl")
    Completion.model_validate(last["response"]["body"], strict=True)
    assert len(rows) == len(others) == len(lines) == len(source.read_text().splitlines())
    for row in rows:
        other = others[row["custom_id"]]
        assert row.keys() == other.keys()
        if row["custom_id"] == "bear":
            assert row["error"]["code"] == ErrorCode.INVALID_REQUEST
            assert other["error"] is not None
            continue
        body, wanted = row["response"]["body"], other["response"]["body"]
        ChatCompletion.model_validate(body, strict=True)
        assert row["response"].keys() == other["response"].keys()
        (own,), (theirs,) = body["choices"], wanted["choices"]
        for name in ("model", "object"):
            assert body[name] == wanted[name]
        for name in body["usage"]:
            assert body["usage"][name] == wanted["usage"][name], name
        assert (own["finish_reason"], own["message"]["content"]) == (
            theirs["finish_reason"],
            theirs["message"]["content"],
        )
        if own["logprobs"] is None:
            assert theirs["logprobs"] is None
            continue
        (token,), (their_token,) = own["logprobs"]["content"], theirs["logprobs"]["content"]
        pairs = zip([token, *token["top_logprobs"]], [their_token, *their_token["top_logprobs"]], strict=True)
        for mine, yours in pairs:
            if mine["token"].endswith("\ufffd"):  # a part of a character, which vLLM leaves out
                assert yours["token"] == ""
            else:
                assert (mine["token"], mine["bytes"]) == (yours["token"], yours["bytes"])
            assert mine["logprob"] == pytest.approx(yours["logprob"], abs=1e-3)
