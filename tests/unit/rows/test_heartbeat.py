"""A sign of life holds up no run."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import IO

import pytest

from prefillcli.rows.output import store
from prefillcli.rows.output.store import Heartbeat, open_store
from prefillcli.runtime import file_calls
from prefillcli.runtime.clock import Pace


@pytest.mark.parametrize("call", ["open_to_write", "replace_file", "remove_file"])
def test_a_heartbeat_that_hangs_holds_up_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    hangs, back = threading.Event(), threading.Event()

    def hang(*_arguments: object) -> None:
        hangs.set()
        back.wait(60)
        raise OSError("stale file handle")

    monkeypatch.setattr(store, "_JOIN_SECONDS", 0.1)
    monkeypatch.setattr(file_calls, call, hang)
    beats = Heartbeat(open_store(str(tmp_path)), lambda: Pace(1.0, 2, None, None), seconds=0.01)
    with beats:
        if call != "remove_file":  # it is removed at the end
            assert hangs.wait(30)
    assert beats._thread.is_alive()  # it still hangs
    back.set()
    beats._thread.join(30)
    assert not beats._thread.is_alive()


def test_what_cannot_be_written_now_is_written_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failures, open_to_write = iter([OSError("stale file handle")] * 3), file_calls.open_to_write

    def open_later(path: str) -> IO[bytes]:
        for failure in failures:
            raise failure
        return open_to_write(path)

    monkeypatch.setattr(file_calls, "open_to_write", open_later)
    sign, end = tmp_path / store.NAME, time.monotonic() + 30
    with Heartbeat(open_store(str(tmp_path)), lambda: Pace(1.0, 2, None, None), seconds=0.01):
        while not sign.exists():
            assert time.monotonic() < end, "no sign of life comes any more"
            time.sleep(0.01)
