"""The output: its columns and values, conflicts, kills at any point, and resuming."""

from __future__ import annotations

import gc
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefillcli.errors import OutputConflictError, PrefillError, UsageError
from prefillcli.plan.behind import LabelSet
from prefillcli.rows.output import parts
from prefillcli.rows.output.sink import Sink
from prefillcli.rows.proof import with_checksum
from prefillcli.rows.records import Prompt, RowError, ScoredRow, Window
from prefillcli.stats.arrays import Int64Array
from tests.unit.rows.outputs import (
    BAD,
    FINGERPRINT,
    TOO_LONG,
    WINDOWS,
    expected_row,
    finished,
    make_window,
    open_sink,
    read,
    score_all,
    scored,
)


@pytest.fixture(params=["out.parquet", "parts/"])
def output(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Others are written from the same parts."""
    return f"{tmp_path}/{request.param}"


@pytest.mark.parametrize(
    "output", ["out.parquet", "out.jsonl", "out.jsonl.gz", "out.jsonl.zst", "parts/"], indirect=True
)
@pytest.mark.parametrize("temperature", [1.0, 0.25])
def test_the_output_has_every_row_in_order_with_the_columns_of_the_manual(output: str, temperature: float) -> None:
    with open_sink(output) as sink:
        score_all(sink, WINDOWS, temperature=temperature)
        sink.finish(windows=3)
    rows = read(output)
    expected = [expected_row(row, row in BAD, temperature) for row in range(15)]
    assert rows == expected
    assert [list(row) for row in rows] == [list(row) for row in expected]
    assert sorted(os.listdir(output.rstrip("/") + ".prefill")) == ["lock", "manifest.json", "row-digests.bin"]


@pytest.mark.parametrize("output", ["out.parquet", "out.jsonl"], indirect=True)
def test_json_lines_input_gives_typed_parquet_and_the_same_json(output: str) -> None:
    windows = [make_window(w.index, w.rows.tolist(), tuple(w.errors), json_text=True) for w in WINDOWS]
    schema = pa.schema([("id", pa.string()), ("kept", pa.string())])
    with open_sink(output, json_carried=True, carried=schema) as sink:
        score_all(sink, windows)
        sink.finish(3)
    assert read(output) == [expected_row(row, row in BAD) for row in range(15)]


def test_without_an_id_column_there_is_the_row_number(output: str) -> None:
    window = Window(
        0, np.array([4, 9]), [Prompt(4, np.arange(2, dtype=np.int32), LabelSet(()))], {9: TOO_LONG}, pa.table({})
    )
    window.carried = pa.table({"": pa.nulls(2)}).select([])
    with open_sink(output, id_name=None, carried=pa.schema([])) as sink:
        sink.write(window, [scored(4)], {}, temperature=1.0)
        sink.finish(1)
    rows = read(output)
    assert [row["row"] for row in rows] == [4, 9]
    assert next(iter(rows[0])) == "row"
    assert "__row" not in rows[0]


def test_counts_are_those_of_the_output(output: str) -> None:
    skipped = RowError("skipped_too_long", "")
    windows = [*WINDOWS, make_window(3, [15, 16])]
    with open_sink(output) as sink:
        score_all(sink, windows[:3])
        sink.write(windows[3], [], {15: skipped, 16: RowError("exceeds_memory", "")}, temperature=1.0)
        before = sink.counts
        sink.finish(4)
        after = sink.counts
    for counts in (before, after):
        assert (counts.total, counts.scored, counts.errors, counts.skipped) == (17, 11, 5, 1)
        assert counts.errors_by_code == {"prompt_too_long": 4, "exceeds_memory": 1}
    scores = [row["score"] for row in read(output) if row["score"] is not None]
    assert after.score_sum == pytest.approx(sum(scores))
    assert after.mean_score == pytest.approx(np.mean(scores))
    with open_sink(output, resume=True) as again:
        assert again.counts == after


@pytest.mark.parametrize(
    "logprobs", [[math.nan, -1.0, -2.0], [-math.inf] * 3, [math.inf, -1.0, -1.0], [-1.0, -2.0, math.nan]]
)
def test_a_score_that_is_no_number_is_an_error_row(tmp_path: Path, logprobs: list[float]) -> None:
    window = make_window(0, [0, 1])
    bad = ScoredRow(0, np.array(logprobs), 0, 0, 0, 0.0)
    with open_sink(tmp_path / "o.parquet") as sink:
        sink.write(window, [bad, scored(1)], {}, temperature=1.0)
        sink.finish(1)
    rows = read(f"{tmp_path}/o.parquet")
    assert [row["error"] for row in rows] == ["nonfinite_score", None]
    assert rows[0]["score"] is None
    assert rows[0]["logprob_Yes"] is None


def test_one_impossible_label_is_a_score_like_any_other(tmp_path: Path) -> None:
    with open_sink(tmp_path / "o.jsonl") as sink:
        results = [ScoredRow(0, np.array([-math.inf, -1.0, -1.0]), 0, 0, 0, 0.0)]
        sink.write(make_window(0, [0]), results, {}, temperature=1.0)
        sink.finish(1)
    (row,) = read(f"{tmp_path}/o.jsonl")
    assert row["score"] == 0.0
    assert row["logprob_Yes"] is None


def test_the_label_mass_is_never_above_one(tmp_path: Path) -> None:
    with open_sink(tmp_path / "o.parquet") as sink:
        results = [ScoredRow(0, np.log(np.array([0.5, 0.3, 0.2])) + 1e-9, 0, 0, 0, 0.0)]
        sink.write(make_window(0, [0]), results, {}, temperature=1.0)
        sink.finish(1)
    assert read(f"{tmp_path}/o.parquet")[0]["label_mass"] == 1.0


@pytest.mark.parametrize(
    ("names", "id_name"), [(["id", "score"], "id"), (["logprob_Yes"], "id"), (["row"], None), (["error"], "error")]
)
def test_a_kept_column_that_clashes_is_a_usage_error(tmp_path: Path, names: list[str], id_name: str | None) -> None:
    with pytest.raises(UsageError, match="rename"):
        open_sink(tmp_path / "o.parquet", id_name=id_name, carried=pa.schema([(n, pa.int64()) for n in names]))
    assert os.listdir(tmp_path) == []


def test_an_existing_directory_gets_parts(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    with open_sink(tmp_path / "there") as sink:
        score_all(sink, WINDOWS)
        sink.finish(3)
    assert sorted(os.listdir(tmp_path / "there")) == ["_SUCCESS", *(f"part-0000{n}.parquet" for n in range(3))]


def test_missing_folders_of_the_output_are_made(tmp_path: Path) -> None:
    with open_sink(tmp_path / "a/b/o.parquet") as sink:
        score_all(sink, WINDOWS)
        sink.finish(3)
    assert len(read(f"{tmp_path}/a/b/o.parquet")) == 15


class TestConflicts:
    def test_the_same_job_must_say_resume_or_overwrite(self, output: str) -> None:
        finished(output)
        with pytest.raises(UsageError, match=r"complete(.|\n)*--resume.*--overwrite") as caught:
            open_sink(output)
        assert not isinstance(caught.value, OutputConflictError)

    @pytest.mark.parametrize("part", FINGERPRINT)
    @pytest.mark.parametrize("resume", [False, True])
    def test_another_job_is_a_conflict_that_says_what_differs(self, output: str, part: str, resume: bool) -> None:
        finished(output)
        with pytest.raises(OutputConflictError, match=f"different {part}\n") as caught:
            open_sink(output, fingerprint=FINGERPRINT | {part: "other"}, resume=resume)
        assert caught.value.exit_code == 4
        assert len(read(output)) == 15

    def test_another_job_half_done_is_a_conflict(self, output: str) -> None:
        with open_sink(output) as sink:
            score_all(sink, WINDOWS[:1])
        with pytest.raises(OutputConflictError, match="model, settings"):
            open_sink(output, fingerprint=FINGERPRINT | {"model": "x", "settings": "y"}, resume=True)

    def test_an_output_without_its_work_folder_is_known_by_its_digest(self, tmp_path: Path) -> None:
        output = f"{tmp_path}/o.parquet"
        finished(output)
        shutil.rmtree(output + ".prefill")
        with pytest.raises(UsageError, match="complete"):
            open_sink(output)
        with pytest.raises(OutputConflictError):
            open_sink(output, fingerprint=FINGERPRINT | {"model": "x"}, resume=True)
        with open_sink(output, resume=True) as sink:
            assert sink.complete
            assert (sink.counts.total, sink.counts.errors) == (15, 4)

    def test_a_job_that_never_wrote_a_row_is_in_nobodys_way(self, output: str) -> None:
        with open_sink(output) as sink:
            sink.settle({"packs": 3})
        with open_sink(output, fingerprint=FINGERPRINT | {"model": "x"}) as sink:
            assert sink.settled == {}


def test_a_manifest_of_another_version_is_refused(tmp_path: Path) -> None:
    output = f"{tmp_path}/o.parquet"
    finished(output)
    manifest = Path(output + ".prefill/manifest.json")
    content = json.loads(manifest.read_bytes()) | {"schema_version": 1}
    del content["checksum"]
    manifest.write_bytes(with_checksum(content))
    with pytest.raises(OutputConflictError, match=r"another version(.|\n)*--overwrite"):
        open_sink(output, resume=True)
    finished(output, overwrite=True)


def test_missing_rows_are_not_passed_over(output: str) -> None:
    with open_sink(output) as sink:
        score_all(sink, WINDOWS[:1])
        with pytest.raises(PrefillError, match="window 1"):
            sink.finish(windows=3)
        sink.write(WINDOWS[1], [], {}, temperature=1.0)
        sink.write(WINDOWS[2], [scored(10), scored(11)], {}, temperature=1.0)
        with pytest.raises(PrefillError, match="window 2"):
            sink.finish(windows=3)
        sink.write(WINDOWS[2], [scored(row) for row in (12, 13, 14)], {}, temperature=1.0)
        for windows in (2, 4):
            with pytest.raises(PrefillError, match="window"):
                sink.finish(windows)
    assert not os.path.exists(output)


class TestResume:
    def test_a_row_written_twice_counts_once(self, output: str) -> None:
        with open_sink(output) as sink:
            score_all(sink, WINDOWS)
            sink.write(WINDOWS[0], [scored(1)], {3: TOO_LONG}, temperature=1.0)
            sink.finish(3)
        assert read(output) == [expected_row(row, row in BAD) for row in range(15)]

    def test_windows_that_changed_are_a_conflict(self, output: str) -> None:
        with open_sink(output) as sink:
            sink.write(WINDOWS[0], [scored(1)], {}, temperature=1.0)
        with open_sink(output, resume=True) as sink, pytest.raises(OutputConflictError, match="window 0"):
            sink.write(make_window(0, list(range(9))), [scored(1)], {}, temperature=1.0)

    def test_what_a_kill_left_half_written_is_removed(self, output: str) -> None:
        with open_sink(output) as sink:
            score_all(sink, WINDOWS[:1])
        work = Path(output.rstrip("/") + ".prefill")
        (work / ".part-000001-000000.parquet.prefill-tmp").write_bytes(b"half")
        folder = Path(output) if output.endswith("/") else Path(output).parent
        folder.mkdir(exist_ok=True)
        name = "part-00000.parquet" if output.endswith("/") else Path(output).name
        (folder / f".{name}.prefill-tmp").write_bytes(b"half")
        finished_names = [name for name in os.listdir(folder) if not name.endswith("prefill-tmp")]
        with open_sink(output, resume=True):
            assert not [name for name in os.listdir(work) if name.endswith("tmp")]
            assert sorted(os.listdir(folder)) == sorted(finished_names)

    def test_old_parts_of_a_directory_go_when_the_new_ones_are_there(self, tmp_path: Path) -> None:
        output = f"{tmp_path}/parts/"
        finished(output)
        (tmp_path / "parts" / "notes.txt").write_text("mine")
        with open_sink(output, overwrite=True) as sink:
            score_all(sink, WINDOWS[:1])
            sink.finish(1)
        assert sorted(os.listdir(output)) == ["_SUCCESS", "notes.txt", "part-00000.parquet"]


@st.composite
def jobs(draw: st.DrawFn) -> tuple[list[Window], list[int]]:
    """Windows over row numbers with gaps (as --sample leaves them), and after how many writes to stop."""
    windows = []
    row = 0
    for index in range(draw(st.integers(1, 4))):
        rows = []
        for _ in range(draw(st.integers(1, 9))):
            row += draw(st.integers(1, 3))
            rows.append(row)
        bad = tuple(row for row in rows if draw(st.booleans()))
        windows.append(make_window(index, rows, bad))
    return windows, draw(st.lists(st.integers(0, 5), max_size=4))


@settings(max_examples=20, deadline=None)
@given(jobs(), st.integers(1, 4), st.sampled_from(["o.parquet", "o.jsonl", "o/"]), st.booleans())
def test_stopped_and_resumed_at_any_part_the_output_is_the_same(
    job: tuple[list[Window], list[int]], per_part: int, name: str, skip: bool
) -> None:
    windows, stops = job
    with tempfile.TemporaryDirectory() as folder:
        output = f"{folder}/{name}"
        for stop in [*stops, 10**6]:
            with open_sink(output, resume=True) as sink:
                for window, rows in _pieces(windows, sink, per_part, skip):
                    if stop == 0:
                        break
                    stop -= 1
                    sink.write(window, [scored(row) for row in rows], {}, temperature=1.0)
                else:
                    sink.finish(len(windows))
        bad = {row for window in windows for row in window.errors}
        rows = [int(row) for window in windows for row in window.rows]
        assert read(output) == [expected_row(row, row in bad) for row in rows]


def _pieces(windows: list[Window], sink: Sink, size: int, skip: bool) -> Iterator[tuple[Window, list[int]]]:
    for window in windows:
        if skip and sink.finished(window.index, window.rows):
            continue
        todo = [prompt.row for prompt in window.prompts if prompt.row not in sink.done(window.index)]
        for at in range(0, len(todo) or 1, size):
            yield window, todo[at : at + size]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["o.jsonl.gz", "o.jsonl.zst"])
def test_an_error_in_the_middle_of_a_compressed_output_leaves_no_traceback(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    """Arrow prints one where a stream over a file that is closed already is not closed itself."""
    with open_sink(f"{tmp_path}/{name}") as sink:
        score_all(sink, WINDOWS)
        part = tmp_path / f"{name}.prefill" / parts.part_name(2, 0)
        part.write_bytes(part.read_bytes()[:-30])
        with pytest.raises(PrefillError, match="--resume"):
            sink.finish(3)
    gc.collect()
    assert capfd.readouterr().err == ""
    finished(f"{tmp_path}/{name}", resume=True)
    assert len(read(f"{tmp_path}/{name}")) == 15


def test_a_remote_output_is_written_and_resumed(memory: Any) -> None:
    for output in ("memory://bucket/o.parquet", "memory://o.parquet"):
        with open_sink(output) as sink:
            score_all(sink, WINDOWS[:1])
        with open_sink(output, resume=True) as sink:
            assert sink.finished(0, WINDOWS[0].rows)
            score_all(sink, WINDOWS)
            sink.finish(3)
        path = output.removeprefix("memory:/")
        rows = pq.read_table(pa.BufferReader(memory.cat_file(path))).to_pylist()
        assert rows == [expected_row(row, row in BAD) for row in range(15)]
        left = [f"{path}.prefill/{name}" for name in ("manifest.json", "row-digests.bin")]
        assert memory.ls(f"{path}.prefill", detail=False) == left
        with pytest.raises(OutputConflictError):
            open_sink(output, fingerprint=FINGERPRINT | {"input": "x"})


def test_memory_of_finishing_does_not_grow_with_the_rows(tmp_path: Path) -> None:
    def peak(windows: int) -> int:
        with open_sink(tmp_path / f"{windows}.parquet") as sink:
            for index in range(windows):
                rows: Int64Array = np.arange(index * 1000, index * 1000 + 1000)
                window = make_window(index, rows.tolist())
                sink.write(window, [scored(int(row)) for row in rows], {}, temperature=1.0)
            del window
            highest = 0
            tables = sink._parts.tables

            def watched() -> Iterator[pa.Table]:
                nonlocal highest
                for table in tables():
                    highest = max(highest, pa.total_allocated_bytes())
                    yield table

            sink._parts.tables = watched  # type: ignore[method-assign]
            start = pa.total_allocated_bytes()
            sink.finish(windows)
        return highest - start

    assert peak(12) < 2 * peak(3) + (1 << 20)
