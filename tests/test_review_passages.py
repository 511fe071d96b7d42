"""The rows of several thousand passages, cut from made-up reviews instead of the downloaded ones."""

from __future__ import annotations

import re
from pathlib import Path
from random import Random

import pyarrow.parquet as pq
import pytest

from benchmarks import review_passages
from benchmarks.choose_prompt import first_short
from benchmarks.review_passages import cut, passage_table, write_nights, write_passages
from recipes.real_model import Review


def made_reviews(split: str, folder: Path | None = None, *, neutral: bool = False) -> list[Review]:
    """Forty reviews of up to nine sentences, each sentence unlike all others."""
    return [
        Review(
            " ".join(
                f"Sentence {at} of review {number} in {split} says so{'.!?'[at % 3]}" for at in range(number % 9 + 1)
            ),
            ("positive", "negative")[number % 2],
        )
        for number in range(40)
    ]


def test_every_sentence_of_a_review_is_in_one_passage() -> None:
    for review in made_reviews("Train"):
        passages = list(cut(review.text, Random(3)))
        assert " ".join(passages) == review.text
        assert all(1 <= sum(passage.count(end) for end in ".!?") <= 4 for passage in passages)


def test_scraps_and_walls_of_text_are_left_out() -> None:
    text = f"Too short. {'Far too long ' * 200}. This one sentence has the right size."
    found = {passage for seed in range(20) for passage in cut(text, Random(seed))}
    assert found == {"This one sentence has the right size."}


def test_rows_ask_about_passages_behind_the_same_examples() -> None:
    pool = made_reviews("Train")
    shown = first_short(pool, 2)
    table = passage_table(shown, pool)
    examples = "".join(f"Review: {each.text}\nSentiment: {each.sentiment}\n\n" for each in shown)
    texts = {each.text for each in shown}
    for row in table.to_pylist():
        assert row["prompt"] == f"{examples}Review: {row['passage']}\nSentiment:"
        assert row["passage"] in pool[row["review"]].text
        assert row["sentiment"] == pool[row["review"]].sentiment
        assert pool[row["review"]].text not in texts
    assert len(set(table["passage"].to_pylist())) == table.num_rows == len(set(table["id"].to_pylist()))


def test_passages_come_from_both_splits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(review_passages, "reviews", made_reviews)
    passages = pq.read_table(write_passages(tmp_path))["passage"].to_pylist()
    assert {split for split in ("Train", "Test") if any(split in each for each in passages)} == {"Train", "Test"}


def test_a_first_model_learns_from_other_reviews_than_it_judges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(review_passages, "reviews", made_reviews)
    night, today = (pq.read_table(path)["prompt"].to_pylist() for path in write_nights(tmp_path))
    sentences = re.compile(r"Sentence \d+ of (review \d+ in \w+)")
    learnt, judged = ({own for text in rows for own in sentences.findall(text)} for rows in (night, today))
    assert (len(learnt), len(judged)) == (26, 54)
    assert not learnt & judged
    assert {len(sentences.findall(text)) for text in night} == {1, 2, 3, 4}
    assert len(set(night)) == len(night) > len(today)
