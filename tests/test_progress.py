"""Lines about long work: with the time where they go into a log, without it on a terminal."""

from __future__ import annotations

import sys
from datetime import UTC, datetime

import pytest

from prefillcli.runtime.clock import Progress, StepLog


def say_something() -> None:
    with StepLog(interval=60) as steps:
        steps.announce("what is measured")
    with Progress(4, interval=1e-9) as progress:
        progress.advance(1, 10)


def test_a_log_has_the_time_with_its_offset_before_each_line(capsys: pytest.CaptureFixture[str]) -> None:
    before = datetime.now(UTC).replace(microsecond=0)
    say_something()
    lines = capsys.readouterr().err.splitlines()
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
