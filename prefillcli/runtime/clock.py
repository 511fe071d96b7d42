"""Progress and cost of a run: wall time by phase, memory over time, progress on stderr."""

from __future__ import annotations

import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Literal, Never

from tqdm import tqdm

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

    At most `most` samples are kept: whenever there are so many, every second one is dropped and the pace halves.
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
    """Seconds as one would say them: `12.3 s`, `4.5 min`, `2.1 h`."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


# Progress on stderr: a live bar on a terminal, a plain line with the time now and then elsewhere.


@dataclass(frozen=True)
class Pace:
    """The progress of a run."""

    rows: float  # finished rows, those of earlier attempts included
    total: int | None  # rows of the whole job; None if not known
    rows_per_second: float | None  # of this attempt; None before its first row
    seconds_left: float | None  # None if unknown


class Progress:
    """Counts rows and prompt tokens. `total` rows may not be known.

    `live` chooses between a bar and lines; by default a terminal has a bar. If `seconds_left` gives a number, it
    predicts the end better than the rows so far.
    """

    def __init__(
        self,
        total: int | None,
        *,
        interval: float,
        quiet: bool = False,
        live: bool | None = None,
        seconds_left: Callable[[], float | None] = lambda: None,
    ) -> None:
        self._total = total
        self._seconds_left = seconds_left
        self._interval = interval
        self._quiet = quiet
        self._rows = 0.0
        self._before = 0
        self._tokens = 0.0
        self._begun = self._last_line = time.monotonic()
        self._bar: tqdm[Never] | None = None
        if not quiet and not log.logs_json() and (log.on_terminal() if live is None else live):
            shape = "{n:,.0f} rows [{elapsed}{postfix}]"
            if total:
                shape = "{l_bar}{bar}| {n:,.0f}/{total:,.0f} rows [{elapsed}{postfix}]"
            self._bar = tqdm(total=total, bar_format=shape, file=sys.stderr, dynamic_ncols=True)

    def resume(self, rows: int) -> None:
        """So many rows were done by earlier attempts; they do not count for the speed."""
        self._before += rows
        self.advance(rows)

    def pace(self) -> Pace:
        """The run's progress; any thread may ask."""
        seconds = time.monotonic() - self._begun
        done = self._rows - self._before
        return Pace(self._rows, self._total, done / seconds if done > 0 else None, self._left(seconds))

    def advance(self, rows: float, tokens: float = 0.0) -> None:
        """`rows` (also parts of one) and `tokens` more are done."""
        self._rows += rows
        self._tokens += tokens
        now = time.monotonic()
        if self._bar is not None:
            after = f"{self._tokens / max(now - self._begun, 1e-9):,.0f} tokens/s{self._end(now - self._begun)}"
            self._bar.set_postfix_str(after, refresh=False)
            self._bar.update(rows)
        elif not self._quiet and now - self._last_line >= self._interval:
            self._last_line = now
            self._log(now - self._begun)

    def _log(self, seconds: float) -> None:
        pace, tokens = self.pace(), self._tokens / seconds
        line = f"{self._rows:,.0f}"
        if self._total:
            line += f" of {self._total:,} rows ({self._rows / self._total:.1%})"
        else:
            line += " rows"
        line += f", {(self._rows - self._before) / seconds:,.1f} rows/s, {tokens:,.0f} tokens/s"
        log.timed(line + self._end(seconds), "progress", **asdict(pace), tokens_per_second=tokens)

    def _end(self, seconds: float) -> str:
        # `, about 5.0 min left`, if that is known.
        left = self._left(seconds)
        return "" if left is None else f", about {duration(left)} left"

    def _left(self, seconds: float) -> float | None:
        left = self._seconds_left()
        done = self._rows - self._before
        if left is None and self._total and done > 0:
            left = max(self._total - self._rows, 0) * seconds / done
        return left

    def close(self) -> None:
        """Leave the bar as it is."""
        if self._bar is not None:
            self._bar.close()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.close()


class StepLog:
    """Prints on stderr which of a few long steps runs, and repeats it while the step lasts, so nothing is silent for
    long.

    Use it as a context manager. Lines are `interval` seconds apart; `announce` prints at once.
    """

    def __init__(self, *, interval: float, quiet: bool = False) -> None:
        self._interval, self._quiet = interval, quiet
        self._step, self._begun, self._last_line = "", time.monotonic(), time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="prefill-steps", daemon=True)

    def begin(self, step: str) -> None:
        """A step begins; it is named when the next line is due."""
        self._step, self._begun = step, time.monotonic()

    def announce(self, text: str) -> None:
        """Print a line now; it names the step that begins with it."""
        self.begin(text)
        self._print(text)

    def _print(self, text: str) -> None:
        self._last_line = time.monotonic()
        if not self._quiet:
            log.timed(text, "step")

    def _watch(self) -> None:
        while not self._ended.wait(max(self._last_line + self._interval - time.monotonic(), 0.05)):
            now = time.monotonic()
            if self._step and now - self._last_line >= self._interval:
                self._print(f"{self._step}: {duration(now - self._begun)} so far")

    def __enter__(self) -> StepLog:
        if not self._quiet:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._ended.set()
        if not self._quiet:
            self._thread.join()
