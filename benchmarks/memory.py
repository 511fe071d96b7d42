"""Peak memory of a step, measured in its own process."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from prefillcli.bench.measure import with_peak


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
