"""A folder on a real S3 server: what is tried again, what is not, and what is proven."""

from __future__ import annotations

import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import aiohttp
import pytest
import s3fs
from fsspec import AbstractFileSystem
from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from huggingface_hub import HfFileSystem

from prefillcli.errors import OutputBusyError, PrefillError, UsageError
from prefillcli.rows import filesystems
from prefillcli.rows.filesystems import Failure, filesystem_of, impatiently, patiently
from prefillcli.rows.output.store import Owner, RemoteStore, Store, exclusive_put, open_store
from tests.s3_server import EXPIRED, SLOW_DOWN, Bucket, Refusal, Request, S3Server, every, once

ALWAYS = 1


@pytest.fixture(scope="module", autouse=True)
def _own_clients() -> Iterator[None]:
    """They are made once, and not shared with other tests."""
    s3fs.S3FileSystem.clear_instance_cache()
    yield
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def bucket(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """A bucket for this process, whose S3 client tries once."""
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setattr(filesystems, "_outage", threading.Event())
    monkeypatch.setattr(filesystems, "_FIRST_WAIT", 0.001)
    monkeypatch.setattr(filesystems, "_LONGEST_WAIT", 0.001)
    return s3_server.new_bucket()


@pytest.fixture
def store(bucket: Bucket) -> Store:
    return open_store(f"{bucket.url}/folder")


def put(store: Store, name: str, data: bytes) -> None:
    with store.create(name) as file:
        file.write(data)


def read(store: Store, name: str) -> bytes:
    with store.read(name) as file:
        return file.read()


USES: dict[str, Callable[[Store], Any]] = {
    "put_bytes": lambda store: store.put_bytes("a", b"1"),
    "create": lambda store: put(store, "a", b"1"),
    "read": lambda store: read(store, "there"),
    "read_bytes": lambda store: store.read_bytes("there"),
    "exists": lambda store: store.exists("there"),
    "names": lambda store: store.names(),
    "find": lambda store: store.find(lambda folder: True),
    "delete": lambda store: store.delete("there"),
    "lock": lambda store: store.lock().release(),
    "in_use": lambda store: store.in_use(),
}


@pytest.mark.parametrize("use", USES)
def test_a_store_that_is_busy_is_asked_again(bucket: Bucket, store: Store, use: str) -> None:
    bucket.put("folder/there", b"0")
    bucket.server.faults.append(every(2, SLOW_DOWN))
    expected = USES[use](store)
    assert expected in (None, b"0", True, ["there"])
    assert not bucket.keys("folder/lock"), "its removal is asked for again too"


@pytest.mark.sampled(4)
@pytest.mark.parametrize("use", USES)
def test_a_store_that_stays_busy_ends_in_an_error_that_says_so(
    bucket: Bucket, store: Store, monkeypatch: pytest.MonkeyPatch, use: str
) -> None:
    minutes = itertools.count(0, filesystems.PATIENCE / 4)
    monkeypatch.setattr(filesystems, "monotonic", lambda: next(minutes))
    bucket.put("folder/there", b"0")
    bucket.server.faults.append(every(ALWAYS, SLOW_DOWN))
    with pytest.raises(PrefillError, match=r"cannot use s3://(.|\n)*busy or cannot be reached: continue with"):
        USES[use](store)
    assert len(bucket.server.requests) == 4, "s3fs does not multiply our tries by its own"


@pytest.mark.parametrize("use", USES)
def test_what_is_refused_is_asked_for_once(bucket: Bucket, store: Store, use: str) -> None:
    bucket.put("folder/there", b"0")
    bucket.server.faults.append(every(ALWAYS, EXPIRED))
    with pytest.raises(PrefillError, match="the credentials have expired or do not allow this: renew them"):
        USES[use](store)
    assert len(bucket.server.requests) <= 2, "isdir and info of s3fs look twice"


def test_a_bucket_that_is_not_there_is_not_made(bucket: Bucket) -> None:
    store = open_store("s3://no-such-bucket/folder")
    assert store.names() == []
    for write in (lambda: store.put_bytes("a", b""), lambda: put(store, "a", b""), store.lock):
        with pytest.raises(PrefillError, match="no such bucket"):
            write()
    buckets = [each["Name"] for each in bucket.server.client.list_buckets()["Buckets"]]
    assert "no-such-bucket" not in buckets


@pytest.mark.parametrize(
    "answer",
    [
        *(Refusal(f"{status} in trouble", "Other") for status in (500, 502, 503, 504)),
        *(Refusal("400 Bad Request", code) for code in ("SlowDown", "InternalError")),
    ],
    ids=lambda answer: f"{answer.status[:3]} {answer.code}",
)
def test_answers_of_a_server_in_trouble_pass(bucket: Bucket, store: Store, answer: Refusal) -> None:
    """Their status says it, or their code alone."""
    bucket.server.faults.append(once("PUT", "a$", answer))
    store.put_bytes("a", b"1")
    assert bucket.get("folder/a") == b"1"


@pytest.mark.nightly
def test_a_large_file_goes_in_parts_and_is_tried_again_whole(bucket: Bucket, store: Store) -> None:
    data = os.urandom(101 << 20)
    bucket.server.faults.append(once("PUT", "a$", Refusal("400 Bad Request", "Other"), after=1))
    with pytest.raises(PrefillError, match="cannot use"):
        put(store, "a", data)
    assert bucket.uploads() == [], "what was sent is given up, so that nobody pays for it"
    bucket.server.reset()
    bucket.server.faults.append(once("PUT", "a$", SLOW_DOWN, after=1))
    put(store, "a", data)
    assert bucket.get("folder/a") == data
    assert bucket.uploads() == []


def test_uploads_that_a_killed_run_left_are_given_up_and_no_others(bucket: Bucket, store: Store) -> None:
    for key in ("folder/a", "folder/day=1/a", "folder/notes/a", "folder/b", "other/a"):
        bucket.begin_upload(key)
    store.clean(lambda name: name.endswith("a"), lambda folder: "=" in folder)
    assert bucket.uploads() == ["folder/notes/a", "folder/b", "other/a"]
    bucket.server.faults.append(every(ALWAYS, EXPIRED))
    store.clean(lambda name: True)  # without the right to look, nothing is cleaned


def test_a_file_that_another_program_cuts_short_at_once_is_noticed(bucket: Bucket, store: Store) -> None:
    def cut(request: Request) -> None:
        if request.method == "HEAD":
            bucket.put("folder/a", b"short")

    bucket.server.faults.append(cut)
    with pytest.raises(PrefillError, match="has 5 bytes in the store, but 100 were written"):
        put(store, "a", b"x" * 100)


def test_a_new_file_replaces_none(bucket: Bucket, store: Store) -> None:
    for data in (b"1", b"1"):
        store.put_bytes("a", data, new=True)  # the second time it is what an answer that was lost has left
        with store.create("b", new=True) as file:
            file.write(data)
    for name in ("a", "b"):
        with pytest.raises(OutputBusyError, match=f"folder/{name} was written by another run"):
            store.put_bytes(name, b"2", new=True)
        with (
            pytest.raises(OutputBusyError, match=f"folder/{name} was written by another run"),
            store.create(name, new=True) as file,
        ):
            file.write(b"3")
        assert bucket.get(f"folder/{name}") == b"1"
    assert sum(request.conditional for request in bucket.server.requests) == 8


def test_where_a_store_has_no_conditional_writes_a_new_file_is_written_all_the_same(
    bucket: Bucket, store: Store
) -> None:
    bucket.server.faults.append(
        lambda request: Refusal("501 Not Implemented", "NotImplemented") if request.conditional else None
    )
    store.put_bytes("a", b"1", new=True)
    with store.create("b", new=True) as file:
        file.write(b"2")
    assert (bucket.get("folder/a"), bucket.get("folder/b")) == (b"1", b"2")


def test_a_lock_whose_creation_was_answered_by_nobody_is_held(bucket: Bucket, store: Store) -> None:
    def lose(request: Request) -> Refusal | None:
        if request.method == "PUT" and request.key.endswith("lock") and not bucket.keys("folder/lock"):
            owner = Owner.this()  # not this run's: of two that come at a time the other was first
            bucket.put("folder/lock", str(vars(owner)).encode())
            return SLOW_DOWN
        return None

    bucket.server.faults.append(lose)
    with pytest.raises(OutputBusyError, match="in use"):
        store.lock()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (TimeoutError("read"), Failure.PASSING),
        (ConnectionResetError(104, "reset"), Failure.PASSING),
        (aiohttp.ServerDisconnectedError(), Failure.PASSING),
        (aiohttp.ClientPayloadError("cut"), Failure.PASSING),
        (FileNotFoundError("a"), Failure.MISSING),
        (FileExistsError("a"), Failure.EXISTS),
        (PermissionError("a"), Failure.REFUSED),
        (OSError(28, "No space left on device"), Failure.OTHER),
        (ValueError("a"), Failure.OTHER),
    ],
)
def test_errors_are_told_apart(error: Exception, expected: Failure) -> None:
    assert Failure.of(error) is expected


