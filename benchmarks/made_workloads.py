"""`python -m benchmarks.made_workloads`: questions with known answers, as files for `prefill bench`.

Two workloads are jobs of the sample domains. The others are tasks like those of RULER (arXiv 2404.06654), which test
what a compressed prompt must still contain. RULER asks for a continuation; here each task is a question of Yes or No.
Every question ends in "about {word}? Answer:", as those that the sample models were trained on: they find a word, but
they can neither count nor track.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from math import ceil
from pathlib import Path
from random import Random
from typing import Annotated

import pyarrow as pa
import pyarrow.parquet as pq
import typer
from transformers import AutoTokenizer

from benchmarks.console import log
from benchmarks.needles import (
    POST_INSTRUCTION,
    TOPICS,
    Case,
    alternating_answers,
    filler,
    fit_history,
    needle,
    post_case,
    prompt,
)
from benchmarks.sample_text import CASES, CREDIT_INSTRUCTION, CREDITORS, ask, credit_case
from benchmarks.score_runs import SAMPLES

NEEDLES = 4  # in multi-needle  # in multi-needle
CHAINS, LOANS = 4, 5  # in variable-tracking: chains, and names along each (RULER: 1 and 5)
COMMON, RARE = 4, 3  # in common-words: common names, and the most mentions of any other
TOP = 3  # in frequent-words: RULER asks for the three most frequent ones
PARAGRAPH = 8  # lines of one applicant's file in qa, or more where that makes more files than ...
MOST_FILES = 200  # ... this: each needs a name of its own
_MANY_POSTS = "Below are a reader, the posts the reader has opened, and one question. Answer Yes or No.\n"
_MANY_FILES = "Below are the account histories of some applicants and one question. Answer Yes or No.\n"
_SHARED_FROM, _SHARED_BY = 40, 20  # rows from which readers come with many posts each, and how many


def multi_needle(rng: Random, lines: int, answer: str) -> str:
    """Are both creditors in the file? Four are mentioned once each. No: either of the two asked about is not there."""
    *needles, missing = rng.sample(CREDITORS, NEEDLES + 1)
    plan = filler(rng, [name for name in CREDITORS if name not in {*needles, missing}], lines)
    for place, name in zip(rng.sample(range(lines), NEEDLES), needles, strict=True):
        plan[place] = name
    pair = rng.sample(needles, 2)
    if answer == "No":
        pair[rng.randrange(2)] = missing
    question = f"Does the file say anything about {pair[0]} and also anything about {pair[1]}?"
    return _ask_file(credit_case(rng, lines, plan), question)


def variable_tracking(rng: Random, lines: int, answer: str) -> str:
    """Who holds the loan in the end? Four loans change hands four times each. No: the last holder of another loan."""
    names = rng.sample(CREDITORS, CHAINS * LOANS)
    chains = [names[start : start + LOANS] for start in range(0, len(names), LOANS)]
    plan = filler(rng, [name for name in CREDITORS if name not in names], lines)
    turns = [number for number in range(CHAINS) for _ in range(LOANS - 1)]
    rng.shuffle(turns)  # chains are interleaved, each in its own order
    places = sorted(rng.sample(range(lines), len(turns)))
    for place in places:
        plan[place] = None
    case = credit_case(rng, lines, plan)
    history = list(case.lines)
    steps = [count() for _ in chains]
    for place, turn in zip(places, turns, strict=True):
        step = next(steps[turn])
        before, after = chains[turn][step : step + 2]
        history[place] = _event(history[place], f"loan from {before} taken over by {after}, same terms")
    asked, other = rng.sample(chains, 2)
    end = asked[-1] if answer == "Yes" else other[-1]
    question = f"The loan from {asked[0]} changed hands. Is what is owed on it now about {end}?"
    return case.head + "".join(f"{line}\n" for line in history) + f"Question: {question} Answer:"


def common_words(rng: Random, lines: int, answer: str) -> str:
    """Is the creditor among the four most common? Half of the lines are about those. No: one that is mentioned rarely.

    RULER's common words stand ten times as often as the others; here it is two to four times below a hundred lines,
    and more above.
    """
    names = rng.sample(CREDITORS, len(CREDITORS))
    common = names[:COMMON]
    often = lines // 2 // COMMON
    left = lines - often * COMMON
    rare = names[COMMON : COMMON + ceil(left / min(RARE, max(1, often // 4)))]
    plan: list[str | None] = [name for name in common for _ in range(often)]
    plan += [rare[number % len(rare)] for number in range(left)]
    rng.shuffle(plan)
    word = rng.choice(common if answer == "Yes" else rare)
    question = f"{COMMON} names come up far more often than all others. Are any of their entries about {word}?"
    return _ask_file(credit_case(rng, lines, plan), question)


def frequent_words(rng: Random, lines: int, answer: str) -> str:
    """Is the topic among the three most frequent, where the k-th is mentioned in proportion to 1/k^2? No: a later one.

    RULER's frequent words extraction, with its Zipf exponent of 2.
    """
    words = rng.sample(TOPICS, len(TOPICS))
    plan: list[str | None] = []
    for rank, word in enumerate(words, 1):
        plan += [word] * min(max(1, int(lines * 0.608 / rank**2)), lines - len(plan))
    plan += [None] * (lines - len(plan))
    rng.shuffle(plan)
    used = [word for word in words if word in plan]
    word = rng.choice(used[:TOP] if answer == "Yes" else used[TOP:])
    case = post_case(rng, lines, plan)
    question = f"{TOP} topics come up more often than all others. Are any of those posts about {word}?"
    head = _MANY_POSTS + case.head.removeprefix(POST_INSTRUCTION)
    return f"{head}{case.history}Question: {question} Answer:"


def qa(rng: Random, lines: int, answer: str) -> str:
    """Does one applicant's file mention a creditor, among the files of others? Yes: one line of it, of no other file.

    No: as often one line of another file does as none of any file.
    """
    asked, *others = rng.sample(CREDITORS, len(CREDITORS))
    files = max(2, min(lines // PARAGRAPH, MOST_FILES))
    plans = [filler(rng, others, lines // files + (number < lines % files)) for number in range(files)]
    chosen, decoy = rng.sample(range(len(plans)), 2)
    if answer == "Yes" or rng.random() < 0.5:
        plan = plans[chosen if answer == "Yes" else decoy]
        plan[rng.randrange(len(plan))] = asked
    cases: dict[str, Case] = {}
    while len(cases) < files:
        plan = plans[len(cases)]
        case = credit_case(rng, len(plan), plan)
        cases.setdefault(case.owner, case)
    owner = list(cases)[chosen]
    text = "".join(case.prefix.removeprefix(CREDIT_INSTRUCTION) for case in cases.values())
    return f"{_MANY_FILES}{text}Question: Does the file of {owner} say anything about {asked}? Answer:"


def _event(line: str, event: str) -> str:
    """The line with its date and another event."""
    return f"{line.partition(': ')[0]}: {event}."


def _ask_file(case: Case, question: str) -> str:
    return f"{case.prefix}Question: {question} Answer:"


@dataclass(frozen=True, slots=True)
class WorkloadKind:
    """How a workload is made: `build(rng, lines, answers=)` gives a prompt for each answer, all behind one history."""

    build: Callable[..., list[str]]
    least: int  # lines of history below which the task has no answer


def _ask_case(domain: str) -> Callable[..., list[str]]:
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


def _each(task: Callable[[Random, int, str], str]) -> Callable[..., list[str]]:
    return lambda rng, lines, answers: [task(rng, lines, answer) for answer in answers]


WORKLOADS = {
    "post-recommendation": WorkloadKind(_ask_case("post_recommendation"), 1),
    "credit-verification": WorkloadKind(_ask_case("credit_verification"), 1),
    "needle": WorkloadKind(_each(needle), 1),
    "multi-needle": WorkloadKind(_each(multi_needle), 8),
    "variable-tracking": WorkloadKind(_each(variable_tracking), 20),
    "common-words": WorkloadKind(_each(common_words), 24),
    "frequent-words": WorkloadKind(_each(frequent_words), 36),
    "qa": WorkloadKind(_each(qa), 16),
}


def make_workload(
    name: str, *, rows: int, tokens: int, seed: int, count: Callable[[str], int]
) -> tuple[list[str], list[str]]:
    """`rows` prompts of at most `tokens` tokens each, as `count` counts them, and their answers.

    From 40 rows on, 20 rows of post-recommendation share a history. Answers alternate, shuffled within a history or
    over the workload. The same arguments give the same texts. Raises ValueError for prompts too short for the task.
    """
    kind = WORKLOADS[name]
    per_history = _SHARED_BY if name == "post-recommendation" and rows >= _SHARED_FROM else 1
    rng = Random(f"{name} {seed} answers")
    blocks = [min(per_history, rows - start) for start in range(0, rows, per_history)] if per_history > 1 else [rows]
    answers = [answer for size in blocks for answer in alternating_answers(rng, size)]
    prompts: list[str] = []
    for start in range(0, rows, per_history):
        prompts += fit_history(
            partial(kind.build, answers=answers[start : start + per_history]),
            tokens=tokens,
            count=count,
            seed=f"{name} {seed} {start}",
            least=kind.least,
        )
    return prompts, answers


def main(
    workload: Annotated[list[str] | None, typer.Option(help=f"One of {', '.join(WORKLOADS)}; repeatable.")] = None,
    rows: Annotated[int, typer.Option(help="Rows of each.")] = 60,
    tokens: Annotated[int, typer.Option(help="Most tokens in a prompt.")] = 1000,
    seed: Annotated[int, typer.Option(help="Another seed gives other texts.")] = 0,
    model: Annotated[str, typer.Option(help="Folder whose tokenizer counts.")] = str(SAMPLES / "models" / "target"),
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the files.")] = Path("out/made"),
) -> None:
    """Write one Parquet file for each workload, with the columns prompt and answer."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    output.mkdir(parents=True, exist_ok=True)
    for name in workload or WORKLOADS:
        prompts, answers = make_workload(
            name, rows=rows, tokens=tokens, seed=seed, count=lambda text: len(tokenizer(text)["input_ids"])
        )
        pq.write_table(pa.table({"prompt": prompts, "answer": answers}), output / f"{name}.parquet")
        log(f"{output / f'{name}.parquet'}: {rows} rows")


if __name__ == "__main__":
    typer.run(main)
