"""Texts of the three sample domains, drawn from a seeded generator.

The domains share one skill: is the thing named in the question in the history above it? A `Case` is
a history and the words that can be asked about; `prompt` is the text a model reads, to be continued
with " Yes" or " No".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from prefillcli.bench.vocabulary import (
    CITIES,
    CREDITORS,
    FIRST_NAMES,
    LAST_NAMES,
    MONTHS,
    SUBJECTS,
    TOPICS,
)

POST_INSTRUCTION = (
    "Below are a reader, the posts the reader has opened, and one new post. "
    "Answer Yes if the reader has read on its topic before, else No.\n"
)
CREDIT_INSTRUCTION = "Below is the account history of an applicant and one question. Answer Yes or No.\n"
LABEL_INSTRUCTION = "Read the text and answer Yes or No.\n"

MOST_WORDS = 64  # distinct words in one history: more than half of all words stay absent

TITLES = (
    "A beginner's guide to {}",
    "What nobody says of {}",
    "Why I gave up on {}",
    "Ten years of {}",
    "The quiet return of {}",
    "My first week with {}",
    "A short history of {}",
    "How to talk to children of {}",
    "Three mistakes people make with {}",
    "Inside the strange world of {}",
    "The hidden cost of {}",
    "Letters from a life in {}",
    "What science makes of {}",
    "Everything we got wrong on {}",
    "In praise of {}",
    "An evening class in {}",
    "The future of {}",
    "Notes on {} for the winter",
    "Is there too much {} in the news?",
    "The town that lives from {}",
    "Photo essay: a summer of {}",
    "Interview: the woman who changed {}",
    "Cheap {} for busy people",
    "Review: the best book on {}",
)
READINGS = (
    'read "{}" for {} min',
    'read "{}" to the end, {} min',
    'opened "{}" and stayed {} min',
    'skimmed "{}" in {} min',
    'saved "{}" after {} min',
    'shared "{}" after {} min',
    'liked "{}" after {} min',
)
FORMATS = ("essay", "interview", "photo story", "long read", "column", "report")
IDLE_READINGS = (
    "opened the weekly digest, closed it after {} min",
    "looked at the front page for {} min",
    "searched the archive for {} min and left",
    "changed the mail settings, {} min on the site",
)
PAYMENTS = (
    "card payment to {}, {}, on time",
    "loan instalment to {}, {}, on time",
    "loan instalment to {}, {}, late by {days} days",
    "direct debit by {}, {}, booked",
    "direct debit by {}, {}, returned for lack of funds",
    "late notice from {}, {} open since {days} days",
    "reminder fee charged by {}, {}",
    "credit line with {} drawn, {}",
    "credit line with {} repaid, {}",
    "refund from {}, {}",
    "rent paid to {}, {}, on time",
    "purchase on account at {}, {}, due in {days} days",
)
IDLE_ENTRIES = (
    "salary received, {}",
    "cash withdrawal, {}",
    "transfer to own savings, {}",
    "account fee, {}",
    "interest credited, {}",
)
TICKETS = (
    "since the last update the {} does not work any more.",
    "I still have a problem with the {} and need help.",
    "could you please explain how the {} works?",
    "my colleague says the {} was changed on Monday.",
    "I wrote to you twice on the {} and got no answer.",
    "there is an error with the {} on my side.",
    "thank you for the quick answer on the {} last week.",
    "the manual leaves out the {} completely.",
)
GREETINGS = ("Hello,", "Dear team,", "Good morning,", "Hi,", "To whom it may concern,")
CLOSINGS = (
    "Please call me back.",
    "I am waiting for your reply.",
    "Many thanks.",
    "This is urgent for us.",
    "Best regards.",
)
NEWS = (
    "The city council debated {} for two hours on Tuesday.",
    "A new report on {} was published in the morning.",
    "Local schools will teach more {} next year.",
    "Visitors came from far away for a day of {} in the park.",
    "Experts disagree on the role of {} in the region.",
    "A small company wants to earn money with {} soon.",
    "The festival opens with an evening of {} on Friday.",
    "The minister called {} a question of our time.",
)
NEWS_CLOSINGS = (
    "More details will follow.",
    "The mayor did not comment.",
    "Tickets are sold out.",
    "The weather stays cold.",
    "The vote is due in spring.",
)


@dataclass(frozen=True)
class Case:
    """One history and what can be asked about it."""

    domain: str  # one of the three, or drill: a bare list of words, for training
    kind: str  # which set of words it asks about: topics, creditors, subjects
    owner: str  # full name of the reader or applicant, or the message's number
    head: str  # instruction and profile
    lines: tuple[str, ...]  # the history
    present: tuple[str, ...]  # distinct words of the history, in order of first mention
    absent: tuple[str, ...]  # words of the same set that the history does not mention

    @property
    def history(self) -> str:
        """The lines of the history alone."""
        return "".join(line + "\n" for line in self.lines)

    @property
    def prefix(self) -> str:
        """Everything before the question; shared by all questions about this case."""
        return self.head + self.history


@dataclass(frozen=True)
class Question:
    """A question about one word, ending in "Answer:"."""

    text: str
    word: str
    subject: str  # the candidate post, or the question's sentence
    answer: str  # Yes, No


def _plan_words(rng: Random, vocabulary: tuple[str, ...], lines: int, idle_share: float) -> list[str | None]:
    """A word or None for each line: about half of the words are mentioned once, some often."""
    most = min(lines, MOST_WORDS)
    distinct = rng.sample(vocabulary, rng.randint(max(1, most // 3), most))
    favourites = distinct[: max(1, rng.randint(len(distinct) // 4, len(distinct) // 2))]
    plan: list[str | None] = list(distinct)
    while len(plan) < lines:
        plan.append(None if rng.random() < idle_share else rng.choice(favourites))
    rng.shuffle(plan)
    return plan


def _split_words(plan: Sequence[str | None], vocabulary: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    present = tuple(dict.fromkeys(word for word in plan if word is not None))
    mentioned = set(present)
    return present, tuple(word for word in vocabulary if word not in mentioned)


def _dates(rng: Random, count: int) -> list[str]:
    """Rising days of the last `count` or more days, as "12 Mar"."""
    days = sorted(rng.randrange(336) for _ in range(count))
    return [f"{day % 28 + 1} {MONTHS[day // 28]}" for day in days]


def _amount(rng: Random) -> str:
    return f"{rng.randint(5, 990)}.{rng.randint(0, 9)}0"


def post_case(rng: Random, lines: int, plan: Sequence[str | None] | None = None) -> Case:
    """A reader's profile and `lines` lines of reading history. `plan` has the topic of each line, or None for none."""
    first, last = rng.choice(FIRST_NAMES), rng.choice(LAST_NAMES)
    if plan is None:
        plan = _plan_words(rng, TOPICS, lines, idle_share=0.3)
    history = []
    for date, word in zip(_dates(rng, lines), plan, strict=True):
        minutes = rng.randint(1, 19)
        if word is None:
            event = rng.choice(IDLE_READINGS).format(minutes)
        else:
            event = rng.choice(READINGS).format(rng.choice(TITLES).format(word), minutes)
        history.append(f"{date}: {event}.")
    device = rng.choice(("on a phone", "on a tablet", "at a desk", "on the train"))
    hour = rng.choice(("in the morning", "at noon", "in the evening", "at night"))
    head = (
        f"{POST_INSTRUCTION}Reader: {first} {last}, {rng.randint(18, 79)}, from {rng.choice(CITIES)}. "
        f"Member since {rng.randint(2009, 2023)}, reads {hour} {device}.\nReading history:\n"
    )
    present, absent = _split_words(plan, TOPICS)
    return Case("post_recommendation", "topics", f"{first} {last}", head, tuple(history), present, absent)