class _GoogleHttpError(Exception):
    """As gcsfs raises: the status is `code`."""

    def __init__(self, code: int) -> None:
        super().__init__(f"{code}")
        self.code = code


class _AzureError(Exception):
    """As azure.core raises."""

    def __init__(self, status_code: int, error_code: str) -> None:
        super().__init__(error_code)
        self.status_code, self.error_code = status_code, error_code


class _HubError(OSError):
    """As huggingface_hub raises: with the answer of httpx."""

    def __init__(self, status_code: int) -> None:
        super().__init__(f"{status_code}")
        self.response = type("Response", (), {"status_code": status_code})()


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (429, Failure.PASSING),
        (503, Failure.PASSING),
        (401, Failure.REFUSED),
        (403, Failure.REFUSED),
        (404, Failure.MISSING),
        (412, Failure.EXISTS),
        (418, Failure.OTHER),
    ],
)
def test_errors_of_every_client_are_told_apart_by_their_status(status: int, expected: Failure) -> None:
    for error in (_GoogleHttpError(status), _AzureError(status, "x"), _HubError(status)):
        assert Failure.of(error) is expected
    outer = OSError("translated")
    outer.__cause__ = _AzureError(status, "x")
    assert Failure.of(outer) is expected


def test_trying_again_ends_in_bounded_time_and_what_cannot_succeed_is_tried_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    waits: list[float] = []
    monkeypatch.setattr(filesystems, "_outage", threading.Event())

    def sleep(seconds: float) -> None:
        nonlocal now
        waits.append(seconds)
        now += seconds

    monkeypatch.setattr(filesystems, "monotonic", lambda: now)
    monkeypatch.setattr(filesystems, "sleep", sleep)

    def busy(slowly: float) -> None:
        nonlocal now
        now += slowly
        raise TimeoutError

    with pytest.raises(TimeoutError):
        patiently(lambda: busy(0.0))
    assert 30 < sum(waits) <= filesystems.PATIENCE
    assert all(wait < later * 2.1 for wait, later in itertools.pairwise(waits))
    waits.clear()
    patiently(lambda: None)
    with pytest.raises(TimeoutError):
        patiently(lambda: busy(40.0))  # a client that has tried for long by itself
    assert len(waits) == 1
    waits.clear()
    with pytest.raises(TimeoutError):
        patiently(lambda: busy(0.0))
    assert waits == [], "it was waited for in vain already"
    patiently(lambda: None)
    with pytest.raises(TimeoutError), impatiently():
        patiently(lambda: busy(0.0))
    assert waits == []
    with pytest.raises(TimeoutError):
        patiently(lambda: busy(0.0))
    assert waits, "it has answered since"
    waits.clear()
    patiently(lambda: None)
    with pytest.raises(PermissionError):
        patiently(lambda: (_ for _ in ()).throw(PermissionError("no")))
    assert waits == []


