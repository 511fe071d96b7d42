"""Requests for typed decisions. The oracles are the packages `openai`, `typesafe-sdk` and `jevcompat`."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jevcompat.mock import MockConfig, validate_request
from openai.types.decision_create_params import DecisionCreateParams
from pydantic import TypeAdapter
from typesafe_sdk._schemas.models import SystemOneRequest

from prefillcli.asking.requests import (
    BARE,
    DecisionRequest,
    RequestError,
    carried_request,
    is_request_file,
    request_of,
)
from prefillcli.options.commands import ScoreSettings
from prefillcli.prompts.questions import Choice, Option, Predicate, Score
from prefillcli.rows.input.source import Source
from tests.unit.asking.decision_bodies import Body, openai_bodies, options_of, systemone_bodies

FEW = st.integers(1, 3)
ODD = st.sampled_from(
    [[], {}, "", "x", "\ud800", 1, True, None, [[]], [{}], {"type": "choice"}, {"type": []}, {"\ud800": 1}]
)
OPENAI_TYPE = TypeAdapter(DecisionCreateParams)
ASKED = {"type": "predicate", "instructions": "Is it late?"}
CHOICE = {"type": "choice", "instructions": "Which?", "choices": [{"value": "a"}, {"value": "b"}]}
SCORE = {"type": "score", "instructions": "How late?", "levels": [{"label": "low"}, {"label": "high"}]}


def openai(*questions: Body, subject: Any = "My order is late.", **others: Any) -> Body:
    return {"model": "judge", "input": subject, "questions": list(questions or [ASKED])} | others


def systemone(question: Any, state: Any = "My order is late.", **others: Any) -> Body:
    return {"model": "judge", "state": state, "questions": {"q": question}} | others


def read_through(value: Any) -> None:
    """Look at everything in a value: pydantic checks what is in an iterable when it is looked at. An object with JSON
    can be an iterable of keys to it."""
    if isinstance(value, dict):
        for key, each in value.items():
            if key != "data":
                read_through(each)
    elif not isinstance(value, str) and hasattr(value, "__iter__"):
        for each in value:
            read_through(each)


def require_questions(request: DecisionRequest, body: Body) -> None:
    """The questions of a request are those of its body, each with a name of its own."""
    given = body["questions"]
    questions = given if isinstance(given, list) else list(given.values())
    assert [len(each.options) for each in request.questions] == [options_of(each) for each in questions]
    kinds = [{"noul": "predicate"}.get(each["type"], each["type"]) for each in questions]
    assert [each.type for each in request.questions] == kinds
    names = [each.name for each in request.questions]
    assert len(set(names)) == len(names)
    wanted = [each.get("name") for each in given] if isinstance(given, list) else list(given)
    assert all(name == own for name, own in zip(names, wanted, strict=True) if own is not None)
    for asked, read in zip(questions, request.questions, strict=True):
        instructions = asked.get("instructions", "")
        if isinstance(instructions, str):
            assert read.instructions == instructions
        elif isinstance(given, dict):
            assert json.loads(read.instructions) == instructions
        if isinstance(read, Choice):
            values = [each["value"] for each in asked["choices"]] if "choices" in asked else list(asked["criteria"])
            assert [(type(each.value), each.value) for each in read.options] == [(type(each), each) for each in values]


@settings(max_examples=100)
@given(openai_bodies())
def test_what_openai_takes_is_read(body: Body) -> None:
    read_through(OPENAI_TYPE.validate_python(body, strict=True))
    before = copy.deepcopy(body)
    request = request_of(body)
    assert request == request_of(json.loads(json.dumps(body)), "/v1/decisions")
    assert body == before
    assert request.kind == "openai"
    if isinstance(body["input"], str):
        assert request.document == body["input"]
    require_questions(request, body)


@settings(max_examples=100)
@given(systemone_bodies())
def test_what_system_one_takes_is_read(body: Body) -> None:
    SystemOneRequest.model_validate(body, strict=True)
    assert validate_request(body, MockConfig()) == []
    request = request_of(body)
    assert request == request_of(json.loads(json.dumps(body)), "/v1/systemone")
    assert request.kind == "systemone"
    state = body["state"]
    assert (request.document if isinstance(state, str) else json.loads(request.document)) == state
    require_questions(request, body)


PIXEL = "iVBORw0KGgo="
URL = f"data:image/png;base64,{PIXEL}"


def test_images_of_openais_requests_are_numbered_in_their_places() -> None:
    image = {"type": "input_image", "image_url": URL, "detail": "high"}
    other = {"type": "input_image", "image_url": "https://x.org/a.png"}
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Which?"}, image, other]},
        {"type": "function_call", "call_id": "x", "name": "find", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "x", "output": [image]},
    ]
    body = openai(subject=items)
    read_through(OPENAI_TYPE.validate_python(body, strict=True))
    request = request_of(body)
    assert request.images == (
        (URL, "input[0].content[1]"),
        ("https://x.org/a.png", "input[0].content[2]"),
        (URL, "input[2].output[0]"),
    )
    assert request.document == (
        "User:\nWhich?\n[Image 1]\n[Image 2]\n\nCall 1 of find:\n{}\n\nOutput of call 1 of find:\n[Image 3]"
    )


def test_assets_of_system_one_are_images_where_their_placeholders_stand() -> None:
    question = {"type": "noul", "instructions": "Is <b> as <a>?", "criteria": {"true": "as in <a>"}}
    assets = {"<a>": {"type": "image", "format": "png", "data_base64": PIXEL}, "<b>": {"data_base64": PIXEL}}
    body = systemone(question, state={"before": "<a>", "after": "this: <b>"}, assets=assets)
    SystemOneRequest.model_validate(body)
    request = request_of(body)
    url = f"data:image;base64,{PIXEL}"
    assert request.images == ((url, 'assets["<a>"]'), (url, 'assets["<b>"]'))
    assert json.loads(request.document) == {"before": "[Image 1]", "after": "this: [Image 2]"}
    (asked,) = request.questions
    assert isinstance(asked, Predicate)
    assert (asked.instructions, asked.true) == ("Is [Image 2] as [Image 1]?", "as in [Image 1]")
    assert body["state"]["before"] == "<a>"


def test_images_of_system_one_may_be_files_or_parts_of_messages() -> None:
    part = {"type": "image_url", "image_url": {"url": "https://x.org/a.png"}}
    state = [{"role": "user", "content": [{"type": "text", "text": "Look"}, part]}]
    body = systemone({"type": "noul", "instructions": "?"}, state=state, images=[URL], files=[{"file_data": URL}])
    request = request_of(body)
    last = "https://x.org/a.png", "state[0].content[1]"
    assert request.images == ((URL, "images[0]"), (URL, "files[0]"), last)
    shown = [{"type": "text", "text": "Look"}, {"type": "text", "text": "[Image 3]"}]
    assert json.loads(request.document) == [{"role": "user", "content": shown}]
    for wrong, message in [
        ({"images": URL}, "images: must be a list"),
        ({"images": [1]}, "images[0]: must be a URL, or an object with one"),
        ({"files": [{"name": "a"}]}, "files[0]: no url, image_url, image, file_data, data"),
        ({"assets": {"a": {"part": "x"}}}, 'assets["a"].part: not supported here'),
        ({"assets": {"a": {"type": "image"}}}, 'assets["a"]: data_base64 is missing'),
        ({"assets": {"a": {"type": "audio", "data_base64": "x"}}}, 'assets["a"].type: "audio" is not image'),
    ]:
        with pytest.raises(RequestError) as error:
            request_of(body | wrong)
        assert str(error.value) == message


def test_a_conversation_has_headings_and_outputs_name_their_calls() -> None:
    items = [
        {"role": "system", "content": "Be brief."},
        {"role": "developer", "content": [{"type": "input_text", "text": "Policy: refund."}], "type": "message"},
        {
            "role": "user",
            "content": [
                {"type": "input_text", "text": "Where is 7?", "prompt_cache_breakpoint": {"mode": "explicit"}},
                {"type": "input_json", "data": {"b": 1, "a": ["é", None]}},
                {"type": "input_json", "data": [{"x": 0.5}]},
            ],
        },
        {"type": "function_call", "call_id": "x", "name": "find", "arguments": '{"n": 7}', "namespace": "orders"},
        {"type": "custom_tool_call", "call_id": "y", "name": "shell", "input": "ls", "status": "completed"},
        {"type": "custom_tool_call_output", "call_id": "y", "output": [{"type": "input_text", "text": "none"}]},
        {"type": "function_call_output", "call_id": "x", "output": "late"},
        {
            "role": "assistant",
            "phase": "final_answer",
            "content": [{"type": "output_text", "text": "Late."}, {"type": "refusal", "refusal": "No refund."}],
        },
    ]
    assert (
        request_of(openai(subject=items)).document
        == """System:
