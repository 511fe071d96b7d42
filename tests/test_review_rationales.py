"""The recipe that shows rationales with their evidence: its rows, its prompt and its page, with made-up reviews."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from benchmarks.review_rationales import (
    EXAMPLES,
    LEAST,
    ROWS,
    WORDS,
    flags,
    page,
    passage,
    sentences,
    template,
    write_rows,
)
from prefillcli.options.commands import ScoreSettings
from recipes.real_model import Review

LONG = "It helped. " * (LEAST // 10)


def test_rows_are_the_first_reviews_that_are_neither_short_nor_long(tmp_path: Path) -> None:
    made = [Review("Too short.", "negative"), Review("word " * 300, "negative")]
    made += [Review(f"{LONG}Row {number}.", "positive") for number in range(ROWS + 3)]
    write_rows(made, tmp_path / "rows.parquet")
    rows = pq.read_table(tmp_path / "rows.parquet").to_pylist()
    assert [row["review"].split("\n")[-1] for row in rows] == [f"Row {number}." for number in range(ROWS)]
    assert {row["sentiment"] for row in rows} == {"positive"}


def test_each_sentence_is_a_line() -> None:
    assert sentences("It helped. Did it? Yes! At 0.5 mg it did") == [
        "It helped.",
        "Did it?",
        "Yes!",
        "At 0.5 mg it did",
    ]


def test_examples_quote_their_review_and_end_as_the_model_ends() -> None:
    for text, name, quote in EXAMPLES:
        assert quote.rstrip(".") in text
        assert f"{text}\nSentiment: {name} {WORDS} {quote}<|im_end|>" in template()
    assert template().endswith("{{ review }}\nSentiment:")


def test_the_page_has_the_text_and_the_sentences_with_the_largest_changes() -> None:
    evidence = [
        {"section": "review", "change": 0.5},
        {"section": "review, line 2", "change": -0.3},
        {"section": "review, line 1", "change": 0.2},
    ]
    scored = {"prediction": "positive", "score": 0.9, "rationale": "it\nhelped", "finish_reason": "length"}
    heading, table = page(
        [{"review": "One | two.\nThree.", "sentiment": "negative"}], [scored | {"evidence": evidence}]
    )
    assert heading == (
        f"**1.** Rated negative; score 0.900, and 0.400 without the review. **positive {WORDS}** *it helped ...*"
    )
    assert table.splitlines()[2:] == ["| -0.300 | Three. |", "| +0.200 | One \\| two. |"]
    with pytest.raises(ValueError, match="not a line"):
        passage("note", ["One."])


def test_score_knows_the_options_of_its_job() -> None:
    known = {"--" + name.replace("_", "-") for name in ScoreSettings.options()} | {"--no-chat"}
    given = {str(each) for each in flags(Path("prompt.j2")) if str(each).startswith("--")}
    assert given <= known
    assert {"--evidence", "--rationale"} <= given
