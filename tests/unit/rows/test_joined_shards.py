"""Shards without a model: however rows are dealt, and wherever a merge dies, the output is that of one sink."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefillcli.errors import PrefillError
from prefillcli.rows.output import Shard
from prefillcli.rows.output.destination import Destination
from prefillcli.rows.output.shards import JoinedShards, ShardSink
from prefillcli.rows.records import Window
from tests.unit.rows.outputs import WINDOWS, open_sink, read, score_all
from tests.unit.rows.test_sink import jobs

NAMES = ["out.parquet", "out.jsonl", "parts/"]


def open_shard(output: str | Path, shard: Shard, **options: Any) -> ShardSink:
    sink: ShardSink = open_sink(output, ShardSink, shard=shard, **options)
    return sink


def own_rows(window: Window, dealt: Sequence[int], number: int) -> Window:
    """The rows of a window that are dealt to a shard, as `windows` gives them."""
    positions = [at for at, each in enumerate(dealt) if each == number]
    rows = window.rows[positions]
    kept = set(rows.tolist())
    return replace(
        window,
        rows=rows,
        prompts=[prompt for prompt in window.prompts if prompt.row in kept],
        errors={row: error for row, error in window.errors.items() if row in kept},
        carried=window.carried.take(pa.array(positions, pa.int64())),
        whole_rows=window.rows,
    )


def score_shard(
    output: str, shard: Shard, windows: Sequence[Window], dealt: Sequence[Sequence[int]], **options: Any
) -> None:
    with open_shard(output, shard, **options) as sink:
        for window, numbers in zip(windows, dealt, strict=True):
            own = own_rows(window, numbers, shard.number - 1)
            if not sink.finished(own.index, own.rows):
                score_all(sink, [own])
        sink.finish(len(windows))
        assert sink.complete


def merge(output: str, **options: bool) -> int:
    """The rows of the output that is made."""
    with JoinedShards(Destination.parse(output)) as joined:
        joined.open(overwrite=options.get("overwrite", False))
        if joined.merged is not None:
            assert joined.merged.counts is not None
            joined.remove()
            return joined.merged.counts.total
        joined.check()
        counts = joined.write()
        joined.remove()
        return counts.total


@pytest.mark.nightly
@settings(max_examples=40, deadline=None)
@given(jobs(), st.integers(1, 4), st.sampled_from(NAMES), st.data())
def test_however_rows_are_dealt_the_merged_output_is_that_of_one_sink(
    job: tuple[list[Window], list[int]], count: int, name: str, data: st.DataObject
) -> None:
    windows, _ = job
    number = st.integers(0, count - 1)
    dealt = [data.draw(st.lists(number, min_size=len(w.rows), max_size=len(w.rows))) for w in windows]
    with tempfile.TemporaryDirectory() as folder:
        with open_sink(f"{folder}/alone/{name}") as sink:
            score_all(sink, windows)
            sink.finish(len(windows))
        output = f"{folder}/{name}"
        for each in data.draw(st.permutations(range(count))):
            score_shard(output, Shard(each + 1, count), windows, dealt)
        assert merge(output) == sum(len(window.rows) for window in windows)
        assert read(output) == read(f"{folder}/alone/{name}")
        assert sorted(os.listdir(folder)) == sorted(["alone", name.rstrip("/"), f"{name.rstrip('/')}.prefill"])


DEALT = [[0, 1, 0, 1, 1, 0, 0], [1, 1, 1], [0, 0, 1, 0, 0]]


def score_both(output: str, **options: Any) -> None:
    for number in (1, 2):
        score_shard(output, Shard(number, 2), WINDOWS, DEALT, **options)


def test_a_row_that_two_shards_have_scored_is_refused(tmp_path: Path) -> None:
    output = f"{tmp_path}/out.parquet"
    score_shard(output, Shard(1, 2), WINDOWS, DEALT)
    other = [[0, 1, 0, 1, 1, 1, 0], *DEALT[1:]]  # row 5 went to the first already
    score_shard(output, Shard(2, 2), WINDOWS, other)
    with pytest.raises(PrefillError, match="not every row of window 0 is there exactly once"):
        merge(output)
    assert not os.path.exists(output)


def test_the_window_before_is_the_last_one_with_rows_of_the_shard(tmp_path: Path) -> None:
    with open_shard(tmp_path / "o.parquet", Shard(1, 2)) as sink:
        for window, numbers in zip(WINDOWS, DEALT, strict=True):
            own = own_rows(window, numbers, 0)
            if not sink.finished(own.index, own.rows):
                sink.write(own, [], {}, temperature=1.0, carried=[(16, "key")] if own.index == 0 else None)
        assert sink.window_before(2) == 0
        assert sink.carried_into(2) == [(16, "key")]


def test_names_of_shards_are_read_back() -> None:
    for shard in (Shard(1, 1), Shard(12, 345)):
        assert Shard.of_name("a.shard-1-of-2.parquet" + shard.ending) == ("a.shard-1-of-2.parquet", shard)
        assert Shard.parse(str(shard)) == shard
    assert Shard.of_name("out.parquet.shard-01-of-2") is None
    assert Shard.of_name("out.parquet") is None
    assert np.all([Shard.parse(text) == Shard(2, 4) for text in ("2/4", " 2 / 4 ", "02/04")])