def credit_case(rng: Random, lines: int, plan: Sequence[str | None] | None = None) -> Case:
    """An applicant's file and `lines` lines of account history. `plan` has the creditor of each line, or None."""
    first, last = rng.choice(FIRST_NAMES), rng.choice(LAST_NAMES)
    if plan is None:
        plan = _plan_words(rng, CREDITORS, lines, idle_share=0.4)
    history = []
    for date, word in zip(_dates(rng, lines), plan, strict=True):
        if word is None:
            event = rng.choice(IDLE_ENTRIES).format(_amount(rng))
        else:
            event = rng.choice(PAYMENTS).format(word, _amount(rng), days=rng.randint(3, 60))
        history.append(f"{date}: {event}.")
    work = rng.choice(("employed", "self-employed", "retired", "a student", "on a temporary contract"))
    head = (
        f"{CREDIT_INSTRUCTION}Applicant: {first} {last}, {rng.randint(18, 79)}, {work}, from "
        f"{rng.choice(CITIES)}. Customer since {rng.randint(1999, 2023)}.\nAccount history:\n"
    )
    present, absent = _split_words(plan, CREDITORS)
    return Case("credit_verification", "creditors", f"{first} {last}", head, tuple(history), present, absent)


def label_case(rng: Random, lines: int) -> Case:
    """A support ticket or a news snippet of `lines` sentences about as many things."""
    number = str(rng.randint(1000, 9999))
    ticket = rng.random() < 0.5
    kind, vocabulary, sentences = ("subjects", SUBJECTS, TICKETS) if ticket else ("topics", TOPICS, NEWS)
    plan: list[str | None] = list(rng.sample(vocabulary, lines))
    body = " ".join(t.format(word) for t, word in zip(rng.sample(sentences, lines), plan, strict=True))
    if ticket:
        text = f"Ticket {number}: {rng.choice(GREETINGS)} {body} {rng.choice(CLOSINGS)}"
    else:
        text = f"News {number}: {body} {rng.choice(NEWS_CLOSINGS)}"
    present, absent = _split_words(plan, vocabulary)
    return Case("labeling", kind, number, LABEL_INSTRUCTION, (text,), present, absent)


