"""The tokenizers of GGUF files: tokens as llama.cpp gives them, and what is refused. The oracle's tokens are recorded
(`make setup-llama-tokens`, `python -m tests.llama_cpp.cases`); `make test-llama-tokens` compares them again."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from prefillcli.errors import UsageError
from prefillcli.models.gguf_header import read_gguf_header
from prefillcli.models.gguf_tokenizer import make_tokenizer, unknown_settings
from prefillcli.models.open import load_tokenizer
from tests.gguf_files import splitting_fields, write_tokenizer
from tests.llama_cpp.cases import RECORDED, cases, letters_fields


def header_fields(file: Path) -> dict[str, Any]:
    return read_gguf_header(file, whole=True).fields


def test_tokens_are_those_of_llama_cpp(tmp_path: Path) -> None:
    """Of every `pre` that is known, and every rule about types, BOS, EOS and spaces."""
    recorded = json.loads(RECORDED.read_text())
    found = {}
    for name, (fields, texts) in cases().items():
        file = write_tokenizer(tmp_path / "m.gguf", fields)
        tokenizer = make_tokenizer(header_fields(file), file)
        found[name] = [tokenizer(text)["input_ids"] for text in texts]
    assert len(found) > 80
    assert found == recorded


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"pre": "own-bpe"}, "tokenizer.ggml.pre is 'own-bpe', a way to split texts that is not known"),
        ({"pre": "kimi-k2"}, "tokenizer.ggml.pre is 'kimi-k2'"),
        ({"model": "rwkv"}, "tokenizer.ggml.model is 'rwkv', which is not read; gpt2, llama, gemma4 are"),
        ({"model": None}, "tokenizer.ggml.model is missing"),
        ({"model": "llama"}, "tokenizer.ggml.scores is missing"),
        ({"merges": None}, "tokenizer.ggml.merges is missing"),
        ({"merges": ["a b", "z z"]}, "no tokenizer can be made of it"),
        ({"token_type": [1, 3]}, "tokenizer.ggml.token_type is missing, or too short"),
        ({"tokens": ["a", "b", "<x>", "a"], "merges": []}, "tokenizer.ggml.tokens has 'a' twice, as 0 and 3"),
        ({"pre": "llama-bpe", "bos_token_id": None}, "tokenizer.ggml.bos_token_id names no token"),
        ({"add_bos_token": True, "bos_token_id": 1 << 20}, "tokenizer.ggml.bos_token_id names no token"),
        ({"add_bos_token": 1}, "tokenizer.ggml.add_bos_token is 1, which is neither true nor false"),
    ],
)
def test_what_cannot_be_applied_is_refused_by_name(changes: dict[str, Any], says: str) -> None:
    fields = {f"tokenizer.ggml.{name}": value for name, value in splitting_fields("ab", **changes).items()}
    with pytest.raises(UsageError) as caught:
        make_tokenizer(fields, Path("m.gguf"))
    assert str(caught.value).startswith(f"m.gguf: {says}")
    assert str(caught.value).endswith("\ntake the model as safetensors")


def test_a_token_that_would_not_be_found_in_texts_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {f"tokenizer.ggml.{name}": value for name, value in splitting_fields("ab").items()}
    added = partial(AddedToken, single_word=True)  # a library that finds fewer
    monkeypatch.setattr("prefillcli.models.gguf_tokenizer.AddedToken", lambda token, **how: added(f"{token} ", **how))
    with pytest.raises(UsageError, match=r"tokens has '<s>' as \d+, which would not be found in texts"):
        make_tokenizer(fields, Path("m.gguf"))


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_transformers_puts_no_rules_of_a_family_in_their_place(family: str, tmp_path: Path) -> None:
    """As it does with folders of Qwen 2, for which it composes letters and their accents."""
    made = make_tokenizer(
        {f"tokenizer.ggml.{name}": value for name, value in letters_fields().items()}, Path("m.gguf")
    )
    made.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    found = load_tokenizer(tmp_path, embedded=300, trust_remote_code=False, said="m.gguf", own=True)
    assert found.backend_tokenizer.to_str() == made.backend_tokenizer.to_str()


def test_settings_that_are_not_known_are_found() -> None:
    known = ["tokenizer.ggml.pre", "tokenizer.ggml.fim_pre_token_id", "tokenizer.chat_template", "general.name"]
    assert unknown_settings(dict.fromkeys([*known, "tokenizer.ggml.add_moods"])) == ["tokenizer.ggml.add_moods"]
