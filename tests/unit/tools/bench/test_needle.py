"""The made prompts of the benchmarks have the length, the balance and the answers that they claim."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from benchmarks.needles import TOPICS, make_needles
from benchmarks.score_runs import SAMPLES


def count(text: str) -> int:
    """Tokens of a crude tokenizer: words and marks."""
    return len(re.findall(r"\w+|[^\w\s]", text))


def made(rows: int = 30, tokens: int = 1500, seed: int = 3) -> tuple[list[str], list[str]]:
    return make_needles(rows=rows, tokens=tokens, seed=seed, count=count)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(SAMPLES / "models" / "target")


def test_same_seed_same_texts() -> None:
    prompts, _ = made(rows=6)
    assert made(rows=6)[0] == prompts
    assert not {*prompts} & {*made(rows=6, seed=4)[0]}


@pytest.mark.parametrize("tokens", [1000, 4000])
def test_prompts_are_as_long_as_asked_and_never_longer(tokens: int, tokenizer: PreTrainedTokenizerBase) -> None:
    def exact(text: str) -> int:
        return len(tokenizer(text)["input_ids"])

    prompts, _ = make_needles(rows=4, tokens=tokens, seed=1, count=exact)
    lengths = [exact(prompt) for prompt in prompts]
    assert max(lengths) <= tokens
    assert min(lengths) >= 0.95 * tokens
    with pytest.raises(ValueError, match="too few"):
        make_needles(rows=4, tokens=40, seed=1, count=exact)


@pytest.mark.parametrize("rows", [1, 2, 31, 45])
def test_answers_are_balanced(rows: int) -> None:
    prompts, answers = made(rows=rows, tokens=800)
    assert len(prompts) == len(answers) == rows
    assert answers.count("Yes") - answers.count("No") == rows % 2
    assert set(answers) <= {"Yes", "No"}


def test_answers_stand_in_no_pattern() -> None:
    _, answers = made(tokens=800)
    assert len({tuple(answers[at : at + 2]) for at in range(0, 12, 2)}) > 1


def test_questions_end_as_the_models_know_them(tokenizer: PreTrainedTokenizerBase) -> None:
    for prompt in made(rows=6)[0]:
        word = re.search(r"about (\w+)\? Answer:\Z", prompt)
        tail = tokenizer.convert_ids_to_tokens(tokenizer(prompt)["input_ids"])[-4:]
        assert tail == [f"Ġ{word[1]}", "?", "ĠAnswer", ":"]


def test_a_needle_is_one_line_at_any_depth() -> None:
    depths = []
    for prompt, answer in zip(*made(rows=120, tokens=700), strict=True):
        history, _, question = prompt.rpartition("New post: ")
        word = re.search(r"about (\w+)\? Answer:\Z", question)
        assert word[1] in TOPICS
        lines = history.splitlines()[3:]
        at = [number for number, line in enumerate(lines) if re.search(rf"\b{word[1]}\b", line)]
        assert len(at) == len(re.findall(rf"\b{word[1]}\b", history)) == (1 if answer == "Yes" else 0)
        depths += [number / len(lines) for number in at]
    quarters = Counter(int(4 * depth) for depth in depths)
    assert min(quarters[n] for n in range(4)) >= 7  # 15 expected
