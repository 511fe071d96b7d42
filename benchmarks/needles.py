"""The synthetic workload: does a reader's history mention a topic?

Texts come from a seeded generator, so their answers are known. A `Case` is a history and the words for questions;
`prompt` is the text that a model reads, to be continued with " Yes" or " No". Every word in question is one token with
its leading space."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

# ruff: noqa: SIM905


TOPICS = tuple(
    """
    tennis chess sailing pottery baking gardening cycling opera jazz poetry astronomy geology
    robots castles volcanoes whales bees orchids coffee tea cheese wine bread pasta sushi
    chocolate knitting weaving origami painting sculpture theatre cinema comics puppets magic
    museums libraries bridges trains ferries airships rockets satellites comets glaciers deserts
    rivers caves islands forests wolves owls horses falcons dolphins turtles spiders beetles
    dinosaurs fossils crystals pearls amber silk denim perfume tattoos haircuts yoga boxing
    fencing judo rowing surfing skiing curling cricket rugby golf archery climbing hiking camping
    fishing kayaks karate marathons swimming dancing ballet tango salsa guitars violins drums
    pianos choirs vinyl podcasts radio printing typography maps globes clocks coins stamps kites
    toys puzzles dice cards poker lotteries inflation mortgages pensions taxes startups unions
    elections treaties monarchs pirates vikings pharaohs samurai knights alchemy algebra geometry
    statistics genetics vaccines allergies sleep memory anxiety habits meditation parenting
    adoption weddings funerals tourism hostels passports refugees languages grammar spelling
    translation recycling compost solar nuclear batteries hydrogen earthquakes hurricanes
    tides drones encryption compilers spreadsheets keyboards telescopes microscopes
    """.split()
)
FIRST_NAMES = tuple(
    """
    Anna Tom Maria Jonas Lena Paul Nina Oscar Clara Felix Ines Marco Sofia Emil Greta Hugo Alice
    Bruno Carla David Elena Frank Helga Igor Julia Karim Laura Milan Nora Peter Rosa Simon Tara
    Victor Wanda Yusuf
    """.split()
)
LAST_NAMES = tuple(
    """
    Keller Berg Novak Rossi Martin Olsen Weber Costa Lindt Moreau Kowal Silva Brandt Fischer Young
    Walker Santos Petrov Haas Dubois Larsen Romero Adler Quinn
    """.split()
)
CITIES = tuple(
    """
    Lyon Oslo Porto Vienna Turin Ghent Leeds Bergen Krakow Malmo Seville Basel Dublin Riga Bristol
    Zurich Hamburg Nantes Prague Utrecht
    """.split()
)
MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
POST_INSTRUCTION = (
    "Below are a reader, the posts the reader has opened, and one new post. "
    "Answer Yes if the reader has read on its topic before, else No.\n"
)
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
_IDLE_SHARE = 0.3  # the share of filler lines without a word
_LINE_TOKENS = 20  # tokens of a line of history, for a first guess
_AIM = 0.985  # of the wanted tokens, so that most guesses are not too long
_CLOSE = 0.97  # of the wanted tokens: close enough
_TRIES = 20  # the most histories that are tried


@dataclass(frozen=True)
class Case:
    """One history and the words for questions about it."""

    domain: str  # one of the three, or drill: a bare list of words, for training
    kind: str  # its set of words: topics, creditors, subjects
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
class CaseQuestion:
    """A question about one word, ending in "Answer:"."""

    text: str
    word: str
    subject: str  # the candidate post, or the question's sentence
    answer: str  # Yes, No


def make_needles(*, rows: int, tokens: int, seed: int, count: Callable[[str], int]) -> tuple[list[str], list[str]]:
    """Make `rows` prompts of at most `tokens` tokens each, as `count` counts them, and their answers, Yes or No.

    Prompts have at least 97 % of `tokens`, or come as close as whole lines of about 20 tokens allow. Answers
    alternate, shuffled. The same arguments give the same texts. Raises ValueError for prompts too short for a history.
    """
    answers = alternating_answers(Random(f"needle {seed} answers"), rows)
    prompts: list[str] = []
    for row, answer in enumerate(answers):

        def build(rng: Random, lines: int, answer: str = answer) -> list[str]:
            return [needle(rng, lines, answer)]

        prompts += fit_history(build, tokens=tokens, count=count, seed=f"needle {seed} {row}")
    return prompts, answers


def alternating_answers(rng: Random, rows: int) -> list[str]:
    """Return equally many Yes and No, or one Yes more, shuffled."""
    answers = ["Yes" if row % 2 == 0 else "No" for row in range(rows)]
    return rng.sample(answers, rows)


def fit_history(
    build: Callable[[Random, int], list[str]], *, tokens: int, count: Callable[[str], int], seed: str, least: int = 1
) -> list[str]:
    """Return the prompts that `build` makes from a generator and a number of lines, with as many lines as fit into
    `tokens`.

    Several are tried, as lines differ in length. The task needs `least` lines. Raises ValueError if they do not fit.
    """
    lines, found, longest = max(least, tokens // _LINE_TOKENS), [], 0
    for number in range(_TRIES):
        prompts = build(Random(f"{seed} {number}"), lines)
        length = max(map(count, prompts))
        if longest < length <= tokens:
            found, longest = prompts, length
        if longest >= _CLOSE * tokens:
            break
        lines = max(least, round(lines * _AIM * tokens / length))
    if not found:
        raise ValueError(f"{tokens} tokens are too few for this task")
    return found


def needle(rng: Random, lines: int, answer: str) -> str:
    """Make a needle: is the topic asked about in the history? Yes: exactly one line, anywhere, mentions it. No: none
    does.

    In both cases one line, at a depth uniform over the history, has a topic that occurs nowhere else.
    """
    asked, other, *rest = rng.sample(TOPICS, len(TOPICS))
    plan = filler(rng, rest, lines)
    plan[rng.randrange(lines)] = asked if answer == "Yes" else other
    case = post_case(rng, lines, plan)
    return prompt(case, ask_post(rng, case, asked))


def filler(rng: Random, words: Sequence[str], lines: int) -> list[str | None]:
    """Return a word or None for each line; a third of `words` recur, so that a history has words that it does not
    mention."""
    used = rng.sample(words, max(1, min(len(words) // 3, lines // 2)))
    return [None if rng.random() < _IDLE_SHARE else rng.choice(used) for _ in range(lines)]


def post_case(rng: Random, lines: int, plan: Sequence[str | None] | None = None) -> Case:
    """Return a reader's profile and `lines` lines of reading history. `plan` has the topic of each line, or None for
    none."""
    first, last = rng.choice(FIRST_NAMES), rng.choice(LAST_NAMES)
    if plan is None:
        plan = plan_words(rng, TOPICS, lines, idle_share=0.3)
    history = []
    for date, word in zip(dates(rng, lines), plan, strict=True):
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
    present, absent = split_words(plan, TOPICS)
    return Case("post_recommendation", "topics", f"{first} {last}", head, tuple(history), present, absent)


def plan_words(rng: Random, vocabulary: tuple[str, ...], lines: int, idle_share: float) -> list[str | None]:
    """Plan a word or None for each line: about half of the words are mentioned once, some often."""
    most = min(lines, MOST_WORDS)
    distinct = rng.sample(vocabulary, rng.randint(max(1, most // 3), most))
    favourites = distinct[: max(1, rng.randint(len(distinct) // 4, len(distinct) // 2))]
    plan: list[str | None] = list(distinct)
    while len(plan) < lines:
        plan.append(None if rng.random() < idle_share else rng.choice(favourites))
    rng.shuffle(plan)
    return plan


def split_words(plan: Sequence[str | None], vocabulary: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    present = tuple(dict.fromkeys(word for word in plan if word is not None))
    mentioned = set(present)
    return present, tuple(word for word in vocabulary if word not in mentioned)


def dates(rng: Random, count: int) -> list[str]:
    """Return rising days of the last `count` or more days, as "12 Mar"."""
    days = sorted(rng.randrange(336) for _ in range(count))
    return [f"{day % 28 + 1} {MONTHS[day // 28]}" for day in days]


def ask_post(rng: Random, case: Case, word: str) -> CaseQuestion:
    """Return the question whether a reader would read a new post about `word`, and its true answer."""
    author = f"{rng.choice(FIRST_NAMES)} {rng.choice(LAST_NAMES)}"
    subject = f"{rng.choice(FORMATS)} by {author}, {rng.randint(1, 19)} min"
    text = f"New post: {subject}.\nWould {case.owner.split()[0]} read this post about {word}? Answer:"
    return CaseQuestion(text, word, subject, "Yes" if word in case.present else "No")


def prompt(case: Case, question: CaseQuestion) -> str:
    """Return the text a model continues with " Yes" or " No"."""
    return case.prefix + question.text
