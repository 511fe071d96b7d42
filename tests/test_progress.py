"""Lines about long work: with the time where they go into a log, without it on a terminal."""

from __future__ import annotations

import json
import random
import re
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from prefillcli.command_line import print_summary
from prefillcli.report.section import numbers_table, pairs_table, stderr_console
from prefillcli.rows.input.source import Source
from prefillcli.runtime import log
from prefillcli.runtime.clock import Expected, Progress, StepLog, progress_line, step


def say_something() -> None:
    with StepLog(interval=60) as steps:
        steps.announce("what is measured")
    with Progress(4, interval=1e-9) as progress:
        progress.advance(1, 10)
        log.info("what happened meanwhile")


def test_a_log_has_the_time_with_its_offset_before_each_line(capsys: pytest.CaptureFixture[str]) -> None:
    before = datetime.now(UTC).replace(microsecond=0)
    say_something()
    *lines, last = capsys.readouterr().err.splitlines()
    assert last == "prefill: what happened meanwhile"
    texts = [line.split(maxsplit=2) for line in lines]
    assert [(first, text.split(",")[0]) for first, _, text in texts] == [
        ("prefill:", "what is measured"),
        ("prefill:", "1 of 4 rows (25.0%)"),
    ]
    assert all(before <= datetime.fromisoformat(time) <= datetime.now(UTC) for _, time, _ in texts)


def test_a_terminal_has_no_time(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    say_something()
    assert "prefill: what is measured\n" in capsys.readouterr().err


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("columns", [20, 44, 60, 100, 136])
def test_a_line_of_progress_fits_any_terminal_and_keeps_what_matters(columns: int, exact: bool) -> None:
    expected = Expected(203_000, exact)
    line = progress_line(5_782, expected, columns=columns, elapsed=148, tokens_per_second=10_434, left=2115)
    assert len(line) <= columns
    assert "5,782" in line
    if columns >= 60:
        assert line.count("|") == 2
    if columns >= 44:
        assert "35.2 min left" in line
    if columns >= 100:
        assert (
            f"5,782 of {'' if exact else 'about '}203,000 rows [02:28, 10,434 tokens/s, about 35.2 min left]" in line
        )


def test_a_table_stands_above_the_live_line(monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "70")
    monkeypatch.setenv("NO_COLOR", "1")
    with StepLog(interval=60):
        step("checking the compiled passes between products")
        stderr_console().print(pairs_table([("processor", "one"), ("memory", "1 GiB")]))
        stderr_console().print(numbers_table([["path", "float32"], ["blocks", "3e-06"]]))
    lines = [re.sub(r"\x1b\[[\d;]*m", "", line).split() for line in screen(capfd.readouterr().err)]
    assert lines == [["processor", "one"], ["memory", "1", "GiB"], ["path", "float32"], ["blocks", "3e-06"]]


def test_what_is_on_a_terminal_after_all_is_drawn(monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "70")
    with StepLog(interval=60):
        step("loading a model")
        log.warning("it is old")
        with Progress(4, interval=60) as progress:
            progress.advance(1, 10)
            log.info("here")
            progress.advance(3, 10)
        step("writing")
    *lines, bar = screen(capfd.readouterr().err)
    assert lines == ["prefill: warning: it is old", "prefill: here"]
    assert re.fullmatch(r"100%\|█+\| 4 of 4 rows \[00:00, .*", bar)


def screen(text: str) -> list[str]:
    """The lines that a terminal shows which was sent this text."""
    shown = []
    for line in text.split("\n"):
        cells: list[str] = []
        for piece in line.split("\r"):
            cells[: len(piece)] = piece
        shown.append("".join(cells).rstrip())
    return [line for line in shown if line]


@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
def test_the_share_of_bytes_tells_how_many_json_lines_there_will_be(tmp_path: Path, ending: str) -> None:
    rows, path = 20_000, tmp_path / f"rows.jsonl{ending}"
    drawn = random.Random(0)
    text = "".join(json.dumps({"text": f"row {row} {drawn.randbytes(row % 80).hex()}"}) + "\n" for row in range(rows))
    with pa.output_stream(str(path)) as file:  # compresses by the ending
        file.write(text.encode())
    source = Source.open([str(path)], columns=["text"])
    assert source.expected_rows() is None
    read = 0
    for batch in source.batches():
        expected = source.expected_rows()
        assert expected is not None
        read += len(batch.rows)
        if 2048 < read < rows:
            assert not expected.exact
            assert str(expected).startswith("about ")
            assert expected.rows == pytest.approx(rows, rel=0.1)
    assert source.expected_rows() == Expected(rows)
    limited = Source.open([str(path)], columns=["text"], limit=100)
    assert sum(len(batch.rows) for batch in limited.batches()) == 100
    assert limited.expected_rows() == Expected(100)


def test_a_long_last_line_is_for_programs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    short, long = {"status": "complete"}, {"checks": list(range(1000))}
    print_summary(long)
    assert json.loads(capsys.readouterr().out) == long
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    print_summary(long)
    print_summary(short)
    assert json.loads(capsys.readouterr().out) == short
