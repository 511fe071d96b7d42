"""Windows: every row once, ids checked over the whole input, and reading ahead without leaks."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from prefillcli.core.windows import Prefetcher, SeenIds, WindowSize, windows
from prefillcli.prompts.builder import BuilderClosed, PromptBuilder
from prefillcli.prompts.labels import Labels, parse_labels
from prefillcli.prompts.questions import typed
from prefillcli.prompts.settings import PromptSettings
from prefillcli.rows.input.source import Source
from prefillcli.rows.records import Window

Write = Callable[..., str]


def open_windows(tokenizer: Any, path: str, id_column: str | None = "id", **options: Any) -> Iterator[Window]:
    source = Source.open([path], columns=["prompt"], carried=[id_column] if id_column else [])
    builder = PromptBuilder(tokenizer, PromptSettings(max_length=50, vocab_size=10**6), source.available)
    labels = Labels(tokenizer, typed(parse_labels("Yes,No")))
    return windows(source, builder, labels, id_column=id_column, **options)


def rows_of(number: int) -> list[dict[str, Any]]:
    return [{"id": f"r{row}", "prompt": f"Is {row} it? Answer:"} for row in range(number)]


def test_every_row_is_in_one_window_as_prompt_or_error(byte_level: Any, write_jsonl: Write) -> None:
    rows: list[Any] = rows_of(5000)
    rows[17]["prompt"] = None
    rows[2500] = b"{"
    rows[4999]["prompt"] = "word " * 100
    found = list(open_windows(byte_level, write_jsonl(rows), size=WindowSize(2000)))
    assert [window.index for window in found] == [0, 1, 2]
    assert np.concatenate([window.rows for window in found]).tolist() == list(range(5000))
    for window in found:
        assert sorted([p.row for p in window.prompts] + list(window.errors)) == window.rows.tolist()
        assert len(window.carried) == len(window.rows)
    errors = {row: error.code for window in found for row, error in window.errors.items()}
    assert errors == {17: "null_prompt", 2500: "invalid_json", 4999: "prompt_too_long"}


def test_windows_close_at_rows_or_bytes_and_the_same_way_every_time(byte_level: Any, write_jsonl: Write) -> None:
    path = write_jsonl(rows_of(5000))

    def cut(**options: Any) -> list[int]:
        return [len(window.rows) for window in open_windows(byte_level, path, **options)]

    assert cut(size=WindowSize(4096)) == [4096, 904]
    assert cut(size=WindowSize(nbytes=1)) == [2048] * 2 + [904]
    assert cut() == [5000]
    assert cut(size=WindowSize(3000)) == cut(size=WindowSize(3000))


def test_a_skipped_window_is_not_tokenised_but_its_ids_count(byte_level: Any, write_jsonl: Write) -> None:
    rows = rows_of(6000)
    rows[5000]["id"] = rows[3]["id"]
    found = list(
        open_windows(byte_level, write_jsonl(rows), size=WindowSize(2048), skip=lambda index, rows: index < 2)
    )
    assert [window.index for window in found] == [2]
    assert found[0].errors[5000].code == "duplicate_id"


def test_once_the_builder_is_closed_no_more_is_read_not_even_of_windows_that_are_passed_over(
    byte_level: Any, write_jsonl: Write
) -> None:
    source = Source.open([write_jsonl(rows_of(50))], columns=["prompt"])
    builder = PromptBuilder(byte_level, PromptSettings(max_length=50, vocab_size=10**6), source.available)
    labels = Labels(byte_level, typed(parse_labels("Yes,No")))
    skipped: list[int] = []

    def skip(index: int, rows: object) -> bool:
        skipped.append(index)
        if len(skipped) == 2:
            builder.close()
        return True

    with pytest.raises(BuilderClosed):
        list(windows(source, builder, labels, id_column=None, size=WindowSize(10, batch_rows=10), skip=skip))
    assert skipped == [0, 1]


def test_null_and_repeated_ids_are_error_rows_through_all_windows(byte_level: Any, write_jsonl: Write) -> None:
    rows: list[Any] = rows_of(7000)
    rows[1]["id"] = rows[0]["id"]
    rows[6999]["id"] = rows[0]["id"]
    rows[10]["id"] = None
    del rows[11]["id"]
    rows[12]["id"] = 7
    rows[13]["id"] = "7"
    rows[14]["prompt"] = None
    rows[15]["id"] = rows[14]["id"]
    rows[16]["id"] = None
    rows[16]["prompt"] = 5
    found = list(open_windows(byte_level, write_jsonl(rows), size=WindowSize(2048)))
    errors = {row: error.code for window in found for row, error in window.errors.items()}
    assert errors == {
        1: "duplicate_id",
        6999: "duplicate_id",
        10: "null_id",
        11: "null_id",
        13: "duplicate_id",  # both are 7 where ids are texts
        14: "null_prompt",
        15: "duplicate_id",
        16: "null_id",
    }


def test_without_an_id_column_nothing_is_checked(byte_level: Any, write_jsonl: Write) -> None:
    rows = [{"prompt": "Answer:"}] * 3
    (window,) = open_windows(byte_level, write_jsonl(rows), id_column=None)
    assert not window.errors
    assert window.carried.num_columns == 0
    assert len(window.carried) in (0, 3)


def test_a_nan_is_no_id() -> None:
    errors = SeenIds().check(np.arange(2), pa.chunked_array([[float("nan"), 1.0]]))
    assert {row: error.code for row, error in errors.items()} == {0: "null_id"}


def test_seen_ids_take_about_eight_bytes_a_row() -> None:
    seen = SeenIds()
    for start in range(0, 60_000, 2000):
        rows = np.arange(start, start + 2000, dtype=np.int64)
        assert not seen.check(rows, pa.chunked_array([pa.array([f"id-{row}" for row in rows])]))
    assert sum(run.nbytes for run in seen._sorted) == 8 * 60_000
    assert len(seen._sorted) < 20


class TestAhead:
    def test_work_is_done_ahead_but_not_further_than_depth(self) -> None:
        made: list[int] = []

        def numbers() -> Iterator[int]:
            for number in range(10):
                made.append(number)
                yield number

        items = Prefetcher(numbers(), depth=2)
        assert next(items) == 0
        deadline = time.monotonic() + 5
        while len(made) < 3 and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.02)
        assert made == [0, 1, 2]
        items.close()

    def test_an_exception_is_raised_after_the_items_before_it(self) -> None:
        def broken() -> Iterator[int]:
            yield 1
            raise ValueError("broken")

        items = Prefetcher(broken())
        assert next(items) == 1
        with pytest.raises(ValueError, match="broken"):
            next(items)

    @pytest.mark.parametrize("taken", [0, 1, 5])
    def test_no_thread_is_left_when_the_consumer_stops_early(self, taken: int) -> None:
        closed = threading.Event()

        def endless() -> Iterator[int]:
            try:
                yield from itertools.count()
            finally:
                closed.set()

        before = threading.active_count()
        with pytest.raises(KeyboardInterrupt), Prefetcher(endless(), depth=2) as items:  # noqa: PT012
            for number in range(taken):
                assert next(items) == number
            raise KeyboardInterrupt
        assert threading.active_count() == before
        assert closed.is_set() or taken == 0
        assert list(items) == []
