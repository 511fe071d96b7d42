"""Requests with typed questions as rows. The oracles are transformers' eager forward, and the packages `openai`,
`typesafe-sdk` and `jevcompat`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from jevcompat.client import Response, parse_json
from jevcompat.validate import choice_confidence, score_confidence, validate_success
from openai.types import Decision
from typesafe_sdk import SystemOneResponse

from prefillcli.asking.forms import QUESTION_END, orders_of, text_of, with_answers
from prefillcli.asking.requests import request_of
from prefillcli.errors import UsageError
from prefillcli.options.commands import BenchSettings, MergeSettings, ProfileSettings
from prefillcli.options.load import load_settings
from prefillcli.tools.bench.bench_job import bench_job
from prefillcli.tools.merge import merge_job
from prefillcli.tools.profile.profile_job import profile_job
from prefillcli.tools.verify import verify_job
from tests.jobs.compression import ByHand, compressed
from tests.jobs.jobs import TOLERANCE, Reference, read_output, read_report, score, write_jsonl, write_parquet
from tests.jobs.models import save_model
from tests.jobs.processes import Command, Hold, cut_small_windows, words_of
from tests.jobs.test_inspected import inspected
from tests.jobs.test_likelihood import encoded_pair, likelihood
from tests.jobs.test_questions import unique_tokens
from tests.unit.asking.decision_bodies import Body, openai_bodies, systemone_bodies

LATE = {"type": "predicate", "name": "late", "instructions": "Is it late?"}
KIND = {"type": "choice", "name": "kind", "instructions": "Which?", "choices": [{"value": each} for each in "abc"]}
TONE = {"type": "score", "name": "tone", "instructions": "How?", "levels": [{"label": "low"}, {"label": "high"}]}
BOTH = {"type": "choice", "instructions": "What?", "choices": [{"value": True}, {"value": "true", "description": "x"}]}
STATE = {
    "q": {"type": "noul", "criteria": {"true": "It is late."}},
    "kind": {"type": "choice", "instructions": "Which?", "criteria": {"Billing": None, "Other": {"a": 1}}},
    "tone": {"type": "score", "instructions": ["How"], "criteria": ["low", "mid", "high"]},
}


def openai(*questions: Body, subject: Any = "The fox is late.", **others: Any) -> Body:
    return {"model": "judge", "input": subject, "questions": list(questions)} | others


def systemone(questions: Body = STATE, state: Any = "The fox is late.", **others: Any) -> Body:
    return {"model": "judge", "state": state, "questions": questions} | others


def line(custom_id: str, body: Any, url: str | None = None) -> Body:
    usual = "/v1/systemone" if isinstance(body, dict) and "state" in body else "/v1/decisions"
    return {"custom_id": custom_id, "method": "POST", "url": url or usual, "body": body}


def answered(rows: list[Any], model: Path, **flags: Any) -> list[Body]:
    """The lines that a job writes for requests."""
    flags = {"model": model, "served_model_name": "judge", "max_error_rate": 1, "overwrite": True} | flags
    assert score(write_jsonl("in.jsonl", rows), "out.jsonl", **flags)["exit_code"] == 0
    return read_output("out.jsonl")


def body_of(row: Body) -> Body:
    """The response that a line has."""
    assert row["error"] is None, row["error"]
    assert row["response"]["status_code"] == 200
    found: Body = row["response"]["body"]
    return found


def shares_of(response: Body) -> list[list[float]]:
    """The probabilities of the options of each question; for yes or no, that of yes and of no."""
    given = response["answers"]
    found = []
    for each in given if isinstance(given, list) else given.values():
        if "probabilities" in each:
            own = each["probabilities"]
            found.append([one["probability"] for one in own] if isinstance(own, list) else list(own.values()))
        else:
            yes = each["probability"] if "probability" in each else each["noul"]
            found.append([yes, 1 - yes])
    return found


def require_form(body: Body, response: Body) -> None:
    """The packages of the APIs read a response, and find no fault with it."""
    raw = json.dumps(response).encode()
    if "state" in body:
        data, error, infinite = parse_json(raw)
        found = Response(200, {"content-type": "application/json"}, raw, 0, data, error, infinite)
        assert [str(each) for each in validate_success(body, found)] == []
        assert list(SystemOneResponse.model_validate_json(raw).answers) == list(body["questions"])
    else:
        read = Decision.model_validate_json(raw, strict=True)
        asked = [(each["type"], each.get("name")) for each in body["questions"]]
        assert [(each.type, each.name) for each in read.answers] == asked
        assert read.usage.total_tokens == read.usage.input_tokens >= read.usage.input_tokens_details.cached_tokens
    told = response["answers"]
    for own, answer in zip(shares_of(response), told if isinstance(told, list) else told.values(), strict=True):
        assert sum(own) == pytest.approx(1, abs=1e-12)
        if "confidence" in answer:
            formula = choice_confidence if answer["type"] == "choice" else score_confidence
            assert answer["confidence"] == pytest.approx(formula(own), abs=1e-12)


def drawn_bodies(count: int) -> list[Body]:
    """Random bodies of both APIs, the same ones every time."""
    found: list[Body] = []

    @settings(
        max_examples=count,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(openai_bodies(st.integers(1, 3)) | systemone_bodies(st.integers(1, 3)))
    def draw(body: Body) -> None:
        found.append(body)

    draw()
    return found


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of `model`, for longer prompts."""
    folder = save_model(tmp_path_factory.mktemp("models") / "long")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 65_536}))
    return folder


