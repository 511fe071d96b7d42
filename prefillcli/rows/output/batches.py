"""The lines of an OpenAI batch output: made of finished rows, and read back."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from prefillcli.rows.output.decisions import first_probability, response_of
from prefillcli.rows.records import TokenText
from prefillcli.rows.values import encode_json

URL, BODY = "url", "body"  # the carried columns that lines are made of, beside the id
# The columns of rows that are bodies themselves.
BARE = ("model", "input", "state", "questions", "images", "files", "assets")
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
SCORE, RERANK = "/score", "/rerank"  # the ends of their paths
# The names of the two texts, or lists of texts, in a body for the scores of pairs.
PAIR_NAMES = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))
# The likeliest tokens after a prompt; for the first one, also what it writes and whether it ends an answer.
LIKELIEST = pa.struct(
    [
        ("written", pa.string()),
        ("ends", pa.bool_()),
        ("tokens", pa.list_(pa.string())),
        ("logprobs", pa.list_(pa.float64())),
    ]
)
LINE = pa.schema([(name, pa.string()) for name in ("id", "custom_id", "response", "error")])
JSON_COLUMNS = ("custom_id", "response", "error")


@dataclass(frozen=True, slots=True)
class Responses:
    """How the answers to requests are written: as lines with responses, or as columns beside the requests."""

    lines: bool = True
    model: str = ""  # named in the response to a request that names none
    text_of: Callable[[int], TokenText] | None = None  # of a token among the likeliest ones; None where none are asked


def top_asked(url: str, body: Mapping[str, Any]) -> int | None:
    """Return how many of the likeliest tokens a valid body asks for; None: it asks for no log-probabilities."""
    given = body.get("logprobs")
    if url == COMPLETION:
        return given
    return (body.get("top_logprobs") or 0) if given else None


def lines_of(rows: pa.Table, row: str, id_name: str, model: str = "") -> pa.Table:
    """Return the lines for rows of parts, as `LINE`. `row` and `id_name` are the columns with row numbers and ids.
    `model` is named in the response to a body that names none."""
    created = int(time.time())
    answered = next(name for name in _MAKES if name in rows.column_names)
    columns = [row, answered, "prompt_tokens", "shared_tokens", "error", "error_detail"]
    ids = rows[id_name].cast(pa.string()).to_pylist()
    names = [name for name in (URL, BODY, *BARE) if name in rows.column_names]
    asked = rows.select(names).to_pylist()
    made = []
    for own, texts, number, answer, tokens, shared, code, detail in zip(
        ids, asked, *(rows[name].to_pylist() for name in columns), strict=True
    ):
        response, error = None, None
        if code is not None:
            error = encode_json({"code": code, "message": detail})
        else:
            told = {name: json.loads(text) for name, text in texts.items() if text is not None}
            url, body = told.get(URL, ""), told.get(BODY, told)
            body = body if body.get("model") is not None else body | {"model": model}
            done = _MAKES[answered](number, created, url, body, answer, tokens, shared)
            response = encode_json({"status_code": 200, "request_id": f"req_{number}", "body": done})
        made.append((f"batch_req_{number}", own, response, error))
    return pa.Table.from_arrays(
        [pa.array(each, pa.string()) for each in zip(*made, strict=True)] if made else [[]] * len(LINE), schema=LINE
    )


def _completion(
    number: int,
    created: int,
    url: str,
    body: dict[str, Any],
    likeliest: dict[str, Any],
    prompt_tokens: int,
    shared_tokens: int,
) -> dict[str, Any]:
    # The object with the answer to a body.
    text, ends = likeliest["written"], likeliest["ends"]
    stops = body.get("stop") or ()
    found = [text.find(each) for each in ([stops] if isinstance(stops, str) else stops) if each in text]
    if found:
        text, ends = text[: min(found)], True
    asked, chat = top_asked(url, body), url == CHAT
    pairs = list(zip(likeliest["tokens"], likeliest["logprobs"], strict=True))
    choice: dict[str, Any] = {"index": 0, "finish_reason": "stop" if ends else "length", "logprobs": None}
    if chat:
        choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        if asked is not None:
            top = [_chat_logprob(*pair) for pair in pairs[:asked]]
            choice["logprobs"] = {"content": [_chat_logprob(*pairs[0]) | {"top_logprobs": top}], "refusal": None}
    else:
        choice["text"] = text
        if asked is not None:
            # Tokens with the same text have one entry: that of the likeliest.
            top_logprobs = dict(reversed(pairs[: max(asked, 1)]))
            choice["logprobs"] = {
                "text_offset": [0],
                "token_logprobs": [pairs[0][1]],
                "tokens": [pairs[0][0]],
                "top_logprobs": [dict(sorted(top_logprobs.items(), key=lambda pair: -pair[1]))],
            }
    return {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{number}",
        "object": "chat.completion" if chat else "text_completion",
        "created": created,
        "model": body["model"],
        "choices": [choice],
        "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": 1, "total_tokens": prompt_tokens + 1},
    }


def as_list(value: Any) -> list[Any]:
    """Return a list, or what stands for a list of one."""
    return value if isinstance(value, list) else [value]


def _pairs(
    number: int,
    created: int,
    url: str,
    body: dict[str, Any],
    scores: list[float],
    prompt_tokens: int,
    shared_tokens: int,
) -> dict[str, Any]:
    # The object with the scores of a body's pairs, as vLLM's server makes it.
    made = {"id": f"score-{number}", "model": body["model"]}
    usage = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens}
    if url.endswith(SCORE):
        data = [{"index": at, "object": "score", "score": score} for at, score in enumerate(scores)]
        return made | {"object": "list", "created": created, "data": data, "usage": usage}
    results: list[dict[str, Any]] = [
        {"index": at, "document": {"text": text, "multi_modal": None}, "relevance_score": score}
        for at, (text, score) in enumerate(zip(as_list(body["documents"]), scores, strict=True))
    ]
    results.sort(key=lambda each: each["relevance_score"], reverse=True)
    return made | {"usage": usage, "results": results[: body.get("top_n") or None]}


def _decisions(
    number: int,
    created: int,
    url: str,
    body: dict[str, Any],
    probabilities: list[list[float]],
    prompt_tokens: int,
    shared_tokens: int,
) -> dict[str, Any]:
    # The answers to a body's typed questions, which have no number and no date.
    return response_of(
        body, probabilities, model=body["model"], input_tokens=prompt_tokens, cached_tokens=shared_tokens
    )


# What makes the object with the answer, by the column that has it.
_MAKES: Mapping[str, Callable[..., dict[str, Any]]] = {
    "pair_scores": _pairs,
    "decisions": _decisions,
    "likeliest": _completion,
}


def _chat_logprob(token: str, logprob: float) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": list(token.encode())}


def rows_of(lines: Iterable[dict[str, Any]], names: Sequence[str], id_name: str) -> pa.Table:
    """Return these columns of lines that were written: the id as JSON text, `score`, `error` and `error_detail`.

    A line without log-probabilities does not show its score, which is 1 here. Of several pairs or questions the first
    one counts.
    """
    values = [_values(line, id_name) for line in lines]
    kinds = {"score": pa.float64()}
    return pa.table({name: pa.array([each[name] for each in values], kinds.get(name, pa.string())) for name in names})


def _values(line: dict[str, Any], id_name: str) -> dict[str, Any]:
    response, error = line["response"], line["error"] or {}
    own = line["custom_id"]
    score = None
    if response is not None:
        body = response["body"]
        if "answers" in body:
            score = first_probability(body)
        elif "choices" not in body:
            first, *_ = body.get("data") or body["results"]
            score = first.get("score", first.get("relevance_score"))
        elif (told := body["choices"][0]["logprobs"]) is None:
            score = 1.0
        else:
            score = math.exp(told["content"][0]["logprob"] if "content" in told else told["token_logprobs"][0])
    return {
        id_name: None if own is None else encode_json(own),
        "score": score,
        "error": error.get("code"),
        "error_detail": error.get("message"),
    }
