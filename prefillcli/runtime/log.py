"""Lines on stderr: text for people, or one JSON object a line for programs that collect logs.

A JSON line has `time` (ISO 8601, UTC), `level`, `run_id`, `event` and `message`, and the event's own fields. Secrets
in URLs are removed from all of these.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

from prefillcli.errors import shown, without_secrets

Level = Literal["info", "warning", "error"]


@dataclass(frozen=True, slots=True)
class JsonLines:
    """The stream for the lines of a run, and the fields that every line has."""

    stream: TextIO
    run_id: str
    worker: int | None = None  # the worker that writes; None for the run's own process

    def write(self, level: Level, event: str, message: str, fields: dict[str, Any]) -> None:
        """Write one line, whole."""
        content = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "level": level,
            "run_id": self.run_id,
            **({} if self.worker is None else {"worker": self.worker}),
            "event": event,
            "message": without_secrets(message),
            **shown(fields),
        }
        self.stream.write(json.dumps(content, separators=(",", ":")) + "\n")
        self.stream.flush()


_lines: JsonLines | None = None
_warned: list[tuple[str, str]] = []  # the warnings of this run: event and message
_MOST_WARNED = 100


def new_run_id() -> str:
    """Return a name that no other run has."""
    return uuid.uuid4().hex


@contextmanager
def log_of(run_id: str, *, json_lines: bool, worker: int | None = None) -> Iterator[None]:
    """Let lines on stderr, inside the block, belong to this run. With `json_lines`, each is a JSON object; so is each
    line that libraries print there."""
    before = _warned[:]
    _warned.clear()
    try:
        with _json_log(run_id, worker) if json_lines else nullcontext():
            yield
    finally:
        _warned[:] = before


def warnings_of_run(without: str) -> list[str]:
    """Return the warnings of this process since the run began, but those about the event `without`."""
    return [message for event, message in _warned if event != without]


@contextmanager
def _json_log(run_id: str, worker: int | None) -> Iterator[None]:
    global _lines
    before, stderr = _lines, sys.stderr
    _lines = JsonLines(stderr, run_id, worker)
    sys.stderr = _Wrapped(_lines)
    try:
        yield
    finally:
        sys.stderr.flush()
        _lines, sys.stderr = before, stderr


def logs_json() -> bool:
    """Return whether lines are JSON objects now."""
    return _lines is not None


def event(name: str, message: str, **fields: Any) -> None:
    """Log an event only in JSON lines: people see it in other ways."""
    if _lines is not None:
        _lines.write("info", name, message, fields)


def info(message: str, event: str = "message", **fields: Any) -> None:
    """Log a line for information. `event` and `fields`, which must be JSON, are only for logs."""
    _write("info", event, message, fields)


def warning(message: str, event: str = "message", **fields: Any) -> None:
    """Log a line that the user should look at; the run goes on."""
    if len(_warned) < _MOST_WARNED:
        _warned.append((event, without_secrets(message)))
    _write("warning", event, message, fields)


def error(message: str, event: str = "message", **fields: Any) -> None:
    """Log the reason why the run ends or fails."""
    _write("error", event, message, fields)


def timed(message: str, event: str, **fields: Any) -> None:
    """Log a line that is repeated during a run; off a terminal it has the local time and its offset from UTC."""
    if _lines is None and not on_terminal():
        message = f"{datetime.now().astimezone().isoformat(timespec='seconds')} {message}"
    _write("info", event, message, fields)


def backtrace(text: str) -> None:
    """Log the origin of an error, in several lines."""
    if _lines is not None:
        _lines.write("error", "traceback", text, {})
    else:
        _print(without_secrets(text))


def _write(level: Level, event: str, message: str, fields: dict[str, Any]) -> None:
    if _lines is not None:
        _lines.write(level, event, message, fields)
        return
    mark = "warning: " if level == "warning" else ""
    _print(f"prefill: {mark}{without_secrets(message)}\n")


def on_terminal() -> bool:
    """Return whether stderr is a terminal."""
    return sys.stderr is not None and sys.stderr.isatty()


class AboveLive:
    """stderr, for whole lines that others print, like tables: they go above the live line."""

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stderr, name)

    def write(self, text: str) -> int:
        _print(text)
        return len(text)

    def flush(self) -> None:
        """Do nothing: each write is flushed."""


def _print(text: str) -> None:
    # Write to stderr, above the live line.
    with _drawing:
        _put(f"{_over('')}{text}{_live}")


def _put(text: str) -> None:
    # To stderr, if there is one: a warning must not end a program that uses the library and has no stderr.
    if sys.stderr is not None:
        with suppress(OSError, ValueError):
            print(text, end="", file=sys.stderr, flush=True)


# The live line: the last one on a terminal, which is drawn again and again.


_live = ""
_drawing = threading.RLock()


def show_live(text: str) -> None:
    """Draw the live line, over the one before; lines of the log go above it. Empty text takes it away."""
    global _live
    with _drawing:
        _put(_over(text))
        _live = text


def leave_live() -> None:
    """End the live line and leave it on the screen."""
    global _live
    with _drawing:
        if _live:
            _put("\n")
        _live = ""


def _over(text: str) -> str:
    # The characters that draw a text instead of the live line. Blanks clear the rest: a notebook knows no other way.
    if not _live:
        return text
    blanks = max(len(_live) - len(text), 0)
    return f"\r{text}{' ' * blanks}" + (f"\r{text}" if blanks else "")


def columns() -> int:
    """Return the width of the terminal on stderr."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or 80
    except (OSError, ValueError, AttributeError):
        return shutil.get_terminal_size().columns


class _Wrapped:
    """A stream that makes a log line of each line that is written to it."""

    def __init__(self, lines: JsonLines) -> None:
        self._lines = lines
        self._begun = ""
        self._lock = threading.RLock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lines.stream, name)

    def isatty(self) -> bool:
        return False

    def write(self, text: str) -> int:
        with self._lock:
            *whole, self._begun = (self._begun + text.replace("\r", "\n")).split("\n")
            for line in whole:
                self._say(line)
        return len(text)

    def flush(self) -> None:
        with self._lock:
            begun, self._begun = self._begun, ""
            self._say(begun)

    def _say(self, line: str) -> None:
        if line.strip():
            self._lines.write("info", "output", line.rstrip(), {})


# Standard streams that are closed, or whose reader is gone.


def survive_closed_streams() -> None:
    """Drop text for a closed stream, a pipe without a reader, or a log on a full disk, from now on, instead of ending
    the run. Each process of a command calls this before it opens anything.

    A scheduler that stops a task closes its pipes at once; the run still has rows and a report to write.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # else the next file would get this number, and libraries' lines for stderr
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
            os.set_inheritable(number, True)
    # Python has None for a stream that was closed
    sys.stdout, sys.stderr = _Lossy(sys.stdout or _nowhere()), _Lossy(sys.stderr or _nowhere())


@contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Send output of this process and its children to stderr, inside the block: stdout is for the run's own line."""
    sys.stdout.flush()
    own = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(own, 1)
        os.close(own)


def _nowhere() -> TextIO:
    return open(os.devnull, "w")


class _Lossy:
    """A text stream whose writes never fail: after the first failure they go nowhere."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            self._give_up()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            self._give_up()

    def _give_up(self) -> None:
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
