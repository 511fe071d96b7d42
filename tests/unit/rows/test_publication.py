"""A directory output: a reader finds nothing, or all of it."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from prefillcli.errors import PrefillError
from prefillcli.rows.output.destination import Destination, Published
from prefillcli.rows.output.publication import publication
from prefillcli.runtime import file_calls
from tests.faults.file_faults import CHANGES
from tests.unit.rows.outputs import EXPECTED, WINDOWS, finished, make_window, open_sink, read, score_all

NAMES = ["_SUCCESS", *(f"part-0000{n}.parquet" for n in range(3))]


def seen_at_every_step(monkeypatch: pytest.MonkeyPatch, place: Path) -> list[dict[str, int]]:
    """What a reader finds in a folder before every call that changes something, in order: names, with times."""
    seen: list[dict[str, int]] = []
    for name in CHANGES:
        call = getattr(file_calls, name)

        def watched(*arguments: Any, call: Any = call, **options: Any) -> Any:
            seen.append({path.name: path.stat().st_mtime_ns for path in place.glob("*")})
            return call(*arguments, **options)

        monkeypatch.setattr(file_calls, name, watched)
    return seen


@pytest.mark.parametrize("before", ["nothing", "an empty folder", "an older output"])
def test_a_reader_sees_nothing_or_all_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str) -> None:
    place = tmp_path / "o"
    old = NAMES[:2]
    if before == "an empty folder":
        place.mkdir(mode=0o750)
    elif before == "an older output":
        with open_sink(f"{place}/") as sink:
            score_all(sink, WINDOWS[:1])
            sink.finish(1)
    with monkeypatch.context() as patch:
        seen = seen_at_every_step(patch, place)
        finished(f"{place}/", overwrite=True)
    allowed = [[], NAMES] if before != "an older output" else [[], NAMES, old]
    assert all(sorted(names) in allowed for names in seen)
    assert NAMES in map(sorted, seen)
    assert read(f"{place}/") == EXPECTED
    assert sorted(os.listdir(tmp_path)) == ["o", "o.prefill"]
    assert sorted(os.listdir(tmp_path / "o.prefill")) == ["lock", "manifest.json", "row-digests.bin"]
    if before == "an empty folder":
        assert place.stat().st_mode & 0o777 == 0o750


def test_in_a_folder_with_other_files_success_comes_last_and_they_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "o"
    finished(f"{place}/")
    (place / "notes.txt").write_text("mine")
    (place / "more").mkdir()
    with monkeypatch.context() as patch:
        seen = seen_at_every_step(patch, place)
        finished(f"{place}/", overwrite=True)
    after = {path.name: path.stat().st_mtime_ns for path in place.glob("*")}
    old, new = ({name: step[name] for name in NAMES} for step in (seen[0], after))
    shown = [{name: step[name] for name in NAMES} for step in seen if "_SUCCESS" in step]
    assert all(files in (old, new) for files in shown)
    assert len(shown) < len(seen)
    assert (place / "notes.txt").read_text() == "mine"
    assert sorted(os.listdir(place)) == sorted([*NAMES, "more", "notes.txt"])


def test_a_folder_that_cannot_be_read_is_not_taken_for_one_without_other_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would be put aside and removed, with what others keep in it."""
    place = tmp_path / "o"
    finished(f"{place}/")
    (place / "day=1").mkdir()
    (place / "day=1" / "notes.txt").write_text("mine")
    listing = file_calls.list_folder

    def broken(path: str) -> list[os.DirEntry[str]]:
        if path.endswith("day=1"):
            raise OSError(errno.EIO, "Input/output error")
        return listing(path)

    with open_sink(f"{place}/", overwrite=True) as sink:
        score_all(sink, WINDOWS)
        monkeypatch.setattr(file_calls, "list_folder", broken)
        with pytest.raises(PrefillError, match=str(place)):
            sink.finish(3)
    assert (place / "day=1" / "notes.txt").read_text() == "mine"
    assert read(f"{place}/") == EXPECTED


def test_in_an_object_store_success_comes_last(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    finished("memory://bucket/o/")
    steps: list[str] = []
    for name in ("put_file", "pipe_file", "rm_file"):
        call = getattr(type(memory), name)

        def watched(self: Any, *arguments: Any, call: Any = call, name: str = name, **options: Any) -> Any:
            path = str(arguments[-1] if name == "put_file" else arguments[0])
            if "/o/" in path:
                steps.append(f"{name} {path.rpartition('/')[2]}")
            return call(self, *arguments, **options)

        monkeypatch.setattr(type(memory), name, watched)
    with open_sink("memory://bucket/o/", overwrite=True) as sink:
        score_all(sink, WINDOWS[:2])
        sink.finish(2)
    assert steps[0] == "rm_file _SUCCESS"
    assert steps[-1] == "pipe_file _SUCCESS"
    assert "rm_file part-00002.parquet" in steps


@pytest.mark.parametrize("name", ["o.parquet", "o.jsonl", "o/"])
@pytest.mark.parametrize("dangling", [True, False])
def test_a_symbolic_link_stays_one_and_its_target_is_written(tmp_path: Path, name: str, dangling: bool) -> None:
    real, link = tmp_path / "real" / name, tmp_path / name
    real.parent.mkdir()
    if not dangling:
        with open_sink(f"{real}/" if name == "o/" else str(real)) as sink:
            sink.write(make_window(0, [0]), [], {}, temperature=1.0)
            score_all(sink, [make_window(0, [0])])
            sink.finish(1)
    link.symlink_to(real)
    output = f"{tmp_path}/{name}"
    finished(output, overwrite=True)
    assert link.is_symlink()
    assert read(f"{real}/" if name == "o/" else str(real)) == read(output) == EXPECTED
    assert sorted(os.listdir(tmp_path)) == [name.rstrip("/"), "real"]
    with open_sink(str(real), resume=True) as sink:
        assert sink.complete


def test_partitions_can_be_written_in_folders_of_their_own(tmp_path: Path) -> None:
    destination = Destination.parse(f"{tmp_path}/o/")
    for day in ("1", "2"):
        output = publication(destination)
        name = f"day={day}/part-00000.parquet"
        with output.create(name) as file:
            file.write(b"x")
        output.publish(Published(_job(), {name: "digest"}))
        assert destination.files() == ["_SUCCESS", name]


def test_half_written_files_of_a_killed_run_go_wherever_they_lie(tmp_path: Path) -> None:
    place = tmp_path / "o"
    left = [place / ".part-00001.parquet.prefill-tmp", place / "day=1" / ".part-00002.parquet.prefill-tmp"]
    others = [place / "notes" / ".part-00003.parquet.prefill-tmp", place / "day=1" / ".mine.prefill-tmp"]
    for path in (*left, *others):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    with open_sink(f"{place}/"):
        assert not any(path.exists() for path in left)
        assert all(path.exists() for path in others)


def _job() -> Any:
    from prefillcli.rows.output.destination import Job

    return Job({"model": "m"})
