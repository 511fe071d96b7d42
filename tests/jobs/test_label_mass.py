"""A job whose model hardly ever answers as it is asked says so, once, and what it answers instead."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import prefillcli
from tests.jobs import jobs
from tests.jobs.jobs import Reference, read_output, read_report, score, texts, write_jsonl, write_parquet
from tests.jobs.models import save_model

LABELS = "Yes= Yes,No= No"


@pytest.fixture(scope="module")
def sure(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose next token is nearly certain, and no label."""
    folder = save_model(tmp_path_factory.mktemp("models") / "sure")
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] *= 12
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def warnings_of(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().err.splitlines() if "of the probability on average" in line]


def mean_mass(rows: list[dict[str, Any]]) -> float:
    return sum(row["label_mass"] for row in rows) / len(rows)


@pytest.mark.parametrize("flags", [{}, {"workers": 2}, {"engine": "hf"}])
def test_labels_that_the_model_never_says_are_told_once(
    sure: Path, flags: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "granularity", jobs.Granularity(window_rows=4))
    source = write_parquet("in.parquet", prompt=texts(12))
    assert score(source, model=sure, labels=LABELS, **flags)["exit_code"] == 0
    assert mean_mass(read_output("out.parquet")) < 1e-3
    err = capsys.readouterr().err.splitlines()
    (at,) = [number for number, line in enumerate(err) if "of the probability on average" in line]
    assert "; it answers " in err[at]
    assert "check that the model is the right one" in err[at + 1]
    assert "the template" in err[at + 1]
    assert "--labels" in err[at + 1]


def behind(reference: Reference, prompt: str, answer: str) -> list[int]:
    """The tokens of an answer behind a prompt."""
    before, whole = reference.ids(prompt), reference.ids(prompt + answer)
    assert whole[: len(before)] == before
    return whole[len(before) :]


def probability(reference: Reference, prompt: str, tokens: list[int]) -> float:
    """Of these tokens behind a prompt, one after the other."""
    ids, found = reference.ids(prompt), 1.0
    for token in tokens:
        found *= float(reference._probabilities(tuple(ids))[token])
        ids = [*ids, token]
    return found


def assert_heard(found: dict[str, Any], reference: Reference, prompts: list[str], answers: list[list[str]]) -> None:
    """What the report says of the first window is what transformers' eager forward says."""
    begins, masses, shares = [], [], dict[int, float]()
    for prompt, own in zip(prompts, answers, strict=True):
        tokens = [behind(reference, prompt, answer) for answer in own]
        begins.append(sum(probability(reference, prompt, [first]) for first in {each[0] for each in tokens}))
        masses.append(sum(probability(reference, prompt, each) for each in tokens))
        top = torch.topk(reference._probabilities(tuple(reference.ids(prompt))), 5)
        for token, value in zip(top.indices.tolist(), top.values.tolist(), strict=True):
            shares[token] = shares.get(token, 0.0) + value / len(prompts)
    assert found["rows"] == len(prompts)
    assert found["begins"] == pytest.approx(sum(begins) / len(begins), rel=1e-3)
    if found["label_mass"] is not None:
        assert found["label_mass"] == pytest.approx(sum(masses) / len(masses), rel=1e-3, abs=1e-12)
    likeliest = sorted(shares.values(), reverse=True)[:5]
    assert [each["share"] for each in found["tokens"]] == pytest.approx(likeliest, rel=1e-3)
    for each in found["tokens"][:3]:
        assert shares[each["id"]] == pytest.approx(each["share"], rel=1e-3)
        assert each["text"] == reference.tokenizer.decode([each["id"]])


