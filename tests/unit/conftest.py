"""Small tokenizers of every family and small inputs, made here so that the tests run offline."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TEXTS = [
    "Is the topic in the history of the user? Answer: Yes",
    "Is the post about music or sport? Answer: No",
    "Reply Yes or No.\nYes",
    "Reply Yes or No.\nNo",
    "(Yes) (No) yes no YES NO",
    "The garden, the train and the river were in the news.",
] * 20
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _byte_level(split: bool = False, chat: str | None = None) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = (
        pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_LLAMA3), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        if split
        else pre_tokenizers.ByteLevel(add_prefix_space=False)
    )
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=specials,
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXTS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = chat
    return fast


def _sentencepiece(prepend: str) -> PreTrainedTokenizerFast:
    """Llama-2-like: BPE over `▁` with bytes for what is unknown."""
    specials = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    if prepend == "normalizer":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend)
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=specials, show_progress=False)
    texts = [line for text in _TEXTS for line in text.split("\n")] + ["Yes", "No"] * 30
    words = [word for text in texts for word in text.split()] if prepend == "normalizer" else texts
    tokenizer.train_from_iterator(words, trainer)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def _word_level() -> PreTrainedTokenizerFast:
    words = ["<unk>"]
    for text in _TEXTS:
        words += [word for word, _ in pre_tokenizers.Whitespace().pre_tokenize_str(text) if word not in words]
    tokenizer = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


@pytest.fixture(scope="session")
def byte_level() -> PreTrainedTokenizerFast:
    """GPT-2's kind, adds <s> before a text."""
    return _byte_level()


@pytest.fixture(scope="session")
def chat_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level with a chat template."""
    return _byte_level(chat=CHAT)


@pytest.fixture(scope="session")
def llama3_like() -> PreTrainedTokenizerFast:
    return _byte_level(split=True)


@pytest.fixture(scope="session")
def metaspace() -> PreTrainedTokenizerFast:
    return _sentencepiece("first")


@pytest.fixture(scope="session")
def metaspace_always() -> PreTrainedTokenizerFast:
    """Puts a space before every piece of text, also after a special token."""
    return _sentencepiece("always")


@pytest.fixture(scope="session")
def llama2_like() -> PreTrainedTokenizerFast:
    return _sentencepiece("normalizer")


@pytest.fixture(scope="session")
def word_level() -> PreTrainedTokenizerFast:
    return _word_level()


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., str]:
    """Write objects (or raw bytes, as they are) as lines; gives the path."""

    def write(lines: list[Any], name: str = "input.jsonl") -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"".join((x if isinstance(x, bytes) else json.dumps(x).encode()) + b"\n" for x in lines))
        return str(path)

    return write
