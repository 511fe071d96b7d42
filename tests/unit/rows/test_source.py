"""The whole input: several files, limits, samples, remote files, fingerprints."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefillcli.errors import ContentChangedError
from prefillcli.rows.input.discovery import KINDS
from prefillcli.rows.input.selection import Selection
from prefillcli.rows.input.source import Source

Write = Callable[..., str]


@pytest.fixture(params=["jsonl", "parquet"])
def two_files(request: pytest.FixtureRequest, tmp_path: Path, write_jsonl: Write) -> list[str]:
    """5,000 rows, whose prompt is the row number, in two files."""
    texts = [f"{row}" for row in range(5000)]
    if request.param == "jsonl":
        return [
            write_jsonl([{"prompt": text} for text in texts[:3000]], "1.jsonl"),
            write_jsonl([{"prompt": text} for text in texts[3000:]], "2.jsonl"),
        ]
    for name, part in (("1.parquet", texts[:3000]), ("2.parquet", texts[3000:])):
        pq.write_table(pa.table({"prompt": part}), tmp_path / name, row_group_size=700)
    return [str(tmp_path / "1.parquet"), str(tmp_path / "2.parquet")]


def rows_and_texts(source: Source) -> tuple[list[int], list[str]]:
    batches = list(source.batches())
    assert [batch.first_row for batch in batches] == [batch.rows[0] for batch in batches]
    rows = [row for batch in batches for row in batch.rows.tolist()]
    return rows, [text for batch in batches for text in batch.columns["prompt"]]


def test_rows_are_numbered_through_all_files(two_files: list[str]) -> None:
    rows, texts = rows_and_texts(Source.open(two_files, columns=["prompt"]))
    assert rows == list(range(5000))
    assert texts == [f"{row}" for row in rows]


@pytest.mark.parametrize("limit", [1, 700, 3000, 3001, 9999])
def test_limit_takes_the_first_rows(two_files: list[str], limit: int) -> None:
    source = Source.open(two_files, columns=["prompt"], limit=limit)
    source.count()
    rows, texts = rows_and_texts(source)
    assert rows == list(range(min(limit, 5000)))
    assert texts == [f"{row}" for row in rows]
    assert source.selected_rows == len(rows)


@pytest.mark.parametrize("sample", [1, 50, 9999])
def test_sample_draws_rows_by_the_seed_and_keeps_their_numbers(two_files: list[str], sample: int) -> None:
    rows, texts = rows_and_texts(Source.open(two_files, columns=["prompt"], sample=sample, seed=3))
    assert len(rows) == min(sample, 5000)
    assert rows == sorted(set(rows))
    assert texts == [f"{row}" for row in rows]
    again, _ = rows_and_texts(Source.open(two_files, columns=["prompt"], sample=sample, seed=3))
    assert again == rows


def test_another_seed_draws_other_rows_from_all_over(two_files: list[str]) -> None:
    drawn = [rows_and_texts(Source.open(two_files, columns=["prompt"], sample=100, seed=seed))[0] for seed in (0, 1)]
    assert drawn[0] != drawn[1]
    assert drawn[0][0] < 500
    assert drawn[0][-1] > 4500


def test_the_number_of_rows_is_known_from_parquet_and_counted_in_json_lines(two_files: list[str]) -> None:
    source = Source.open(two_files, columns=["prompt"])
    assert source.selected_rows == (5000 if two_files[0].endswith("parquet") else None)
    assert source.count() == 5000
    assert source.selected_rows == 5000


def test_columns_can_be_chosen_after_a_look_at_what_there_is(two_files: list[str]) -> None:
    source = Source.open(two_files)
    assert source.available == ("prompt",)
    assert rows_and_texts(source.select(columns=["prompt"], carried=["prompt"]))[1][7] == "7"
    assert source.carried_schema.names == ["prompt"]


def test_remote_files_are_read_like_local_ones(two_files: list[str], memory: Any) -> None:
    for path in two_files:
        memory.pipe_file(f"/in/{Path(path).name}", Path(path).read_bytes())
    local = Source.open(two_files, columns=["prompt"])
    remote = Source.open(["memory://in"], columns=["prompt"])
    assert rows_and_texts(remote) == rows_and_texts(local)
    assert remote.fingerprint() == local.fingerprint(), "where the store has no versions, the content counts"


def test_a_limit_that_is_reached_stops_reading(two_files: list[str]) -> None:
    Path(two_files[1]).write_bytes(b"\xff" * 10) if two_files[1].endswith("jsonl") else None
    source = Source.open(two_files, columns=["prompt"], limit=10)
    assert len(rows_and_texts(source)[0]) == 10


class TestFingerprint:
    def test_it_is_the_same_for_the_same_content_elsewhere(self, two_files: list[str], tmp_path: Path) -> None:
        first = Source.open(two_files).fingerprint()
        moved = []
        for path in two_files:
            target = tmp_path / "elsewhere" / Path(path).name
            target.parent.mkdir(exist_ok=True)
            target.write_bytes(Path(path).read_bytes())
            os.utime(target, (1, 1))
            moved.append(str(target))
        assert Source.open(moved).fingerprint() == first

    def test_it_changes_with_content_order_and_chosen_rows(self, two_files: list[str], tmp_path: Path) -> None:
        prints = [
            Source.open(two_files).fingerprint(),
            Source.open(two_files[::-1]).fingerprint(),
            Source.open(two_files[:1]).fingerprint(),
            Source.open(two_files, limit=10).fingerprint(),
            Source.open(two_files, sample=10).fingerprint(),
            Source.open(two_files, sample=10, seed=1).fingerprint(),
        ]
        if two_files[0].endswith("jsonl"):
            data = Path(two_files[1]).read_bytes()
            Path(two_files[1]).write_bytes(data.replace(b"4321", b"1234"))
        else:
            pq.write_table(pa.table({"prompt": ["other"] * 2000}), two_files[1])
        prints.append(Source.open(two_files).fingerprint())
        assert len(set(prints)) == len(prints)

    def test_an_unused_seed_does_not_count(self, two_files: list[str]) -> None:
        assert Source.open(two_files, seed=1).fingerprint() == Source.open(two_files, seed=2).fingerprint()


def test_another_file_in_the_place_of_the_one_that_was_found_is_not_read(two_files: list[str], tmp_path: Path) -> None:
    source = Source.open(two_files, columns=["prompt"])
    os.replace(shutil.copy(two_files[1], tmp_path / "other"), two_files[0])
    with pytest.raises(ContentChangedError, match=Path(two_files[0]).name):
        next(source.batches())


@given(total=st.integers(0, 300), sample=st.integers(1, 300), seed=st.integers(0, 5), parts=st.integers(1, 7))
def test_a_sample_is_the_same_rows_however_the_input_is_cut(total: int, sample: int, seed: int, parts: int) -> None:
    selection = Selection.draw(sample, total, seed)
    cuts = [total * part // parts for part in range(parts + 1)]
    rows = [row for low, high in pairwise(cuts) for row in selection.within(low, high).tolist()]
    assert rows == selection.within(0, total).tolist()
    assert len(rows) == min(sample, total) == selection.count(total)
    assert not rows or selection.end is None or selection.end == rows[-1] + 1


def test_json_lines_batches_are_bounded(write_jsonl: Write) -> None:
    path = write_jsonl([{"prompt": "x" * 3_000_000}] * 7 + [{"prompt": "y"}] * 5000)
    batches = list(Source.open([path], columns=["prompt"]).batches())
    assert all(len(batch.rows) <= 2048 and batch.nbytes <= 12 << 20 for batch in batches)
    assert sum(len(batch.rows) for batch in batches) == 5007


def test_needed_and_carried_columns_may_be_the_same(write_jsonl: Write) -> None:
    path = write_jsonl([{"prompt": "a", "id": 1}])
    (batch,) = Source.open([path], columns=["prompt", "prompt"], carried=["id", "prompt"]).batches()
    assert batch.columns == {"prompt": ["a"]}
    assert {name: json.loads(text) for name, text in batch.carried.to_pylist()[0].items()} == {
        "id": 1,
        "prompt": "a",
    }


class TestOptionalColumns:
    def test_files_may_lack_them(self, tmp_path: Path) -> None:
        files = []
        for number, columns in enumerate(
            (
                {"prompt": ["a", "b"], "keep": [0.5, None]},
                {"prompt": ["c"]},
                {"specprefill": [True], "prompt": ["d"]},
                {"prompt": ["e"], "keep": ["x"], "specprefill": [None]},
            )
        ):
            files.append(str(tmp_path / f"{number}.parquet"))
            pq.write_table(pa.table(columns), files[-1])
        source = Source.open(files)
        source.select(columns=["prompt"], carried=[], optional=["keep", "specprefill"])
        found = [batch.columns for batch in source.batches()]
        assert found == [
            {"prompt": ["a", "b"], "keep": [0.5, None]},
            {"prompt": ["c"]},
            {"prompt": ["d"], "specprefill": [True]},
            {"prompt": ["e"], "keep": ["x"], "specprefill": [None]},
        ]

    def test_lines_may_lack_them(self, write_jsonl: Write) -> None:
        path = write_jsonl(
            [{"prompt": "a", "keep": 0.5}, {"prompt": "b"}, {"specprefill": False, "prompt": "c"}, {"keep": 1}, b"{"]
        )
        source = Source.open([path]).select(columns=["prompt"], carried=[], optional=["keep", "specprefill"])
        (batch,) = source.batches()
        assert batch.columns == {
            "prompt": ["a", "b", "c", None, None],
            "keep": [0.5, None, None, 1, None],
            "specprefill": [None, None, False, None, None],
        }
        assert {row: error.code for row, error in batch.errors.items()} == {3: "missing_column", 4: "invalid_json"}

    def test_a_line_far_into_the_file_may_be_the_first_to_have_them(self, write_jsonl: Write) -> None:
        path = write_jsonl([{"prompt": "a"}] * 3000 + [{"prompt": "b", "keep": 0.25}])
        source = Source.open([path]).select(columns=["prompt"], carried=[], optional=["keep"])
        assert [batch.columns["keep"][-1] for batch in source.batches()] == [None, 0.25]

    @pytest.mark.parametrize("kind", ["jsonl", "parquet"])
    def test_what_the_prompt_needs_is_not_optional(self, kind: str, tmp_path: Path, write_jsonl: Write) -> None:
        if kind == "jsonl":
            path = write_jsonl([{"prompt": "a", "keep": 0.5}, {"prompt": "b"}])
        else:
            path = str(tmp_path / "in.parquet")
            pq.write_table(pa.table({"prompt": ["a", "b"], "keep": [0.5, None]}), path)
        source = Source.open([path]).select(columns=["prompt", "keep"], carried=["keep"], optional=["keep"])
        (batch,) = source.batches()
        assert batch.columns == {"prompt": ["a", "b"], "keep": [0.5, None]}
        assert {row: error.code for row, error in batch.errors.items()} == (
            {1: "missing_column"} if kind == "jsonl" else {}
        )


def test_a_kind_of_file_that_nothing_reads_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, ".yaml", "yaml")  # as one does who adds a format
    path = tmp_path / "in.yaml"
    path.write_text("prompt: x")
    with pytest.raises(AssertionError, match="yaml"):
        Source.open([str(path)])
