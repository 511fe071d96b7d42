# ruff: noqa: SIM905
"""Texts of the three sample domains, drawn from a seeded generator.

The domains share one skill: is the thing named in the question in the history above it? The histories of readers are
those of the made workload of `prefill bench`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from benchmarks.needles import (
    CITIES,
    FIRST_NAMES,
    LAST_NAMES,
    TOPICS,
    Case,
    CaseQuestion,
    ask_post,
    dates,
    plan_words,
    post_case,
    split_words,
)

CREDITORS = tuple(
    """
    Norvik Halden Brixa Tarnow Velmar Quonto Ostrel Lumera Kestral Zandor Mirelo Pavonte Drexel
    Fenwick Galbor Hestia Ivarsen Jantex Korvane Lindero Maxiom Nerida Oblong Pexton Quillar
    Rostova Sandvig Tormund Ulmera Vexley Wexham Xandris Yarrow Zephon Altora Bexhill Corvino
    Dunmore Elvane Farrow Grenada Hollis Isenor Jorvik Kendal Lorano Marrick Nordel Orvane Pelham
    Quarto Redwick Silvano Tobrik Umbrel Varenna Wolden Xebec Yelvert Zimora Ambrex Boreal Calvo
    Dorset Emberly Falkon Gorman Harbix Inverno Jasper Kilmar Lexor Montrex Nimbus Olverra Primus
    Quando Rivano Stellex Tundra Ursano Vantor Winslow Xylos Yorvane Zenith Arcado Blenko Cintra
    Delmor Estrel Fintra Glenard Hybrix Ixtal Jolvane Kravex Lanark Mondrel Nuvola Optima Polvar
    Querida Rendal Sorano Trevix Unitas Vorden Westro Yukon
    """.split()
)
SUBJECTS = tuple(
    """
    billing login refund delivery password invoice subscription calendar printer keyboard camera
    charger warranty voucher newsletter backup export search website firewall browser screen
    microphone speaker router battery contract address payment receipt discount upgrade account
    profile attachment signature license database dashboard reminder translation booking parking
    badge elevator heating lighting
    """.split()
)
CREDIT_INSTRUCTION = "Below is the account history of an applicant and one question. Answer Yes or No.\n"
LABEL_INSTRUCTION = "Read the text and answer Yes or No.\n"
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


def _amount(rng: Random) -> str:
    return f"{rng.randint(5, 990)}.{rng.randint(0, 9)}0"


def credit_case(rng: Random, lines: int, plan: Sequence[str | None] | None = None) -> Case:
    """An applicant's file and `lines` lines of account history. `plan` has the creditor of each line, or None."""
    first, last = rng.choice(FIRST_NAMES), rng.choice(LAST_NAMES)
    if plan is None:
        plan = plan_words(rng, CREDITORS, lines, idle_share=0.4)
    history = []
    for date, word in zip(dates(rng, lines), plan, strict=True):
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
    present, absent = split_words(plan, CREDITORS)
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
    present, absent = split_words(plan, vocabulary)
    return Case("labeling", kind, number, LABEL_INSTRUCTION, (text,), present, absent)


CASES: dict[str, Callable[[Random, int], Case]] = {
    "post_recommendation": post_case,
    "credit_verification": credit_case,
    "labeling": label_case,
}


def ask(rng: Random, case: Case, word: str) -> CaseQuestion:
    """The question about `word`, worded for the case's domain, and its true answer."""
    if case.domain == "post_recommendation":
        return ask_post(rng, case, word)
    answer = "Yes" if word in case.present else "No"
    if case.domain == "drill":
        return CaseQuestion(f" about {word}? Answer:", word, word, answer)
    if case.domain == "credit_verification":
        subject = f"Does the file say anything about {word}?"
    else:
        subject = f"Is it about {word}?"
    return CaseQuestion(f"Question: {subject} Answer:", word, subject, answer)


def ask_fairly(rng: Random, case: Case, most: int) -> list[CaseQuestion]:
    """Up to `most` questions about different words; each answer is a fair coin given the ones before.

    Asking ends with the last present word: what came before never tells what must follow.
    """
    present = rng.sample(case.present, len(case.present))
    absent = rng.sample(case.absent, len(case.absent))
    questions: list[CaseQuestion] = []
    while present and absent and len(questions) < most:
        word = present.pop() if rng.random() < 0.5 else absent.pop()
        questions.append(ask(rng, case, word))
    return questions
