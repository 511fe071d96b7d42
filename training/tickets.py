"""Support tickets, drawn from a seeded generator, with typed questions and the right answers to them."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from transformers import PreTrainedTokenizerBase

from benchmarks.sample_text import GREETINGS, SUBJECTS, TICKETS
from prefillcli.asking.forms import QUESTION_END, text_of
from prefillcli.prompts.questions import Choice, Predicate, Question, Score
from training.curriculum import SHORT, Batch, BatchMaker, Lesson

DEPARTMENTS = {
    "payments": ("payment", "refund", "invoice", "billing", "receipt", "discount", "voucher", "subscription"),
    "devices": ("printer", "keyboard", "camera", "charger", "screen", "microphone", "speaker", "router", "battery"),
    "accounts": ("login", "password", "account", "profile", "signature", "license"),
}
UNTOLD = {
    "payments": ("contract", "delivery"),
    "devices": ("elevator", "heating"),
    "accounts": ("newsletter", "calendar"),
}
URGENCY = {
    "low": ("There is no hurry.", "It can wait.", "Answer when you have time."),
    "normal": ("Please call me back.", "I am waiting for your reply.", "Best regards.", "Please answer this week."),
    "high": (
        "This is urgent for us.",
        "We cannot work until it is solved.",
        "I need it today.",
        "Please act at once.",
    ),
}
LINES = (
    *TICKETS,
    "we lost the {} again, same as in spring.",
    "the {} arrived broken.",
    "how do I change the {}?",
    "I was charged for the {} and did not order it.",
    "I want the {} today.",
    "my {} is missing.",
)
PREDICATES = (
    "Is it about {}?",
    "Is it about the {}?",
    "Does the customer ask for a {}?",
    "Does it name the {}?",
    "Is the {} what they write about?",
    "Is there a problem with the {}?",
)
WHICH = ("What is it about?", "Which of these is it about?")
WHO = ("Which department should answer?", "Which department is it for?", "Who should answer?")
HOW = ("How urgent is it?", "How urgent is the request?")
HISTORIES = 0.2  # of the batches: short prompts as they were, so that the model still finds what is asked for
SEQUENCES = 24  # in a batch of tickets


@dataclass(frozen=True)
class Ticket:
    """A ticket's text, and what is true of it."""

    text: str
    department: str
    urgency: str
    refund: bool


def draw_ticket(rng: Random, untold: bool = False) -> Ticket:
    """Return a ticket about one or two things of a department, with `untold` also of those that the model was never
    told: some answers are then in doubt."""
    department = rng.choice(list(DEPARTMENTS))
    known = DEPARTMENTS[department] + UNTOLD[department] * untold
    words = rng.sample(known, rng.randint(1, 2))
    text, urgency = write_ticket(rng, words)
    return Ticket(text, department, urgency, "refund" in words)


def write_ticket(rng: Random, words: list[str]) -> tuple[str, str]:
    """Return a text about these words, and how urgent it is."""
    urgency = rng.choice(list(URGENCY))
    lines = " ".join(line.format(word) for line, word in zip(rng.sample(LINES, len(words)), words, strict=True))
    return f"{rng.choice(GREETINGS)} {lines} {rng.choice(URGENCY[urgency])}", urgency


def draw_question(rng: Random) -> tuple[str, Question, str]:
    """Return a ticket's text, a question about it, and the right answer."""
    kind = rng.choice(("predicate", "choice", "department", "score"))
    if kind == "department":
        ticket = draw_ticket(rng)
        return ticket.text, Choice(rng.choice(WHO), rng.sample(list(DEPARTMENTS), len(DEPARTMENTS))), ticket.department
    words = rng.sample(SUBJECTS, 9)
    if kind == "choice":
        options = words[: rng.randint(2, 6)]
        right = rng.choice(options)
        named = [right, *words[6 : 6 + rng.randint(0, 2)]]  # the others are no options
        return write_ticket(rng, rng.sample(named, len(named)))[0], Choice(rng.choice(WHICH), options), right
    named = words[: rng.randint(1, 3)]
    text, urgency = write_ticket(rng, named)
    if kind == "score":
        return text, Score(rng.choice(HOW), list(URGENCY)), urgency
    right = rng.choice(("Yes", "No"))
    return text, Predicate(rng.choice(PREDICATES).format(rng.choice(named) if right == "Yes" else words[-1])), right


class TicketBatchMaker(BatchMaker):
    """Makes batches of typed questions about tickets, and of histories as before."""

    def make(self, lesson: Lesson, gaps: bool = False) -> Batch:
        """Return a batch of tickets, or now and then of short histories, whatever the lesson."""
        if self._rng.random() < HISTORIES:
            return super().make(Lesson(False, self._rng.randint(1, SHORT)), gaps)
        return self._batch([self._ticket() for _ in range(SEQUENCES)], gaps)

    def _ticket(self) -> tuple[list[int], set[int]]:
        return encode_ticket(self._tokenizer, *draw_question(self._rng))


def encode_ticket(
    tokenizer: PreTrainedTokenizerBase, text: str, question: Question, answer: str
) -> tuple[list[int], set[int]]:
    """Return the token ids of a prompt with its answer, and the indices that predict one of the answer's tokens."""
    prompt = tokenizer(text + text_of(question) + QUESTION_END)["input_ids"]
    said = tokenizer(f" {answer}", add_special_tokens=False)["input_ids"]
    return [*prompt, *said], set(range(len(prompt) - 1, len(prompt) + len(said) - 1))
