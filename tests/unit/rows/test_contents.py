"""Digests tell every change of a file, are remembered only where that is safe, and a change in between is noticed."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
from blake3 import blake3

from prefillcli.errors import ContentChangedError
from prefillcli.rows import proof
from prefillcli.rows.input.discovery import discover
from prefillcli.rows.proof import DigestCache, FileContents, Stamp, stamp_of

CACHE = "prefillcli/digests.json"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder; every file counts as unchanged for long."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("prefillcli.rows.proof.SETTLED_NS", -(10**12))
    return tmp_path / "cache" / CACHE


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "in" / "in.jsonl"
    path.parent.mkdir()
    path.write_bytes(b'{"prompt":"a"}\n' * 1000)
    return path


def contents_of(*inputs: Any) -> FileContents:
    names = [str(each) for each in inputs]
    return FileContents(discover(names)[0], "input", lambda: [found.path for found in discover(names)[0]])


def count_reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    reads: list[str] = []
    content_digest = proof.content_digest

    def counted(file: Any, *more: Any) -> Any:
        reads.append(file.path)
        return content_digest(file, *more)

    monkeypatch.setattr(proof, "content_digest", counted)
    return reads


def edit(path: Path, at: int = 700) -> None:
    """Change one byte in place; size and time of modification stay."""
    before = path.stat()
    with path.open("r+b") as stream:
        stream.seek(at)
        byte = stream.read(1)
        stream.seek(at)
        stream.write(bytes([byte[0] ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_a_digest_is_of_the_whole_content(file: Path) -> None:
    folder = file.parent
    (folder / "big.jsonl").write_bytes(os.urandom((4 << 20) + 17))
    (folder / "empty.jsonl").touch()
    assert contents_of(folder).digests() == [
        blake3((folder / name).read_bytes()).hexdigest() for name in ("big.jsonl", "empty.jsonl", "in.jsonl")
    ]


def test_a_file_that_did_not_change_is_not_read_again(
    cache: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents_of(file).digests()
    reads = count_reads(monkeypatch)
    assert contents_of(file).digests() == before
    assert reads == []
    edit(file)
    assert contents_of(file).digests() != before, "although size and time of modification are the same"
    file.rename(file.with_name("other.jsonl"))
    contents_of(file.with_name("other.jsonl")).digests()
    assert len(reads) == 2


def test_a_file_changed_a_moment_ago_is_not_remembered(
    cache: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache.parent.parent))
    contents_of(file).digests()
    reads = count_reads(monkeypatch)
    contents_of(file).digests()
    assert reads == [str(file)]


@pytest.mark.parametrize("damage", ["no json", "other json", "other digest", "a folder", "no rights"])
def test_a_bad_cache_is_an_empty_one(cache: Path, file: Path, monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    before = contents_of(file).digests()
    text = cache.read_text()
    if damage == "other digest":
        cache.write_text(text.replace(before[0], "0" * 64))
    elif damage == "a folder":
        cache.unlink()
        cache.mkdir()
    elif damage == "no rights":  # root may do what it likes, so the folder is a file
        cache.unlink()
        cache.parent.rmdir()
        cache.parent.touch()
    else:
        cache.write_text({"no json": text[:-9], "other json": "[1]"}[damage])
    reads = count_reads(monkeypatch)
    assert contents_of(file).digests() == before
    assert reads == [str(file)]


def test_the_cache_keeps_the_entries_used_last(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000
    monkeypatch.setattr("prefillcli.rows.proof.time.time", lambda: now)
    for name in "abcaded":
        now += 1
        path = tmp_path / f"{name}.jsonl"
        if not path.exists():
            path.touch()
        stamp = stamp_of(fsspec.filesystem("file"), str(path))
        digests = DigestCache(most=3)
        if digests.get(str(path), stamp) is None:
            digests.put(str(path), stamp, name)
        digests.save()
    entries = json.loads(cache.read_text())["entries"]
    assert {Path(json.loads(key)[0]).stem for key in entries} == {"a", "d", "e"}


def test_runs_at_the_same_time_leave_a_cache_that_can_be_read(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [tmp_path / f"{number}.jsonl" for number in range(40)]
    for path in paths:
        path.write_text(path.name)
    runs = [threading.Thread(target=lambda path=path: contents_of(path).digests()) for path in paths]
    for run in runs:
        run.start()
    for run in runs:
        run.join()
    assert not list(cache.parent.glob("*.tmp"))
    assert len(json.loads(cache.read_text())["entries"]) >= 1
    reads = count_reads(monkeypatch)
    contents_of(*paths).digests()
    assert len(reads) < len(paths)


CHANGES: dict[str, Callable[[Path], Any]] = {
    "a row more": lambda path: path.write_bytes(path.read_bytes() + b"{}\n"),
    "one byte, the time put back": edit,
    "another file in its place": lambda path: (edit(path), path.write_bytes(path.read_bytes())),
    "gone": Path.unlink,
    "a file beside it": lambda path: path.with_name("z.jsonl").touch(),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("settled", [True, False])
def test_a_change_after_the_digest_is_noticed(
    cache: Path, file: Path, monkeypatch: pytest.MonkeyPatch, change: str, settled: bool
) -> None:
    if not settled:
        monkeypatch.undo()
    known = contents_of(file.parent)
    known.begin()
    known.digests()
    known.require_unchanged()
    CHANGES[change](file)
    with pytest.raises(ContentChangedError, match="jsonl") as caught:
        known.require_unchanged()
    assert "--resume" in str(caught.value)
    assert caught.value.exit_code == 4


def test_a_change_within_a_step_of_the_clock_is_noticed(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = discover([str(file)])[0][0]
    monkeypatch.setattr(proof, "stamp_of", lambda *_, **__: found.stamp)  # a filesystem with coarse times
    known = contents_of(file)
    known.digests()
    known.require_unchanged()
    edit(file)
    with pytest.raises(ContentChangedError):
        known.require_unchanged()


def test_other_rights_and_names_are_no_other_content(cache: Path, file: Path) -> None:
    known = contents_of(file)
    known.digests()
    file.chmod(0o600)
    known.require_unchanged()
    os.link(file, file.with_name("second name"))
    known.require_unchanged()


def test_remote_content_is_hashed_where_the_store_has_no_versions(memory: Any) -> None:
    memory.pipe_file("/a.jsonl", b"{}\n")
    known = contents_of("memory://a.jsonl")
    assert known.digests() == [blake3(b"{}\n").hexdigest()]
    known.require_unchanged()
    memory.pipe_file("/a.jsonl", b"[]\n")
    with pytest.raises(ContentChangedError, match=r"a\.jsonl"):
        known.require_unchanged()


def test_a_remote_etag_stands_for_the_content(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    memory.pipe_file("/a.jsonl", b"{}\n")
    etag = listed = '"1"'

    def invalidate_cache(path: str) -> None:
        nonlocal listed
        listed = etag

    monkeypatch.setattr(memory, "invalidate_cache", invalidate_cache)
    monkeypatch.setattr(memory, "info", lambda path: {"name": path, "size": 3, "type": "file", "ETag": listed})
    known = contents_of("memory://a.jsonl")
    monkeypatch.setattr(memory, "open", lambda *_: pytest.fail("it was read"))
    assert known.digests() == ['ETag "1"']
    known.require_unchanged()
    etag = '"2"'
    with pytest.raises(ContentChangedError):
        known.require_unchanged()


def test_a_weak_etag_does_not_stand_for_it(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    memory.pipe_file("/a.jsonl", b"{}\n")
    found = {"name": "/a.jsonl", "size": 3, "type": "file", "ETag": 'W/"1"'}
    monkeypatch.setattr(memory, "info", lambda path: found)
    assert contents_of("memory://a.jsonl").digests() == [blake3(b"{}\n").hexdigest()]


def test_young_and_old_stamps() -> None:
    stamp = Stamp(1, (1,), changed_ns=10**18)
    assert not stamp.settled(10**18 + 10**9)
    assert not stamp.settled(10**18 - 10**9), "the clock of a server that is ahead"
    assert stamp.settled(10**18 + 6 * 10**9)
