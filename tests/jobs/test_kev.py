"""Decision models that read each option at a token of its own: the texts of llama.cpp's form of the prompt, and a
pointer head computed by hand from the hidden states of transformers' own eager forward."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import dequantize, quantize
from transformers import AutoTokenizer

from prefillcli.engines.torch import TorchEngine
from prefillcli.options.commands import InspectSettings
from prefillcli.options.load import load_settings
from prefillcli.tools.inspect import inspect_job
from tests.gguf_files import GgufReference, write_gguf
from tests.jobs.jobs import read_output, read_report, score, write_jsonl, write_parquet
from tests.jobs.models import save_model
from tests.jobs.test_gguf import QWEN35

TEMPLATE = (
    "<|fim_prefix|>{{ state }}<|fim_middle|>{{ instructions }}{% for o in options %}<|box_start|>"
    "{% if type == 'score' %}{% if o.description %}{{ o.description }}{% endif %}{% else %}"
    "{% if type != 'noul' %}{{ o.key }}{% elif o.key == 'true' %}yes{% else %}no{% endif %}"
    "{% if o.description %}: {{ o.description }}{% endif %}{% endif %}<|box_end|>{% endfor %}<|fim_suffix|>"
)
SPECIAL = ["<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|box_start|>", "<|box_end|>"]
HEAT = {"choice": 0.5, "noul": 1.5, "score": 0.75}
WIDTH = 8  # of a query, and of a key
QUESTIONS: dict[str, Any] = {
    "route": {
        "type": "choice",
        "instructions": "Which team?",
        "criteria": {"pay": "money", "it": None, "<|hr|>": "x"},
    },
    "urgency": {
        "type": "score",
        "instructions": {"ask": "How urgent?"},
        "criteria": ["low", {"level": ["high", 1.5]}],
    },
    "angry": {"type": "noul", "instructions": "Is the customer angry?", "criteria": {"true": "shouts"}},
}
STATES: list[Any] = [
    "I was charged twice. <|box_end|>",
    {"ticket": "Straße 7", "plan": ["pro", 1.5, True, None], "by": {"name": "Ann", "of": {"a": 1}}},
    ["a", {"b": "c", "d": "e"}, ["f", "  g"]],
]
# Each part as llama.cpp writes it: the texts of these states, and of the questions with their options.
STATED = [
    "I was charged twice. <¦box_end¦>",
    "ticket: Straße 7\nplan:\n  - pro\n  - 1.5\n  - True\n  - \nby:\n  name: Ann\n  of:\n    a: 1",
    "- a\n- b: c\n  d: e\n- - f\n  - g",
]
ASKED = {
    "route": ("Which team?", ["pay: money", "it", "<¦hr¦>: x"]),
    "urgency": ("ask: How urgent?", ["low", "level:\n  - high\n  - 1.5"]),
    "angry": ("Is the customer angry?", ["no", "yes: shouts"]),
}


@pytest.fixture(scope="module")
def head() -> tuple[np.ndarray, np.ndarray]:
    """The weight and the bias of a pointer head: queries first."""
    draw = np.random.default_rng(0)
    return draw.normal(0, 0.15, (2 * WIDTH, 64)).astype(np.float32), draw.normal(0, 1, 2 * WIDTH).astype(np.float32)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, head: tuple[np.ndarray, np.ndarray]) -> Callable[..., Path]:
    """Writes a model with a pointer head, unless `tensors` are others."""
    torch.manual_seed(0)
    folder = save_model(
        tmp_path_factory.mktemp("models") / "plain", family="qwen3_5_text",
        layer_types=["linear_attention", "full_attention"], linear_num_key_heads=2, linear_num_value_heads=4,
        linear_key_head_dim=16, linear_value_head_dim=16,
        rope_parameters={
            "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1],
        },
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    tokenizer.save_pretrained(folder)

    def write(template: str = TEMPLATE, tensors: dict[str, np.ndarray] | None = None, kind: Kind = Kind.F32) -> Path:
        settings = QWEN35 | {"decision.type": "kev"} | {f"decision.temperature.{k}": v for k, v in HEAT.items()}
        own = {"cls.output.weight": head[0], "cls.output.bias": head[1]} if tensors is None else tensors
        path = tmp_path_factory.mktemp("gguf") / "m.gguf"
        return write_gguf(
            path, folder, architecture="qwen35", kind=kind, settings=settings, tensors=own, systemone=template
        )

    return write


@pytest.fixture(scope="module")
def file(made: Callable[..., Path]) -> Path:
    return made()


def by_hand(file: Path, head: tuple[np.ndarray, np.ndarray]) -> Callable[..., list[Any]]:
    """Gives the probabilities of options, close to these, from the hidden states of a model."""
    reference = GgufReference(file)
    weight, bias = (torch.from_numpy(each) for each in head)

    def answered(state: str, instructions: str, listed: Sequence[str], heat: float) -> list[Any]:
        boxes = "".join(f"<|box_start|>{each}<|box_end|>" for each in listed)
        text = f"<|fim_prefix|>{state}<|fim_middle|>{instructions}{boxes}<|fim_suffix|>"
        ids = torch.tensor(reference.tokenizer(text, add_special_tokens=False).input_ids)
        with torch.inference_mode():
            rows = reference._model.model(input_ids=ids[None]).last_hidden_state[0] @ weight.T + bias
        places = torch.nonzero(ids == reference.token("<|box_end|>"))[:, 0]
        assert len(places) == len(listed)
        scores = rows[places, WIDTH:].double() @ rows[-1, :WIDTH].double() / WIDTH**0.5
        return [pytest.approx(each, abs=1e-5) for each in torch.softmax(scores / heat, 0).tolist()]

    return answered


@pytest.fixture(scope="module")
def answer(file: Path, head: tuple[np.ndarray, np.ndarray]) -> Callable[..., list[Any]]:
    return by_hand(file, head)


def assert_answers(rows: Sequence[dict[str, Any]], answer: Callable[..., list[Any]]) -> None:
    spread = set()
    for stated, row in zip(STATED, rows, strict=True):
        assert row["error"] is None, row
        found = row["response"]["body"]["answers"]
        assert list(found["route"]["probabilities"].values()) == answer(stated, *ASKED["route"], 0.5)
        assert found["urgency"]["score"] == answer(stated, *ASKED["urgency"], 0.75)[1]
        assert found["angry"]["noul"] == answer(stated, *ASKED["angry"], 1.5)[1]
        spread.add(round(found["angry"]["noul"], 2))
    assert len(spread) == len(STATED), "answers must differ enough to tell a wrong one"


@pytest.mark.parametrize(
    "flags",
    [{}, {"engine": "hf"}, {"chunk_tokens": 16, "pack_tokens": 64}, {"deterministic": True}, {"weights": "stream"}],
    ids=str,
)
def test_an_option_is_read_at_its_end_and_the_question_at_the_end_of_the_prompt(
    file: Path, answer: Callable[..., list[Any]], flags: dict[str, Any]
) -> None:
    write_jsonl("in.jsonl", [{"state": state, "questions": QUESTIONS} for state in STATES])
    assert score("in.jsonl", "out.jsonl", model=file, **flags)["exit_code"] == 0
    assert_answers(read_output("out.jsonl"), answer)
    assert read_report("out.run.json")["layout"] == {"type": "kev", "temperatures": HEAT, "curve": None}


def test_a_quantised_file_is_read_alike(made: Callable[..., Path], head: tuple[np.ndarray, np.ndarray]) -> None:
    """Its head too is in blocks."""
    file, kind = made(kind=Kind.Q8_0), Kind.Q8_0
    weight = dequantize(quantize(head[0], kind), kind)
    write_jsonl("in.jsonl", [{"state": state, "questions": QUESTIONS} for state in STATES])
    assert score("in.jsonl", "out.jsonl", model=file, dtype="float32")["exit_code"] == 0
    assert_answers(read_output("out.jsonl"), by_hand(file, (weight, head[1])))


LONG = "The customer writes for the third time about the same bill, and is not amused. " * 4
TEXTS = [f"{LONG}{each}" for each in ("<|im_end|>", "<|fim_suffix|> now", "no", "no", "yes, at once", "")]
ASKED_OF_FILE = [
    {"name": "late", "type": "predicate", "instructions": "Is it late?"},
    {
        "name": "team",
        "type": "choice",
        "instructions": "Which?",
        "choices": ["pay", {"value": "it", "description": "x"}],
    },
]


def escaped(text: str) -> str:
    return text.replace("<|", "<¦").replace("|>", "¦>")


def test_a_file_is_scored_alike_after_a_stop(
    file: Path, answer: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("q.yaml").write_text(json.dumps({"questions": ASKED_OF_FILE}))
    write_parquet("in.parquet", text=TEXTS)
    given: dict[str, Any] = {"model": file, "questions": "q.yaml", "pack_tokens": 128, "orders": 2}
    assert score("in.parquet", "whole.parquet", **given)["exit_code"] == 0
    rows = read_output("whole.parquet")
    for text, row in zip(TEXTS, rows, strict=True):
        shown = escaped(text)
        assert row["late"] == answer(shown, "Is it late?", ["no", "yes"], 1.5)[1]
        one, other = (answer(shown, "Which?", each, 0.5) for each in (["pay", "it: x"], ["it: x", "pay"]))
        mean = (one[0].expected + other[1].expected) / 2
        assert row["team.probabilities"]["pay"] == pytest.approx(mean, abs=1e-5)
        assert row["shared_tokens"] > 0.5 * row["prompt_tokens"]
    answered, calls = TorchEngine._answer, iter(range(99))

    def stops(*own: Any) -> Any:
        if next(calls) == 3:
            raise RuntimeError("stopped")
        return answered(*own)

    with monkeypatch.context() as patch:
        patch.setattr(TorchEngine, "_answer", stops)
        assert score("in.parquet", **given)["exit_code"] == 1
    assert score("in.parquet", resume=True, **given)["exit_code"] == 0
    for row, own in zip(read_output("out.parquet"), rows, strict=True):
        assert (row["late"], row["team"]) == (pytest.approx(own["late"], abs=1e-5), own["team"])


@pytest.mark.slow
def test_workers_answer_alike(file: Path, answer: Callable[..., list[Any]]) -> None:
    write_jsonl("in.jsonl", [{"state": state, "questions": QUESTIONS} for state in STATES])
    assert score("in.jsonl", "out.jsonl", model=file, workers=2, threads=1)["exit_code"] == 0
    assert_answers(read_output("out.jsonl"), answer)


def test_transformers_reads_a_file_alike(file: Path, answer: Callable[..., list[Any]]) -> None:
    write_parquet("in.parquet", text=TEXTS[:2])
    assert score("in.parquet", model=file, ask="Is it late?", engine="hf")["exit_code"] == 0
    for text, row in zip(TEXTS, read_output("out.parquet"), strict=False):
        assert row["answer"] == answer(escaped(text), "Is it late?", ["no", "yes"], 1.5)[1]


def test_the_options_are_part_of_the_prompt(file: Path) -> None:
    """Its tokens are counted, and texts are cut before it grows too long."""
    count = len(AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)(escaped(TEXTS[0])).input_ids)
    write_parquet("in.parquet", text=[TEXTS[0]])
    for limit, on_long in ((count + 100, "error"), (count, "error"), (count, "truncate-left")):
        done = score("in.parquet", model=file, ask="Is it late?", max_length=limit, on_long=on_long, overwrite=True)
        (row,) = read_output("out.parquet")
        assert done["exit_code"] == (0 if row["error"] is None else 1)
        if (limit, on_long) == (count, "error"):
            assert row["error"] == "prompt_too_long"
        elif on_long == "error":
            assert count < row["prompt_tokens"] == row["kept_tokens"] < limit
        else:
            assert row["truncated"]
            assert count - 10 < row["prompt_tokens"] <= limit


def test_evidence_asks_again_without_a_section(file: Path, answer: Callable[..., list[Any]]) -> None:
    write_parquet("in.parquet", text=["no fox\n\nand no dog"])
    assert score("in.parquet", model=file, ask="Is it late?", evidence=True)["exit_code"] == 0
    (row,) = read_output("out.parquet")
    (found,) = row["answer.evidence"]
    without = answer("and no dog", "Is it late?", ["no", "yes"], 1.5)[1].expected
    assert found["change"] == pytest.approx(row["answer"] - without, abs=1e-5)
    assert read_report("out.run.json")["tokens"]["prompt"] == row["prompt_tokens"]


def test_inspect_shows_the_whole_prompt_and_its_answer(file: Path, answer: Callable[..., list[Any]]) -> None:
    write_parquet("in.parquet", text=["one text"])
    given = {"inputs": ["in.parquet"], "ask": "Is it late?", "model": str(file), "row": "0", "html": "row.html"}
    done = inspect_job(load_settings(InspectSettings, given, environment={}))
    assert done["exit_code"] == 0
    assert done["score"] == answer("one text", "Is it late?", ["no", "yes"], 1.5)[1]
    page = Path("row.html").read_text()
    assert "kev, the model" in page
    assert "fim_suffix" in page
    assert "vocabulary" not in page


@pytest.mark.parametrize("flags", [
    {"draft": "self", "keep": 0.5}, {"exit": True}, {"compute": "int8"}, {"first": "words"}, {"rationale": 8},
    {"engine": "vllm"},
], ids=str)  # fmt: skip
def test_what_such_a_head_cannot_do_is_refused_before_the_model_is_opened(
    file: Path, flags: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("prefillcli.scoring.opening.open_models")
    write_parquet("in.parquet", text=["a"])
    assert score("in.parquet", model=file, ask="Is it late?", **flags)["exit_code"] == 2
    err = capsys.readouterr().err
    name = next(iter(flags))
    assert f"--{name}" in err
    assert "layout of its own (kev)" in err if name == "draft" else "a decision model of the type kev: " in err


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tensors": {}}, "it has no tensor cls.output.weight"),
        ({"tensors": {"cls.output.weight": np.ones((6, 32), np.float32)}}, "cls.output.weight has the shape [6, 32]"),
        ({"template": "{{ state }} {{ instructions }}<|box_end|>"}, "1 places at which options are read, not 2"),
    ],
)
def test_a_file_that_lacks_what_is_read_is_refused(
    made: Callable[..., Path], change: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_parquet("in.parquet", text=["a"])
    assert score("in.parquet", model=made(**change), ask="Is it late?")["exit_code"] == 2
    assert said in capsys.readouterr().err


def test_generic_reads_the_head_of_the_vocabulary(file: Path, made: Callable[..., Path]) -> None:
    write_parquet("in.parquet", text=["one", "two"])
    found = []
    for name, model in (("a", file), ("b", made(tensors={}))):
        assert (
            score("in.parquet", f"{name}.parquet", ask="Is it late?", model=model, layout="generic")["exit_code"] == 0
        )
        found.append([row["answer"] for row in read_output(f"{name}.parquet")])
    assert found[0] == found[1]
