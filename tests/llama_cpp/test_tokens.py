"""Tokenizers of GGUF files against llama.cpp's own: `make test-llama-tokens`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from prefillcli.models.gguf_header import read_gguf_header
from prefillcli.models.gguf_tokenizer import SPLITS, make_tokenizer
from recipes.real_model import FOLDER, GEMMA, gguf_file, joined_file
from tests.gguf_files import splitting_fields, tokenizer_fields, write_tokenizer
from tests.llama_cpp.cases import RECORDED, cases, tokens_of
from tests.llama_cpp.oracle import TEXTS, llama_tokens

pytestmark = pytest.mark.real

#: The packages of `make setup-tokenizers`, and what their models' files say of them.
PACKAGES = {
    "qwen3": ("gpt2", "qwen2"),
    "gptoss": ("gpt2", "gpt-4o"),
    "llama3_1": ("gpt2", "llama-bpe"),
    "deepseek_v3": ("gpt2", "deepseek-v3"),
    "gemma3": ("gemma4", "gemma4"),
}
#: Of these llama.cpp approximates the model's own pattern, which does split a word before a capital.
APPROXIMATED = {"youtu", "tiny_aya", "cohere2moe"}


def assert_same(file: Path, texts: list[str]) -> None:
    fields = read_gguf_header(file, whole=True).fields
    tokenizer = make_tokenizer(fields, file)
    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    added = [token for token, kind in zip(tokens, kinds, strict=True) if kind in (3, 4)]
    texts = [*texts, *added, *(f"{token}Hi {token}\n" for token in added[:200])]
    for text, wanted in zip(texts, llama_tokens(file, texts), strict=True):
        assert tokenizer(text)["input_ids"] == wanted, text


def test_the_recorded_tokens_are_those_of_llama_cpp() -> None:
    assert json.loads(RECORDED.read_text()) == tokens_of(cases())


@pytest.mark.parametrize("name", [name for name in SPLITS if not SPLITS[name].lines])
def test_every_way_to_split_texts(name: str, tmp_path: Path) -> None:
    texts = [text for text in TEXTS if name not in APPROXIMATED or "camelCase" not in text]
    fields = splitting_fields(" ".join(texts), pre=name)
    assert_same(write_tokenizer(tmp_path / "m.gguf", fields), texts)


@pytest.mark.parametrize("name", PACKAGES)
def test_real_tokenizers(name: str, tmp_path: Path) -> None:
    model, pre = PACKAGES[name]
    fields: dict[str, Any] = tokenizer_fields(FOLDER / "tokenizers" / name, model=model, pre=pre)
    assert_same(write_tokenizer(tmp_path / "m.gguf", fields), list(TEXTS))


def test_the_file_of_smollm2() -> None:
    assert_same(gguf_file(), list(TEXTS))


def test_the_file_of_gemma() -> None:
    assert_same(joined_file(GEMMA), list(TEXTS))