class _Azure(AsyncFileSystem):
    """With the signatures of adlfs."""

    async def _pipe_file(self, path: Any, value: Any, overwrite: bool = True, **kwargs: Any) -> Any:
        return ("pipe", path, value, overwrite)

    async def _put_file(self, lpath: Any, rpath: Any, delimiter: Any = "/", overwrite: bool = True, **k: Any) -> Any:
        return ("put", lpath, rpath, overwrite)


def test_which_filesystems_have_writes_for_what_is_not_there_yet() -> None:
    azure = _Azure(skip_instance_cache=True)
    for method, name in (("pipe_file", "pipe"), ("put_file", "put")):
        write = exclusive_put(azure, method)
        assert write is not None
        assert write("a", "b") == (name, "a", "b", False)
        assert exclusive_put(s3fs.S3FileSystem(anon=True, skip_instance_cache=True), method) is not None
        assert exclusive_put(HfFileSystem(token=False, skip_instance_cache=True), method) is None
        assert exclusive_put(AbstractFileSystem(skip_instance_cache=True), method) is None
    assert exclusive_put(MemoryFileSystem()) is not None


@pytest.mark.parametrize(
    ("inner", "seconds"), [("datasets/me/data", 600.0), ("me/model/out", 600.0), ("buckets/me/b/out", 30.0)]
)
def test_a_repository_of_the_hub_gets_few_commits_for_signs_of_life(inner: str, seconds: float) -> None:
    assert RemoteStore(HfFileSystem(token=False), inner, f"hf://{inner}").beat_seconds == seconds


@pytest.mark.parametrize(
    ("url", "package", "extra"),
    [
        ("s3://b/a.parquet", "s3fs", "s3"),
        ("gs://b/a.parquet", "gcsfs", "gcs"),
        ("abfs://c@a.dfs.core.windows.net/a.parquet", "adlfs", "azure"),
    ],
)
def test_a_missing_package_is_named(url: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_url: str) -> None:
        raise ImportError("install it")

    monkeypatch.setattr("fsspec.core.url_to_fs", missing)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UsageError) as caught:
        filesystem_of(url)
    assert package in str(caught.value)
    assert f"[{extra}]'" in str(caught.value)