def test_random_requests_have_responses_of_their_api(long_model: Path) -> None:
    bodies = drawn_bodies(110)
    lines = answered([line(f"r{at}", body) for at, body in enumerate(bodies)], long_model)
    assert len(lines) == len(bodies) >= 100
    assert {"input" in body for body in bodies} == {True, False}
    for at, (body, row) in enumerate(zip(bodies, lines, strict=True)):
        assert row["custom_id"] == f"r{at}"
        response = body_of(row)
        assert response["model"] == "judge"
        require_form(body, response)
        sizes = [len(each.options) for each in request_of(body).questions]
        assert [len(each) for each in shares_of(response)] == sizes


def wanted_shares(
    reference: Reference, body: Body, orders: int = 1, chat: str = "{}" + QUESTION_END
) -> list[list[float]]:
    """The probabilities of each question by transformers' eager forward: the means over the orders of its options."""
    request = request_of(body)
    found = []
    for question in request.questions:
        every = []
        for order in orders_of(question, orders):
            prompt = chat.format(request.document + text_of(question, order))
            labels = with_answers(question, order).answers
            space = "" if prompt[-1].isspace() else " "
            texts = [space + (each.said or each.name) for each in labels]
            logprobs = [sum(likelihood(reference, *encoded_pair(reference, prompt, each))[0]) for each in texts]
            weights = np.exp(np.array(logprobs) - max(logprobs))
            every.append(weights / weights.sum())
        found.append(np.mean(every, axis=0).tolist())
    return found


HANDFUL = [openai(LATE, KIND, TONE, BOTH), systemone(), openai(KIND, subject=[{"role": "user", "content": "Late?"}])]


def assert_near(found: list[list[float]], wanted: list[list[float]]) -> None:
    for own, other in zip(found, wanted, strict=True):
        assert own == pytest.approx(other, abs=TOLERANCE)


@pytest.mark.parametrize("flags", [{}, {"engine": "hf"}, {"pack_tokens": 64}, {"orders": 2}])
def test_probabilities_are_those_of_the_eager_forward(
    model: Path, reference: Reference, flags: dict[str, Any]
) -> None:
    form = {"format": "openai"} if "orders" in flags else {}
    for row, body in zip(answered(HANDFUL, model, **form, **flags), HANDFUL, strict=True):
        require_form(body, body_of(row))
        assert_near(shares_of(body_of(row)), wanted_shares(reference, body, flags.get("orders", 1)))


