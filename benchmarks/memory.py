"""Memory of a step, measured in its own process, and of a process with all below it."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from prefillcli.runtime.memory import with_peak


def peak_in_child(task: Callable[..., Callable[[], object]], *args: Any) -> int:
    """Bytes of host memory at the peak of a step above what was in use before it, in a new process.

    `task(*args)` prepares and returns the step. Linux only. Raises RuntimeError if the process ends early.
    """
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=_send_peak, args=(there, task, args))
    process.start()
    there.close()
    try:
        return int(here.recv())
    except EOFError:
        raise RuntimeError(f"the measured process ended with {process.exitcode}") from None
    finally:
        process.join()


def _send_peak(pipe: Connection, task: Callable[..., Callable[[], object]], args: tuple[Any, ...]) -> None:
    _, peak = with_peak(task(*args))
    if peak is None:
        raise OSError("this system does not report a process's peak memory; Linux does")
    pipe.send(peak)


def tree_memory(root: int) -> int:
    """Proportional set size of a process and of all below it. What has just ended counts nothing."""
    total = 0
    for process in _tree(root):
        with suppress(OSError):
            lines = (process / "smaps_rollup").read_text().splitlines()
            total += sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
    return total


def tree_processor_seconds(root: int) -> float:
    """What a process and all below it have computed, in seconds of one core."""
    total = 0.0
    for process in _tree(root):
        with suppress(OSError):
            after_name = (process / "stat").read_text().rpartition(")")[2].split()
            total += sum(map(int, after_name[11:13])) / os.sysconf("SC_CLK_TCK")
    return total


def _tree(root: int) -> Iterator[Path]:
    """A process and all below it, as folders of /proc."""
    waiting = [root]
    while waiting:
        process = Path(f"/proc/{waiting.pop()}")
        with suppress(OSError):
            for children in process.glob("task/*/children"):
                waiting += map(int, children.read_text().split())
            yield process
