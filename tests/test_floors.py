"""`prefill calibrate --accuracy` on rows of every kind, without a model: the floors, and what is refused."""

from __future__ import annotations

import csv
import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from prefillcli.cli import app
from prefillcli.stats.acceptance import Acceptance, lowest_floor, lowest_floors
from tests.jobs.jobs import write_jsonl, write_parquet

ROWS = 800
LABELS = ("calm", "angry", "sad")


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def floors(scores: str = "s.parquet", *words: str) -> dict[str, Any]:
    """The summary of a command, with 90 % accuracy unless the words say otherwise."""
    goal = [] if "--accuracy" in words else ["--accuracy", "0.9"]
    done = CliRunner().invoke(app, ["calibrate", scores, *goal, *words])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert done.exit_code == found["exit_code"]
    return found | {"stderr": done.stderr}


def shares(options: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities [rows, options], and the number of the right option, which is as likely as they say."""
    draws = np.random.default_rng(seed)
    found = draws.dirichlet([0.25] * options, ROWS)
    return found, np.array([draws.choice(options, p=each) for each in found])


def labels_of(names: tuple[str, ...]) -> tuple[dict[str, list[Any]], np.ndarray]:
    """The columns of a job of these labels, and the right numbers."""
    found, right = shares(len(names))
    columns = {"score": found[:, 0].tolist(), "label_mass": [0.9] * ROWS}
    with np.errstate(divide="ignore"):
        columns |= {f"logprob_{name}": np.log(0.9 * found[:, at]).tolist() for at, name in enumerate(names)}
    return columns, right


def expected(options: int, seed: int = 0) -> Acceptance:
    found, right = shares(options, seed)
    return lowest_floor(found.max(axis=1), found.argmax(axis=1) == right, 0.9)


def assert_same(entry: dict[str, Any], wanted: Acceptance) -> None:
    assert wanted.floor is not None
    assert (entry["floor"], entry["rows"]) == (wanted.floor, wanted.rows)
    assert (entry["accepted"], entry["errors"], entry["needed"]) == (wanted.accepted, wanted.errors, None)
    assert entry["bound"] == pytest.approx(wanted.bound)
    assert entry["share"] == pytest.approx(wanted.share)


@pytest.mark.parametrize("names", [("Yes", "No"), LABELS])
def test_a_job_of_labels_has_one_floor(names: tuple[str, ...]) -> None:
    columns, right = labels_of(names)
    write_parquet("s.parquet", **columns, truth=[names[at] for at in right])
    done = floors("s.parquet", "--truth", "truth")
    assert done["output"] == "floors.json"
    (entry,) = done["questions"]["answer"]["floors"]
    assert entry["answer"] is None
    assert_same(entry, expected(len(names)))
    content = json.loads(Path("floors.json").read_text())
    assert (content["schema_version"], content["accuracy"], content["confidence"]) == (1, 0.9, 0.95)
    assert content["questions"] == done["questions"]
    line = next(text for text in done["stderr"].splitlines() if text.startswith("answer"))
    assert line.split()[1:4] == ["any", str(ROWS), f"{entry['floor']:g}"]
    assert "--review-below floors.json" in done["stderr"]


def test_each_question_has_its_floors() -> None:
    found, right = shares(2)
    columns = {"late": found[:, 0].tolist(), "late.label_mass": [0.9] * ROWS, "is_late": (right == 0).tolist()}
    write_parquet("s.parquet", **columns, **typed(LABELS, seed=1))
    done = floors("s.parquet", "--truth", "late=is_late,q=truth", "-o", "f.json")
    assert_same(done["questions"]["late"]["floors"][0], expected(2))
    assert_same(done["questions"]["q"]["floors"][0], expected(3, seed=1))
    alone = floors("s.parquet", "--truth", "q=truth")
    assert alone["questions"] == {"q": done["questions"]["q"]}


@pytest.mark.parametrize(
    "words", [(True, False), (1, 0), (1.0, 0.0), ("Yes", "No"), ("true", "false"), ("YES ", "no"), ("1.0", "0.0")]
)
def test_a_predicate_is_right_by_any_word_for_true_and_false(words: tuple[Any, Any]) -> None:
    found, right = shares(2)
    columns = {"late": found[:, 0].tolist(), "late.label_mass": [0.9] * ROWS}
    write_parquet("s.parquet", **columns, truth=[words[at] for at in right])
    for truth in ("late=truth", "truth"):  # the only question needs no name
        assert_same(floors("s.parquet", "--truth", truth)["questions"]["late"]["floors"][0], expected(2))


def typed(values: Any, *, score: bool = False, seed: int = 0, **more: Any) -> dict[str, list[Any]]:
    """The columns of a choice of these values, or of a score of as many levels."""
    found, right = shares(len(values), seed)
    given = (found @ np.arange(len(values))).tolist() if score else [values[at] for at in found.argmax(axis=1)]
    names = [str(each).lower() for each in values]
    told = [dict(zip(names, each, strict=True)) for each in found.tolist()]
    columns = {"q": given, "q.probabilities": told, "q.label_mass": [0.9] * ROWS}
    return columns | {"q.confidence": [0.5] * ROWS, "truth": [values[at] for at in right]} | more


@pytest.mark.parametrize("values", [LABELS, (True, False)])
def test_a_choice_is_right_by_its_value(values: Any) -> None:
    write_parquet("s.parquet", **typed(values))
    assert_same(floors("s.parquet", "--truth", "q=truth")["questions"]["q"]["floors"][0], expected(len(values)))


@pytest.mark.parametrize("said", [int, float, str])
def test_a_score_is_right_by_the_number_of_its_level(said: Any) -> None:
    table = typed((0, 1, 2), score=True)
    write_jsonl("s.jsonl", [dict(zip(table, row, strict=True)) for row in zip(*table.values(), strict=True)])
    write_parquet("s.parquet", **table | {"truth": [said(each) for each in table["truth"]]})
    done = floors("s.parquet", "--truth", "q=truth", "--per-answer")["questions"]["q"]["floors"]
    assert [each["answer"] for each in done] == ["0", "1", "2"]
    assert_same(floors("s.jsonl", "--truth", "q=truth")["questions"]["q"]["floors"][0], expected(3))


def test_per_answer_each_has_its_own_and_an_unproven_one_has_none() -> None:
    found, right = shares(3)
    answers = found.argmax(axis=1)
    right = np.where(answers == 1, 0, right)  # the second is never right
    table = typed(LABELS) | {"truth": [LABELS[at] for at in right]}
    write_parquet("s.parquet", **table)
    done = floors("s.parquet", "--truth", "q=truth", "--per-answer")
    entries = done["questions"]["q"]["floors"]
    assert [each["answer"] for each in entries] == list(LABELS)
    wanted = lowest_floors(found.max(axis=1), answers == right, answers, 3, 0.9)
    assert_same(entries[0], wanted[0])
    assert_same(entries[2], wanted[2])
    assert (entries[1]["floor"], entries[1]["bound"], entries[1]["needed"]) == (None, None, None)
    assert "q, angry: no floor is proven; answers are not right often enough" in done["stderr"]


def test_where_nothing_is_proven_the_number_of_rows_that_would_is_told() -> None:
    columns, right = labels_of(("Yes", "No"))
    few = {name: values[:60] for name, values in columns.items()}
    write_parquet("s.parquet", **few, truth=[("Yes", "No")[at] for at in right[:60]])
    done = floors("s.parquet", "--truth", "truth", "--accuracy", "0.99")
    (entry,) = done["questions"]["answer"]["floors"]
    assert (done["exit_code"], entry["floor"], entry["share"]) == (3, None, 0.0)
    assert entry["needed"] > 60
    assert entry["right"] == sum(shares(2)[0][:60].argmax(axis=1) == right[:60])
    said = [" ".join(text.split()) for text in done["stderr"].split("\n\n")]
    assert (
        f"No floor is proven for an accuracy of 0.99: of 60 labelled rows {entry['right']} are answered right"
        in said[0]
    )
    assert f"about {entry['needed']:,} labelled rows would prove one" in said[0]
    assert "--review-below" not in done["stderr"]
    assert done["error"] in said[0]


def test_reviewed_rows_come_back_as_truth_by_id_or_by_row() -> None:
    columns, right = labels_of(("Yes", "No"))
    truth = [("Yes", "No")[at] for at in right]
    order = np.random.default_rng(3).permutation(ROWS)[:400]
    write_parquet("s.parquet", row=list(range(ROWS)), post=[f"p{at}" for at in range(ROWS)], **columns)
    write_jsonl("looked.jsonl", [{"post": f"p{at}", "row": int(at), "verdict": truth[at]} for at in order])
    by_id, by_row = (
        floors("s.parquet", "--truth", "verdict", "--truth-from", "looked.jsonl", "--id-column", name)
        for name in ("post", "row")
    )
    assert by_id["questions"] == by_row["questions"]
    found = by_id["questions"]["answer"]
    assert found["floors"][0]["rows"] == 400
    assert found["left_out"] == {"without a right answer": 400}


def test_rows_that_cannot_be_used_are_left_out_and_counted() -> None:
    columns, right = labels_of(("Yes", "No"))
    good = [dict(zip(columns, row, strict=True)) | {"truth": ("Yes", "No")[at]}
            for *row, at in zip(*columns.values(), right, strict=True)]  # fmt: skip
    bad = [
        good[0] | {"score": None, "logprob_Yes": None, "logprob_No": None},
        good[0] | {"score": 2.0, "logprob_Yes": None},
        good[0] | {"truth": None},
        good[0] | {"truth": "maybe"},
    ]
    write_jsonl("s.jsonl", [*bad, *good, b"{broken"])
    done = floors("s.jsonl", "--truth", "truth")
    found = done["questions"]["answer"]
    assert found["mistakes"] == {"rows": 1, "examples": [{"value": "maybe", "rows": 1, "near": None}]}
    assert "--truth truth: 1 right answer is none of Yes, No: maybe" in " ".join(done["stderr"].split())
    assert_same(found["floors"][0], expected(2))
    assert found["left_out"] == {
        "without an answer": 1,
        "whose answer has no probabilities": 1,
        "without a right answer": 1,
        "whose right answer is none of the options": 1,
        "that cannot be read": 1,
    }


def late() -> dict[str, list[Any]]:
    """The columns of a predicate."""
    return {"late": shares(2)[0][:, 0].tolist(), "late.label_mass": [0.9] * ROWS}


TABLE = labels_of(LABELS)[0] | {"truth": [LABELS[at] for at in labels_of(LABELS)[1]]}


@pytest.mark.parametrize(
    ("table", "words", "said"),
    [
        (TABLE, ("--truth", "truth", "--accuracy", "1"), "--accuracy '1': should be less than 1"),
        (TABLE, ("--truth", "truth", "--accuracy", "0"), "--accuracy '0': should be greater than 0"),
        (TABLE, (), "no --truth given"),
        (TABLE, ("--truth", "else"), "no column 'else'"),
        (TABLE, ("--truth", "tone=truth"), "--truth tone=truth: no question 'tone'\nthere are answer"),
        (TABLE, ("--truth", "truth", "--folds", "3"), "--folds has no effect beside --accuracy"),
        (TABLE | {"truth": [None] * ROWS}, ("--truth", "truth"), f"({ROWS} without a right answer)"),
        (
            TABLE | {"truth": ["?"] * ROWS},
            ("--truth", "truth"),
            f"--truth truth: none of its values is a label: ? ({ROWS} rows)",
        ),
        ({name: values[:0] for name, values in TABLE.items()}, ("--truth", "truth"), "it has no rows"),
        (TABLE | {"score": TABLE["logprob_sad"]}, ("--truth", "truth"), "score is not the probability of calm"),
        ({"prompt": ["x"], "truth": ["y"]}, ("--truth", "truth"), "not an output of prefill score"),
        (typed(LABELS) | late(), ("--truth", "truth"), "there are q, late: write it like q=truth"),
        (typed(LABELS), ("--truth", "p=truth"), "--truth p=truth: no question 'p'"),
    ],
)
def test_what_proves_nothing_is_refused(table: dict[str, Any], words: tuple[str, ...], said: str) -> None:
    write_parquet("s.parquet", **table)
    done = floors("s.parquet", *words)
    assert done["exit_code"] == 2
    assert said in done["error"]
    assert len(done["error"].splitlines()) <= 3
    assert not Path("floors.json").exists()


@pytest.mark.parametrize("words", [("--truth", "late=is_late", "--truth", "q=truth"), ("--recipe", "r.yaml")])
def test_columns_of_right_answers_are_named_one_by_one_or_by_a_mapping(words: tuple[str, ...]) -> None:
    write_parquet("s.parquet", **typed(LABELS), **late(), is_late=(shares(2)[1] == 0).tolist())
    Path("r.yaml").write_text("truth:\n  late: is_late\n  q: truth\n")
    wanted = floors("s.parquet", "--truth", "late=is_late,q=truth")["questions"]
    assert list(wanted) == ["late", "q"]
    assert floors("s.parquet", *words)["questions"] == wanted


def test_a_question_that_no_row_answers_has_no_floor() -> None:
    table = typed(LABELS) | {name: [None] * ROWS for name in ("q", "q.probabilities")}
    write_jsonl("s.jsonl", [dict(zip(table, row, strict=True)) for row in zip(*table.values(), strict=True)])
    assert "no row has an answer to q with its probabilities" in floors("s.jsonl", "--truth", "q=truth")["error"]


def test_per_answer_needs_an_accuracy() -> None:
    write_parquet("s.parquet", **TABLE)
    done = CliRunner().invoke(app, ["calibrate", "s.parquet", "--truth", "truth", "--per-answer"])
    assert done.exit_code == 2
    assert "--per-answer needs --accuracy" in done.stdout


def test_floors_replace_floors_and_nothing_else() -> None:
    write_parquet("s.parquet", **TABLE)
    assert floors("s.parquet", "--truth", "truth")["exit_code"] == 0
    assert floors("s.parquet", "--truth", "truth", "--accuracy", "0.8")["exit_code"] == 0
    Path("floors.json").write_text('{"mine": 1}')
    assert "that is not written by prefill calibrate" in floors("s.parquet", "--truth", "truth")["error"]


@pytest.mark.parametrize("ending", ["csv", "tsv", "jsonl"])
def test_floors_are_the_same_for_every_format(ending: str) -> None:
    found, right = shares(2)
    table = {"late": found[:, 0].tolist(), "late.label_mass": [0.9] * ROWS, "is_late": (right == 0).tolist()}
    table |= typed(LABELS, seed=1)
    write_parquet("s.parquet", **table)
    rows = list(zip(*table.values(), strict=True))
    if ending == "jsonl":
        write_jsonl("s.jsonl", [dict(zip(table, row, strict=True)) for row in rows])
    else:
        with Path(f"s.{ending}").open("w", newline="") as file:
            # Between tabs quotes are characters like any other
            form = {"delimiter": "\t", "quoting": csv.QUOTE_NONE, "quotechar": None} if ending == "tsv" else {}
            writer = csv.writer(file, **form)
            writer.writerow(table)
            writer.writerows([[each if isinstance(each, str) else json.dumps(each) for each in row] for row in rows])
    words = ("--truth", "late=is_late,q=truth", "--per-answer")
    assert floors(f"s.{ending}", *words)["questions"] == floors("s.parquet", *words)["questions"]


@pytest.mark.parametrize("words", [("--accuracy", "0.9"), ("--accuracy", "0.999999"), ()])
def test_a_narrow_terminal_shows_whole_figures_and_no_empty_lines(
    monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes it for a terminal
    monkeypatch.setenv("NO_COLOR", "1")
    columns, right = labels_of(("Yes", "No"))
    write_parquet("s.parquet", **columns, truth=[("Yes", "No")[at] for at in right])
    done = CliRunner().invoke(app, ["calibrate", "s.parquet", "--truth", "truth", *words])
    lines = re.sub(r"\x1b\[\d*m", "", done.stderr).splitlines()
    shown = [line for line in lines if not line.startswith("prefill: warning: ")]
    assert max(map(len, shown)) <= 60
    assert "…" not in done.stderr
    assert not any(not one.strip() and not other.strip() for one, other in pairwise(shown))
    assert sum(not line.strip() for line in shown) <= 2  # around the table