SENTENCES = ["None: everything is as it was.", "Some: a real difference that is worth a second look."]
SIZE = {"type": "score", "name": "size", "instructions": "How?", "levels": [{"label": each} for each in SENTENCES]}


@pytest.mark.parametrize("flags", [{}, {"orders": 2}, {"workers": 2}])
def test_answers_about_texts_without_content_are_divided_out(
    model: Path, reference: Reference, flags: dict[str, Any]
) -> None:
    bodies, texts = [*HANDFUL, openai(SIZE, LATE)], ["N/A", "[MASK]"]
    flags = {"format": "openai", "calibrate_with": texts} | flags
    orders = flags.get("orders", 1)
    for row, body in zip(answered(bodies, model, **flags), bodies, strict=True):
        require_form(body, body_of(row))
        empty = [
            wanted_shares(reference, {**body, "state" if "state" in body else "input": text}, orders) for text in texts
        ]
        wanted = []
        for own, *others in zip(wanted_shares(reference, body, orders), *empty, strict=True):
            left = np.array(own) / np.mean(others, axis=0)
            wanted.append((left / left.sum()).tolist())
        assert_near(shares_of(body_of(row)), wanted)


def test_a_document_is_computed_once(model: Path, reference: Reference) -> None:
    body = openai(LATE, KIND, TONE, subject="The quick brown fox saw a dog. " * 20)
    (row,) = answered([body], model)
    texts = [request_of(body).document + text_of(each) + QUESTION_END for each in request_of(body).questions]
    ids = [reference.ids(text) for text in texts]
    tokens, usage = read_report()["tokens"], body_of(row)["usage"]
    assert tokens["computed"] <= 1.02 * unique_tokens(ids)
    assert usage["input_tokens"] == sum(map(len, ids))
    assert usage["input_tokens_details"]["cached_tokens"] >= 1.9 * len(reference.ids(body["input"]))


def test_names_and_neighbours_change_no_bit(model: Path) -> None:
    others = [LATE, TONE | {"instructions": "How late?"}, BOTH, *({**LATE, "name": f"n{at}"} for at in range(5))]
    lists = [
        [KIND],
        [KIND | {"name": "another"}, *others],
        [*others[::-1], KIND | {"name": None}],
        [*others[:3], {key: KIND[key] for key in KIND if key != "name"}, *others[3:]],
    ]
    rows = answered([openai(*each) for each in lists], model, deterministic=True)
    found = []
    for each, row in zip(lists, rows, strict=True):
        own = zip(each, shares_of(body_of(row)), strict=True)
        found += [shares for asked, shares in own if asked["instructions"] == "Which?"]
    assert len(found) == 4
    assert found[1:] == found[:1] * 3
    criteria = {"a": None, "b": None, "c": None}
    many = {f"q{at}": STATE["q"] for at in range(4)} | {"z": {"type": "choice", "instructions": "Which?"}}
    state = many | {"z": {"type": "choice", "instructions": "Which?", "criteria": criteria}}
    (other,) = answered([systemone(state)], model, deterministic=True)
    assert shares_of(body_of(other))[-1] == found[0], "the same question of the other API"


def test_many_questions_and_many_options(long_model: Path, reference: Reference) -> None:
    options = [{"value": f"o{at}"} for at in range(255)]
    most = {"type": "choice", "instructions": "Which?", "choices": options}
    many = openai(*({**LATE, "name": f"q{at}", "instructions": f"Is it {at}?"} for at in range(40)))
    rows = answered([openai(most), many], long_model)
    for row, body in zip(rows, [openai(most), many], strict=True):
        require_form(body, body_of(row))
    assert len(shares_of(body_of(rows[0]))[0]) == 255
    picked = {**many, "questions": many["questions"][7:9]}
    assert_near(shares_of(body_of(rows[1]))[7:9], wanted_shares(reference, picked))


