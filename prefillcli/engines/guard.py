"""Processes that must neither outlive this one nor die unnoticed."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import active_children
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from threading import Event, Thread

_LOOK_SECONDS = 0.1
#: Reads process ids until it is told to end; its input ends when the process that writes them does.
_LEASH = 'while read pid; do [ "$pid" = end ] && exit; pids="$pids $pid"; done; [ -z "$pids" ] || kill -KILL $pids'


class Guard:
    """Kills the children that this process starts from now on if it dies, however it does.

    Say `watch` when all have started, and `release` before they are ended in the usual way.
    """

    def __init__(self) -> None:
        self._seen = set(active_children())
        self._children: list[BaseProcess] = []
        self._leash = subprocess.Popen(  # noqa: S603 - nothing comes from outside
            ["/bin/sh", "-c", _LEASH],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            text=True,
            bufsize=1,
        )
        self._started = Event()
        self._looker = Thread(target=self._look, name="prefill-guard-start", daemon=True)
        self._looker.start()

    def watch(self, died: Callable[[], None]) -> None:
        """No more children start; `died` is called, in a thread, once one of them has ended."""
        self._stop_looking()
        sentinels = [process.sentinel for process in self._children]

        def watch() -> None:
            if wait(sentinels):
                died()

        Thread(target=watch, name="prefill-guard", daemon=True).start()

    def release(self) -> None:
        """Let the children live."""
        self._stop_looking()
        self._leash.communicate("end\n")

    def kill(self) -> None:
        """End what a start that failed left behind; nothing after `release`."""
        self._stop_looking()
        if self._leash.stdin:
            self._leash.stdin.close()
        self._leash.wait()

    def _look(self) -> None:
        while True:
            done = self._started.wait(_LOOK_SECONDS)
            for process in active_children():
                if process not in self._seen:
                    self._seen.add(process)
                    self._children.append(process)
                    if self._leash.stdin:
                        with suppress(BrokenPipeError):  # somebody killed the shell
                            self._leash.stdin.write(f"{process.pid}\n")
            if done:
                return

    def _stop_looking(self) -> None:
        self._started.set()
        self._looker.join()
