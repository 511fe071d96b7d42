"""Every request of a job into an object store fails once, in every way."""

from __future__ import annotations

import io
import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import s3fs
from fsspec.implementations.memory import MemoryFileSystem

from prefillcli.errors import OutputBusyError, PrefillError
from prefillcli.rows import filesystems
from prefillcli.rows.output.destination import SUCCESS
from tests.faults.loops import Job, fail_each
from tests.faults.nursery import Nursery, Outcome
from tests.faults.output_checks import proven
from tests.faults.request_faults import RequestKind
from tests.s3_server import Bucket, S3Server
from tests.unit.rows.outputs import EXPECTED, WINDOWS, open_sink, score_all


def score_into_store(url: str, environment: dict[str, str], name: str, folder: Path, **options: Any) -> None:
    """A job of two parts, into a folder of its own."""
    os.environ |= environment
    with open_sink(f"{url}/{folder.name}/{name}", **options) as sink:
        score_all(sink, WINDOWS[1:2], per_part=4)
        score_all(sink, [WINDOWS[0]], per_part=9)
        score_all(sink, WINDOWS[2:], per_part=9)
        sink.finish(len(WINDOWS))


@dataclass(frozen=True)
class StoreChecks:
    nursery: Nursery
    kind: RequestKind
    bucket: Bucket
    name: str
    again: Callable[..., None]

    def rows_shown(self, folder: Path) -> list[dict[str, Any]] | None:
        """What a reader finds; None for nothing."""
        keys = self.bucket.keys(f"{folder.name}/{self.name}")
        if self.name.endswith("/"):
            if f"{folder.name}/{self.name}{SUCCESS}" not in keys:
                return None
            keys = [key for key in keys if key.endswith(".parquet")]
        tables = [pq.read_table(io.BytesIO(self.bucket.get(key))) for key in keys if ".prefill/" not in key]
        return pa.concat_tables(tables).to_pylist() if tables else None

    def absent_or_whole(self, folder: Path) -> None:
        assert self.rows_shown(folder) in (None, EXPECTED)

    def kept_out(self, folder: Path) -> None:
        self.absent_or_whole(folder)
        if f"{folder.name}/{self.name.rstrip('/')}.prefill/lock" in self.bucket.keys(folder.name):
            with pytest.raises(OutputBusyError):
                open_sink(f"{self.bucket.url}/{folder.name}/{self.name}", overwrite=True)

    def goes_on(self, folder: Path, outcome: Outcome) -> None:
        self.absent_or_whole(folder)
        if self.kind.passes:
            assert outcome.done
        if outcome.done:
            assert self.rows_shown(folder) == EXPECTED
            assert proven(f"{self.bucket.url}/{folder.name}/{self.name}")
        elif outcome.refusal is not None:
            assert f"{self.bucket.url}/{folder.name}" in outcome.refusal
        resumed = self.nursery.run(None, self.again, folder)
        assert resumed.done
        assert self.rows_shown(folder) == EXPECTED
        assert proven(f"{self.bucket.url}/{folder.name}/{self.name}")
        work = f"{folder.name}/{self.name.rstrip('/')}.prefill/"
        assert self.bucket.keys(work) == [f"{work}manifest.json", f"{work}row-digests.bin"]


@pytest.fixture
def bucket(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    return s3_server.new_bucket()


def store_job(nursery: Nursery, bucket: Bucket, kind: RequestKind, name: str) -> Job:
    run = partial(score_into_store, bucket.url, bucket.server.environment, name)
    checks = StoreChecks(nursery, kind, bucket, name, partial(run, resume=True))
    return Job(run, checks.goes_on, None, checks.kept_out)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["o.parquet", "o/"])
@pytest.mark.parametrize("kind", RequestKind)
def test_every_request_of_a_job_may_fail(
    nursery: Nursery,
    tmp_path: Path,
    bucket: Bucket,
    name: str,
    kind: RequestKind,
    count_faults: Callable[[str, int], None],
) -> None:
    job = store_job(nursery, bucket, kind, name)
    count_faults(kind.meaning, fail_each(nursery, tmp_path, job, kind))


