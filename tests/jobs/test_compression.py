"""Jobs with a draft: which rows are compressed, which tokens are left of them, and what they answer then."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tests.jobs.compression import (
    HOW,
    LAST,
    RATE,
    ByHand,
    Prompt,
    assert_close,
    compressed,
    full_rows,
    lines_of,
    unrelated,
)
from tests.jobs.jobs import Reference, read_output, read_report, write_jsonl, write_parquet
from tests.jobs.models import save_model


@pytest.fixture(scope="module")
def by_hand(reference: Reference, model: Path, draft: Path) -> ByHand:
    return ByHand(reference, model, draft)


def users(reference: Reference, rows: int = 4) -> list[Prompt]:
    """Rows of three users: a long history, which the user's rows share, and a part of their own."""
    histories = unrelated(reference, [201, 158, 240], seed=1)
    ends = unrelated(reference, [48 + 7 * row for row in range(rows)], seed=2)
    return [history + end for history in histories for end in ends]


def test_compressed_rows_answer_from_the_tokens_that_the_draft_picks(
    model: Path, draft: Path, reference: Reference, by_hand: ByHand
) -> None:
    prompts = unrelated(reference, [300, 65, 129, 200, 163, 301, 128, 90])
    assert compressed(write_jsonl("in.jsonl", lines_of(prompts)), model=model, draft=draft)["exit_code"] == 0
    rows = read_output("out.parquet")
    for row, prompt in zip(rows, prompts, strict=True):
        kept = by_hand.kept(prompt)
        assert (row["method"], row["kept_tokens"]) == ("specprefill", len(kept))
        assert row["prompt_tokens"] == len(prompt) > len(kept)
        assert row["score"] == pytest.approx(by_hand.score(prompt, kept), abs=1e-5)
    assert max(row["score"] for row in rows) - min(row["score"] for row in rows) > 0.05
    differences = [
        abs(by_hand.score(p, np.arange(len(p))) - row["score"]) for p, row in zip(prompts, rows, strict=True)
    ]
    assert max(differences) > 0.01, "reading less must change an answer, or nothing is tested"
    report = read_report()
    assert report["keep"] == RATE
    assert report["tokens"]["kept"] == sum(row["kept_tokens"] for row in rows)
    assert report["tokens"]["draft"] == report["tokens"]["prompt"] == sum(map(len, prompts))


def test_rows_that_are_not_to_be_compressed_are_read_as_without_a_draft(
    model: Path, draft: Path, reference: Reference, by_hand: ByHand
) -> None:
    prompts = unrelated(reference, [200, 64, 40, 180, 170, 65, 50])
    wish = [False, None, ..., None, ..., False, True]
    source = write_jsonl("in.jsonl", lines_of(prompts, specprefill=wish, keep=[None, None, ..., None, None, 0.5, ...]))
    full = full_rows(source, model)
    compressed(source, model=model, draft=draft)
    rows = read_output("out.parquet")
    assert [row["method"] for row in rows] == ["full"] * 3 + ["specprefill"] * 2 + ["full", "specprefill"]
    in_full = [number for number, row in enumerate(rows) if row["method"] == "full"]
    assert_close([rows[number] for number in in_full], [full[number] for number in in_full])
    for number in in_full:
        assert rows[number]["kept_tokens"] == rows[number]["prompt_tokens"] == len(prompts[number])
    for number in (3, 4, 6):
        kept = by_hand.kept(prompts[number])
        assert rows[number]["kept_tokens"] == len(kept)
        assert rows[number]["score"] == pytest.approx(by_hand.score(prompts[number], kept), abs=1e-5)


def test_a_rate_of_one_is_the_job_without_a_draft(model: Path, draft: Path, reference: Reference) -> None:
    source = write_jsonl("in.jsonl", lines_of(unrelated(reference, [200, 50, 120])))
    full = full_rows(source, model)
    compressed(source, model=model, draft=draft, keep=1.0)
    assert_close(read_output("out.parquet"), full)
    assert {row["method"] for row in read_output("out.parquet")} == {"full"}


KEEPS = [0.5, 1, None, math.nan, 0.1, 1.0]


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_a_row_can_have_a_rate_of_its_own(
    model: Path, draft: Path, reference: Reference, by_hand: ByHand, kind: str
) -> None:
    prompts = unrelated(reference, [200, 150, 160, 170, 180, 190])
    if kind == "parquet":
        source = write_parquet("in.parquet", prompt_token_ids=prompts, keep=pa.array(KEEPS, pa.float64()))
    else:
        own = [... if keep is None else keep for keep in KEEPS]
        source = write_jsonl("in.jsonl", lines_of(prompts, keep=own))
    compressed(source, model=model, draft=draft)
    rows = read_output("out.parquet")
    assert [row["error"] for row in rows] == [None] * 6
    for row, prompt, rate in zip(rows, prompts, [0.5, 1, RATE, RATE, 0.1, 1], strict=True):
        kept = by_hand.kept(prompt, rate) if rate < 1 else np.arange(len(prompt))
        assert (row["method"], row["kept_tokens"]) == ("specprefill" if rate < 1 else "full", len(kept))
        assert row["score"] == pytest.approx(by_hand.score(prompt, kept), abs=1e-5)


