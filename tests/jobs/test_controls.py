"""Jobs with `--draft random` and `--draft bm25`: what a draft is compared with picks the tokens, without a model."""

from __future__ import annotations

from math import ceil
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.jobs import read_output, read_report, score, write_jsonl

KEEP, FIRST, LAST = 0.3, 4, 16
HOW: dict[str, Any] = {"keep": KEEP, "keep_first": FIRST, "keep_last": LAST, "compress_above": 0, "overwrite": True}


@pytest.fixture
def rows() -> Path:
    texts = ["".join(f"Day {day} of {row} was {day * row % 7} degrees.\n" for day in range(9)) for row in range(4)]
    return write_jsonl(
        "rows.jsonl", [{"prompt": f"{text}Was a day of {row} warm? Answer:"} for row, text in enumerate(texts)]
    )


def controlled(rows: Path, model: Path, draft: str, **given: Any) -> tuple[list[dict[str, Any]], dict[str, str]]:
    assert score(rows, "out.parquet", model=model, draft=draft, **HOW, **given)["exit_code"] == 0
    return read_output("out.parquet"), read_report("out.run.json")["fingerprint"]


@pytest.mark.parametrize("draft", ["random", "bm25"])
def test_as_many_tokens_are_kept_as_the_rate_says(draft: str, rows: Path, model: Path) -> None:
    found, _ = controlled(rows, model, draft)
    for row in found:
        others = row["prompt_tokens"] - FIRST - LAST
        assert row["method"] == draft
        assert row["kept_tokens"] == FIRST + LAST + ceil(KEEP * others)
    assert read_report("out.run.json")["tokens"]["draft"] == 0


def test_the_seed_decides_which_chunks_are_drawn(rows: Path, model: Path) -> None:
    (first, name), (again, same), (second, other) = (controlled(rows, model, "random", seed=n) for n in (1, 1, 2))
    scores = [[row["score"] for row in found] for found in (first, again, second)]
    assert scores[0] == scores[1] != scores[2]
    assert name == same
    assert name["draft"] != other["draft"]