Be brief.

Developer:
Policy: refund.

User:
Where is 7?
{"b":1,"a":["é",null]}
[{"x":0.5}]

Call 1 of orders.find:
{"n": 7}

Call 2 of shell:
ls

Output of call 2 of shell:
none

Output of call 1 of orders.find:
late

Assistant:
Late.
Refusal: No refund."""
    )


def test_questions_have_their_types_options_and_names() -> None:
    asked = [{"type": "input_text", "text": "Is it"}, {"type": "input_json", "data": {"b": 1}}]
    choices = [{"value": "true", "description": "a word"}, {"value": True}, {"value": False, "description": ""}]
    levels = [{"label": "low", "description": "fine"}, {"label": "high"}]
    request = request_of(
        openai(
            {"type": "predicate", "instructions": asked, "name": "questions[1]"},
            CHOICE | {"choices": choices, "name": None},
            SCORE | {"levels": levels, "name": "how"},
        )
    )
    assert request.questions == (
        Predicate('Is it\n{"b":1}', name="questions[1]"),
        Choice("Which?", (Option("true", "a word"), Option(True), Option(False)), name="questions[1]'"),
        Score("How late?", (Option("low", "fine"), Option("high")), name="how"),
    )


def test_criteria_of_system_one_become_options() -> None:
    body = {
        "state": {"b": None, "a": [1]},
        "questions": {
            "yes": {"type": "noul", "criteria": {"true": {"k": 1}, "false": None}},
            "환불": {"type": "choice", "criteria": {"a": None, "b": ["c", 1]}},
            "level": {"type": "score", "instructions": ["How", "late?"], "criteria": ["low", {"label": "high"}]},
        },
    }
    request = request_of(body)
    assert request.document == '{"b":null,"a":[1]}'
    assert request.questions == (
        Predicate("", name="yes", true='{"k":1}'),
        Choice("", (Option("a"), Option("b", '["c",1]')), name="환불"),
        Score('["How","late?"]', (Option("low"), Option('{"label":"high"}')), name="level"),
    )


def test_what_has_no_effect_changes_nothing() -> None:
    others = {"prompt_cache_key": "k", "prompt_cache_options": {"ttl": "30m"}, "safety_identifier": "me", "user": "me"}
    others |= {"metadata": {"a": 1}, "store": True, "service_tier": "flex", "seed": 7, "x_id": [1], "tools": None}
    assert request_of(openai(**others)) == request_of(openai())
    assert request_of(systemone(ASKED | {"type": "noul"}, **others, input=None)).kind == "systemone"


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def cyclic() -> Any:
    value: dict[str, Any] = {}
    value["self"] = value["again"] = value
    return value


def user(*parts: Any) -> list[Body]:
    return [{"role": "user", "content": list(parts)}]


CALL = {"type": "function_call", "call_id": "x", "name": "find", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "x", "output": "late"}
NOUL = ASKED | {"type": "noul"}
PICK = {"type": "choice", "criteria": {"a": None, "b": None}}
RATE = {"type": "score", "criteria": ["low", "high"]}


def wrong_bodies() -> Iterator[tuple[Any, str]]:
    yield [], "body is not an object"
    yield {"questions": [ASKED]}, "neither input and state: give one of them"
    yield openai(state="x"), "both input and state: give one of them"
    yield {"input": "x"}, "questions is missing"
    yield openai(temperature=0.5), "temperature: not supported here"
    yield openai(question=[]), "question: not supported here; did you mean 'questions'?"
    yield openai(**{"a b\ud800": 1}), r'["a b\ud800"]: not supported here'
    yield openai(model=5), "model: must be a text"

    yield openai(subject=" "), "input: is empty"
    yield openai(subject=[]), "input: must be a text, or a list of items"
    yield openai(subject={"a": 1}), "input: must be a text, or a list of items"
    yield openai(subject=["x"]), "input[0]: must be an object"
    yield (
        openai(subject=[{"role": "tool", "content": "x"}]),
        ('input[0].role: "tool" is not user or developer or system or assistant'),
    )
    yield openai(subject=[{"role": "user"}]), "input[0]: content is missing"
    yield openai(subject=[{"role": "user", "content": 1}]), "input[0].content: must be a text, or a list of parts"
    yield openai(subject=[{"role": "user", "content": "x", "name": "me"}]), "input[0].name: not supported here"
    yield (
        openai(subject=[{"type": "reasoning"}]),
        (
            'input[0].type: "reasoning" is not message or function_call or custom_tool_call or '
            "function_call_output or custom_tool_call_output"
        ),
    )
    yield openai(subject=user({"type": "input_audio"})), "input[0].content[0]: input_audio is not supported here"
    yield openai(subject=user({"type": "input_image"})), "input[0].content[0]: image_url is missing"
    yield (
        openai(subject=user({"type": "input_image", "file_id": "x", "image_url": "https://x"})),
        "input[0].content[0].file_id: not supported here",
    )
    assistant = [{"role": "assistant", "content": [{"type": "input_image", "image_url": "https://x"}]}]
    yield openai(subject=assistant), "input[0].content[0]: input_image is not supported here"
    yield (
        openai(subject=user({"type": "output_text", "text": "x"})),
        ("input[0].content[0].type: \"output_text\" is not input_text or input_json; did you mean 'input_text'?"),
    )
    yield openai(subject=user({"type": "input_text", "text": 1})), "input[0].content[0].text: must be a text"
    yield openai(subject=user("x")), "input[0].content[0]: must be an object"
    for data in ("x", ["x"]):
        yield (
            openai(subject=user({"type": "input_json", "data": data})),
            ("input[0].content[0].data: must be an object, or a list of objects"),
        )
    for data in ({"a": nested(100)}, cyclic()):
        yield (
            openai(subject=user({"type": "input_json", "data": data})),
            ("input[0].content[0].data: nested more than 100 levels deep"),
        )
    yield openai(subject=[OUTPUT]), 'input[0].call_id: "x" is the id of no function_call before it'
    yield (
        openai(subject=[CALL, OUTPUT | {"type": "custom_tool_call_output"}]),
        ('input[1].call_id: "x" is the id of no custom_tool_call before it'),
    )
    yield openai(subject=[CALL, CALL]), 'input[1].call_id: "x" is the id of an earlier call'
    yield openai(subject=[CALL | {"call_id": []}]), "input[0].call_id: must be a text"

    yield openai() | {"questions": {}}, "questions: must be a list"
    yield openai() | {"questions": []}, "questions: 0 questions, at least 1"
    yield openai(*[ASKED] * 401), "questions: 401 questions, at most 400"
    yield openai("Is it?"), "questions[0]: must be an object"
    yield openai(ASKED, {"instructions": "x"}), "questions[1]: has no type"
    yield openai(ASKED | {"type": "noul"}), 'questions[0].type: "noul" is not predicate or choice or score'
    yield openai(ASKED | {"type": ["choice"]}), 'questions[0].type: ["choice"] is not predicate or choice or score'
    yield openai({"type": "predicate"}), "questions[0]: instructions is missing"
    for empty in ("", " \n", [], [{"type": "input_text", "text": " "}]):
        yield openai(ASKED | {"instructions": empty}), "questions[0].instructions: is empty"
    yield openai(ASKED | {"instructions": {"a": 1}}), "questions[0].instructions: must be a text, or a list of parts"
    yield openai(ASKED | {"choices": []}), "questions[0].choices: not supported here"
    yield openai(ASKED | {"name": ""}), "questions[0].name: is empty"
    yield openai(ASKED | {"name": 1}), "questions[0].name: must be a text"
    yield openai(*[ASKED | {"name": name} for name in "aba"]), 'questions[2].name: "a" is the name of questions[0]'
    for count, s, limit in ((0, "s", "at least 2"), (1, "", "at least 2"), (256, "s", "at most 255")):
        choices = [{"value": str(each)} for each in range(count)]
        yield openai(ASKED, CHOICE | {"choices": choices}), f"questions[1].choices: {count} option{s}, {limit}"
        levels = [{"label": str(each)} for each in range(count)]
        yield openai(SCORE | {"levels": levels}), f"questions[0].levels: {count} level{s}, {limit}"
    yield openai(CHOICE | {"choices": "ab"}), "questions[0].choices: must be a list of objects"
    yield openai(CHOICE | {"choices": ["a", "b"]}), "questions[0].choices[0]: must be an object"
    yield openai(CHOICE | {"choices": [{"value": 1}]}), "questions[0].choices[0].value: must be a text, true or false"
    yield openai(CHOICE | {"choices": [{"label": "a"}]}), "questions[0].choices[0].label: not supported here"
    yield openai(CHOICE | {"choices": [{"value": True}] * 2}), "questions[0].choices: the option True is given twice"
    yield (
        openai(CHOICE | {"choices": [{"value": ""}, {"value": "a"}]}),
        ("questions[0].choices: option '': it has no text"),
    )
    yield openai(SCORE | {"levels": [{"label": "a"}] * 2}), "questions[0].levels: the level 'a' is given twice"
    yield openai(SCORE | {"levels": [{"description": "a"}]}), "questions[0].levels[0]: label is missing"
    yield openai(SCORE | {"levels": [{"label": True}]}), "questions[0].levels[0].label: must be a text"
    yield (
        openai(SCORE | {"levels": [{"label": "a", "description": {}}]}),
        ("questions[0].levels[0].description: must be a text"),
    )

    yield systemone(NOUL, state=1), "state: must be a text, an object or a list"
    yield systemone(NOUL, state=[]), "state: is empty"
    yield systemone(NOUL, state=nested(101)), "state: nested more than 100 levels deep"
    yield systemone(NOUL, state=[float("nan")]), "state: a number in it is not finite"
    yield systemone(NOUL, assets={}), "assets: 0 assets, at least 1"
    yield systemone(NOUL) | {"questions": [NOUL]}, "questions: must be an object, with a question for each id"
    yield systemone(NOUL) | {"questions": {}}, "questions: 0 questions, at least 1"
    yield systemone(NOUL) | {"questions": {" ": NOUL}}, "questions: an id is empty"
    yield systemone({"type": "boolean"}), 'questions["q"].type: "boolean" is not noul or choice or score'
    yield systemone({"type": "noul"}), 'questions["q"]: neither instructions nor criteria'
    yield systemone({"type": "noul", "criteria": {"true": None}}), 'questions["q"]: neither instructions nor criteria'
    yield systemone(NOUL | {"instructions": 5}), 'questions["q"].instructions: must be a text, an object or a list'
    yield systemone(NOUL | {"criteria": {"yes": "x"}}), 'questions["q"].criteria.yes: not supported here'
    yield systemone(NOUL | {"name": "q"}), 'questions["q"].name: not supported here'
    yield systemone({"type": "choice"}), 'questions["q"]: criteria is missing'
    yield (
        systemone(PICK | {"criteria": ["a", "b"]}),
        ('questions["q"].criteria: must be an object, with a description or null for each option'),
    )
    yield (
        systemone(PICK | {"criteria": {"a": 1}}),
        ('questions["q"].criteria["a"]: must be a text, an object or a list'),
    )
    for count, s, limit in ((0, "s", "at least 2"), (1, "", "at least 2"), (256, "s", "at most 255")):
        criteria = {str(each): None for each in range(count)}
        yield systemone(PICK | {"criteria": criteria}), f'questions["q"].criteria: {count} option{s}, {limit}'
        yield systemone(RATE | {"criteria": [*criteria]}), f'questions["q"].criteria: {count} level{s}, {limit}'
    yield (
        systemone(RATE | {"criteria": {"0": "low", "1": "high"}}),
        ('questions["q"].criteria: must be a list of levels, the lowest first'),
    )
    yield (
        systemone(RATE | {"criteria": ["low", None]}),
        ('questions["q"].criteria[1]: must be a text, an object or a list'),
    )
    yield systemone(RATE | {"criteria": ["low", "low"]}), "questions[\"q\"].criteria: the level 'low' is given twice"


@pytest.mark.parametrize(("body", "message"), list(wrong_bodies()))
def test_a_wrong_body_is_told_at_its_place(body: Any, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        request_of(body)
    assert str(caught.value) == message
    message.encode()


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The ways to everything in a value."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield from paths(each, (*path, key))


@settings(max_examples=300)
@given(openai_bodies(FEW) | systemone_bodies(FEW), ODD, st.randoms(use_true_random=False))
def test_a_damaged_body_is_read_or_told(body: Body, odd: Any, random: Random) -> None:
    *way, last = random.choice([path for path in paths(body) if path])
    inner: Any = body
    for key in way:
        inner = inner[key]
    action = random.randrange(3)
    if action == 0:
        inner[last] = odd
    elif action == 1:
        del inner[last]
    elif isinstance(inner, dict):
        inner[random.choice(["type", "name", "\ud800", "criteria", "data"])] = odd
    try:
        request_of(body)
    except RequestError as error:
        str(error).encode()


def test_the_url_says_whose_request_it_is() -> None:
    for url, body, message in (
        ("/v1/systemone", openai(), "input: not supported here"),
        ("/v1/decisions", systemone(NOUL), "state: not supported here"),
        ("/v1/responses", openai(), 'url "/v1/responses": only /v1/decisions and /v1/systemone ask typed questions'),
    ):
        with pytest.raises(RequestError) as caught:
            request_of(body, url)
        assert str(caught.value) == message


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(openai_bodies() | systemone_bodies(), min_size=1, max_size=3), st.booleans())
def test_requests_come_whole_out_of_files(tmp_path: Path, bodies: list[Body], bare: bool) -> None:
    urls = ["/v1/decisions" if "input" in body else "/v1/systemone" for body in bodies]
    envelopes = [{"url": url, "body": body} for url, body in zip(urls, bodies, strict=True)]
    own = [{"id": 1} | {key: body[key] for key in body if key in BARE} for body in bodies]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in (own if bare else envelopes)))
    source = Source.open([str(path)])
    columns = [name for name in (BARE if bare else ("url", "body")) if name in source.available]
    source.select(columns=[], carried=columns)
    rows = [row for batch in source.batches() for row in batch.carried.to_pylist()]
    assert [carried_request(row) for row in rows] == [request_of(body) for body in bodies]


def test_a_body_that_is_none_is_told() -> None:
    for texts, message in (
        ({"url": None, "body": None}, "body is not an object"),
        ({"url": '"/v1/decisions"', "body": "[" * 100_000 + "]" * 100_000}, "body is nested too deeply"),
    ):
        with pytest.raises(RequestError) as caught:
            carried_request(texts)
        assert str(caught.value) == message


def test_rows_with_a_document_and_questions_are_requests() -> None:
    plain = ScoreSettings(inputs=("rows.jsonl",), model="m", output="out.jsonl")
    assert is_request_file(plain, ["id", "state", "questions"])
    assert is_request_file(plain, ["input", "state", "questions"])
    assert not is_request_file(plain, ["input", "output"])
    assert not is_request_file(plain, ["questions", "prompt"])
    templated = plain.with_options({"template": "{{ state }}"})
    assert not is_request_file(templated, ["state", "questions"])