CHOICES = [["Gray mice", "Blue"], ["Cold", "Hot water", "Ice"]]
KINDS: dict[str, tuple[dict[str, Any], list[list[str]]]] = {
    "labels": ({"labels": "Gray,Blue"}, [[" Gray", " Blue"]]),
    "divided": ({"labels": "Gray,Blue", "label_norm": "bytes"}, [[" Gray", " Blue"]]),
    "ordered": ({"labels": "10,20,30", "label_values": "1,2,3"}, [[" 10", " 20", " 30"]]),
    "choices": ({"choices_column": "choices"}, [[f" {each}" for each in own] for own in CHOICES]),
    "target": ({"target_column": "target"}, [[" Gray mice"]]),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("kind", "engine"), [*((kind, "torch") for kind in KINDS), ("labels", "hf"), ("target", "hf")]
)
def test_every_kind_of_answer_is_checked(
    kind: str, engine: str, sure: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, (asked, answers) = texts(12), KINDS[kind]
    own = [{"prompt": each, "choices": CHOICES[at % 2], "target": " Gray mice"} for at, each in enumerate(prompts)]
    source = write_jsonl("in.jsonl", own)
    assert score(source, "out.jsonl", model=sure, dtype="float32", engine=engine, **asked)["exit_code"] == 0
    (found,) = read_report()["first_answers"]
    assert_heard(found, Reference(sure), prompts, [answers[at % len(answers)] for at in range(12)])
    assert (found["label_mass"] is None) == (kind in ("choices", "target"))
    (warning,) = warnings_of(capsys)
    assert re.search(r"; it answers (`[^`]+`|token \d+) \(\d", warning)


def test_each_question_is_checked(sure: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = texts(12)
    questions = [
        {"name": "fox", "text": " Yes or no?\nAnswer:", "labels": ["Yes", "No"]},
        {"name": "tint", "text": " What tint?\nAnswer:", "labels": ["Gray", "Blue"], "when": "fox >= 0"},
        {"name": "both", "text": " Is it?\nAnswer:", "labels": ["Gray", "Blue"], "when": "tint >= 0"},
    ]
    Path("q.yaml").write_text(json.dumps({"document": "{{ prompt }}", "questions": questions}))
    source = write_parquet("in.parquet", prompt=prompts)
    assert score(source, model=sure, dtype="float32", questions="q.yaml")["exit_code"] == 0
    found = read_report()["first_answers"]
    assert [each["question"] for each in found] == ["fox", "tint", "both"]
    for each, question in zip(found, questions, strict=True):
        labels = [f" {name}" for name in question["labels"]]
        assert_heard(each, Reference(sure), [text + question["text"] for text in prompts], [labels] * 12)
    warned = warnings_of(capsys)
    for each in found:
        assert any(f"of question '{each['question']}'" in line for line in warned) == (each["label_mass"] < 0.1)
    assert len(warned) >= 2


@pytest.mark.parametrize(("errors", "heard"), [(1, 3), (4, 4)])
def test_the_first_window_is_the_first_that_has_rows_to_read(
    errors: int, heard: int, sure: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "granularity", jobs.Granularity(batch_rows=4, window_rows=4))
    source = write_parquet("in.parquet", prompt=[None] * errors + texts(7))
    score(source, model=sure, labels=LABELS, max_error_rate=1.0)
    (found,) = read_report()["first_answers"]
    assert found["rows"] == heard
    assert len(warnings_of(capsys)) == 1


def test_the_page_shows_what_was_asked_and_one_prompt_with_its_answer(sure: Path) -> None:
    prompts = [f"a <b>secret</b> {text}" for text in texts(12)]
    source = write_parquet("in.parquet", text=prompts)
    score(source, model=sure, labels="Gray,Blue", template="Text: {{ text }}\nTint?", dtype="float32")
    page = Path("out.run.html").read_text()
    report = read_report()
    (found,) = report["first_answers"]
    for text in (str(sure), "Text: {{ text }}", "Gray,Blue", f"{report['answers']['answer']['label_mass']:.4g}"):
        assert html.escape(text) in page
    (prompt,) = [html.escape(f"Text: {text}\nTint?") for text in prompts[:1]]
    assert prompt in page
    row = read_output("out.parquet")[0]
    best = max(row["score"], 1 - row["score"])
    assert f"{row['prediction']}, with a probability of {best:.4f}" in page
    assert all(f"{100 * each['share']:.2g} %" in page for each in found["tokens"])
    assert "secret" not in Path("out.run.json").read_text()
    assert "<b>secret" not in page


def test_documents_have_nothing_before_them_and_are_not_checked(
    sure: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_parquet("in.parquet", target=texts(4))
    score(source, model=sure, target_column="target", max_length=40)
    assert read_report()["first_answers"] == []
    assert warnings_of(capsys) == []


def test_a_model_that_says_the_labels_is_not_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_model(tmp_path / "model")
    tensors, reference = load_file(folder / "model.safetensors"), Reference(folder)
    head = tensors["lm_head.weight"]
    yes, no = (reference.token(word) for word in (" Yes", " No"))
    row = 200 * head[yes].clone()
    head.zero_()
    head[yes], head[no] = row, -row  # one of them always has the largest logit
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    source = write_parquet("in.parquet", prompt=texts(12))
    assert score(source, model=folder, labels=LABELS)["exit_code"] == 0
    assert mean_mass(read_output("out.parquet")) > 0.1
    assert warnings_of(capsys) == []


def test_a_scorer_tells_it_once(sure: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with prefillcli.Scorer(sure, labels=LABELS) as scorer:
        assert mean_mass(scorer.score(texts(4)).to_pylist()) < 1e-3
        scorer.score(texts(4))
    assert len(warnings_of(capsys)) == 1


def test_classes_of_a_head_have_no_such_mass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_model(tmp_path / "model", classifies=True, num_labels=40)
    tensors = load_file(folder / "model.safetensors")
    tensors["score.weight"] *= 100
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    source = write_parquet("in.parquet", prompt=texts(4))
    for number in range(0, 40, 8):
        score(source, model=folder, labels=f"LABEL_{number},LABEL_{number + 1}", overwrite=True)
        if mean_mass(read_output("out.parquet")) < 1e-3:
            break
    else:
        pytest.fail("no two classes are improbable")
    assert warnings_of(capsys) == []
