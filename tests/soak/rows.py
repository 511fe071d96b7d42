"""Rows for `python -m tests.soak`: many short questions, some long ones, and a few that are wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.score_runs import SAMPLES

GROUP_ROWS = 16_384
WRONG_EVERY = 5_000
"""One row in so many has no prompt, and another one the id of an earlier row."""
_TASK = "Read the text and answer Yes or No."
_SHORT = 45  # characters of a sentence
_LONG_LINES = 45  # of an account history, about 20 tokens each
_SCHEMA = pa.schema({"id": pa.string(), "prompt": pa.string(), "long": pa.bool_(), "wrong": pa.string()})


def write_night(path: Path, *, rows: int, long: int, seed: int) -> None:
    """Write `rows` short rows and `long` ones, spread among them, to a Parquet file, unless they are there.

    Columns: `id`, `prompt`, `long`, and `wrong`: the error that the row must have, or null.
    """
    schema = _SCHEMA.with_metadata({"night": f"{rows} and {long} rows of seed {seed}"})
    if path.exists() and pq.read_schema(path).metadata == schema.metadata:
        return
    rng = np.random.default_rng(seed)
    total = rows + long
    long_rows = set(rng.choice(total, long, replace=False).tolist())
    made = _rows(total, long_rows, rng)
    begun = path.with_suffix(".begun")
    with pq.ParquetWriter(begun, schema) as writer:
        for start in range(0, total, GROUP_ROWS):
            group = [next(made) for _ in range(min(GROUP_ROWS, total - start))]
            writer.write_table(pa.Table.from_pylist(group, schema=schema))
    begun.rename(path)


def _rows(total: int, long_rows: set[int], rng: np.random.Generator) -> Iterator[dict[str, object]]:
    questions = _questions()
    histories = [json.loads(line)["prompt"] for line in (SAMPLES / "credit_verification.jsonl").open()]
    for number in range(total):
        if number in long_rows:
            prompt = _long_prompt(histories[int(rng.integers(len(histories)))], number)
        else:
            about = bool(rng.integers(2))
            sentence, subject = questions[int(rng.integers(len(questions)))]
            asked = subject if about else questions[int(rng.integers(len(questions)))][1]
            prompt = f"{_TASK}\n{sentence} {number}.\nQuestion: Is it about {asked}? Answer:"
        row: dict[str, object] = {"id": f"night-{number:07}", "prompt": prompt, "long": number in long_rows}
        if number % WRONG_EVERY == WRONG_EVERY - 1:
            row |= {"prompt": None, "wrong": "skipped_empty"}
        elif number % WRONG_EVERY == WRONG_EVERY // 2:
            row |= {"id": f"night-{number // 2:07}", "wrong": "duplicate_id"}
        yield row


def _questions() -> list[tuple[str, str]]:
    """Short sentences of the short samples, each with what it is about."""
    table = pq.read_table(SAMPLES / "labeling.parquet").to_pylist()
    found = set()
    for row in table:
        for sentence in row["text"].partition(": ")[2].split(". "):
            if row["subject"] in sentence and len(sentence) <= _SHORT:
                found.add((sentence.strip(" .") + ".", row["subject"]))
    return sorted(found)


def _long_prompt(prompt: str, number: int) -> str:
    """The beginning of an account history and its question, with a number of its own."""
    head, *lines, question = prompt.split("\n")
    start = number % max(len(lines) - _LONG_LINES, 1)
    return "\n".join([head, f"File {number}.", *lines[start : start + _LONG_LINES], question])