WRONG: dict[str, tuple[Any, str, str]] = {
    "image": (
        openai(LATE, subject=[{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]),
        "invalid_request",
        "input[0].content[0]: an image, and only text and JSON are read",
    ),
    "no questions": (openai(), "invalid_request", "questions: 0 questions"),
    "model": (openai(LATE, model="bear"), "invalid_request", 'model "bear" is not the one of this job, judge'),
    "long": (openai(LATE, KIND, subject="fox " * 300), "prompt_too_long", "question late: "),
    "empty": (systemone(state=" "), "invalid_request", "state: is empty"),
    "number": (5, "invalid_request", "body is not an object"),
}


def test_a_wrong_request_is_an_error_of_its_line(model: Path) -> None:
    lines = [line(name, body) for name, (body, _, _) in WRONG.items()]
    chat = line("chat", {"model": "judge", "messages": []}, "/v1/chat/completions")
    get = line("get", openai(LATE)) | {"method": "GET"}
    odd = line("odd", openai(LATE)) | {"url": [1]}
    right = line("right", openai(LATE))
    rows = answered([right, *lines, chat, odd, get, right, b"{", line("other", systemone())], model, max_length=200)
    first, *wrong, chatted, urls, got, again, unread, other = rows
    assert "late" in json.dumps(body_of(first))
    for row, (name, (_, code, said)) in zip(wrong, WRONG.items(), strict=True):
        assert (row["custom_id"], row["response"], row["error"]["code"]) == (name, None, code)
        assert row["error"]["message"].startswith(said)
    assert "only /v1/decisions and /v1/systemone are answered" in chatted["error"]["message"]
    assert urls["error"]["message"].startswith("url [1]: ")
    assert got["error"]["message"] == 'method is "GET", not POST'
    assert [each["error"]["code"] for each in (again, unread)] == ["duplicate_id", "invalid_json"]
    require_form(systemone(), body_of(other))
    chats = {"max_tokens": 1, "prompt": "x", "model": "judge"}
    asked = [line("text", chats, "/v1/completions"), line("typed", openai(LATE))]
    typed = answered(asked, model, format="openai")[1]
    assert "typed questions are answered where the first line of a file asks some" in typed["error"]["message"]


NUMBERS = {
    "NaN": "",
    "-Infinity": "",
    "1e999": "",
    '{"a": {"b": [1, NaN]}}': ".a.b[1]",
    '{"the sum": -1e400}': '["the sum"]',
    "9" * 400 + ".0": "",
}


@pytest.mark.parametrize("name", ["input", "state"])
@pytest.mark.parametrize("in_lines", [False, True])
def test_a_number_that_is_not_finite_makes_an_invalid_request_that_names_its_place(
    model: Path, name: str, in_lines: bool
) -> None:
    good = json.dumps(openai(LATE, subject="x" * 9) if name == "input" else systemone(state="x" * 9))
    good = json.dumps(line("a", json.loads(good))) if in_lines else good
    bodies = [good, *(good.replace(json.dumps("x" * 9), number) for number in NUMBERS)]
    bodies.append(good.replace('"Is it late?"', "NaN").replace('"It is late."', '{"a": 1e999}'))
    Path("in.jsonl").write_text("\n".join(bodies))
    score("in.jsonl", "out.jsonl", model=model, served_model_name="judge", max_error_rate=1)
    first, *others = read_output("out.jsonl")
    assert first["error"] is None
    asked = "questions[0].instructions" if name == "input" else "questions.q.criteria.true.a"
    wanted = [*(name + place for place in NUMBERS.values()), asked]
    for row, place in zip(others, wanted, strict=True):
        assert row["error"]["code"] == "invalid_request"
        assert row["error"]["message"].startswith(f"{'body.' * in_lines}{place}: its number is not finite"), row


def test_control_tokens_of_the_data_are_text(chat_model: Path, chat_reference: Reference) -> None:
    asked = KIND | {"instructions": "</s> Which?", "choices": [{"value": "</s>"}, {"value": "<s> b"}]}
    odd = openai(asked, LATE, subject="<s>The fox</s> [assistant]")
    (row,) = answered([odd], chat_model)
    require_form(odd, body_of(row))
    end = chat_reference.tokenizer.eos_token_id
    prompt = f"{odd['input']}{text_of(request_of(odd).questions[0])}"
    meant = len(chat_reference.ids(prompt, special=False))
    assert end in chat_reference.ids(prompt), "the tokenizer takes it for the end"
    assert body_of(row)["usage"]["input_tokens"] > 2 * meant
    plain = openai(KIND, LATE)
    (row,) = answered([plain], chat_model)
    chat = "[user] {}\n[assistant]\n"
    assert_near(shares_of(body_of(row)), wanted_shares(chat_reference, plain, chat=chat))


def test_of_a_long_document_the_end_is_cut_and_the_question_stays(model: Path, reference: Reference) -> None:
    body = openai(LATE, subject=" ".join(f"fox {at}" for at in range(100)))
    (row,) = answered([body], model, on_long="truncate-right", max_length=60)
    cuts = [openai(LATE, subject=body["input"][:at]) for at in range(1, 200)]
    size = body_of(row)["usage"]["input_tokens"]
    assert 55 <= size <= 60
    texts = [
        cut["input"] + text_of(request_of(cut).questions[0]) + QUESTION_END for cut in cuts if cut["input"].strip()
    ]
    same = [cut for cut, text in zip(cuts, texts, strict=True) if len(reference.ids(text)) == size]
    (yes, _), *_ = shares_of(body_of(row))
    assert min(abs(wanted_shares(reference, cut)[0][0] - yes) for cut in same) < TOLERANCE


def test_of_a_compressed_document_each_question_chooses_its_tokens(
    model: Path, draft: Path, reference: Reference
) -> None:
    other = LATE | {"name": "other", "instructions": "Who saw it?"}
    body = openai(LATE, other, subject="The quick brown fox saw a dog, and no dog saw it. " * 5)
    flags = {"model": model, "draft": draft, "compress_per_row": True, "served_model_name": "judge"}
    assert compressed(write_jsonl("in.jsonl", [body]), output="out.jsonl", **flags)["exit_code"] == 0
    by_hand = ByHand(reference, model, draft)
    asked = [reference.ids(body["input"] + text_of(each) + QUESTION_END) for each in request_of(body).questions]
    kept = [by_hand.kept(ids) for ids in asked]
    assert all(len(own) < len(ids) for own, ids in zip(kept, asked, strict=True))
    wanted = [by_hand.score(ids, own) for ids, own in zip(asked, kept, strict=True)]
    (row,) = read_output("out.jsonl")
    assert [yes for yes, _ in shares_of(body_of(row))] == pytest.approx(wanted, abs=TOLERANCE)


def shown(rows: list[Body]) -> list[Any]:
    """What the same job writes again, but for rounding and what was shared: ids, errors and probabilities."""
    every = [[] if row["error"] else shares_of(body_of(row)) for row in rows]
    near = [[round(each, 5) for own in found for each in own] for found in every]
    return [(row["id"], row["custom_id"], row["error"], own) for row, own in zip(rows, near, strict=True)]


def test_killed_resumed_sharded_and_merged_the_lines_are_the_same(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_small_windows(monkeypatch)
    rows: list[Body] = [openai(LATE, KIND, subject=f"The fox {at} is late.") for at in range(12)]
    rows += [systemone(state={"fox": at}) for at in range(12)]
    rows[7]["questions"] = []
    flags = {"model": model, "served_model_name": "judge", "max_error_rate": 0.5, "deterministic": True}
    flags |= {"pack_tokens": 128, "memory": "64MiB"}
    whole = answered(rows, **flags)
    assert [row["custom_id"] for row in whole] == list(range(24)), "without ids they are the row numbers"
    verified = verify_job("out.jsonl", ["in.jsonl"])
    assert (verified["exit_code"], verified["problems"]) == (0, [])
    assert verified["rows"] == {"total": 24, "scored": 23, "errors": 1}

    hold = Hold("prefillcli.engines.torch:TorchEngine.answer", call=6)
    killed = Command("score", "in.jsonl", "-o", "killed.jsonl", *words_of(flags), hold=hold)
    killed.wait_until_held()
    killed.kill()
    assert score("in.jsonl", "killed.jsonl", resume=True, **flags)["exit_code"] == 0
    assert Path("killed.jsonl").read_bytes() == Path("out.jsonl").read_bytes()

    for shard in ("1/2", "2/2"):
        assert score("in.jsonl", "merged.jsonl", shard=shard, **flags)["exit_code"] == 0
    given = {"output": "merged.jsonl", "quiet": True, "max_error_rate": 0.5}
    assert merge_job(load_settings(MergeSettings, given, environment={}))["exit_code"] == 0
    assert shown(read_output("merged.jsonl")) == shown(whole)
    assert verify_job("merged.jsonl", ["in.jsonl"])["problems"] == []


def test_bare_rows_keep_their_ids_and_need_no_model(model: Path) -> None:
    rows = [{"id": f"t{at}", "input": "Late.", "questions": [LATE], "more": at} for at in range(2)]
    found = answered(rows, model, served_model_name=())
    assert [row["custom_id"] for row in found] == ["t0", "t1"]
    assert body_of(found[0])["model"] == model.name


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"output": "out.parquet"}, "give --output a path that ends in .jsonl"),
        ({"format": "systemone"}, "the first request has another form\ngive --format openai"),
        ({"format": "openai", "inputs": "state.jsonl"}, "give --format systemone"),
        ({"format": "openai", "inputs": "rows.jsonl"}, "not a batch file"),
        ({"labels": "A,B"}, "--format cannot be combined with --labels"),
        ({"truth": "id"}, "--format cannot be combined with --truth"),
        ({"exit": True}, "--format cannot be combined with --exit"),
        ({"format": "openai", "rationale": 5}, "--format cannot be combined with --rationale"),
        ({"evidence": True}, "--format cannot be combined with --evidence"),
        ({"draft": "self", "keep": 0.5, "audit": 5}, "--format cannot be combined with --audit"),
        ({"format": "openai", "calibrate_with": " "}, "--calibrate-with ' ': requests ask about a text"),
        (
            {"format": "openai", "calibrate_with": "x", "calibrate_columns": "y"},
            "prompts of requests are made of no columns",
        ),
        ({"calibrate_with": "N/A"}, "needs a --template or --questions, whose columns it replaces, or --format"),
        ({"orders": 2}, "needs --questions or --format"),
        ({"inputs": "in.parquet"}, "are read from JSON Lines"),
    ],
)
def test_what_cannot_go_with_requests_is_refused(model: Path, flags: dict[str, Any], said: str) -> None:
    write_jsonl("in.jsonl", [openai(LATE)])
    write_jsonl("state.jsonl", [line("r", systemone())])
    write_jsonl("rows.jsonl", [{"prompt": "x"}])
    write_parquet("in.parquet", input=["x"], questions=["[]"])
    given = {"model": model, "inputs": "in.jsonl", "output": "out.jsonl"} | flags
    try:
        error = score(**given)["error"]
    except UsageError as raised:  # before a job begins
        error = str(raised)
    assert said in error


