"""Tokens by llama.cpp's own tokenizer, compiled from its source: `make setup-llama-tokens`."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

PROGRAM = Path(__file__).parents[2] / "out" / "real" / "llama_tokens"

#: Languages, spaces, numbers, code and punctuation, on which patterns differ.
TEXTS = (
    "", "Hello world", "Is the customer satisfied? Answer: ", "I'm sure they'LL say it's OK, we'Ve won.",
    "  two  spaces\tand\ttabs ", "a\n\nb\r\n\r\n  c\n \n d\n\n\n\ne", "1 12 123 1234 12345 1,234,567.89 2024-07-26",
    "x=foo(bar[3],{'k':\"v\"}); // ok!!! ???? ...", "ÉCOLE été naïve Straße ŁÓDŹ", "HTMLParser camelCase iPhone",
    "日本語のテキストです。中文字符，测试！", "한국어 텍스트 입니다",  # noqa: RUF001
    "Привет, мир! Ещё раз.", "مرحبا بالعالم ، كيف",
    "नमस्ते दुनिया", "emoji 😀👍🏽 and 🇩🇪", "a  b   c    d        e", "trailing   ", "   leading",
    "~`!@#$%^&*()_+-={}[]|\\:\";'<>?,./", "don't can't 'tis 'S", "100% of $5.00 €20 ½ ² ٣٤",
    "\u00a0nbsp\u2003em\u3000ideo", "<b>bold</b> <br/>", "http://www.example.com/a_b?c=d&e=f#g",
    "0x1F 3.14e-10 v1.2.3",
    "e\u0301 a\u030a", "Second line.\nThird.", "A" * 70, " " * 40 + "x",
)  # fmt: skip


def llama_tokens(file: Path, texts: Sequence[str]) -> list[list[int]]:
    """Return the ids of each text, special tokens included, by a GGUF file. Raises ValueError for one that llama.cpp
    refuses."""
    lines = "".join(f"{text.encode().hex()}\n" for text in texts)
    done = subprocess.run([PROGRAM, file], input=lines, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(done.stderr.strip() or f"exit code {done.returncode}")
    return [[int(number) for number in line.split()] for line in done.stdout.split("\n")[:-1]]
