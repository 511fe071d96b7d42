"""Real rows for the real model: reviews, each behind the same two examples."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from transformers import AutoTokenizer

from prefillcli.plan.trie import TokenArray
from recipes.real_model import FOLDER, Review, real_model, reviews

EXAMPLE_CHARACTERS = (150, 400)
SENTIMENTS = ("positive", "negative")
TOPICS = ("pain", "sleep", "skin", "mood", "weight", "infection", "birth control", "headache", "nausea", "the price")


def review_prompts(rows: int, folder: Path = FOLDER) -> list[TokenArray]:
    """Token ids of `rows` prompts: a positive and a negative example, then a review of the test split and, where these
    are not enough, of the training split. The model and the reviews are downloaded if they are not there."""
    tokenizer = AutoTokenizer.from_pretrained(real_model(folder))
    examples, asked = _examples_and_asked(rows, folder)
    head = "".join(f"{_ask(each)} {each.sentiment}\n\n" for each in examples)
    return [np.asarray(tokenizer(head + _ask(each)).input_ids, np.int32) for each in asked]


def review_truths(rows: int, folder: Path = FOLDER) -> list[bool]:
    """Whether each of the reviews of `review_prompts` is positive."""
    return [each.sentiment == "positive" for each in _examples_and_asked(rows, folder)[1]]


def sentiment_tokens(folder: Path = FOLDER) -> tuple[int, int]:
    """The first token of a positive and of a negative answer."""
    tokenizer = AutoTokenizer.from_pretrained(real_model(folder))
    positive, negative = (tokenizer(f" {sentiment}").input_ids[0] for sentiment in SENTIMENTS)
    return positive, negative


def _examples_and_asked(rows: int, folder: Path) -> tuple[list[Review], list[Review]]:
    train = reviews("Train", folder)
    fewest, most = EXAMPLE_CHARACTERS
    examples = [
        next(each for each in train if each.sentiment == sentiment and fewest < len(each.text) < most)
        for sentiment in SENTIMENTS
    ]
    return examples, [each for each in [*reviews("Test", folder), *train] if each not in examples][:rows]


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
