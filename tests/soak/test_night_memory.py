"""What the soak tells of memory over time."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tests.soak.memory import Look, MemoryOverTime, Process
from tests.soak.strikes import Attempt


def test_medians_are_by_the_rows_that_are_done_and_by_the_age_of_workers(tmp_path: Path) -> None:
    memory = MemoryOverTime(100)
    for done in range(100):
        workers = tuple(Process(number, 10.0 * done, 1000 * number + done) for number in (1, 2)) if done else ()
        memory.add(Look(10.0 * done, 1, float(done), 7000 + done, Process(0, 10.0 * done, 500 + done), workers))
    report = memory.report()
    assert report["memory"]["50%"] == {"driver": 550, "worker": 1550, "all": 7050}
    assert report["memory of a worker"]["60 to 120 s"] == 1508  # from 6 to 11 rows, of both workers
    assert report["most memory"] == {"driver": 599, "worker": 2099, "all": 7099}
    memory.write(tmp_path / "memory.jsonl")
    lines = (tmp_path / "memory.jsonl").read_text().splitlines()
    assert [json.loads(line)["rows"] for line in lines] == list(range(100))


def test_an_attempt_is_looked_at_with_its_age_and_memory(tmp_path: Path) -> None:
    output = tmp_path / "disk" / "scores.parquet"
    output.parent.mkdir()
    attempt = Attempt(["--help"], output, 3)
    try:
        look = attempt.look(5.0)
    finally:
        attempt.kill()
    assert (look.attempt, look.rows, look.workers) == (3, 0, ())
    assert look.driver.pid != os.getpid()
    assert 0 <= look.driver.age < 60
    assert look.driver.memory > 0
    assert look.all > 0
