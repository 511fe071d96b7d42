"""Probes have the length, the balance and the answers that they claim."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from benchmarks.score_runs import SAMPLES
from prefillcli.bench.probes import WORKLOADS, PromptSet, make_workload
from prefillcli.bench.vocabulary import CREDITORS, TOPICS

NAMES = list(WORKLOADS)


def count(text: str) -> int:
    """Tokens of a crude tokenizer: words and marks."""
    return len(re.findall(r"\w+|[^\w\s]", text))


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(SAMPLES / "models" / "target")


def made(name: str, rows: int = 30, tokens: int = 1500, seed: int = 3, **more: int) -> PromptSet:
    return make_workload(name, rows=rows, tokens=tokens, seed=seed, count=count, **more)


def parts(prompt: str) -> tuple[str, str, str]:
    """What stands before the question, the question, and the word asked about."""
    history, mark, question = prompt.rpartition("New post: " if "\nNew post: " in prompt else "Question: ")
    word = re.search(r"about (\w+)\? Answer:\Z", prompt)
    assert word
    return history, mark + question, word[1]


def found(word: str, text: str) -> int:
    return len(re.findall(rf"\b{word}\b", text))


def mentions(text: str, vocabulary: tuple[str, ...]) -> Counter[str]:
    words = set(vocabulary)
    return Counter(word for word in re.findall(r"\w+", text) if word in words)


@pytest.mark.parametrize("name", NAMES)
def test_same_seed_same_texts(name: str) -> None:
    first = made(name, rows=6)
    assert first == made(name, rows=6)
    assert first.name == name
    other = made(name, rows=6, seed=4)
    assert not set(first.prompts) & set(other.prompts)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tokens", [1000, 4000])
def test_prompts_are_as_long_as_asked_and_never_longer(
    name: str, tokens: int, tokenizer: PreTrainedTokenizerBase
) -> None:
    def exact(text: str) -> int:
        return len(tokenizer(text)["input_ids"])

    workload = make_workload(name, rows=4, tokens=tokens, seed=1, count=exact)
    lengths = [exact(prompt) for prompt in workload.prompts]
    assert max(lengths) <= tokens
    assert min(lengths) >= 0.95 * tokens


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rows", [1, 2, 31, 45])
def test_answers_are_balanced(name: str, rows: int) -> None:
    workload = made(name, rows=rows, tokens=800)
    assert len(workload.prompts) == len(workload.answers) == rows
    assert workload.answers.count("Yes") - workload.answers.count("No") == rows % 2
    assert set(workload.answers) <= {"Yes", "No"}


@pytest.mark.parametrize("name", NAMES)
def test_answers_stand_in_no_pattern(name: str) -> None:
    answers = made(name, rows=30, tokens=800).answers
    assert len({answers[:2], answers[2:4], answers[4:6], answers[6:8], answers[8:10], answers[10:12]}) > 1


@pytest.mark.parametrize("name", NAMES)
def test_questions_end_as_the_models_know_them(name: str, tokenizer: PreTrainedTokenizerBase) -> None:
    for prompt in made(name, rows=6).prompts:
        word = parts(prompt)[2]
        tail = tokenizer.convert_ids_to_tokens(tokenizer(prompt)["input_ids"])[-4:]
        assert tail == [f"Ġ{word}", "?", "ĠAnswer", ":"]


@pytest.mark.parametrize("name", ["post-recommendation", "credit-verification"])
def test_jobs_ask_for_what_is_in_the_history_or_not(name: str) -> None:
    workload = made(name, rows=60, per_user=20)
    users: dict[str, list[str]] = {}
    for prompt, answer in zip(workload.prompts, workload.answers, strict=True):
        history, _, word = parts(prompt)
        assert answer == ("Yes" if found(word, history) else "No")
        users.setdefault(history, []).append(word)
    assert [len(words) for words in users.values()] == [20, 20, 20]
    assert all(len(set(words)) == 20 for words in users.values())


def test_only_large_post_recommendations_share_histories_unasked() -> None:
    def histories(name: str, rows: int) -> int:
        return len({parts(prompt)[0] for prompt in made(name, rows=rows).prompts})

    assert histories("post-recommendation", 40) == 2
    assert histories("post-recommendation", 39) == 39
    assert histories("credit-verification", 40) == 40
    with pytest.raises(ValueError, match="one question"):
        made("needle", per_user=2)


def test_a_needle_is_one_line_at_any_depth() -> None:
    workload = made("needle", rows=120, tokens=700)
    depths = []
    for prompt, answer in zip(workload.prompts, workload.answers, strict=True):
        history, _, word = parts(prompt)
        assert word in TOPICS
        lines = history.splitlines()[3:]
        at = [number for number, line in enumerate(lines) if found(word, line)]
        assert len(at) == found(word, history) == (1 if answer == "Yes" else 0)
        depths += [number / len(lines) for number in at]
    quarters = Counter(int(4 * depth) for depth in depths)
    assert min(quarters[n] for n in range(4)) >= 7  # 15 expected


def test_multi_needle_asks_for_two_single_mentions() -> None:
    workload = made("multi-needle", rows=60)
    missing = Counter[int]()
    for prompt, answer in zip(workload.prompts, workload.answers, strict=True):
        history, question, last = parts(prompt)
        pair = re.findall(r"about (\w+)", question)
        counts = [found(word, history) for word in pair]
        assert pair[1] == last
        assert set(counts) <= {0, 1}
        assert answer == ("Yes" if sum(counts) == 2 else "No")
        if answer == "No":
            missing[counts.index(0)] += 1
            assert sum(counts) == 1
    assert min(missing[0], missing[1]) >= 5


def test_variable_tracking_asks_for_the_end_of_a_chain() -> None:
    workload = made("variable-tracking", rows=40)
    for prompt, answer in zip(workload.prompts, workload.answers, strict=True):
        history, question, word = parts(prompt)
        steps = re.findall(r"loan from (\w+) taken over by (\w+)", history)
        assert len(steps) == 16
        start = re.search(r"loan from (\w+)", question)
        assert start
        holder = start[1]
        for before, after in steps:  # each chain stands in its own order
            holder = after if before == holder else holder
        assert answer == ("Yes" if holder == word else "No")
        assert found(word, history) == 1  # in both cases, so that a mention alone tells nothing
        assert holder != start[1]


@pytest.mark.parametrize("tokens", [700, 1500, 6000])
def test_common_words_are_far_more_common(tokens: int) -> None:
    workload = made("common-words", rows=12, tokens=tokens)
    for prompt, answer in zip(workload.prompts, workload.answers, strict=True):
        history, _, word = parts(prompt)
        ranked = mentions(history, CREDITORS).most_common()
        assert ranked[3][1] >= 2 * ranked[4][1]
        assert word in dict(ranked)
        assert answer == ("Yes" if word in dict(ranked[:4]) else "No")


@pytest.mark.parametrize("tokens", [700, 1500, 6000])
def test_frequent_words_follow_zipf(tokens: int) -> None:
    workload = made("frequent-words", rows=12, tokens=tokens)
    for prompt, answer in zip(workload.prompts, workload.answers, strict=True):
        history, _, word = parts(prompt)
        ranked = mentions(history, TOPICS).most_common()
        assert ranked[2][1] > ranked[3][1]
        assert ranked[0][1] / ranked[1][1] == pytest.approx(4, rel=0.25)
        assert word in dict(ranked)
        assert answer == ("Yes" if word in dict(ranked[:3]) else "No")


def test_qa_asks_about_one_file_among_many() -> None:
    workload = made("qa", rows=60)
    decoys = 0
    for prompt, answer in zip(workload.prompts, workload.answers, strict=True):
        history, question, word = parts(prompt)
        owner = re.search(r"file of (\w+ \w+) say", question)
        assert owner
        files = dict(re.findall(r"Applicant: (\w+ \w+),(.*?)(?=Applicant: |\Z)", history, re.DOTALL))
        assert len(files) == history.count("Applicant: ") >= 5
        assert answer == ("Yes" if found(word, files[owner[1]]) else "No")
        assert found(word, history) <= 1
        decoys += answer == "No" and found(word, history)
    assert 6 <= decoys <= 24  # of 30


def test_what_cannot_be_made_is_refused() -> None:
    with pytest.raises(KeyError):
        made("no-such-workload")
    with pytest.raises(ValueError, match="needs 20 lines"):
        made("variable-tracking", tokens=100)
    with pytest.raises(ValueError, match="1 or more"):
        made("needle", rows=0)
    with pytest.raises(ValueError, match="1 or more"):
        made("post-recommendation", per_user=0)
