"""What a sink keeps in memory: little for each row, part and attempt, however many there are."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.memory import peak_in_child
from tests.unit.rows.outputs import make_window, open_sink, score_all, scored

KIB, MIB = 1 << 10, 1 << 20


def peak_of(step: Callable[[], None]) -> int:
    """Bytes that Python's own objects take at most, above those before, with hardly any garbage among them."""
    thresholds = gc.get_threshold()
    gc.freeze()  # what was there before is not gone through, so that collections are cheap and can be frequent
    gc.set_threshold(200, 2, 2)
    tracemalloc.start()
    try:
        step()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        gc.set_threshold(*thresholds)
        gc.unfreeze()


def attempts(output: str, count: int) -> int:
    """A job that is resumed so many times, and writes a part in each attempt; the peak of the last one."""
    windows = [make_window(index, [10 * index + row for row in range(10)]) for index in range(count)]
    for window in windows[:-1]:
        with open_sink(output, resume=True) as sink:
            sink.write(window, [scored(row) for row in window.rows.tolist()], {}, temperature=1.0)

    def last() -> None:
        with open_sink(output, resume=True) as sink:
            score_all(sink, windows[-1:], per_part=10)
            sink.finish(count)

    return peak_of(last)


@pytest.mark.nightly
def test_a_hundred_resumes_take_hardly_more_memory_than_ten(tmp_path: Path) -> None:
    few, many = (attempts(f"{tmp_path}/{count}.parquet", count) for count in (10, 100))
    # A part's place in the order takes 0.7 to 1 KiB. Where its whole record is kept as well, that is 16.
    assert many - few < 90 * 2 * KIB, f"{(many - few) / 90 / KIB:.1f} KiB for each attempt"


def job(output: str, windows: int) -> Callable[[], None]:
    """A job of so many windows of 10,000 rows."""

    def run() -> None:
        with open_sink(output) as sink:
            for index in range(windows):
                window = make_window(index, list(range(index * 10_000, (index + 1) * 10_000)))
                score_all(sink, [window], per_part=2_500)
            sink.finish(windows)

    return run


@pytest.mark.nightly
def test_a_million_rows_take_hardly_more_memory_than_fifty_thousand(tmp_path: Path) -> None:
    few, many = (peak_in_child(job, f"{tmp_path}/{windows}.parquet", windows) for windows in (5, 100))
    assert many <= 1.2 * few + 20 * MIB, f"{few / MIB:.0f} MiB for 50,000 rows, {many / MIB:.0f} MiB for a million"
