"""Children that end with the process that started them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from multiprocessing import get_context
from pathlib import Path
from threading import Event

from prefillcli.engines.vllm import Guard

START = """
import multiprocessing, sys, time
if __name__ == "__main__":  # the child needs no Guard
    from prefillcli.engines.vllm import Guard
    guard = Guard()
    child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,))
    child.start()
    time.sleep(1)
    print(child.pid, flush=True)
    time.sleep(60)
"""


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def ends(pid: int, seconds: float = 10) -> bool:
    end = time.monotonic() + seconds
    while lives(pid) and time.monotonic() < end:
        time.sleep(0.05)
    return not lives(pid)


def test_children_die_with_a_process_that_is_killed_while_it_starts_them(tmp_path: Path) -> None:
    script = tmp_path / "start.py"
    script.write_text(START)
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as process:
        pid = int(process.stdout.readline())
        assert lives(pid)
        process.kill()
    assert ends(pid)


def test_a_child_that_dies_is_told_and_released_ones_live() -> None:
    told = Event()
    guard = Guard()
    context = get_context("spawn")
    children = [context.Process(target=time.sleep, args=(60,)) for _ in range(2)]
    try:
        for child in children:
            child.start()
        guard.watch(told.set)
        assert not told.is_set()
        os.kill(children[0].pid, signal.SIGKILL)
        assert told.wait(10)
        guard.release()
        guard.kill()  # there is nothing left for it to do
        time.sleep(0.2)
        assert lives(children[1].pid)
    finally:
        for child in children:
            child.kill()
            child.join()


def test_what_a_failed_start_left_is_ended() -> None:
    guard = Guard()
    child = get_context("spawn").Process(target=time.sleep, args=(60,))
    child.start()
    guard.kill()
    child.join(10)
    assert child.exitcode == -signal.SIGKILL
