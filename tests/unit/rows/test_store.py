"""Files that appear whole or not at all, a full disk, a lock."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from prefillcli.errors import PrefillError, ResourceError, UsageError
from prefillcli.rows.output.destination import is_partition
from prefillcli.rows.output.store import LocalStore, RemoteStore, Store, open_store
from prefillcli.runtime import file_calls


@pytest.fixture(params=["local", "remote"])
def store(request: pytest.FixtureRequest, tmp_path: Path, memory: Any) -> Store:
    return open_store(str(tmp_path / "new" / "folder") if request.param == "local" else "memory://bucket/folder")


def content(store: Store, name: str) -> bytes:
    with store.read(name) as file:
        return file.read()


def test_the_kind_follows_from_the_path(tmp_path: Path, memory: Any) -> None:
    assert isinstance(open_store(str(tmp_path)), LocalStore)
    assert isinstance(open_store(f"file://{tmp_path}"), LocalStore)
    assert isinstance(open_store("memory://bucket"), RemoteStore)
    with pytest.raises(UsageError, match="nosuch"):
        open_store("nosuch://bucket")


def test_files_come_and_go(store: Store) -> None:
    assert store.names() == []
    store.put_bytes("b", b"1")
    store.put_bytes("a", b"2")
    store.put_bytes("a", b"3")
    with store.create("c") as file:
        file.write(b"4")
        file.write(b"5")
    assert store.names() == ["a", "b", "c"]
    assert (content(store, "a"), content(store, "c")) == (b"3", b"45")
    store.delete("a")
    store.delete("a")
    assert store.names() == ["b", "c"]
    with pytest.raises(FileNotFoundError):
        store.read("a")


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_write_that_fails_leaves_the_old_file_and_no_other(store: Store, error: type[BaseException]) -> None:
    store.put_bytes("a", b"old")

    def write() -> None:
        with store.create("a") as file:
            file.write(b"half")
            raise error

    with pytest.raises(error):
        write()
    assert content(store, "a") == b"old"
    if isinstance(store, LocalStore):
        assert os.listdir(store.location) == ["a"]


def test_what_a_killed_process_left_is_no_file_and_is_cleaned(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path))
    program = (
        "import os, sys; from prefillcli.rows.output.store import LocalStore\n"
        "with LocalStore(sys.argv[1]).create('a') as file: file.write(b'half'); file.flush(); os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", program, str(tmp_path)]).returncode == 9
    assert len(os.listdir(tmp_path)) == 1
    assert store.names() == []
    store.clean(lambda name: name == "other")
    assert len(os.listdir(tmp_path)) == 1
    store.clean(lambda name: name == "a")
    assert os.listdir(tmp_path) == []


def test_data_is_on_disk_before_the_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for name in ("write_bytes", "sync_file", "replace_file", "sync_folder"):
        call = getattr(file_calls, name)

        def noted(*arguments: Any, call: Any = call, name: str = name) -> Any:
            calls.append(name)
            return call(*arguments)

        monkeypatch.setattr(file_calls, name, noted)
    LocalStore(str(tmp_path)).put_bytes("a", b"x")
    assert calls == ["write_bytes", "sync_file", "replace_file", "sync_folder"]


@pytest.mark.parametrize("call", ["write_bytes", "sync_file", "replace_file"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_a_resource_error_that_names_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    def full(*_arguments: Any) -> None:
        raise OSError(number, os.strerror(number))

    store = LocalStore(str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(file_calls, call, full)
        with pytest.raises(ResourceError, match=f"{tmp_path}/a") as caught:
            store.put_bytes("a", b"x")
    assert caught.value.exit_code == 5
    assert os.listdir(tmp_path) == []


def test_what_cannot_be_looked_up_is_not_taken_for_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else an output would be begun anew, or files of others be taken for none."""
    store = LocalStore(str(tmp_path))
    store.put_bytes("a", b"x")
    (tmp_path / "day=1").mkdir()
    (tmp_path / "file").write_bytes(b"")

    def broken(*_arguments: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    assert not LocalStore(f"{tmp_path}/file").exists("below")
    with monkeypatch.context() as patch:
        patch.setattr(file_calls, "is_there", broken)
        with pytest.raises(PrefillError, match=f"{tmp_path}/a"):
            store.exists("a")
    listing = file_calls.list_folder
    monkeypatch.setattr(file_calls, "list_folder", lambda path: broken() if "day" in path else listing(path))
    for look in (lambda: store.find(is_partition), lambda: store.clean(lambda name: True, is_partition)):
        with pytest.raises(PrefillError, match=str(tmp_path)):
            look()


def test_every_folder_that_is_made_survives_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    monkeypatch.setattr(file_calls, "sync_folder", synced.append)
    LocalStore(f"{tmp_path}/a/b/c").put_bytes("d", b"")
    assert synced == [f"{tmp_path}{inner}" for inner in ("", "/a", "/a/b", "/a/b/c")]


def test_a_folder_that_cannot_be_made_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(PrefillError, match=f"{tmp_path}/file/folder"):
        LocalStore(str(tmp_path / "file" / "folder")).put_bytes("a", b"")


def test_the_lock_is_given_back(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path))
    lock = store.lock()
    with pytest.raises(ResourceError, match=str(os.getpid())):
        store.lock()
    lock.release()
    lock.release()
    store.lock().release()


class ClientError(Exception):
    """What the client of an object store raises: no OSError."""


@pytest.mark.parametrize("call", ["put_file", "pipe_file", "ls", "rm_file"])
def test_what_an_object_store_raises_is_an_error_that_names_the_path(
    memory: Any, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def refuse(*_arguments: Any, **_options: Any) -> None:
        raise ClientError("no credentials")

    store = open_store("memory://bucket/folder")
    monkeypatch.setattr(type(memory), call, refuse)

    def use() -> None:
        if call == "put_file":
            with store.create("a") as file:
                file.write(b"x")
        elif call == "pipe_file":
            store.put_bytes("a", b"x")
        elif call == "rm_file":
            store.delete("a")
        else:
            store.names()

    with pytest.raises(PrefillError, match=r"memory://bucket/folder(.|\n)*no credentials"):
        use()
