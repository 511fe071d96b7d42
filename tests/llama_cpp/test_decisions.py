"""Decision models in GGUF format against llama-server's own answers: `make test-llama-decisions`.

The files are as llama.cpp's converter writes them, with the real tokenizer of Qwen3 and random weights.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.decisions import typed_decisions
from recipes import real_model
from tests.gguf_files import tokenizer_fields, write_gguf
from tests.jobs.jobs import read_output, score, write_jsonl
from tests.jobs.models import randomise
from tests.jobs.test_gguf import QWEN35
from tests.llama_cpp.server import PROGRAM, serving, templates

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not PROGRAM.exists(), reason="make setup-llama-server compiles llama-server"),
]

FOLDER = real_model.FOLDER.absolute()
CASES = 20  # of Typed Decisions, with five questions each
LONGEST = 120  # characters of a text in their states
TOLERANCE = 1e-4
TEMPERATURES = {
    "openjev": {"choice": 0.85, "score": 0.85, "noul": 1.5547},
    "nimble": {"choice": 0.7, "choice.3_5": 1.3, "choice.11": 0.9, "score.6_10": 2.0, "noul.2": 1.2},
    "kev": {"choice": 0.6, "score": 0.9, "noul": 1.3},
    "lev": {"choice.small": 0.8, "choice.mid": 1.4, "choice.large": 1.9, "score.small": 0.6, "noul.small": 1.7},
}
MOST = {"openjev": 52}  # options, of others 255
WIDTH = 8  # of Kev's queries and keys


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def systemone() -> dict[str, str]:
    return templates()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with random weights, whose logits spread over a few units."""
    path = tmp_path_factory.mktemp("models") / "qwen3"
    tokenizer = FOLDER / "tokenizers" / "qwen3"
    shutil.copytree(tokenizer, path)
    count = len(tokenizer_fields(tokenizer, model="gpt2", pre="qwen2")["tokens"])
    config = AutoConfig.for_model(
        "qwen3_5_text",
        **{"vocab_size": count, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 32768},
        **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
        **{"linear_key_head_dim": 16, "linear_value_head_dim": 16},
        layer_types=["linear_attention", "full_attention"] * 2,
        rope_parameters={
            **{"rope_type": "default", "rope_theta": 10000.0},
            **{"partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]},
        },
        tie_word_embeddings=True,
    )
    model = AutoModelForCausalLM.from_config(config)
    randomise(model, 7)
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def head() -> dict[str, np.ndarray]:
    """Kev's pointer head."""
    draw = np.random.default_rng(0)
    return {
        "cls.output.weight": draw.normal(0, 0.15, (2 * WIDTH, 64)).astype(np.float32),
        "cls.output.bias": draw.normal(0, 1, 2 * WIDTH).astype(np.float32),
    }


def requests(most: int) -> Iterator[dict[str, Any]]:
    """Typed Decisions with short states, and requests of every kind of value."""
    for case in typed_decisions(FOLDER)[:: 400 // CASES]:
        yield {"state": _cut(case.state), "questions": case.questions}
    chance = random.Random(most)
    words = [
        "Straße",
        "日本語",
        "naïve",
        "a\tb\n\nc",
        "1,5 €",
        '"said"',
        "<b>&amp;</b>",
        "😀👍🏽",
        "\\n",
        "'",
        "מילה",
        "  x  ",
    ]
    values: list[Any] = [*words, 1, -7, 2.5, 1e-7, 1e22, 0.1, 1.0, True, False, None, 10**15, {}, []]
    for number in range(10):
        described = [chance.choice([None, chance.choice(words), {"why": chance.choice(values)}]) for _ in range(most)]
        count = most if number == 0 else chance.randint(2, 12)
        options = {f"{chance.choice(words)} {at}": each for at, each in enumerate(described[:count])}
        yield {
            "state": chance.choice(words) * 3 if number % 3 == 0 else _value(chance, values, depth=3),
            "questions": {
                f"one {chance.choice(words)}": {"type": "choice", "instructions": "Which?", "criteria": options},
                "two": {
                    "type": "score",
                    "instructions": {"z": chance.choice(words), "a": [chance.choice(values)]},
                    "criteria": [
                        {"level": at, "b": 1, "a": None} if at % 2 else f"{at}" for at in range(2 + number % 9)
                    ],
                },
                "three": {"type": "noul", "instructions": chance.choice(words) + "?"},
                "four": {"type": "noul", "instructions": "Is it?", "criteria": {"true": {"b": 2, "a": words[:3]}}},
            },
        }


def _value(chance: random.Random, values: list[Any], depth: int) -> Any:
    if not depth:
        return chance.choice(values)
    inner = [_value(chance, values, depth - 1) for _ in range(chance.randint(1, 4))]
    return (
        inner if chance.random() < 0.4 else {f"{chance.choice('zyxabcé')}{at}": each for at, each in enumerate(inner)}
    )


def _cut(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _cut(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_cut(each) for each in value[:5]]
    if isinstance(value, float):  # of which llama.cpp's templates write six digits, and we all
        return float(f"{value:.6g}")
    return value[:LONGEST] if isinstance(value, str) else value


def _shares(answer: dict[str, Any]) -> list[float]:
    return [answer["noul"]] if answer["type"] == "noul" else [*answer["probabilities"].values()]


@pytest.mark.parametrize("type_", TEMPERATURES)
def test_answers_are_those_of_llama_server(
    type_: str, systemone: dict[str, str], folder: Path, head: dict[str, np.ndarray], tmp_path: Path
) -> None:
    kev = type_ == "kev"
    heat = {f"decision.temperature.{name}": each for name, each in TEMPERATURES[type_].items()}
    file = write_gguf(
        tmp_path / "m.gguf",
        folder,
        architecture="qwen35",
        settings=QWEN35 | heat | {"decision.type": type_} | ({"embedding_length_out": 2 * WIDTH} if kev else {}),
        tensors=head if kev else {},
        tokenizer=tokenizer_fields(folder, model="gpt2", pre="qwen2"),
        systemone=systemone[type_],
    )
    asked = [*requests(MOST.get(type_, 255))]
    with serving(file) as ask:
        wanted = [ask(body) for body in asked]
    write_jsonl("in.jsonl", asked)
    assert score("in.jsonl", "out.jsonl", model=file)["exit_code"] == 0
    found = [row["response"]["body"]["answers"] for row in read_output("out.jsonl")]
    questions, largest = 0, 0.0
    for body, own, server in zip(asked, found, wanted, strict=True):
        assert own.keys() == server.keys()
        for name, answer in server.items():
            ours, theirs = _shares(own[name]), _shares(answer)
            questions += 1
            largest = max(largest, float(np.abs(np.subtract(ours, theirs)).max()))
            assert ours == pytest.approx(theirs, abs=TOLERANCE), json.dumps({"asked": body, "name": name})
            assert own[name].get("choice") == answer.get("choice")
            for number in ("score", "confidence"):
                assert own[name].get(number, 0.0) == pytest.approx(answer.get(number, 0.0), abs=10 * TOLERANCE)
    spread = [share for server in wanted for answer in server.values() for share in _shares(answer)]
    assert np.std(spread) > 0.1, "answers must differ enough to tell wrong ones"
    print(f"{type_}: {questions} questions, largest difference {largest:.2g}")
