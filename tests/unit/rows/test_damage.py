"""Bytes that change, files that are copied, swapped or lost: rows are scored again, or the output is refused."""

from __future__ import annotations

import io
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefillcli.errors import DamagedFileError, OutputConflictError, OutputDamagedError, PrefillError
from prefillcli.rows.output.parts import part_name
from prefillcli.rows.proof import require_seal
from tests.unit.rows.outputs import (
    EXPECTED,
    FINGERPRINT,
    WINDOWS,
    finished,
    make_window,
    open_sink,
    read,
    score_all,
    scored,
)

KINDS = ("o.parquet", "p.jsonl.gz", "q/")


def flip(path: Path, at: int, mask: int = 1) -> None:
    data = bytearray(path.read_bytes())
    data[at % len(data)] ^= mask
    path.write_bytes(data)


def begun(folder: str | Path, *, temperature: float = 1.0, **options: Any) -> Path:
    """The work folder of a job with some rows of every window."""
    output = f"{folder}/o.parquet"
    with open_sink(output, **options) as sink:
        sink.settle({"pack_tokens": 64})
        score_all(sink, WINDOWS[:2], temperature=temperature)
        sink.write(WINDOWS[2], [scored(11), scored(13)], {}, temperature=temperature)
    return Path(output + ".prefill")


