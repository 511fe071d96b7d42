"""Tasks like those of RULER, in the words of the sample domains. Their answers are known from how they are made.

A task takes a generator, a number of history lines and the answer to make true, and gives a prompt. RULER (arXiv
2404.06654) asks for a continuation; here each task is a question of Yes or No. Every question ends in "about {word}?
Answer:", as those that the sample models were trained on: they find a word, but they can neither count nor track.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from math import ceil
from random import Random

from prefillcli.bench.sample_text import (
    CREDIT_INSTRUCTION,
    POST_INSTRUCTION,
    Case,
    ask,
    credit_case,
    post_case,
    prompt,
)
from prefillcli.bench.vocabulary import CREDITORS, TOPICS

NEEDLES = 4  # in multi-needle
CHAINS, LOANS = 4, 5  # in variable-tracking: chains, and names along each (RULER: 1 and 5)
COMMON, RARE = 4, 3  # in common-words: common names, and the most mentions of any other
TOP = 3  # in frequent-words: RULER asks for the three most frequent ones
PARAGRAPH = 8  # lines of one applicant's file in qa, or more where that makes more files than ...
MOST_FILES = 200  # ... this: each needs a name of its own

_IDLE_SHARE = 0.3  # of filler lines, those about nothing that is asked about
_MANY_POSTS = "Below are a reader, the posts the reader has opened, and one question. Answer Yes or No.\n"
_MANY_FILES = "Below are the account histories of some applicants and one question. Answer Yes or No.\n"


def needle(rng: Random, lines: int, answer: str) -> str:
    """Is the topic asked about in the history? Yes: exactly one line, anywhere, mentions it. No: none does.

    In both cases one line at a depth uniform over the history has a topic that stands nowhere else.
    """
    asked, other, *rest = rng.sample(TOPICS, len(TOPICS))
    plan = _filler(rng, rest, lines)
    plan[rng.randrange(lines)] = asked if answer == "Yes" else other
    case = post_case(rng, lines, plan)
    return prompt(case, ask(rng, case, asked))


def multi_needle(rng: Random, lines: int, answer: str) -> str:
    """Are both creditors in the file? Four are mentioned once each. No: either of the two asked about is not there."""
    *needles, missing = rng.sample(CREDITORS, NEEDLES + 1)
    plan = _filler(rng, [name for name in CREDITORS if name not in {*needles, missing}], lines)
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
    plan = _filler(rng, [name for name in CREDITORS if name not in names], lines)
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
    plans = [_filler(rng, others, lines // files + (number < lines % files)) for number in range(files)]
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


def _filler(rng: Random, words: Sequence[str], lines: int) -> list[str | None]:
    """A word or None for each line; a third of `words` recur, so that a history has words that it does not mention."""
    used = rng.sample(words, max(1, min(len(words) // 3, lines // 2)))
    return [None if rng.random() < _IDLE_SHARE else rng.choice(used) for _ in range(lines)]


def _event(line: str, event: str) -> str:
    """The line with its date and another event."""
    return f"{line.partition(': ')[0]}: {event}."


def _ask_file(case: Case, question: str) -> str:
    return f"{case.prefix}Question: {question} Answer:"
