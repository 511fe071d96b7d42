"""Requests with images have the answers of transformers' whole forward."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.image_rows import Whole, file_of, picture, url_of
from tests.jobs.jobs import TOLERANCE, read_output, score, write_jsonl

WHICH = "Which?\n- y\n- n"
CHOICES = [{"value": "y"}, {"value": "n"}]
IMAGE = {"type": "image"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    return Whole("smolvlm", tmp_path_factory.mktemp("models") / "smolvlm")


def expected(whole: Whole, text: str, *numbers: int) -> float:
    """The share of the first label after a user's message of these pictures and this text."""
    parts = [*(IMAGE for _ in numbers), {"type": "text", "text": text}]
    return whole.answer([{"role": "user", "content": parts}], list(map(picture, numbers))).score


def line(number: int, content: Any) -> dict[str, Any]:
    body = {"model": "smolvlm", "max_tokens": 1, "messages": [{"role": "user", "content": content}]}
    return {"custom_id": f"r{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}


def test_lines_of_a_batch_file_have_images_where_their_parts_stand(whole: Whole) -> None:
    text, image = {"type": "text", "text": "Is it?"}, {"type": "image_url", "image_url": {"url": url_of(1)}}
    Path("1.png").write_bytes(file_of(1))
    file = {"type": "image_url", "image_url": {"url": "1.png"}}
    write_jsonl("in.jsonl", [line(0, [text, image, text]), line(1, "Is it?"), line(2, [file]), line(3, [image])])
    assert score("in.jsonl", model=whole.folder, labels="y,n", max_error_rate=0.5)["exit_code"] == 0
    rows = read_output("out.parquet")
    for row, parts in [(0, [text, IMAGE, text]), (3, [IMAGE])]:
        answer = whole.answer([{"role": "user", "content": parts}], [picture(1)])
        assert rows[row]["score"] == pytest.approx(answer.score, abs=TOLERANCE)
        assert rows[row]["prompt_tokens"] == answer.prompt_tokens
    assert rows[1]["error"] is None
    assert rows[2]["error"] == "invalid_image"
    assert "names a file" in rows[2]["error_detail"]


def openai(*parts: Any) -> dict[str, Any]:
    question = {"type": "choice", "instructions": "Which?", "choices": CHOICES}
    return {"input": [{"role": "user", "content": list(parts)}], "questions": [question, question]}


def test_images_of_openais_decisions_stand_before_the_document(whole: Whole) -> None:
    text, image = {"type": "input_text", "text": "Look."}, {"type": "input_image", "image_url": url_of(1)}
    other = {"type": "input_image", "image_url": url_of(2)}
    broken = {"type": "input_image", "image_url": "data:image/png;base64,aGVsbG8="}
    write_jsonl("in.jsonl", [openai(text, image), openai(image, other), openai(text), openai(text, broken)])
    summary = score("in.jsonl", output="out.jsonl", model=whole.folder, max_error_rate=0.5)
    assert summary["exit_code"] == 0
    documents: list[tuple[str, tuple[int, ...]]] = [
        ("User:\nLook.\n[Image 1]", (1,)),
        ("User:\n[Image 1]\n[Image 2]", (1, 2)),
    ]
    found = [json.loads(own) for own in Path("out.jsonl").read_text().splitlines()]
    for own, (document, numbers) in zip(found, documents, strict=False):
        for answer in own["response"]["body"]["answers"]:
            assert answer["probabilities"][0]["probability"] == pytest.approx(
                expected(whole, f"{document}\n\n{WHICH}", *numbers), abs=TOLERANCE
            )
    assert found[2]["error"] is None
    assert found[3]["error"]["code"] == "invalid_image"
    assert found[3]["error"]["message"].startswith("input[0].content[1]: ")


def test_assets_of_system_one_stand_before_the_state(whole: Whole) -> None:
    asset = {"type": "image", "format": "png", "data_base64": base64.b64encode(file_of(3)).decode()}
    question = {"type": "choice", "instructions": "Which?", "criteria": {"y": None, "n": None}}
    write_jsonl("in.jsonl", [{"state": "It is <x>.", "assets": {"<x>": asset}, "questions": {"q": question}}])
    assert score("in.jsonl", output="out.jsonl", model=whole.folder)["exit_code"] == 0
    (found,) = (json.loads(own) for own in Path("out.jsonl").read_text().splitlines())
    wanted = expected(whole, f"It is [Image 1].\n\n{WHICH}", 3)
    assert found["response"]["body"]["answers"]["q"]["probabilities"]["y"] == pytest.approx(wanted, abs=TOLERANCE)


def test_requests_with_images_are_refused_by_a_model_of_text(chat_model: Path) -> None:
    image = {"type": "input_image", "image_url": url_of(1)}
    write_jsonl("in.jsonl", [openai({"type": "input_text", "text": "Look."}), openai(image)])
    assert score("in.jsonl", output="out.jsonl", model=chat_model, max_error_rate=0.5)["exit_code"] == 0
    found = [json.loads(own)["error"] for own in Path("out.jsonl").read_text().splitlines()]
    assert found[0] is None
    assert found[1] == {
        "code": "invalid_request",
        "message": "input[0].content[0]: an image, and only text and JSON are read",
    }
    refused = score("in.jsonl", output="other.jsonl", model=chat_model, image_column=["photo"])
    assert refused["exit_code"] == 2
    assert "--image-column cannot be combined with --format: requests bring their own images" in refused["error"]
