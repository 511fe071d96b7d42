"""Progress and cost of a run: wall time by phase, memory over time, progress on stderr."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Literal, NamedTuple

from prefillcli.errors import counted
from prefillcli.runtime import log
from prefillcli.runtime.memory import device_memory, peak_resident_memory, resident_memory

# The phases of a run in their order; `run.json` has the seconds of each under its name.
Phase = Literal["read", "waiting", "plan", "load", "exits", "draft", "model", "write", "evaluate"]


class Clock:
    """Adds up seconds under names."""

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self.seconds: defaultdict[Phase, float] = defaultdict(float)

    @property
    def total(self) -> float:
        """Seconds since the clock was made."""
        return time.monotonic() - self._begun

    @contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        begun = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] += time.monotonic() - begun


class MemoryWatch:
    """Samples the memory in use from a thread; use it as a context manager.

    At most `most` samples are kept: when that many are reached, every second one is dropped and the pace halves.
    """

    def __init__(self, clock: Clock, *, interval: float = 0.2, most: int = 500) -> None:
        # Seconds on the clock; bytes of the process, and of tensors on the devices.
        self.samples: list[tuple[float, int, int]] = []
        self._clock = clock
        self._interval = interval
        self._most = most
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="prefill-memory", daemon=True)

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._stopped.set()
        self._thread.join()
        self._look()

    def _watch(self) -> None:
        self._look()
        while not self._stopped.wait(self._interval):
            self._look()

    def _look(self) -> None:
        if len(self.samples) == self._most:
            del self.samples[1::2]
            self._interval *= 2
        self.samples.append((round(self._clock.total, 2), _host(), device_memory()))


def _host() -> int:
    try:
        return resident_memory()
    except OSError:  # not Linux: only the peak so far is known
        return peak_resident_memory()


def duration(seconds: float) -> str:
    """Return seconds as people write them: `12.3 s`, `4.5 min`, `2.1 h`."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


# Progress on stderr: a live line on a terminal, a plain line with the time now and then elsewhere.


class Expected(NamedTuple):
    """The expected number of rows, exact or estimated."""

    rows: int
    exact: bool = True

    def __str__(self) -> str:
        return f"{self.rows:,}" if self.exact else f"about {self.rows:,}"


@dataclass(frozen=True)
class Pace:
    """The progress of a run."""

    rows: float  # finished rows, those of earlier attempts included
    total: int | None  # rows of the whole job; None if not known
    rows_per_second: float | None  # of this attempt; None before its first row
    seconds_left: float | None  # None if unknown
    estimated: bool = False  # whether the total is an estimate


class Progress:
    """Counts rows and prompt tokens.

    `expected` returns the expected number of rows; it is called again and again, because an estimate gets better. It
    returns None where nothing is known. `live` chooses between a live line and a log of lines; by default a terminal
    has the live one. If `seconds_left` gives a number, it predicts the end better than the rows so far.
    """

    def __init__(
        self,
        expected: int | Callable[[], Expected | None] | None,
        *,
        interval: float,
        quiet: bool = False,
        live: bool | None = None,
        seconds_left: Callable[[], float | None] = lambda: None,
    ) -> None:
        known = Expected(expected) if isinstance(expected, int) else None
        self._expected = expected if callable(expected) else lambda: known
        self._seconds_left = seconds_left
        self._interval = interval
        self._quiet = quiet
        self._rows = 0.0
        self._before = 0
        self._tokens = 0.0
        self._begun = self._last_line = time.monotonic()
        self._live = not quiet and not log.logs_json() and (log.on_terminal() if live is None else live)
        self._drawn = 0.0  # when the live line was drawn

    def resume(self, rows: int) -> None:
        """Take the number of rows that earlier attempts did; they do not count for the speed."""
        self._before += rows
        self._rows += rows

    def start(self) -> None:
        """Begin the first row: the time before does not count for the speed."""
        step("")
        self._begun = self._last_line = time.monotonic()
        if self._live:
            self._draw(self._begun)

    def pace(self) -> Pace:
        """Return the run's progress; any thread may ask."""
        seconds, expected = time.monotonic() - self._begun, self._expected()
        done = self._rows - self._before
        return Pace(
            self._rows,
            None if expected is None else expected.rows,
            done / seconds if done > 0 else None,
            self._left(expected, seconds),
            estimated=expected is not None and not expected.exact,
        )

    def advance(self, rows: float, tokens: float = 0.0) -> None:
        """Count further `rows` (also parts of one) and `tokens` as done."""
        self._rows += rows
        self._tokens += tokens
        now = time.monotonic()
        if self._live:
            if now - self._drawn >= _REDRAW_SECONDS:
                self._draw(now)
        elif not self._quiet and now - self._last_line >= self._interval:
            self._last_line = now
            self._log(now - self._begun)

    def _draw(self, now: float) -> None:
        self._drawn, seconds = now, now - self._begun
        expected = self._expected()
        log.show_live(
            progress_line(
                self._rows,
                expected,
                columns=log.columns() - 1,
                elapsed=seconds,
                tokens_per_second=self._tokens / max(seconds, 1e-9),
                left=self._left(expected, seconds),
            )
        )

    def _log(self, seconds: float) -> None:
        pace, tokens, expected = self.pace(), self._tokens / seconds, self._expected()
        line = rows_of(self._rows, expected)
        if expected is not None and expected.rows:
            line += f" ({min(self._rows / expected.rows, 1):.1%})"
        line += f", {(self._rows - self._before) / seconds:,.1f} rows/s, {tokens:,.0f} tokens/s"
        left = "" if pace.seconds_left is None else f", about {duration(pace.seconds_left)} left"
        log.timed(line + left, "progress", **asdict(pace), tokens_per_second=tokens)

    def _left(self, expected: Expected | None, seconds: float) -> float | None:
        left = self._seconds_left()
        done = self._rows - self._before
        if left is None and expected is not None and done > 0:
            left = max(expected.rows - self._rows, 0) * seconds / done
        return left

    def close(self) -> None:
        """Leave the live line as it is."""
        if self._live and self._drawn:
            self._draw(time.monotonic())
            log.leave_live()

    def __enter__(self) -> Progress:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.close()


