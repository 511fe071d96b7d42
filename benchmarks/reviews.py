"""Real rows for the real model: reviews, each behind the same two examples."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from transformers import AutoTokenizer

from prefillcli.plan.trie import TokenArray
from recipes.real_model import FOLDER, Review, real_model, reviews

EXAMPLE_CHARACTERS = (150, 400)
TOPICS = ("pain", "sleep", "skin", "mood", "weight", "infection", "birth control", "headache", "nausea", "the price")


def review_prompts(rows: int, folder: Path = FOLDER) -> list[TokenArray]:
    """Token ids of `rows` prompts: a positive and a negative example, then a review of the test split and, where these
    are not enough, of the training split. The model and the reviews are downloaded if they are not there."""
    tokenizer = AutoTokenizer.from_pretrained(real_model(folder))
    train = reviews("Train", folder)
    fewest, most = EXAMPLE_CHARACTERS
    examples = [
        next(each for each in train if each.sentiment == sentiment and fewest < len(each.text) < most)
        for sentiment in ("positive", "negative")
    ]
    head = "".join(f"{_ask(each)} {each.sentiment}\n\n" for each in examples)
    asked = [each for each in [*reviews("Test", folder), *train] if each not in examples][:rows]
    return [np.asarray(tokenizer(head + _ask(each)).input_ids, np.int32) for each in asked]


def question_prompts(documents: int, tokens: int, folder: Path = FOLDER) -> list[TokenArray]:
    """Token ids of the prompts that ask for each of the `TOPICS`, behind each of some documents of so many tokens.

    A document is consecutive reviews of the test split. Its prompts follow one another.
    """
    tokenizer = AutoTokenizer.from_pretrained(real_model(folder))
    ids = tokenizer("\n\n".join(each.text for each in reviews("Test", folder))).input_ids
    texts = [tokenizer.decode(ids[at * tokens : (at + 1) * tokens]) for at in range(documents)]
    asked = [f"{text}\n\nIs this about {topic}? Answer:" for text in texts for topic in TOPICS]
    return [np.asarray(tokenizer(each).input_ids, np.int32) for each in asked]


def _ask(review: Review) -> str:
    return f"Review: {review.text}\nSentiment:"
