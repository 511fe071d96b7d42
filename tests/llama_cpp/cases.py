"""Tiny tokenizers in GGUF files, and texts for them: `python -m tests.llama_cpp.cases` records llama.cpp's tokens."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prefillcli.models.gguf_tokenizer import SPLITS
from tests.gguf_files import SPLIT_TEXT, splitting_fields, write_tokenizer
from tests.llama_cpp.oracle import llama_tokens

RECORDED = Path(__file__).parent.parent / "unit" / "models" / "llama_cpp_tokens.json"
Fields = dict[str, Any]
_ADDED = "<\uff5cUser\uff5c>Hi<\uff5cend\u2581of\uff5c> there<think>\n<s> x"


def cases() -> dict[str, tuple[Fields, list[str]]]:
    """Return settings and texts by the name of the case; those of `pre` by its value."""
    found = {name: (splitting_fields(SPLIT_TEXT, pre=name), [SPLIT_TEXT]) for name in SPLITS if not SPLITS[name].lines}
    for name in ("llama-bpe", "qwen2"):
        found[f"{name}, a token that no merge makes"] = splitting_fields("a b", pre=name), ["Zz", "Zz a"]
    for name, begins in (("qwen2", True), ("tekken", False)):
        fields = splitting_fields("Hi there", pre=name, add_bos_token=begins, add_eos_token=True, eos_token_id=40)
        found[f"{name}, begins {begins}"] = fields, ["Hi there", ""]
    found["no pre"] = splitting_fields("a 12345!b", pre=None), ["a 12345!b"]
    found["added tokens"] = splitting_fields("Hi there"), [_ADDED, f" {_ADDED} "]
    found["types that the file has wrong"] = _wrong_types()
    found["letters"] = letters_fields(), ["Hi there", "  Hi", "", "é日\tx", "Hi<s>there</s> there", "<unk> <think>Hi"]
    found["letters without a space before them"] = letters_fields(add_space_prefix=False), ["Hi there", " Hi<s>there"]
    found["letters, no BOS"] = letters_fields(add_bos_token=False, bos_token_id=2), ["Hi", " "]
    phi3 = letters_fields(**{"general.name": "Phi-3 mini"})
    phi3["tokens"][phi3["tokens"].index("<0xFE>")] = "<|endoftext|>"  # which llama.cpp wants there
    found["Phi-3"] = phi3, ["<think>\n Hi<s> there", "</s>  Hi"]
    found["gemma4"] = _lines("gemma4"), ["Hi  there\n\nHi\n", "é\n\n\n", "Hi<s> <think>"]
    found["sarvam-moe"] = _lines("gpt2", pre="sarvam-moe"), ["Hi  there\n\nHi\n", "é\n\n\n", "Hi<s> <think>"]
    return found


def _wrong_types() -> tuple[Fields, list[str]]:
    fields = splitting_fields("Hi there")
    names = [
        "<|im_end|>",
        "</s>",
        "<fim_prefix>",
        "<|file_sep|>",
        "<|channel|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "",
    ]
    fields["tokens"] = [*fields["tokens"], *names]
    fields["token_type"] = [*fields["token_type"], *[1] * len(names)]
    fields["fim_pre_token_id"] = 3  # so that the name of the usual one means nothing
    return fields, ["Hi".join(names), "Hi there"]


def letters_fields(**changes: Any) -> Fields:
    """Return settings of SentencePiece: pieces with scores, and bytes for other letters."""
    text = "▁Hi▁▁there▁x\n"
    parts = {text[at : at + size] for at in range(len(text)) for size in range(1, 7) if at + size <= len(text)}
    pieces = sorted(parts, key=lambda part: (len(part) > 1, hash_of(part)))
    special = {"<unk>": 2, "<s>": 3, "</s>": 3, **{f"<0x{byte:02X}>": 6 for byte in range(256)}, "<think>": 4}
    tokens = [*special, *pieces]
    fields = {
        "model": "llama",
        "pre": "default",
        "tokens": tokens,
        "scores": [-float(number) for number in range(len(tokens))],
        "token_type": [*special.values(), *[1] * len(pieces)],
    }
    return fields | changes


def hash_of(part: str) -> int:
    """Return a number that shuffles pieces, the same in every process."""
    return sum(ord(letter) * 31**at for at, letter in enumerate(part)) % 997


def _lines(model: str, **changes: Any) -> Fields:
    fields = letters_fields()
    del fields["scores"]
    parts = [token for token in fields["tokens"] if not token.startswith("<") and len(token) > 1]
    merges = ["\n \n", *(f"{part[:at]} {part[at:]}" for part in parts for at in range(1, len(part)))]
    fields["tokens"] = [*fields["tokens"], "\n\n"]
    fields["token_type"] = [*fields["token_type"], 1]
    return fields | {"model": model, "merges": merges, "bos_token_id": 1, "eos_token_id": 2} | changes


def tokens_of(found: Mapping[str, tuple[Fields, list[str]]]) -> dict[str, list[list[int]]]:
    """Return llama.cpp's tokens of each case's texts."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "m.gguf")
        return {name: llama_tokens(write_tokenizer(file, fields), texts) for name, (fields, texts) in found.items()}


if __name__ == "__main__":
    lines = [f"{json.dumps(name)}: {json.dumps(ids)}" for name, ids in tokens_of(cases()).items()]
    RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n")