CASES: dict[str, Callable[[Random, int], Case]] = {
    "post_recommendation": post_case,
    "credit_verification": credit_case,
    "labeling": label_case,
}


def ask(rng: Random, case: Case, word: str) -> Question:
    """The question about `word`, worded for the case's domain, and its true answer."""
    answer = "Yes" if word in case.present else "No"
    if case.domain == "post_recommendation":
        author = f"{rng.choice(FIRST_NAMES)} {rng.choice(LAST_NAMES)}"
        subject = f"{rng.choice(FORMATS)} by {author}, {rng.randint(1, 19)} min"
        first = case.owner.split()[0]
        text = f"New post: {subject}.\nWould {first} read this post about {word}? Answer:"
        return Question(text, word, subject, answer)
    if case.domain == "drill":
        return Question(f" about {word}? Answer:", word, word, answer)
    if case.domain == "credit_verification":
        subject = f"Does the file say anything about {word}?"
    else:
        subject = f"Is it about {word}?"
    return Question(f"Question: {subject} Answer:", word, subject, answer)


def ask_fairly(rng: Random, case: Case, most: int) -> list[Question]:
    """Up to `most` questions about different words; each answer is a fair coin given the ones before.

    Asking ends with the last present word: what came before never tells what must follow.
    """
    present = rng.sample(case.present, len(case.present))
    absent = rng.sample(case.absent, len(case.absent))
    questions: list[Question] = []
    while present and absent and len(questions) < most:
        word = present.pop() if rng.random() < 0.5 else absent.pop()
        questions.append(ask(rng, case, word))
    return questions


def prompt(case: Case, question: Question) -> str:
    """The text a model continues with " Yes" or " No"."""
    return case.prefix + question.text
