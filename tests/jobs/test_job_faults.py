"""Every call of a whole job that touches files of output, report or metrics fails once."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.faults.file_faults import Fault, Kind
from tests.faults.loops import EVERY
from tests.faults.output_checks import proven
from tests.jobs.jobs import score, texts, without_seconds, write_parquet
from tests.jobs.processes import Command, cut_small_windows

ROWS = 45
OUTPUT = "o/run.parquet"


def let_fail(fault: Fault) -> None:
    """In the process of a job: one call fails, and a file names it."""

    def note(call: str) -> None:
        Path("hit").write_text(call)

    fault.arm(note)


def assert_no_row_is_lost(job: Command, kind: Kind, code: int, expected: list[dict[str, Any]]) -> None:
    """What has to hold after a fault."""
    assert "Traceback" not in job.stderr
    assert (code == -9) == (kind is Kind.KILL)
    assert code in (-9, 0, 1, 4, 5)
    if os.path.exists(OUTPUT):
        assert without_seconds(OUTPUT) == expected
    assert proven(f"{os.getcwd()}/{OUTPUT}") or code != 0


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(1, 5))
@pytest.mark.parametrize("kind", [Kind.ERROR, Kind.LATE, Kind.FULL, Kind.KILL])
def test_every_call_of_a_whole_job_may_fail(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    model: Path,
    kind: Kind,
    first: int,
    count_faults: Callable[[str, int], None],
) -> None:
    monkeypatch.chdir(tmp_path)
    write_parquet("in.parquet", id=[f"r{i}" for i in range(ROWS)], prompt=[*texts(ROWS - 1), None])
    cut_small_windows(monkeypatch, flush_seconds=0.0)
    assert score("in.parquet", "clean.parquet", model=model, id_column="id", max_error_rate=1)["exit_code"] == 0
    expected = without_seconds("clean.parquet")
    words = [f"{tmp_path}/in.parquet", "--output", OUTPUT, "--model", model, "--id-column", "id"]
    words += ["--max-error-rate", 1, "--metrics-file", "o/run.prom"]
    step = 4 * EVERY
    for number in count(first + step // 8 * 4, step):
        folder = tmp_path / f"{number}"
        folder.mkdir()
        monkeypatch.chdir(folder)
        job = Command("score", *words, prepare=partial(let_fail, kind.fault(number)))
        code = job.end()
        if not Path("hit").exists():
            assert code == 0, job.stderr
            break
        assert_no_row_is_lost(job, kind, code, expected)
        resumed = Command("score", *words, "--resume")
        assert resumed.end() == 0, resumed.stderr
        assert without_seconds(OUTPUT) == expected
        assert proven(f"{folder}/{OUTPUT}")
        left = ["run.parquet", "run.parquet.prefill", "run.prom", "run.run.html", "run.run.json"]
        assert sorted(os.listdir("o")) == left
        assert sorted(os.listdir("o/run.parquet.prefill")) == ["lock", "manifest.json", "row-digests.bin"]
    count_faults(kind.meaning, number // step)