def resumed(work: Path) -> list[dict[str, Any]]:
    output = str(work).removesuffix(".prefill")
    finished(output, resume=True)
    return read(output)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return begun(tmp_path_factory.mktemp("job"))


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished output of every kind."""
    folder = tmp_path_factory.mktemp("outputs")
    for name in KINDS:
        finished(f"{folder}/{name}")
    return folder


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(1, 255))
def test_any_byte_of_any_file_of_the_work_folder_may_flip(job: Path, which: int, at: int, mask: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        work = Path(shutil.copytree(job, f"{folder}/o.parquet.prefill"))
        names = sorted(name for name in os.listdir(work) if name != "lock")
        flip(work / names[which % len(names)], at, mask)
        assert resumed(work) == EXPECTED


def test_every_byte_of_a_part_counts(job: Path) -> None:
    whole = (job / part_name(2, 0)).read_bytes()
    require_seal(io.BytesIO(whole))
    for at in range(len(whole)):
        data = bytearray(whole)
        data[at] ^= 1 << at % 8
        with pytest.raises(DamagedFileError):
            require_seal(io.BytesIO(data))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 255), st.sampled_from(KINDS), st.booleans())
def test_a_finished_output_with_any_byte_flipped_is_refused(
    outputs: Path, at: int, mask: int, name: str, alone: bool
) -> None:
    """With its work folder and, where it can prove itself, without."""
    output, work = outputs / name, outputs / (name.rstrip("/") + ".prefill")
    files = sorted(output.iterdir()) if name.endswith("/") else [output]
    file = files[at % len(files)]
    good = file.read_bytes()
    try:
        if alone:
            work.rename(outputs / "aside")
        flip(file, at // len(files), mask)
        with pytest.raises(OutputConflictError, match="--overwrite") as caught:
            open_sink(f"{outputs}/{name}", resume=True)
        assert caught.value.exit_code == 4
        assert not alone or not work.exists()
    finally:
        file.write_bytes(good)
        if alone:
            (outputs / "aside").rename(work)


def test_a_byte_flipped_in_the_seal_of_a_file_of_a_folder_is_refused(tmp_path: Path) -> None:
    finished(f"{tmp_path}/q/")
    shutil.rmtree(tmp_path / "q.prefill")
    part = tmp_path / "q" / "part-00001.parquet"
    flip(part, part.read_bytes().rindex(b"prefillcli.seal") + 20)
    with pytest.raises(OutputDamagedError, match="part-00001"):
        open_sink(f"{tmp_path}/q/", resume=True)


@pytest.mark.parametrize("name", ["o.parquet", "o.jsonl", "o/"])
def test_an_output_that_is_cut_short_or_replaced_is_not_complete(tmp_path: Path, name: str) -> None:
    output, other = f"{tmp_path}/{name}", f"{tmp_path}/other/{name}"
    finished(output)
    with open_sink(other, fingerprint=FINGERPRINT | {"model": "x"}) as sink:
        score_all(sink, WINDOWS, temperature=2.0)
        sink.finish(3)
    file = Path(output) / "part-00001.parquet" if name == "o/" else Path(output)
    good = file.read_bytes()
    pq.write_table(pa.table({"id": ["id-0"], "score": [0.5]}), tmp_path / "foreign")
    theirs = Path(other) / file.name if name == "o/" else Path(other)
    for bad in (good[:-1], good[: len(good) // 2], b"", (tmp_path / "foreign").read_bytes(), theirs.read_bytes()):
        file.write_bytes(bad)
        with pytest.raises(OutputDamagedError, match=rf"{file}(.|\n)*--overwrite"):
            open_sink(output, resume=True)
    file.unlink()
    if name == "o/":
        with pytest.raises(OutputDamagedError, match="missing"):
            open_sink(output, resume=True)
        file.write_bytes(good)
        shutil.copy(file, Path(output) / "part-00003.parquet")
        with pytest.raises(OutputDamagedError, match="not one of its files"):
            open_sink(output, resume=True)
        Path(output, "part-00003.parquet").unlink()
        Path(output, "_SUCCESS").unlink()
        with pytest.raises(OutputDamagedError, match="_SUCCESS is missing"):
            open_sink(output, resume=True)


def test_a_part_under_another_name_or_of_another_job_is_scored_again(tmp_path: Path) -> None:
    others = begun(tmp_path / "other", fingerprint=FINGERPRINT | {"model": "x"}, temperature=3.0)
    work = begun(tmp_path / "this")

    def copied(source: Path, name: str) -> None:
        shutil.copy(source, work / name)

    copied(work / part_name(0, 0), part_name(0, 7))
    assert resumed(work) == EXPECTED
    for name in (part_name(2, 0), part_name(0, 1), part_name(1, 0)):
        shutil.rmtree(tmp_path / "this")
        work = begun(tmp_path / "this")
        copied(others / name, name)
        assert resumed(work) == EXPECTED
    shutil.rmtree(tmp_path / "this")
    work = begun(tmp_path / "this")
    os.replace(work / part_name(0, 1), work / part_name(2, 0))
    assert resumed(work) == EXPECTED


def test_a_part_that_holds_rows_of_another_part_is_scored_again(tmp_path: Path) -> None:
    """As two runs at a time would leave them in an object store that cannot be locked."""
    work, twin = begun(tmp_path / "this"), tmp_path / "twin/o.parquet"
    with open_sink(twin) as sink:
        sink.write(WINDOWS[0], [scored(4)], {}, temperature=1.0)
        sink.write(WINDOWS[0], [scored(5), scored(6)], {}, temperature=1.0)
    shutil.copy(f"{twin}.prefill/{part_name(0, 1)}", work / part_name(0, 1))
    assert resumed(work) == EXPECTED


def test_windows_that_are_cut_another_way_are_refused(tmp_path: Path) -> None:
    """Another version may cut the input into windows of other sizes; finished ones must not hide what is missing."""
    work = begun(tmp_path)
    with open_sink(str(work).removesuffix(".prefill"), resume=True) as sink:
        for rows in (range(12), range(5), (0, 1, 2, 3, 4, 6, 7)):
            with pytest.raises(OutputConflictError, match="window 0"):
                sink.finished(0, make_window(0, list(rows)).rows)


def test_a_part_damaged_while_the_job_runs_is_found_when_it_is_read(tmp_path: Path) -> None:
    output = f"{tmp_path}/o.parquet"
    with open_sink(output) as sink:
        score_all(sink, WINDOWS)
        flip(Path(output + ".prefill", part_name(1, 0)), 300)
        with pytest.raises(PrefillError, match=r"part-000001-000000(.|\n)*--resume"):
            sink.finish(3)
    assert not os.path.exists(output)
    finished(output, resume=True)
    assert read(output) == EXPECTED


def test_a_part_that_a_twin_run_replaces_while_the_job_runs_is_not_taken(tmp_path: Path) -> None:
    """Whole, of this job and of its name, but with other rows of the window."""
    output, twin = f"{tmp_path}/o.parquet", tmp_path / "twin/o.parquet"
    with open_sink(twin) as sink:
        sink.write(WINDOWS[0], [scored(1)], {}, temperature=1.0)
        sink.write(WINDOWS[0], [scored(0), scored(5)], {}, temperature=1.0)
    with open_sink(output) as sink:
        score_all(sink, WINDOWS)
        shutil.copy(f"{twin}.prefill/{part_name(0, 1)}", f"{output}.prefill/{part_name(0, 1)}")
        with pytest.raises(PrefillError, match=r"window 0(.|\n)*--resume"):
            sink.finish(3)
    assert not os.path.exists(output)
    finished(output, resume=True)
    assert read(output) == EXPECTED


@pytest.mark.parametrize("keep", [0, 5, 100])
def test_a_manifest_that_is_cut_short_costs_no_row(tmp_path: Path, keep: int) -> None:
    work = begun(tmp_path)
    output = str(work).removesuffix(".prefill")
    manifest = work / "manifest.json"
    whole = manifest.read_bytes()
    for content in (whole[: len(whole) * keep // 100 - 1 if keep == 100 else keep], None):
        manifest.unlink() if content is None else manifest.write_bytes(content)
        with open_sink(output, resume=True) as sink:
            assert sink.counts.total == 12
            assert sink.settled == {"pack_tokens": 64}
        if content is not None:
            manifest.write_bytes(content)
            with pytest.raises(OutputConflictError, match="different model"):
                open_sink(output, fingerprint=FINGERPRINT | {"model": "x"}, resume=True)
    assert resumed(work) == EXPECTED


def test_a_manifest_whose_values_have_changed_is_not_believed(tmp_path: Path) -> None:
    manifest = begun(tmp_path) / "manifest.json"
    whole = manifest.read_text()
    for old, new in (('"pack_tokens": 64', '"pack_tokens": 65'), ('"running"', '"complete"'), ('"m"', '"n"')):
        assert old in whole
        manifest.write_text(whole.replace(old, new))
        with open_sink(tmp_path / "o.parquet", resume=True) as sink:
            assert (sink.complete, sink.settled, sink.counts.total) == (False, {"pack_tokens": 64}, 12)


def test_an_output_proves_itself_without_its_work_folder_where_it_can(tmp_path: Path) -> None:
    for name in ("o.parquet", "o/", "o.jsonl"):
        output = f"{tmp_path}/{name}"
        finished(output)
        work = Path(output.rstrip("/") + ".prefill")
        (work / "manifest.json").write_bytes(b"{")
        if name == "o.jsonl":
            with pytest.raises(OutputConflictError, match="--overwrite"):
                open_sink(output, resume=True)
        else:
            with open_sink(output, resume=True) as sink:
                assert sink.complete
                assert (sink.counts.total, sink.counts.errors) == (15, 4)


def test_the_pages_of_parts_and_outputs_have_checksums(tmp_path: Path) -> None:
    """pyarrow, which knows nothing of the seal, finds a flipped byte of a page."""
    output = tmp_path / "o.parquet"
    with open_sink(output) as sink:
        score_all(sink, WINDOWS)
        files = [Path(f"{output}.prefill", part_name(2, 0))]
        copies = [Path(shutil.copy(file, tmp_path / "part.parquet")) for file in files]
        sink.finish(3)
    for file in (output, *copies):
        column = pq.read_metadata(file).row_group(0).column(2)
        flip(file, column.data_page_offset + column.total_compressed_size - 2)
        with pytest.raises(OSError, match="CRC"):
            pq.read_table(file, page_checksum_verification=True)


def test_what_is_written_beside_an_output_says_which_job_it_is(tmp_path: Path) -> None:
    finished(f"{tmp_path}/o/")
    said = json.loads((tmp_path / "o/_SUCCESS").read_text())
    assert said["fingerprint"] == FINGERPRINT
    assert sorted(said["files"]) == [f"part-0000{n}.parquet" for n in range(3)]
