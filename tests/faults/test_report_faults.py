"""Every call that writes a report, its page and metrics fails once: each is an old file or a whole new one."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from prefillcli.report.run import RunReport, write_files
from tests.faults.file_faults import Kind
from tests.faults.loops import Job, fail_each
from tests.faults.nursery import Nursery, Outcome

NAMES = ["run.html", "run.json", "run.prom"]


def write(folder: Path, *, score: float = 0.5, codes: str = "codes") -> None:
    """The three files, and the exit code in a fourth, which no fault concerns."""
    report = RunReport(status="complete", exit_code=0, output=f"{folder}/o.parquet", report=f"{folder}/run.json")
    report.mean_score = score
    write_files(report, f"{folder}/run.prom")
    (folder / codes).write_text(f"{report.exit_code}")


def is_whole(path: Path, score: float) -> bool:
    """Whether a file is that of a run with this mean score; of pages only that it has an end."""
    text = path.read_text()
    if path.suffix == ".json":
        return bool(json.loads(text)["mean_score"] == score)
    if path.suffix == ".html":
        return text.rstrip().endswith("</html>")
    return f"prefill_score_mean {score}\n" in text and text.endswith("\n")


def check(nursery: Nursery, folder: Path, outcome: Outcome) -> None:
    assert outcome.refusal is None, "scores are written, whatever becomes of the report"
    new = {name for name in NAMES if is_whole(folder / name, 0.5)}
    assert all(name in new or is_whole(folder / name, 0.25) for name in NAMES)
    if not outcome.killed:
        code = (folder / "codes").read_text()
        assert code != "0" or "run.json" in new
    assert nursery.run(None, write, folder).done
    assert all(is_whole(folder / name, 0.5) for name in NAMES)
    assert {*os.listdir(folder)} == {*NAMES, "before", "codes"}


@pytest.mark.parametrize(
    "kind",
    [
        Kind.FULL,
        *(
            pytest.param(kind, marks=pytest.mark.nightly)
            for kind in (Kind.ERROR, Kind.LATE, Kind.HALF, Kind.SHORT, Kind.KILL, Kind.HANG)
        ),
    ],
)
def test_every_call_of_a_report_may_fail(
    nursery: Nursery, tmp_path: Path, kind: Kind, count_faults: Callable[[str, int], None]
) -> None:
    begin = tmp_path / "begin"
    begin.mkdir()
    write(begin, score=0.25, codes="before")
    job = Job(write, partial(check, nursery), begin)
    count_faults(kind.meaning, fail_each(nursery, tmp_path, job, kind))