def test_whole_numbers_and_dictionaries_in_parquet_are_rates_too(
    model: Path, draft: Path, reference: Reference
) -> None:
    prompts = unrelated(reference, [200, 150, 160])
    for column, methods in (
        (pa.array([1, None, 1], pa.int32()), ["full", "specprefill", "full"]),
        (pa.array([0.5, None, 1.0]).dictionary_encode(), ["specprefill", "specprefill", "full"]),
    ):
        source = write_parquet("in.parquet", prompt_token_ids=prompts, keep=column)
        assert compressed(source, model=model, draft=draft)["exit_code"] == 0
        assert [row["method"] for row in read_output("out.parquet")] == methods


def test_a_rate_that_makes_no_sense_is_an_error_of_its_row_alone(
    model: Path, draft: Path, reference: Reference
) -> None:
    prompts = unrelated(reference, [150] * 12)
    keep = [..., 0, 1.5, "x", True, ..., -0.5, [0.5], ..., "0.5", None, 0.4]
    wish = [..., ..., ..., ..., ..., "yes", ..., ..., 1, ..., None, True]
    bad = range(1, 10)
    source = write_jsonl("in.jsonl", lines_of(prompts, keep=keep, specprefill=wish))
    summary = compressed(source, model=model, draft=draft)
    rows = read_output("out.parquet")
    assert summary["exit_code"] == 3
    assert [row["error"] for row in rows] == ["invalid_keep" if n in bad else None for n in range(12)]
    for row, name in ((rows[2], "1.5"), (rows[3], "'x'"), (rows[4], "True"), (rows[5], "'yes'")):
        assert name in row["error_detail"]
        assert row["score"] is None
    good = [line for number, line in enumerate(lines_of(prompts, keep=keep, specprefill=wish)) if number not in bad]
    compressed(write_jsonl("good.jsonl", good), model=model, draft=draft)
    assert_close([row for row in rows if row["error"] is None], read_output("out.parquet"))


def test_without_a_draft_the_columns_are_columns_like_others(model: Path, reference: Reference) -> None:
    source = write_jsonl("in.jsonl", lines_of(unrelated(reference, [90, 80]), keep=["x", 7], specprefill=[1, "no"]))
    rows = full_rows(source, model, keep_columns="keep")
    assert [(row["error"], row["method"], row["keep"]) for row in rows] == [(None, "full", "x"), (None, "full", "7")]


@pytest.mark.parametrize(("window", "lookahead"), [(0, 4), (8, 1)])
def test_rows_of_one_user_share_what_is_kept_of_the_history(
    model: Path, draft: Path, reference: Reference, window: int, lookahead: int
) -> None:
    source = write_jsonl("in.jsonl", lines_of(users(reference)))
    options = {"model": model, "draft": draft, "query_window": window, "lookahead": lookahead}
    compressed(source, **options)
    shared, report = read_output("out.parquet"), read_report()
    compressed(source, "per-row.parquet", compress_per_row=True, **options)
    alone, alone_report = read_output("per-row.parquet"), read_report("per-row.run.json")
    assert {row["method"] for row in shared + alone} == {"specprefill"}
    assert report["tokens"]["computed"] < 0.6 * sum(row["kept_tokens"] for row in shared)
    assert report["tokens"]["computed"] < alone_report["tokens"]["computed"]
    assert all(row["shared_tokens"] >= 0.3 * 150 for row in shared)
    assert report["tokens"]["draft"] == alone_report["tokens"]["draft"] < 0.6 * report["tokens"]["prompt"]


def test_per_row_keeps_what_the_row_would_keep_by_itself(
    model: Path, draft: Path, reference: Reference, by_hand: ByHand
) -> None:
    prompts = users(reference)
    compressed(write_jsonl("in.jsonl", lines_of(prompts)), model=model, draft=draft, compress_per_row=True)
    for row, prompt in zip(read_output("out.parquet"), prompts, strict=True):
        kept = by_hand.kept(prompt)
        assert row["kept_tokens"] == len(kept)
        assert row["score"] == pytest.approx(by_hand.score(prompt, kept), abs=1e-5)


