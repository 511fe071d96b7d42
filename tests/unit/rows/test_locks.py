"""One run at a time on an output, in object stores too."""

from __future__ import annotations

import json
import multiprocessing
from dataclasses import asdict, replace
from typing import Any

import pytest
from fsspec import AbstractFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from prefillcli.errors import OutputBusyError
from prefillcli.rows.output.store import Owner, open_store
from tests.unit.rows.outputs import EXPECTED, WINDOWS, open_sink, read_memory, score_all

OUTPUT = "memory://bucket/o.parquet"
LOCK = "/bucket/o.parquet.prefill/lock"


PIPE = MemoryFileSystem.pipe_file


def ignoring(self: Any, path: str, value: bytes, mode: str = "overwrite") -> None:
    """An object store that hears the wish for an exclusive write, and overwrites all the same."""
    PIPE(self, path, value)


def refusing(self: Any, path: str, value: bytes, mode: str = "overwrite") -> None:
    """An object store that does not know exclusive writes."""
    if mode == "create":
        raise NotImplementedError("IfNoneMatch")
    PIPE(self, path, value)


def older(self: Any, path: str, value: bytes) -> None:
    """A filesystem package of a time without exclusive writes."""
    PIPE(self, path, value)


def put_lock(memory: Any, owner: Owner) -> None:
    memory.pipe_file(LOCK, json.dumps(asdict(owner)).encode())


def test_a_second_run_is_kept_out_of_an_object_store(memory: Any) -> None:
    with open_sink(OUTPUT) as first:
        for flags in ({"resume": True}, {"overwrite": True}, {}):
            with pytest.raises(
                OutputBusyError, match=r"in use by process \d+ on (.|\n)*delete memory://.*/lock"
            ) as caught:
                open_sink(OUTPUT, **flags)
            assert caught.value.exit_code == 5
        score_all(first, WINDOWS)
        first.finish(3)
    assert not memory.exists(LOCK)
    with open_sink(OUTPUT, resume=True) as again:
        assert again.complete


def test_the_lock_of_a_dead_process_of_this_machine_is_taken_over(memory: Any) -> None:
    process = multiprocessing.get_context("spawn").Process(target=int)
    process.start()
    process.join()
    assert process.pid
    for dead in (replace(Owner.this(), pid=process.pid), replace(Owner.this(), started="1")):
        put_lock(memory, dead)
        with open_sink(OUTPUT, resume=True):
            assert json.loads(memory.cat_file(LOCK))["token"] != dead.token


def test_the_lock_of_a_process_elsewhere_stays_whatever_its_age(memory: Any) -> None:
    elsewhere = replace(Owner.this(), host="node7", machine="another boot", since="2020-01-01T00:00:00+00:00")
    put_lock(memory, elsewhere)
    with pytest.raises(OutputBusyError, match="on node7 since 2020-01-01"):
        open_sink(OUTPUT, resume=True)
    for content in (b"garbage", b"{}", b"[]", b'{"host": 1}'):
        memory.pipe_file(LOCK, content)
        with pytest.raises(OutputBusyError, match="an unknown host"):
            open_sink(OUTPUT, resume=True)
    memory.rm_file(LOCK)
    open_sink(OUTPUT, resume=True).close()


def test_a_run_whose_lock_was_taken_away_writes_no_more(memory: Any) -> None:
    with open_sink(OUTPUT) as first:
        score_all(first, WINDOWS[:1])
        put_lock(memory, replace(Owner.this(), host="node7"))
        before = memory.find("/bucket")
        with pytest.raises(OutputBusyError, match="taken away"):
            score_all(first, WINDOWS[1:])
        assert memory.find("/bucket") == before
    assert json.loads(memory.cat_file(LOCK))["host"] == "node7", "the other's lock stays"


@pytest.mark.parametrize("pipe", [ignoring, refusing, older, AbstractFileSystem.pipe_file])
def test_where_no_lock_can_be_had_a_warning_says_so(
    memory: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], pipe: Any
) -> None:
    """fsspec's own pipe_file looks whether the object is there, and writes then: that is no lock."""
    monkeypatch.setattr(MemoryFileSystem, "pipe_file", pipe)
    with open_sink(OUTPUT) as sink:
        assert "cannot be locked" in capsys.readouterr().err
        score_all(sink, WINDOWS)
        sink.finish(3)
    assert open_store(OUTPUT + ".prefill").names() == ["manifest.json", "row-digests.bin"]
    assert read_memory(OUTPUT) == EXPECTED


@pytest.mark.parametrize("pipe", [refusing, older])
def test_a_lock_that_is_there_counts_where_none_can_be_made(
    memory: Any, monkeypatch: pytest.MonkeyPatch, pipe: Any
) -> None:
    put_lock(memory, replace(Owner.this(), machine="another boot"))
    monkeypatch.setattr(MemoryFileSystem, "pipe_file", pipe)
    with pytest.raises(OutputBusyError, match="in use"):
        open_sink(OUTPUT)