@pytest.mark.parametrize(("kind", "job"), [(ProfileSettings, profile_job), (BenchSettings, bench_job)])
def test_other_commands_say_who_answers(model: Path, kind: Any, job: Any) -> None:
    write_jsonl("in.jsonl", [line("r", openai(LATE))])
    error = job(load_settings(kind, {"inputs": ["in.jsonl"], "model": str(model)}, environment={}))["error"]
    assert "which prefill score answers and prefill inspect shows" in error


@pytest.mark.parametrize("in_lines", [False, True])
@pytest.mark.parametrize("question", [None, "kind", "tone"])
def test_a_request_is_shown_with_its_answers(
    model: Path, reference: Reference, question: str | None, in_lines: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies = [openai(LATE), openai(LATE, KIND, TONE), systemone()]
    write_jsonl("in.jsonl", [line(f"r{at}", body) for at, body in enumerate(bodies)] if in_lines else bodies)
    asked = {} if question is None else {"question": question}
    given = {"inputs": ["in.jsonl"], "model": str(model), "served_model_name": "judge", "orders": 2}
    given |= {"format": "openai", **asked}
    for row in ("1", "r1") if in_lines else ("1",):
        line_, (shown,) = inspected(monkeypatch, **given, row=row)
        assert (line_["exit_code"], line_["row"]) == (0, 1)
        names, (late, kind, tone) = ["late", "kind", "tone"], wanted_shares(reference, bodies[1], orders=2)
        alone = dict(zip(names, wanted_shares(reference, bodies[1]), strict=True))[question or "late"]
        assert shown.full is not None
        assert shown.full.score == pytest.approx(alone[0], abs=TOLERANCE)
        assert (
            shown.labels
            == {"late": ["Yes", "No"], "kind": ["a", "b", "c"], "tone": ["low", "high"]}[question or "late"]
        )
        (table,) = [each.parts[0].table for each in shown.further if each.title == "All questions"]
        assert table is not None
        for (name, said, share), own, labels in zip(
            table[1:], (late, kind, tone), (["Yes", "No"], ["a", "b", "c"], ["low", "high"]), strict=True
        ):
            assert (name, said) == (names.pop(0), labels[own.index(max(own))])
            assert float(str(share)) == pytest.approx(max(own), abs=1e-3)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"question": "kinf"}, "no question 'kinf'; did you mean 'kind'?\nthere are late, kind"),
        ({"labels": "A,B"}, "--format cannot be combined with --labels"),
        ({"evidence": True}, "--format cannot be combined with --evidence"),
        ({"inputs": ["rows.jsonl"], "question": "late"}, "--question: the rows ask one question, which has no name"),
        ({"inputs": ["chat.jsonl"], "format": "openai"}, "--format: the rows are no requests with typed questions"),
        ({"row": "r7"}, "--row r7: a row's number counts from 0"),
    ],
)
def test_what_cannot_be_shown_of_requests_is_refused(
    model: Path, flags: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_jsonl("in.jsonl", [openai(LATE, KIND, model=None)])
    write_jsonl("rows.jsonl", [{"prompt": "x"}])
    write_jsonl("chat.jsonl", [line("r", {"prompt": "x", "max_tokens": 1}, "/v1/completions")])
    shown, _ = inspected(monkeypatch, **{"inputs": ["in.jsonl"], "model": str(model)} | flags)
    assert shown["exit_code"] == 2
    assert said in shown["error"]


@pytest.mark.parametrize("flags", [{"exit": True}, {"first": "words"}, {"compute": "int8"}], ids=str)
def test_requests_are_read_in_full(model: Path, flags: dict[str, Any]) -> None:
    write_jsonl("in.jsonl", [openai(LATE, KIND)])
    done = score("in.jsonl", "out.jsonl", model=model, **flags)
    assert done["exit_code"] == 2
    assert f"--format cannot be combined with --{next(iter(flags))}: the requests of the input" in done["error"]


def test_workers_write_the_same_bytes_and_another_engine_the_same_answers(model: Path, draft: Path) -> None:
    rows = [openai(LATE, KIND, subject=f"The fox {at} is late.") for at in range(12)]
    rows += [systemone(state={"fox": at}) for at in range(12)]
    whole = answered(rows, model)
    once = Path("out.jsonl").read_bytes()
    answered(rows, model, workers=2)
    assert Path("out.jsonl").read_bytes() == once
    for one, other in zip(whole, answered(rows, model, engine="hf"), strict=True):
        require_form(rows[one["custom_id"]], body_of(other))
        assert_near(shares_of(body_of(other)), shares_of(body_of(one)))


def test_a_model_with_a_head_says_so(tmp_path: Path) -> None:
    classifier = save_model(tmp_path / "classifier", classifies=True, num_labels=2)
    error = score(write_jsonl("in.jsonl", [openai(LATE)]), "out.jsonl", model=classifier)["error"]
    assert "read the next token with --head vocabulary" in error
