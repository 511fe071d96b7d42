"""Seeded workloads as texts with true answers, to measure what compression costs and gains.

Two are jobs of the sample domains; the others test what a compressed prompt must still contain (`tasks.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from prefillcli.bench import tasks
from prefillcli.bench.sample_text import CASES, ask, prompt

_LINE_TOKENS = 20  # of a line of history, for a first guess
_AIM = 0.985  # of the wanted tokens, so that most guesses are not too long
_CLOSE = 0.97  # of the wanted tokens: close enough
_TRIES = 20  # histories that are tried at most
_SHARED_FROM, _SHARED_BY = 40, 20  # rows from which readers come with many posts each, and how many


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Prompts with the answers that are true of them."""

    name: str
    prompts: tuple[str, ...]
    answers: tuple[str, ...]  # Yes or No, one for each prompt; as many of each, or one Yes more


@dataclass(frozen=True, slots=True)
class WorkloadKind:
    """How a workload is made: `build(rng, lines, answers)` gives a prompt for each answer, all behind one history."""

    summary: str  # for a table of workloads
    build: Callable[[Random, int, Sequence[str]], list[str]]
    least: int  # lines of history below which the task has no answer
    shares: bool = False  # several questions about one history are possible


def _ask_case(domain: str) -> Callable[[Random, int, Sequence[str]], list[str]]:
    """Questions about one history of a sample domain, each about another word while there are any."""

    def build(rng: Random, lines: int, answers: Sequence[str]) -> list[str]:
        case = CASES[domain](rng, lines)
        words = {"Yes": rng.sample(case.present, len(case.present)), "No": rng.sample(case.absent, len(case.absent))}
        prompts = []
        for number, answer in enumerate(answers):
            among = words[answer]
            word = among[answers[:number].count(answer) % len(among)]
            prompts.append(prompt(case, ask(rng, case, word)))
        return prompts

    return build


def _each(task: Callable[[Random, int, str], str]) -> Callable[[Random, int, Sequence[str]], list[str]]:
    return lambda rng, lines, answers: [task(rng, lines, answer) for answer in answers]


WORKLOADS: dict[str, WorkloadKind] = {
    "post-recommendation": WorkloadKind(
        "would a reader with this history read the new post?", _ask_case("post_recommendation"), 1, shares=True
    ),
    "credit-verification": WorkloadKind(
        "does the applicant's file mention the creditor?", _ask_case("credit_verification"), 1, shares=True
    ),
    "needle": WorkloadKind("one line mentions the topic asked about, or none", _each(tasks.needle), 1),
    "multi-needle": WorkloadKind(
        "two of four single mentions, or one and a missing one", _each(tasks.multi_needle), 8
    ),
    "variable-tracking": WorkloadKind("who holds a loan that changed hands", _each(tasks.variable_tracking), 20),
    "common-words": WorkloadKind("is it one of the four most common names", _each(tasks.common_words), 24),
    "frequent-words": WorkloadKind("is it one of the three most frequent topics", _each(tasks.frequent_words), 36),
    "qa": WorkloadKind("a fact about one applicant among the files of others", _each(tasks.qa), 16),
}


def make_workload(
    name: str, *, rows: int, tokens: int, seed: int, count: Callable[[str], int], per_user: int | None = None
) -> PromptSet:
    """`rows` prompts of at most `tokens` tokens each, as `count` counts them, special tokens included if it does.

    The longest prompt about each history has 97 % of `tokens` or more, or comes as close as whole lines of about 20
    tokens allow. `per_user` rows share a history: by default 20 of post-recommendation from 40 rows on, else 1; other
    numbers only for the two jobs. Answers alternate, shuffled within a history or over the workload. The same
    arguments give the same texts.

    Raises KeyError for an unknown name, ValueError for `per_user` that the workload does not have, for fewer than one
    row, and for prompts too short for the task.
    """
    recipe = WORKLOADS[name]
    if per_user is None:
        per_user = _SHARED_BY if name == "post-recommendation" and rows >= _SHARED_FROM else 1
    if rows < 1 or per_user < 1:
        raise ValueError(f"{rows} rows, {per_user} for each history: both must be 1 or more")
    if per_user > 1 and not recipe.shares:
        raise ValueError(f"{name} has one question for each history")
    answers = _answers(Random(f"{name} {seed} answers"), rows, per_user)
    prompts: list[str] = []
    for start in range(0, rows, per_user):
        prompts += _fit(name, recipe, answers[start : start + per_user], tokens, count, f"{name} {seed} {start}")
    return PromptSet(name, tuple(prompts), tuple(answers))


def _answers(rng: Random, rows: int, per_user: int) -> list[str]:
    """Alternating answers, shuffled within each history's rows; where a history has one, over all."""
    answers = ["Yes" if row % 2 == 0 else "No" for row in range(rows)]
    block = per_user if per_user > 1 else rows
    return [
        answer
        for start in range(0, rows, block)
        for answer in rng.sample(answers[start : start + block], len(answers[start : start + block]))
    ]


def _fit(
    name: str, recipe: WorkloadKind, answers: Sequence[str], tokens: int, count: Callable[[str], int], seed: str
) -> list[str]:
    """The prompts of one history, with as many lines as fit `tokens`: several are tried, as lines differ in length."""
    lines, found, longest = max(recipe.least, tokens // _LINE_TOKENS), [], 0
    for number in range(_TRIES):
        prompts = recipe.build(Random(f"{seed} {number}"), lines, answers)
        length = max(map(count, prompts))
        if longest < length <= tokens:
            found, longest = prompts, length
        if longest >= _CLOSE * tokens:
            break
        lines = max(recipe.least, round(lines * _AIM * tokens / length))
    if not found:
        raise ValueError(f"{name}: no prompt of {tokens} tokens, the task needs {recipe.least} lines of history")
    return found