METHODS = ("isdir", "ls", "find", "info", "cat_file", "open", "put_file", "pipe_file", "rm_file", "tail")


class FailingStore:
    """fsspec's store in memory, in which one call fails."""

    def __init__(self, patch: pytest.MonkeyPatch, kind: RequestKind, number: int) -> None:
        self._kind = kind
        self._number = number
        self._calls = 0
        self._inside = False
        for name in METHODS:
            patch.setattr(MemoryFileSystem, name, self._guarded(getattr(MemoryFileSystem, name)))

    @property
    def hit(self) -> bool:
        return self._calls >= self._number

    def _guarded(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*arguments: Any, **options: Any) -> Any:
            if self._inside:  # a part of another call
                return call(*arguments, **options)
            self._calls += 1
            fails = self._calls == self._number
            if fails and self._kind is RequestKind.DENIED:
                raise PermissionError("Access Denied")
            if fails and self._kind is RequestKind.BUSY:
                raise ConnectionError("the connection was reset")
            self._inside = True
            try:
                found = call(*arguments, **options)
            finally:
                self._inside = False
            if fails:
                raise ConnectionError("the connection was reset")
            return found

        return guarded


def score_in_memory(name: str, **options: Any) -> None:
    with open_sink(f"memory://bucket/{name}", **options) as sink:
        score_all(sink, WINDOWS, per_part=4)
        sink.finish(len(WINDOWS))


def rows_in_memory(memory: Any, name: str) -> list[dict[str, Any]] | None:
    if name.endswith("/"):
        if not memory.exists(f"/bucket/{name}{SUCCESS}"):
            return None
        files = sorted(memory.glob(f"/bucket/{name}*.parquet"))
    else:
        files = [f"/bucket/{name}"] if memory.exists(f"/bucket/{name}") else []
    tables = [pq.read_table(pa.BufferReader(memory.cat_file(file))) for file in files]
    return pa.concat_tables(tables).to_pylist() if tables else None


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("o/", RequestKind.LOST),
        ("o.parquet", RequestKind.DENIED),
        pytest.param("o/", RequestKind.DENIED, marks=pytest.mark.nightly),
        pytest.param("o/", RequestKind.BUSY, marks=pytest.mark.nightly),
        pytest.param("o.parquet", RequestKind.LOST, marks=pytest.mark.nightly),
        pytest.param("o.parquet", RequestKind.BUSY, marks=pytest.mark.nightly),
    ],
)
def test_every_call_of_any_object_store_may_fail(
    memory: Any,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    kind: RequestKind,
    count_faults: Callable[[str, int], None],
) -> None:
    monkeypatch.setattr(filesystems, "_FIRST_WAIT", 0.001)
    monkeypatch.setattr(filesystems, "_LONGEST_WAIT", 0.001)
    for number in itertools.count(1):
        memory.store.clear()
        memory.pseudo_dirs[:] = [""]
        refusal: str | None = None
        with monkeypatch.context() as patch:
            failing = FailingStore(patch, kind, number)
            try:
                score_in_memory(name)
            except PrefillError as error:
                refusal = str(error)
        shown = rows_in_memory(memory, name)
        assert shown in (None, EXPECTED)
        assert refusal is None or (kind is RequestKind.DENIED and "memory://bucket" in refusal), (number, refusal)
        assert refusal is not None or (shown == EXPECTED and proven(f"memory://bucket/{name}"))
        if not failing.hit:
            break
        memory.store.pop(f"/bucket/{name.rstrip('/')}.prefill/lock", None)  # where deleting it was refused
        score_in_memory(name, resume=True)
        assert rows_in_memory(memory, name) == EXPECTED
        left = [f"/bucket/{name.rstrip('/')}.prefill/{each}" for each in ("manifest.json", "row-digests.bin")]
        assert sorted(memory.ls(f"/bucket/{name.rstrip('/')}.prefill", detail=False)) == left
    assert number > 30
    count_faults(kind.meaning, number - 1)
