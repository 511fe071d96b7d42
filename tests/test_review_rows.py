"""The rows and runs that measure compression on a real model, with made-up reviews instead of the downloaded ones."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from benchmarks import review_rows
from benchmarks.bench_reviews import RUNS, bench_command, table_lines
from prefillcli.options.commands import BenchSettings
from recipes.real_model import Review

COUNTS = {"Train": 300, "Test": 260}


def made_reviews(split: str, folder: Path) -> list[Review]:
    return [
        Review(f"{split} {number:03d} " + "word " * (20 if number % 3 else 150), ("positive", "negative")[number % 2])
        for number in range(COUNTS[split])
    ]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    monkeypatch.setattr(review_rows, "reviews", made_reviews)
    return review_rows.write_rows(tmp_path)


def read_reviews(path: Path) -> tuple[list[list[str]], list[str]]:
    """The reviews in each prompt of a file, the one in question last, and what is right."""
    table = pq.read_table(path).to_pydict()
    prompts = [[part.split(" word")[0] for part in text.split("Review: ")[1:]] for text in table["prompt"]]
    return prompts, table["sentiment"]


def test_no_review_is_both_chosen_on_and_judged_by(files: dict[str, Path]) -> None:
    seen = {half: {each for name, path in files.items() if name.endswith(half) for row in read_reviews(path)[0]
                   for each in row} for half in ("chosen", "held")}  # fmt: skip
    assert not seen["chosen"] & seen["held"]
    assert all(each.startswith("Train") for each in seen["chosen"])
    for kind in ("shared", "own", "long"):
        assert all(row[-1].startswith("Test") for row in read_reviews(files[f"{kind}.held"])[0])


def test_a_draft_learns_nothing_of_what_judges_it(files: dict[str, Path], tmp_path: Path) -> None:
    learnt = {each.text.split(" word")[0] for each in review_rows.draft_reviews(tmp_path)}
    held = {
        each for name, path in files.items() if name.endswith("held") for row in read_reviews(path)[0] for each in row
    }
    assert learnt
    assert not learnt & held


def test_half_of_the_rows_and_of_the_examples_are_positive(files: dict[str, Path]) -> None:
    for name, path in files.items():
        prompts, right = read_reviews(path)
        assert right.count("positive") == len(right) / 2, name
        shown = pq.read_table(path)["prompt"][0].as_py()
        assert (
            shown.count("Sentiment: positive\n") == shown.count("Sentiment: negative\n") == (len(prompts[0]) - 1) // 2
        )
        assert shown.endswith("\nSentiment:")


def test_examples_are_shared_where_the_name_says_so(files: dict[str, Path]) -> None:
    shared, own = (read_reviews(files[f"{kind}.held"])[0] for kind in ("shared", "own"))
    together = review_rows.TOGETHER
    assert len(shared) == review_rows.GROUPS * together
    assert len({tuple(row[:-1]) for row in shared}) == review_rows.GROUPS
    assert len({tuple(row[:-1]) for row in shared[:together]}) == 1
    assert len({tuple(row[:-1]) for row in own}) == len(own)
    assert len({row[-1] for row in shared}) == len(shared)


@pytest.mark.parametrize("name", RUNS)
def test_a_run_has_options_that_exist(name: str, tmp_path: Path) -> None:
    command = bench_command(RUNS[name], tmp_path, tmp_path / "bench.json")
    given = {word.removeprefix("--") for word in command if word.startswith("--")} - {"no-chat"}
    assert given <= BenchSettings.options().keys()
    assert RUNS[name].rows in ("shared", "own", "long")


def test_the_table_has_a_line_for_each_method_of_a_finished_run(tmp_path: Path) -> None:
    audit = {"flips": 3, "rows": 48, "flip_rate": 0.0625, "interval": [0.013, 0.172], "mean_difference": 0.05}
    methods = [
        {"method": "hybrid", "kept": 1.0, "speedup": {"median": 1.0}, "answers": {"accuracy": 0.75, "auc": 0.8}},
        {"method": "ends@0.2", "kept": 0.25, "speedup": {"median": 2.5}, "answers": {"accuracy": 0.5, "auc": 0.6}},
    ]
    for each, found in zip(methods, (None, audit), strict=True):
        each["answers"]["audit"] = found  # type: ignore[index]
    for name, rounds in (("long.self", 0), ("own.speed", 3)):
        (tmp_path / f"{name}.json").write_text(json.dumps({"workloads": [{"rounds": rounds, "methods": methods}]}))
    _, _, reference, compressed, _, timed = table_lines(tmp_path)
    assert reference == "| long.self | hybrid | 100.0% |  |  |  | 75.0% | 0.800 |  |"
    cells = " | ".join(["ends@0.2", "25.0%", "3 of 48 (6.2%)", "1.3-17.2 %", "0.050", "50.0%", "0.600"])
    assert compressed == f"| long.self | {cells} |  |"
    assert timed == f"| own.speed | {cells} | 2.50 |"
