"""Pictures of shapes and a word, drawn from a seeded generator, with typed questions and the right answers."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from PIL import Image, ImageDraw, ImageFont

from prefillcli.prompts.questions import Choice, Predicate, Question, Score

KINDS = ("circle", "square", "triangle", "star")
COLOURS = {
    "red": (215, 40, 40),
    "green": (40, 165, 70),
    "blue": (45, 80, 215),
    "yellow": (240, 200, 30),
    "purple": (150, 50, 175),
}
WORDS = ("SALE", "NEW", "TEA", "MILK", "RICE", "SOAP", "JAM", "CORN")
NOTHING = "nothing"  # is printed
SIZES = {"small": 0.46, "medium": 0.68, "large": 0.94}  # of the side of a shape's cell
MOST = 5  # shapes
COLUMNS, ROWS = 3, 2  # of the cells in which shapes stand
STRIP = 0.27  # of a picture's height, which is left to the word
SIDES = (60, 84)  # of a picture, in pixels: the shortest and the longest
SPECKLES = 0.006  # of the pixels

IS_COLOUR = ("Is there a {} shape?", "Is anything {}?", "Does it show something {}?", "Is there something {}?")
IS_KIND = ("Is there a {}?", "Does it show a {}?", "Is it a picture of a {}?")
IS_BOTH = ("Is there a {} {}?", "Does it show a {} {}?")
IS_WORD = ("Is {} printed on it?", "Does it say {}?", "Is the word {}?")
IS_ANY_WORD = ("Is a word printed on it?", "Is there a word?")
IS_MORE = ("Are there more than {} shapes?", "Does it show more than {} shapes?")
WHICH_KIND = ("Which shape is it?", "What shape is it?", "What does it show?")
WHICH_COLOUR = ("Which colour is there?", "Which of these colours is there?")
WHICH_WORD = ("Which word is printed on it?", "What is printed on it?", "What does it say?")
HOW_MANY = ("How many shapes are there?", "How many shapes does it show?")
HOW_LARGE = ("How large are the shapes?", "How large is it?")
CAPTIONS = ("photo {}", "picture {}", "item {}", "a photo", "a picture", "a photo from the shop", "on the shelf {}")
LEVELS = [str(count) for count in range(1, MOST + 1)]


@dataclass(frozen=True)
class Picture:
    """A picture, and what is true of it: all its shapes are of one kind and size. Without a word that is `NOTHING`."""

    image: Image.Image
    kind: str
    colours: frozenset[str]
    count: int
    size: str
    word: str

    @property
    def png(self) -> bytes:
        """The picture's file."""
        file = io.BytesIO()
        self.image.save(file, "PNG", optimize=True)
        return file.getvalue()


def draw_picture(rng: Random) -> Picture:
    """Return a picture of one to five shapes in one or two colours, and four times of five with a word."""
    kind, size = rng.choice(KINDS), rng.choice(list(SIZES))
    count = rng.randint(1, MOST)
    colours = rng.sample(list(COLOURS), 2 if count > 1 and rng.random() < 0.5 else 1)
    painted = [*colours, *rng.choices(colours, k=count - len(colours))]
    word = NOTHING if rng.random() < 0.2 else rng.choice(WORDS)
    width, height = (rng.randint(*SIDES) for _ in range(2))
    image = Image.new("RGB", (width, height), (rng.randint(205, 255), rng.randint(205, 255), rng.randint(205, 255)))
    draw = ImageDraw.Draw(image)
    dust = _near((128, 128, 128), rng, 60)
    for _ in range(round(SPECKLES * width * height)):
        draw.point((rng.randrange(width), rng.randrange(height)), fill=dust)
    strip = round(STRIP * height)
    above = rng.random() < 0.5  # where the word stands
    if word != NOTHING:
        _print(draw, word, rng, (width, strip), 0 if above else height - strip)
    cell = width / COLUMNS, (height - strip) / ROWS
    for place, colour in zip(rng.sample(range(COLUMNS * ROWS), count), painted, strict=True):
        radius = SIZES[size] * min(cell) / 2
        left, top = place % COLUMNS * cell[0], place // COLUMNS * cell[1] + strip * above
        at = left + rng.uniform(radius, cell[0] - radius), top + rng.uniform(radius, cell[1] - radius)
        _paint(draw, kind, at, radius, _near(COLOURS[colour], rng, 20))
    return Picture(image, kind, frozenset(colours), count, size, word)


def _near(colour: tuple[int, int, int], rng: Random, most: int) -> tuple[int, int, int]:
    red, green, blue = (min(255, max(0, each + rng.randint(-most, most))) for each in colour)
    return red, green, blue


def _print(draw: ImageDraw.ImageDraw, word: str, rng: Random, size: tuple[int, int], top: int) -> None:
    font = ImageFont.load_default(round(0.9 * size[1]))
    left, upper, right, lower = draw.textbbox((0, 0), word, font=font)
    x = rng.uniform(0, max(0, size[0] - (right - left))) - left
    y = top + rng.uniform(0, max(0, size[1] - (lower - upper))) - upper
    draw.text((round(x), round(y)), word, font=font, fill=_near((35, 35, 35), rng, 30))


