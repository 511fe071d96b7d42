"""decider's layouts: the tokens of the package decider-ai, and transformers' own eager forward at their end."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config

from prefillcli.asking.decisions import DecisionBuilder
from tests.jobs.jobs import read_output, score, write_jsonl
from tests.real.conftest import FOLDER

LONG = [f"item {at}" for at in range(9)]
STATES: list[Any] = [
    "My card was charged twice.",
    {"ticket": "Straße 7", "items": [{"at": 1}, *range(8)], "plan": ["pro", 1.5, True, None]},
    [{"role": "user", "content": "Late again!\n"}],
]
QUESTIONS: dict[str, Any] = {
    "team": {
        "type": "choice",
        "instructions": "Which team?",
        "criteria": {"billing": "money", "None of the above": None},
    },
    "which": {"type": "choice", "instructions": {"ask": "Which?"}, "criteria": dict.fromkeys([*LONG, *"xyz"])},
    "angry": {"type": "noul", "instructions": "Is the customer angry?", "criteria": {"true": "shouts"}},
    "fits": {"type": "noul", "criteria": {"true": "it fits", "false": ["no", 1]}},
    "how": {"type": "score", "instructions": "How urgent?", "criteria": ["low", {"level": "mid"}, "high"]},
    "stars": {
        "type": "score",
        "instructions": ["Stars", 2],
        "criteria": ["0: none", " -1 :few", "none", "2 : 3: n/a"],
    },
}
CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 1.3, "temperature_by_type": {"choice": 0.7, "noul": 2.0}},
    "chat": {"layout": "chat", "temperature_by_options": {"a": 1.5, "b": -0.2, "min": 0.5}},
    "schema first": {"schema_first": True, "temperature_schema_first": 0.8, "neutralize_none": False},
    "schema first, chat": {
        "schema_first": True, "chat_template": True, "temperature_by_type": {"score": 1.7},
        "temperature_schema_first_by_type": {"noul": 0.6},
    },
    "levels apart": {"isolated_levels": True, "temperature": 1.4, "temperature_by_type": {"score": 0.6, "noul": 3.0}},
    "levels apart, by options": {
        "isolated_levels": True, "layout": "chat", "temperature_by_options": {"a": 1.5, "b": -0.2},
    },
    "levels apart, schema first": {
        "isolated_levels": True, "schema_first": True, "temperature_schema_first_by_type": {"score": 2.0},
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of random weights with a real tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "qwen3"
    tokenizer = AutoTokenizer.from_pretrained(FOLDER / "tokenizers" / "qwen3")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=4096, initializer_range=0.5,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", CONFIGS)
def test_questions_are_asked_and_answered_as_by_decider(
    model: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from decider import prompt, systemone, temperature

    config = CONFIGS[name]
    (model / "decider_config.json").write_text(json.dumps(config))
    write_jsonl("in.jsonl", [{"state": state, "questions": QUESTIONS} for state in STATES])
    asked_ids = set()
    build = DecisionBuilder.build

    def noted(builder: DecisionBuilder, *given: Any) -> Any:
        prompts, errors = build(builder, *given)
        asked_ids.update(tuple(each.tokens.tolist()) for each in prompts)
        return prompts, errors

    monkeypatch.setattr(DecisionBuilder, "build", noted)
    assert score("in.jsonl", "out.jsonl", model=model, dtype="float32")["exit_code"] == 0
    tokenizer = AutoTokenizer.from_pretrained(model)
    eager = AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager", dtype=torch.float32).eval()
    chat, first = prompt.chat_for(tokenizer, config), bool(config.get("schema_first"))
    heats = temperature.from_config(config)[int(first)]
    order = SimpleNamespace(shuffle=lambda _: None, sample=lambda values, count: values[:count])
    for state, row in zip(STATES, read_output("out.jsonl"), strict=True):
        rendered = {key: systemone.render_question(asked) for key, asked in QUESTIONS.items()}
        planned, index = systemone.plan_rows(rendered, bool(config.get("isolated_levels")))
        answers = []
        for asked, type_ in zip(planned, systemone.row_types(rendered, index), strict=True):
            options = _neutral(asked["options"]) if config.get("neutralize_none", True) else asked["options"]
            own = SimpleNamespace(text=asked["question"], options=options, gold=0)
            example = SimpleNamespace(context=systemone.render_state(state), qs=[own])
            layout = "schema_first" if first else "state_first"
            item = prompt.build(example, tokenizer, order, max_options=255, layout=layout, chat=chat)
            item["types"] = [type_]
            assert tuple(item["ids"]) in asked_ids, (name, asked)
            with torch.inference_mode():
                logits = eager(input_ids=torch.tensor([item["ids"]])).logits[0, -1].double()
            heat = temperature.for_items(*heats, [item])
            heat = heat[0][0] if isinstance(heat, list) else heat
            letters = prompt.label_table(tokenizer)[1][: len(options)]
            answers.append(torch.softmax(logits[letters] / heat, -1).tolist())
        monkeypatch.setattr(systemone, "round", lambda value, _: value, raising=False)
        for key, wanted in systemone.assemble(rendered, index, answers).items():
            found = row["response"]["body"]["answers"][key]
            for told in {"noul", "probabilities", "score", "confidence"} & wanted.keys():
                assert found[told] == pytest.approx(wanted[told], abs=2e-5), (name, key, told)


def _neutral(options: list[str]) -> list[str]:
    # As the package does in `infer`, whose other imports are not at hand.
    return ["not listed here" if each.strip().lower().startswith("none of the above") else each for each in options]
