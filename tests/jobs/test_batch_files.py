"""OpenAI batch files, in and out. The oracle is transformers' own eager forward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prefillcli.errors import UsageError
from prefillcli.options.commands import InspectSettings, MergeSettings
from prefillcli.options.load import load_settings
from prefillcli.tools.inspect import inspect_job
from prefillcli.tools.merge import merge_job
from prefillcli.tools.verify import verify_job
from tests.jobs.jobs import Reference, read_output, score, texts, write_jsonl
from tests.jobs.processes import Command, Hold, cut_small_windows, words_of

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
TOLERANCE = 1e-5
HELLO = [{"role": "user", "content": "Is a fox quick?"}]
PARTS = [{"type": "text", "text": "Is a fox"}, {"type": "text", "text": "quick?"}]


def line(custom_id: Any, url: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": "fox", "max_tokens": 1} | body}


def answered(lines: list[Any], model: Path, **flags: Any) -> list[dict[str, Any]]:
    """The lines that a job writes for a batch file."""
    given = {"model": model, "format": "openai", "served_model_name": "fox", "max_error_rate": 1} | flags
    assert score(write_jsonl("batch.jsonl", lines), "out.jsonl", **given)["exit_code"] == 0
    return read_output("out.jsonl")


def top_tokens(reference: Reference, ids: list[int], count: int) -> tuple[list[str], list[float], str, str]:
    """The texts of the likeliest tokens behind a prompt, their log-probabilities, what the first of them writes, and
    why the answer ends there."""
    top = reference._probabilities(tuple(ids)).log().topk(count)
    tokenizer = reference.tokenizer
    written = tokenizer.decode(top.indices[:1], skip_special_tokens=True).removesuffix("\ufffd")
    reason = "stop" if int(top.indices[0]) == tokenizer.eos_token_id else "length"
    return [tokenizer.decode([token]) for token in top.indices.tolist()], top.values.tolist(), written, reason


@pytest.mark.parametrize("engine", ["torch", "hf"])
def test_chats_and_completions_have_the_likeliest_tokens(
    chat_model: Path, chat_reference: Reference, engine: str
) -> None:
    lines = [
        line("chat", CHAT, messages=HELLO, logprobs=True, top_logprobs=20),
        line("parts", CHAT, messages=[{"role": "user", "content": PARTS}], logprobs=True),
        line("no logprobs", CHAT, messages=HELLO, max_tokens=None, max_completion_tokens=1, temperature=0, n=1),
        line("text", COMPLETION, prompt="Is a fox quick? Answer:", logprobs=5, stop=["zzz"], top_p=0.5, user="me"),
        line("list", COMPLETION, prompt=["Is a fox quick? Answer:"], logprobs=0),
        line("ids", COMPLETION, prompt=[5, 6, 7], logprobs=20),
    ]
    rows = answered(lines, chat_model, engine=engine)

    def chat_ids(text: str) -> list[int]:
        return chat_reference.ids(f"<s>[user] {text}\n[assistant]\n", special=False)

    completion_ids = chat_reference.ids("Is a fox quick? Answer:")
    prompts = [chat_ids("Is a fox quick?"), chat_ids("Is a fox\nquick?"), chat_ids("Is a fox quick?")]
    prompts += [completion_ids, completion_ids, [5, 6, 7]]
    for asked, ids, row in zip(lines, prompts, rows, strict=True):
        body = row["response"]["body"]
        (choice,) = body["choices"]
        tokens, logprobs, written, reason = top_tokens(chat_reference, ids, 20)
        assert (row["custom_id"], row["error"]) == (asked["custom_id"], None)
        assert body["usage"] == {
            "prompt_tokens": len(ids),
            "completion_tokens": 1,
            "total_tokens": len(ids) + 1,
        }
        assert (body["model"], choice["finish_reason"]) == ("fox", reason)
        if asked["url"] == CHAT:
            assert (body["object"], choice["message"]["content"]) == ("chat.completion", written)
            own = [] if choice["logprobs"] is None else choice["logprobs"]["content"]
            own = own + [top for each in own for top in each["top_logprobs"]]
            found = [(each["token"], each["logprob"]) for each in own]
            wanted = [0, *range(asked["body"].get("top_logprobs", 0))] if own else []
            assert all(bytes(each["bytes"]).decode() == each["token"] for each in own)
            assert bool(own) == bool(asked["body"].get("logprobs"))
        else:
            assert (body["object"], choice["text"]) == ("text_completion", written)
            own = choice["logprobs"]
            found = [(own["tokens"][0], own["token_logprobs"][0]), *own["top_logprobs"][0].items()]
            most = max(asked["body"]["logprobs"], 1)  # tokens with the same text share an entry
            wanted = [0, *(at for at in range(most) if tokens[at] not in tokens[:at])]
        assert [token for token, _ in found] == [tokens[at] for at in wanted]
        assert np.allclose([logprob for _, logprob in found], [logprobs[at] for at in wanted], rtol=0, atol=TOLERANCE)


def test_a_stop_text_and_an_end_token_end_the_answer(model: Path, reference: Reference) -> None:
    prompt = "Is a fox quick? Answer:"
    _, _, written, _ = top_tokens(reference, reference.ids(prompt), 1)
    assert written
    lines = [line("stops", COMPLETION, prompt=prompt, stop=written[-1]), line("goes on", COMPLETION, prompt=prompt)]
    # A prompt whose likeliest token is the end token, found by trying.
    ids = next([a, b] for a in range(2, 399) for b in (a, 7) if int(reference._probabilities((a, b)).argmax()) == 1)
    rows = answered([*lines, line("ends", COMPLETION, prompt=ids, logprobs=1)], model)
    stops, goes_on, ends = (row["response"]["body"]["choices"][0] for row in rows)
    assert (stops["text"], stops["finish_reason"]) == (written[: written.index(written[-1])], "stop")
    assert (goes_on["text"], goes_on["finish_reason"]) == (written, "length")
    assert (ends["text"], ends["finish_reason"], ends["logprobs"]["tokens"]) == ("", "stop", ["</s>"])


#: What the body of a chat may not say, and a part of the answer to it.
REFUSED: dict[str, tuple[Any, str]] = {
    "model": ("bear", '"bear" is not the one of this job, fox'),
    "n": (2, "n 2: only 1"),
    "stream": (True, "stream true: only false"),
    "temperature": (0.7, "temperature 0.7: only 0"),
    "logit_bias": ({"5": -100}, "logit_bias"),
    "tools": ([{}], "tools"),
    "response_format": ({"type": "json_object"}, "response_format"),
    "max_tokens": (16, "max_tokens 16: one token"),
    "top_logprobs": (21, "from 0 to 20"),
    "stop": ([1], "stop [1]: must be a text"),
    "top_k": (5, "top_k: not supported here"),
    "messages": ([{"role": "user", "content": [{"type": "image_url"}]}], "a part that is not text"),
}


def test_what_is_not_done_is_an_error_line(chat_model: Path) -> None:
    lines: list[Any] = [
        line(key, CHAT, **{"messages": HELLO, "logprobs": True} | {key: value}) for key, (value, _) in REFUSED.items()
    ]
    others = {
        "embeddings": (line("embeddings", "/v1/embeddings", input="x"), 'url "/v1/embeddings"'),
        "unsaid": (line("unsaid", CHAT, messages=HELLO, max_tokens=None), "must be 1"),
        "two prompts": (line("two prompts", COMPLETION, prompt=["a", "b"]), "2 prompts"),
        "GET": (line("GET", COMPLETION, prompt="a") | {"method": "GET"}, 'method is "GET"'),
        "a list": (line("a list", COMPLETION) | {"body": []}, "not an object"),
    }
    right = line("right", CHAT, messages=HELLO)
    lines += [*(each for each, _ in others.values()), right, right, b"{"]
    rows = answered(lines, chat_model)
    wanted = {name: said for name, (_, said) in (REFUSED | others).items()}
    for row in rows[: len(wanted)]:
        assert (row["response"], row["error"]["code"]) == (None, "invalid_request"), row
        assert wanted.pop(row["custom_id"]) in row["error"]["message"]
    assert wanted == {}
    assert rows[-3]["response"]["status_code"] == 200
    assert [row["error"]["code"] for row in rows[-2:]] == ["duplicate_id", "invalid_json"]


def without_time(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for row in rows:
        if row["response"] is not None:
            row["response"]["body"].pop("created")
    return rows


def assert_same(rows: list[dict[str, Any]], whole: list[dict[str, Any]]) -> None:
    """The same lines, but for the time, and rounding in other packs."""
    assert len(rows) == len(whole) > 0
    for row, wanted in zip(without_time(rows), without_time(whole), strict=True):
        if row["response"] is not None:
            own, other = (each["response"]["body"]["choices"][0].pop("logprobs") for each in (row, wanted))
            assert own["token_logprobs"] == pytest.approx(other["token_logprobs"], abs=TOLERANCE)
        assert row == wanted


def test_killed_resumed_sharded_and_merged_the_lines_are_the_same(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_small_windows(monkeypatch)
    lines = [line(f"r{at}", COMPLETION, prompt=text, logprobs=3) for at, text in enumerate(texts(40))]
    lines[7]["body"]["n"] = 2
    flags = {"model": model, "format": "openai", "served_model_name": "fox", "max_error_rate": 0.5}
    flags |= {"pack_tokens": 64, "memory": "64MiB"}
    whole = answered(lines, **flags)
    verified = verify_job("out.jsonl", ["batch.jsonl"])
    assert (verified["exit_code"], verified["problems"]) == (0, [])
    assert verified["rows"] == {"total": 40, "scored": 39, "errors": 1}

    words = words_of(flags)
    hold = Hold("prefillcli.engines.torch:TorchEngine.answer", call=6)
    killed = Command("score", "batch.jsonl", "-o", "killed.jsonl", *words, hold=hold)
    killed.wait_until_held()
    killed.kill()
    resumed = score("batch.jsonl", "killed.jsonl", resume=True, **flags)
    assert resumed["exit_code"] == 0
    assert_same(read_output("killed.jsonl"), whole)

    for shard in ("1/2", "2/2"):
        assert score("batch.jsonl", "merged.jsonl", shard=shard, **flags)["exit_code"] == 0
    given = {"output": "merged.jsonl", "quiet": True, "max_error_rate": 0.5}
    assert merge_job(load_settings(MergeSettings, given, environment={}))["exit_code"] == 0
    assert_same(read_output("merged.jsonl"), answered(lines, overwrite=True, **flags))
    assert verify_job("merged.jsonl", ["batch.jsonl"])["problems"] == []


def test_without_the_format_labels_are_scored(model: Path, reference: Reference) -> None:
    prompts = texts(4)
    lines = [line(f"r{at}", COMPLETION, prompt=text, max_tokens=None) for at, text in enumerate(prompts)]
    path = write_jsonl("batch.jsonl", [*lines, line("long", COMPLETION, prompt="x", max_tokens=5)])
    assert score(path, "out.jsonl", model=model, served_model_name="fox,bear", max_error_rate=1)["exit_code"] == 0
    *rows, long = read_output("out.jsonl")
    assert [row["custom_id"] for row in rows] == ["r0", "r1", "r2", "r3"]
    assert [row["score"] for row in rows] == pytest.approx(
        [reference.answer(text).score for text in prompts], abs=TOLERANCE
    )
    assert long["error"] == "invalid_request"
    shown = {"inputs": [str(path)], "model": str(model), "served_model_name": "fox", "row": "2", "quiet": True}
    found = inspect_job(load_settings(InspectSettings, shown, environment={}))
    assert found["score"] == pytest.approx(reference.answer(prompts[2]).score, abs=TOLERANCE)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"id_column": "url"}, "ids are custom_id"),
        ({"output": "out.parquet"}, "ends in .jsonl"),
        ({"engine": "vllm"}, "the likeliest ones"),
        ({"draft": "self", "keep": 0.5}, "the likeliest token of a prompt is asked for"),
        ({"inputs": "rows.jsonl"}, "not a batch file"),
    ],
)
def test_what_cannot_go_with_the_format_is_refused(model: Path, flags: dict[str, Any], said: str) -> None:
    write_jsonl("batch.jsonl", [line("r0", COMPLETION, prompt="x")])
    write_jsonl("rows.jsonl", [{"prompt": "x"}])
    given = {"model": model, "format": "openai", "inputs": "batch.jsonl", "output": "out.jsonl"} | flags
    try:
        error = score(**given)["error"]
    except UsageError as raised:  # before a job begins
        error = str(raised)
    assert said in error


@pytest.mark.parametrize("on_long", ["truncate-left", "truncate-right"])
def test_of_a_chat_that_is_too_long_the_messages_are_cut(
    chat_model: Path, chat_reference: Reference, on_long: str
) -> None:
    said = " ".join(f"fox {number}" for number in range(40))
    chat = [{"role": "system", "content": "Be quick."}, {"role": "user", "content": [{"type": "text", "text": said}]}]
    lines = [line("long", CHAT, messages=chat, logprobs=True), line("short", CHAT, messages=HELLO, logprobs=True)]
    row, _ = answered(lines, chat_model, on_long=on_long, max_length=60)
    assert row["error"] is None
    body = row["response"]["body"]
    size = body["usage"]["prompt_tokens"]
    assert 55 <= size <= 60
    rests = [said[at:] if on_long == "truncate-left" else said[:at] for at in range(len(said))]
    ids = [chat_reference.ids(f"<s>[system] Be quick.\n[user] {each}\n[assistant]\n", special=False) for each in rests]
    found = [top_tokens(chat_reference, each, 1)[1][0] for each in ids if len(each) == size]
    logprob = body["choices"][0]["logprobs"]["content"][0]["logprob"]
    assert min(abs(logprob - each) for each in found) < TOLERANCE