_REDRAW_SECONDS = 0.1
_LEAST_BAR = 8  # characters; a shorter bar shows nothing


def progress_line(
    rows: float,
    expected: Expected | None,
    *,
    columns: int,
    elapsed: float,
    tokens_per_second: float,
    left: float | None,
) -> str:
    """Return the progress in a line of at most this many `columns`, with a bar where the number of rows is known.

    Where there is no room for all of it, the speed goes first and the elapsed time second, then words, then the bar.
    """
    minutes, seconds = divmod(int(elapsed), 60)
    clock = f"{minutes // 60}:{minutes % 60:02}:{seconds:02}" if minutes >= 60 else f"{minutes:02}:{seconds:02}"
    speed, end = f"{tokens_per_second:,.0f} tokens/s", "" if left is None else f"about {duration(left)} left"
    counted = rows_of(rows, expected) if rows or expected is not None else "reading"
    details = ([clock, speed, end], [clock, end], [end])
    lines = [f"{counted} [{', '.join(filter(None, each))}]" for each in details if any(each)]
    if expected is not None and expected.rows:
        share, about = min(rows / expected.rows, 1.0), "" if expected.exact else "~"
        lines.append(f"{rows:,.0f}/{about}{expected.rows:,}" + (end and f" [{end.removeprefix('about ')}]"))
        percent = f"{share:4.0%}|"
        for line in lines:
            room = columns - len(percent) - len(line) - 2
            if room >= _LEAST_BAR:
                return f"{percent}{'█' * int(share * room):<{room}}| {line}"
        lines = [f"{share:.0%} {line}" for line in lines]
    return next((line for line in lines if len(line) <= columns), counted[:columns])


def rows_of(rows: float, expected: Expected | None = None) -> str:
    """Return the rows in words: `12 rows`, `12 of 40 rows`, `12 of about 40 rows`."""
    if expected is None or not expected.rows:
        return counted(round(rows), "row")
    return f"{rows:,.0f} of {expected} {'row' if expected.rows == 1 else 'rows'}"


class StepLog:
    """Names on stderr the step that runs, of a few long ones, so that nothing is silent for long.

    A terminal has the step and its seconds in a live line. Elsewhere, a line is repeated while the step lasts, every
    `interval` seconds; `announce` prints at once. Use it as a context manager: inside, `step` names the steps.
    """

    def __init__(self, *, interval: float, quiet: bool = False) -> None:
        self._interval, self._quiet = interval, quiet
        self._step, self._begun, self._last_line = "", time.monotonic(), time.monotonic()
        self._changing = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="prefill-steps", daemon=True)
        self._outer: StepLog | None = None

    @property
    def _live(self) -> bool:
        return not self._quiet and log.on_terminal() and not log.logs_json()

    def begin(self, step: str, *, at_once: bool = False) -> None:
        """Begin a step. A log names it `at_once`, or when the next line is due. Without a name, end the step
        before."""
        with self._changing:
            shown, self._step, self._begun = self._step, step, time.monotonic()
            if self._live and (shown or step):
                self._draw()
            elif at_once:
                self._print(step)

    def goes_on(self, step: str) -> None:
        """Give the running step a new name, which shows how far it has come."""
        self._step = step

    def announce(self, text: str) -> None:
        """Print a line now; it names the step that begins with it."""
        self.begin(text)
        self._print(text)

    def _print(self, text: str) -> None:
        self._last_line = time.monotonic()
        if not self._quiet:
            log.timed(text, "step")

    def _draw(self) -> None:
        seconds = time.monotonic() - self._begun
        so_far = f" [{seconds:.0f} s]" if seconds >= 1 else ""
        room = log.columns() - 1 - len(so_far)
        log.show_live(f"{self._step[:room]}{so_far}" if self._step else "")

    def _watch(self) -> None:
        while not self._ended.wait(self._pause()):
            with self._changing:
                now = time.monotonic()
                if self._step and self._live:
                    self._draw()
                elif self._step and now - self._last_line >= self._interval:
                    self._print(f"{self._step}: {duration(now - self._begun)} so far")

    def _pause(self) -> float:
        return 1.0 if self._live else max(self._last_line + self._interval - time.monotonic(), 0.05)

    def __enter__(self) -> StepLog:
        global _steps
        self._outer, _steps = _steps, self
        if not self._quiet:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        global _steps
        _steps = self._outer
        self._ended.set()
        if not self._quiet:
            self._thread.join()
            self.begin("")


_steps: StepLog | None = None  # that of this process's command


def step(name: str, *, at_once: bool = False) -> None:
    """Begin a long step of this process's command; without a name, end the one before. Nothing happens outside a
    `StepLog`. A log names it `at_once`, or when it has lasted an interval."""
    if _steps is not None:
        _steps.begin(name, at_once=at_once)


def step_goes_on(name: str) -> None:
    """Give the running step a new name, which shows how far it has come."""
    if _steps is not None:
        _steps.goes_on(name)
