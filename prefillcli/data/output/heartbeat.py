"""The sign of life that a run leaves in its work folder, which `prefill status` reads."""

from __future__ import annotations

import datetime
import json
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from prefillcli.data.filesystems import impatiently
from prefillcli.data.output.locks import Owner
from prefillcli.data.output.store import Store
from prefillcli.runtime.progress import Pace

NAME = "heartbeat.json"
_MISSED = 3  # beats that may be late before a run counts as dead
_PATIENCE = 5.0  # seconds in which the last sign must be written


@dataclass(frozen=True)
class Beat:
    """One sign of life."""

    owner: Owner
    pace: Pace
    running: bool
    """False in the last one."""
    updated: str
    """UTC, in ISO 8601."""
    seconds: float
    """Between two beats."""

    @classmethod
    def last(cls, store: Store) -> Beat | None:
        """The last sign of life in a work folder; None if there is none that can be read."""
        try:
            content = json.loads(store.read_bytes(NAME))
            owner = Owner.of_json(content["owner"])
            if owner is None:
                return None
            rest: dict[str, Any] = {name: content[name] for name in ("running", "updated", "seconds")}
            datetime.datetime.fromisoformat(rest["updated"])
            return cls(owner=owner, pace=Pace(**content["pace"]), **rest)
        except (OSError, ValueError, KeyError, TypeError):
            return None

    @property
    def time(self) -> datetime.datetime:
        return datetime.datetime.fromisoformat(self.updated)

    @property
    def age(self) -> float:
        """Seconds since then, by the clock of this machine."""
        return (datetime.datetime.now(datetime.UTC) - self.time).total_seconds()

    def alive(self) -> bool:
        """Whether the run still goes on: known if it runs on this machine, else judged by the age of the beat."""
        known = self.owner.alive()
        return self.running and (self.age < _MISSED * self.seconds if known is None else known)


class Heartbeat:
    """Leaves signs of life in a work folder from a thread; use it as a context manager.

    A sign that cannot be written is left out: no run fails for it, and none waits for it.
    """

    def __init__(self, store: Store, pace: Callable[[], Pace], *, seconds: float | None = None) -> None:
        self._store = store
        self._pace = pace
        self._seconds = seconds or store.beat_seconds
        self._owner = Owner.this()
        self._stopped = threading.Event()
        self._failed = False
        self._thread = threading.Thread(target=self._work, name="prefill-heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_exception: object) -> None:
        self._failed = kind is not None
        self._stopped.set()
        self._thread.join(_PATIENCE)  # a disk that hangs holds up its thread, not the run

    def _work(self) -> None:
        while not self._stopped.is_set():
            self._beat(running=True)
            self._stopped.wait(self._seconds)
        if self._failed:
            self._beat(running=False)
            return
        with suppress(Exception), impatiently():  # the manifest says it all
            self._store.delete(NAME)

    def _beat(self, *, running: bool) -> None:
        with suppress(Exception), impatiently():
            now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            beat = Beat(self._owner, self._pace(), running, now, self._seconds)
            self._store.put_bytes(NAME, json.dumps(asdict(beat)).encode())
