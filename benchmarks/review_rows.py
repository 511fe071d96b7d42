"""Rows with many labelled reviews before the one in question, for what measures compression on a real model."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pyarrow as pa
import pyarrow.parquet as pq

from recipes.real_model import Review, reviews

SHOTS = 32  # examples of a prompt
SHORT = 400  # most characters of an example: 32 of them have about 2,200 tokens
LONG = 650  # fewest characters of a long review: about 150 tokens
GROUPS, TOGETHER = 4, 24  # sets of examples in a file; rows with the same examples
OWN = 24  # rows with examples of their own


def write_rows(folder: Path) -> dict[str, Path]:
    """The files by name: `shared`, `own` and `long`, each `.chosen` (to choose settings on) and `.held` (to judge).

    In `shared` 24 rows have the same examples, in `own` every row has others. In `long` two examples come before a
    review of many words. Half of the rows are positive. All reviews of `.chosen` are of the training split, and those
    asked about in `.held` of the test split. No review is in both, as an example or otherwise.
    """
    rng = Random(0)
    for_chosen, asked, for_held = _thirds(reviews("Train", folder), rng)
    found = {}
    for half, examples, pool in (("chosen", for_chosen, asked), ("held", for_held, reviews("Test", folder))):
        short = [each for each in examples if len(each.text) <= SHORT]
        longer = [each for each in pool if len(each.text) >= LONG]
        tables = {
            "shared": many_shot(short, balanced(rng, pool, GROUPS * TOGETHER), SHOTS, TOGETHER, rng),
            "own": many_shot(short, balanced(rng, pool, OWN), SHOTS, 1, rng),
            "long": many_shot(short, balanced(rng, longer, _twice_the_fewer(longer)), 2, len(longer), rng),
        }
        for kind, table in tables.items():
            found[f"{kind}.{half}"] = folder / f"{kind}.{half}.parquet"
            pq.write_table(table, found[f"{kind}.{half}"])
    return found


def draft_reviews(folder: Path) -> list[Review]:
    """What a draft may learn from: the training split without the examples of the files `.held`."""
    for_chosen, asked, _ = _thirds(reviews("Train", folder), Random(0))
    return for_chosen + asked


def many_shot(examples: list[Review], asked: list[Review], shots: int, together: int, rng: Random) -> pa.Table:
    """Columns `prompt` and `sentiment`; each `together` rows begin with the same `shots` examples, half positive."""
    prompts: list[str] = []
    for at in range(0, len(asked), together):
        shown = "".join(f"{ask(each)} {each.sentiment}\n\n" for each in balanced(rng, examples, shots))
        prompts += [shown + ask(each) for each in asked[at : at + together]]
    return pa.table({"prompt": prompts, "sentiment": [each.sentiment for each in asked]})


def ask(review: Review) -> str:
    """The part of a prompt that asks about a review; its sentiment is the next word."""
    return f"Review: {review.text}\nSentiment:"


def balanced(rng: Random, pool: list[Review], count: int) -> list[Review]:
    """`count` of the reviews in random order, half of them positive."""
    positive, negative = ([each for each in pool if each.sentiment == name] for name in ("positive", "negative"))
    found = rng.sample(positive, count // 2) + rng.sample(negative, count // 2)
    rng.shuffle(found)
    return found


def _twice_the_fewer(pool: list[Review]) -> int:
    """How many reviews of a pool there are at most, half of them positive."""
    positive = sum(each.sentiment == "positive" for each in pool)
    return 2 * min(positive, len(pool) - positive)


def _thirds(pool: list[Review], rng: Random) -> tuple[list[Review], list[Review], list[Review]]:
    """The reviews in random order, in three parts."""
    pool = list(pool)
    rng.shuffle(pool)
    third = len(pool) // 3
    return pool[:third], pool[third : 2 * third], pool[2 * third :]
