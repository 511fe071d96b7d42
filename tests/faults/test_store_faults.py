"""Every request of a job into S3 fails once, in every way."""

from __future__ import annotations

import io
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

from prefillcli.data.output.target import SUCCESS
from prefillcli.errors import OutputBusyError
from tests.data.outputs import EXPECTED, WINDOWS, open_sink, score_all
from tests.faults.loops import Job, fail_each
from tests.faults.nursery import Nursery, Outcome
from tests.faults.output_checks import proven
from tests.faults.request_faults import RequestKind
from tests.s3_server import Bucket, S3Server


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


@pytest.mark.parametrize("kind", [RequestKind.LOST, RequestKind.KILL])
def test_some_requests_of_a_job_may_fail(
    nursery: Nursery, tmp_path: Path, bucket: Bucket, kind: RequestKind, count_faults: Callable[[str, int], None]
) -> None:
    job = store_job(nursery, bucket, kind, "o.parquet")
    count_faults(kind.meaning, fail_each(nursery, tmp_path, job, kind, first=8, every=21))
