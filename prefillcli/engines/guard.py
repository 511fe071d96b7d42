"""Processes that must neither outlive this one nor die unnoticed."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from threading import Thread


class Guard:
    """Kills `processes` if this process dies, however it does; calls `died`, in a thread, once one of them has ended.

    Release it before they are ended in the usual way.
    """

    def __init__(self, processes: Sequence[BaseProcess], died: Callable[[], None]) -> None:
        pids = " ".join(str(process.pid) for process in processes)
        end = ["/bin/sh", "-c", f"read line || kill -KILL {pids}"]  # its input ends when this process does
        self._leash = subprocess.Popen(  # noqa: S603 - process ids alone
            end,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        sentinels = [process.sentinel for process in processes]

        def watch() -> None:
            if wait(sentinels):
                died()

        Thread(target=watch, name="prefill-guard", daemon=True).start()

    def release(self) -> None:
        """Let the processes live."""
        self._leash.communicate(b"\n")