def _paint(
    draw: ImageDraw.ImageDraw, kind: str, at: tuple[float, float], radius: float, fill: tuple[int, int, int]
) -> None:
    x, y = at
    if kind == "circle":
        draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=fill)
    elif kind == "square":
        side = 0.85 * radius
        draw.rectangle((x - side, y - side, x + side, y + side), fill=fill)
    elif kind == "triangle":
        draw.polygon([(x, y - radius), (x + radius, y + radius * 0.8), (x - radius, y + radius * 0.8)], fill=fill)
    else:
        turns = [math.pi * (point / 5 - 0.5) for point in range(10)]
        far = [radius * (0.4 if point % 2 else 1.1) for point in range(10)]
        draw.polygon(
            [(x + each * math.cos(turn), y + each * math.sin(turn)) for turn, each in zip(turns, far, strict=True)],
            fill=fill,
        )


class Asked(NamedTuple):
    """A question about a picture, and its right answer: the text of an option, or Yes or No."""

    about: str
    question: Question
    answer: str


def ask_about(rng: Random, picture: Picture) -> Asked:
    """Return a question about a picture and its answer, which for most predicates is Yes or No by a fair coin."""
    about, weight = list(_ASKED), [each[1] for each in _ASKED.values()]
    (name,) = rng.choices(about, weight)
    question, answer = _ASKED[name][0](rng, picture)
    return Asked(name, question, answer)


def ask_all(rng: Random, picture: Picture) -> list[Asked]:
    """Return a question of every sort about a picture."""
    return [Asked(name, *ask(rng, picture)) for name, (ask, _) in _ASKED.items()]


def caption(rng: Random) -> str:
    """Return the text beside a picture: nothing in half of the cases."""
    return rng.choice(CAPTIONS).format(rng.randint(1, 999)) if rng.random() < 0.5 else ""


def _predicate(rng: Random, texts: tuple[str, ...], names: tuple[object, ...], holds: bool) -> tuple[Question, str]:
    return Predicate(rng.choice(texts).format(*names)), "Yes" if holds else "No"


def _is_colour(rng: Random, picture: Picture) -> tuple[Question, str]:
    holds = rng.random() < 0.5
    return _predicate(rng, IS_COLOUR, (_one(rng, COLOURS, picture.colours, holds),), holds)


def _is_kind(rng: Random, picture: Picture) -> tuple[Question, str]:
    holds = rng.random() < 0.5
    return _predicate(rng, IS_KIND, (_one(rng, KINDS, {picture.kind}, holds),), holds)


def _is_both(rng: Random, picture: Picture) -> tuple[Question, str]:
    holds = rng.random() < 0.5
    right = holds or rng.random() < 0.5  # the colour; else the kind is, and not the colour
    names = _one(rng, COLOURS, picture.colours, right), _one(rng, KINDS, {picture.kind}, holds or not right)
    return _predicate(rng, IS_BOTH, names, holds)


def _is_word(rng: Random, picture: Picture) -> tuple[Question, str]:
    holds = picture.word != NOTHING and rng.random() < 0.6
    return _predicate(rng, IS_WORD, (_one(rng, WORDS, {picture.word}, holds),), holds)


def _is_any_word(rng: Random, picture: Picture) -> tuple[Question, str]:
    return _predicate(rng, IS_ANY_WORD, (), picture.word != NOTHING)


def _is_more(rng: Random, picture: Picture) -> tuple[Question, str]:
    than = rng.randint(1, MOST - 1)
    return _predicate(rng, IS_MORE, (than,), picture.count > than)


def _which_kind(rng: Random, picture: Picture) -> tuple[Question, str]:
    return Choice(rng.choice(WHICH_KIND), _options(rng, KINDS, picture.kind)), picture.kind


def _which_colour(rng: Random, picture: Picture) -> tuple[Question, str]:
    right = rng.choice(sorted(picture.colours))
    absent = [each for each in COLOURS if each not in picture.colours]
    return Choice(rng.choice(WHICH_COLOUR), _options(rng, (right, *absent), right)), right


def _which_word(rng: Random, picture: Picture) -> tuple[Question, str]:
    return Choice(rng.choice(WHICH_WORD), _options(rng, (*WORDS, NOTHING), picture.word)), picture.word


def _how_many(rng: Random, picture: Picture) -> tuple[Question, str]:
    return Score(rng.choice(HOW_MANY), LEVELS), str(picture.count)


def _how_large(rng: Random, picture: Picture) -> tuple[Question, str]:
    return Score(rng.choice(HOW_LARGE), list(SIZES)), picture.size


def _one(rng: Random, names: Iterable[str], right: Collection[str], holds: bool) -> str:
    return rng.choice([each for each in names if (each in right) == holds])


def _options(rng: Random, names: tuple[str, ...], right: str) -> list[str]:
    # All of them as they are listed, or some with the right one, in any order.
    if rng.random() < 0.3:
        return list(names)
    others = [each for each in names if each != right]
    options = [right, *rng.sample(others, rng.randint(1, len(others)))]
    return rng.sample(options, len(options))


# What a question is about, with how often it is asked.
_ASKED: dict[str, tuple[Callable[[Random, Picture], tuple[Question, str]], float]] = {
    "is colour": (_is_colour, 2),
    "is kind": (_is_kind, 2),
    "is both": (_is_both, 2),
    "is word": (_is_word, 2),
    "is any word": (_is_any_word, 0.5),
    "is more": (_is_more, 2),
    "which kind": (_which_kind, 1.5),
    "which colour": (_which_colour, 1.5),
    "which word": (_which_word, 2.5),
    "how many": (_how_many, 2.5),
    "how large": (_how_large, 1.5),
}