def test_an_unrelated_row_changes_no_score(model: Path, draft: Path, reference: Reference) -> None:
    prompts = users(reference)
    strangers = unrelated(reference, [222, 30], seed=9)
    firsts = {prompt[0] for prompt in prompts}
    free = iter(token for token in range(3, 260) if token not in firsts)
    strangers = [[next(free), *stranger[1:]] for stranger in strangers]
    compressed(write_jsonl("in.jsonl", lines_of(prompts)), model=model, draft=draft)
    wanted = read_output("out.parquet")
    compressed(write_jsonl("more.jsonl", lines_of([strangers[0], *prompts, strangers[1]])), model=model, draft=draft)
    rows = read_output("out.parquet")
    assert [row["method"] for row in rows] == ["specprefill"] * 13 + ["full"]
    assert_close(rows[1:-1], wanted)
    assert [row["kept_tokens"] for row in rows[1:-1]] == [row["kept_tokens"] for row in wanted]


def test_what_a_row_in_full_computes_anyway_is_there_for_its_neighbours(
    model: Path, draft: Path, reference: Reference
) -> None:
    prompts = users(reference)[:4]
    source = write_jsonl("in.jsonl", lines_of(prompts, specprefill=[False, True, True, True]))
    full = full_rows(source, model)
    compressed(source, model=model, draft=draft)
    rows = read_output("out.parquet")
    assert_close(rows[:1], full[:1])
    assert [row["method"] for row in rows] == ["full"] + ["specprefill"] * 3
    assert all(row["kept_tokens"] >= 201 + LAST for row in rows[1:])
    assert all(row["shared_tokens"] >= 201 for row in rows)


@pytest.mark.parametrize(
    "options",
    [
        {"pack_tokens": 64, "prefix_kv": "offload"},
        {"pack_tokens": 64, "prefix_kv": "discard"},
        {"chunk_tokens": 17},
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)
def test_packs_and_chunks_change_no_score(
    model: Path, draft: Path, reference: Reference, options: dict[str, Any]
) -> None:
    prompts = [
        prompt for pair in zip(users(reference), unrelated(reference, [99] * 12, 5), strict=True) for prompt in pair
    ]
    source = write_jsonl("in.jsonl", lines_of(prompts))
    compressed(source, model=model, draft=draft)
    wanted, packs = read_output("out.parquet"), read_report()["packs"]
    compressed(source, model=model, draft=draft, **options)
    rows = read_output("out.parquet")
    assert_close(rows, wanted, 1e-5)
    assert {row["method"] for row in rows} == {"specprefill"}
    assert [row["kept_tokens"] for row in rows] == [row["kept_tokens"] for row in wanted]
    assert (read_report()["packs"] > packs) is ("pack_tokens" in options)


def test_a_longer_prompt_than_fits_is_scored_where_its_kept_tokens_fit(
    model: Path, reference: Reference, tmp_path: Path
) -> None:
    draft = save_model(tmp_path / "narrow", seed=3, layers=1, hidden=32)
    by_hand = ByHand(reference, model, draft)
    prompts = unrelated(reference, [900, 400])
    budget = {"memory": "48.5MiB", "chunk_tokens": 16}
    source = write_jsonl("in.jsonl", lines_of(prompts))
    assert [row["error"] for row in full_rows(source, model, **budget)] == ["exceeds_memory", None]
    compressed(source, model=model, draft=draft, **budget)
    for row, prompt in zip(read_output("out.parquet"), prompts, strict=True):
        assert (row["error"], row["method"]) == (None, "specprefill")
        assert row["score"] == pytest.approx(by_hand.score(prompt, by_hand.kept(prompt)), abs=1e-5)


def test_the_options_of_a_job_reach_the_selection(model: Path, draft: Path, reference: Reference) -> None:
    source = write_jsonl("in.jsonl", lines_of(unrelated(reference, [320])))
    tokens = {}
    for name, changes in {
        "as it is": {},
        "nothing always": {"keep_first": 0, "keep_last": 8},
        "much at the end": {"keep_last": 200},
        "each by itself": {"select_chunk": 1},
        "all above": {"compress_above": 320},
    }.items():
        compressed(source, model=model, draft=draft, **(HOW | changes))
        tokens[name] = read_output("out.parquet")[0]["kept_tokens"]
    assert 96 <= tokens["nothing always"] <= 96 + 8
    assert 96 <= tokens["as it is"] <= 96 + 20
    assert 200 <= tokens["much at the end"] <= 296
    assert tokens["all above"] == 320
    assert 96 <= tokens["each by itself"] <= 96 + 20
