"""Real rows for the real model: reviews, each behind the same two examples."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from prefillcli.options.load import scorer_settings
from prefillcli.plan.trie import TokenArray
from prefillcli.prompts.questions import Choice, Predicate, Score
from prefillcli.scoring.opening import open_inputs, open_rows
from recipes.real_model import FOLDER, Review, real_model, reviews

EXAMPLE_CHARACTERS = (150, 400)
SENTIMENTS = ("positive", "negative")
TOPICS = ("pain", "sleep", "skin", "mood", "weight", "infection", "birth control", "headache", "nausea", "the price")


#: Typed questions about reviews.
ASKED = (
    Predicate("Is the patient satisfied with the drug?", name="satisfied"),
    Predicate("Does the patient name a side effect?", name="effects"),
    Predicate("Did the drug help within a week?", name="quick"),
    Predicate("Has the patient stopped taking it?", name="stopped"),
    Choice("Who wrote it?", ["the patient", "a parent", "a doctor"], name="writer"),
    Choice("What is it mostly about?", ["pain", "sleep", "mood", "skin", "weight"], name="topic"),
    Choice("Which side effect is the worst?", ["nausea", "headache", "fatigue", "none"], name="worst"),
    Score("How strong are the side effects?", ["none", "mild", "strong"], name="strength"),
    Score("How long was it taken?", ["days", "weeks", "months", "years"], name="duration"),
    Score("How likely would the patient recommend it?", ["never", "perhaps", "surely"], name="recommended"),
)


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


def question_tokens(
    model: Path, asked: Sequence[Mapping[str, Any]], texts: Sequence[str]
) -> tuple[list[TokenArray], list[list[list[int]]]]:
    """Token ids of the prompts that the program makes of a question file about each text, text by text, and those of
    the options after each. Raises ValueError for an option with several spellings."""
    with TemporaryDirectory() as folder:
        rows = Path(folder, "texts.jsonl")
        rows.write_text("\n".join(json.dumps({"text": each}) for each in texts))
        settings = scorer_settings(model, {"questions": list(asked)}, owner="score()", paths=(str(rows),))
        inputs = open_inputs(*open_rows(settings))
        with inputs.windows() as windows:
            prompts = [each for window in windows for each in window.prompts]
        inputs.builder.close()
    if any(len(own) != 1 for each in prompts for own in each.labels.spellings):
        raise ValueError("an option has several spellings, and one is compared")
    return [each.tokens for each in prompts], [[own.tolist() for own in each.labels.sequences] for each in prompts]


def _ask(review: Review) -> str:
    return f"Review: {review.text}\nSentiment:"
