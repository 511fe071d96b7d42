"""Every call of a sink fails once, in every way: the output is absent or whole, and a resumed job writes the same."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from prefillcli.runtime import file_calls
from tests.faults.file_faults import CALLS, CHANGES, Fault, Kind
from tests.faults.loops import Job, fail_each
from tests.faults.nursery import Nursery
from tests.faults.output_checks import OutputChecks
from tests.unit.rows.outputs import FINGERPRINT, WINDOWS, open_sink, read, score_all

CASES = [
    "o.parquet",
    "o.jsonl.gz",
    "o/",
    "o.parquet over an older one",
    "o/ over an older one",
    "o/ beside other files",
]
OLD = FINGERPRINT | {"model": "old"}


def score_into(name: str, folder: Path, **options: Any) -> None:
    """A job of five parts."""
    with open_sink(f"{folder}/{name}", **options) as sink:
        score_all(sink, WINDOWS, per_part=4)
        sink.finish(len(WINDOWS))


def score_older(name: str, folder: Path) -> list[dict[str, Any]]:
    """Another job's output, of one window; returns its rows."""
    with open_sink(f"{folder}/{name}", fingerprint=OLD) as sink:
        score_all(sink, WINDOWS[:1])
        sink.finish(1)
    return read(f"{folder}/{name}")


def job_of(nursery: Nursery, place: Path, case: str, kind: Kind) -> Job:
    """The job into an output, where there may be an older one, with other files beside it."""
    name, _, circumstance = case.partition(" ")
    begin = older = None
    others = ("notes.txt",) if circumstance == "beside other files" else ()
    if circumstance:
        begin = place / "begin"
        begin.mkdir()
        older = score_older(name, begin)
        for other in others:
            (begin / name / other).write_text("mine")
    anew = partial(score_into, name, overwrite=True)
    checks = OutputChecks(
        nursery, kind, name, partial(score_into, name, resume=True), anew, older=older, others=others, begin=begin
    )
    return Job(anew if circumstance else partial(score_into, name), checks.goes_on, begin, checks.kept_out)


@pytest.mark.nightly
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", Kind)
def test_every_call_of_a_job_may_fail(
    nursery: Nursery, tmp_path: Path, case: str, kind: Kind, count_faults: Callable[[str, int], None]
) -> None:
    job = job_of(nursery, tmp_path, case, kind)
    count_faults(kind.meaning, fail_each(nursery, tmp_path, job, kind))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("case", "kind", "first"),
    [
        ("o.parquet", Kind.KILL, 5),
        ("o/ over an older one", Kind.KILL, 9),
        ("o.parquet", Kind.LATE, 3),
        ("o.jsonl.gz", Kind.FULL, 7),
        ("o/", Kind.ERROR, 11),
        ("o.parquet", Kind.KILL_HALF, 2),
    ],
)
def test_some_calls_of_a_job_may_fail(
    nursery: Nursery, tmp_path: Path, case: str, kind: Kind, first: int, count_faults: Callable[[str, int], None]
) -> None:
    job = job_of(nursery, tmp_path, case, kind)
    count_faults(kind.meaning, fail_each(nursery, tmp_path, job, kind, first=first, every=23))


@pytest.mark.nightly
@pytest.mark.parametrize("case", ["o.parquet", "o/ over an older one"])
@pytest.mark.parametrize("killed", [20, 33, 46])
@pytest.mark.parametrize("kind", [Kind.KILL_HALF, Kind.ERROR, Kind.LATE, Kind.KILL])
def test_every_call_of_a_job_that_goes_on_may_fail(
    nursery: Nursery, tmp_path: Path, case: str, killed: int, kind: Kind, count_faults: Callable[[str, int], None]
) -> None:
    job = job_of(nursery, tmp_path, case, kind)
    name = case.partition(" ")[0]
    begin = job.begin or tmp_path / "begin"
    begin.mkdir(exist_ok=True)
    assert nursery.run(Fault(Kind.KILL, killed), job.run, begin).killed
    job.begin, job.run = begin, partial(score_into, name, resume=True)
    count_faults(kind.meaning, fail_each(nursery, tmp_path, job, kind))


def test_each_call_of_the_seam_is_a_place_of_a_fault() -> None:
    assert len(CALLS) == 21
    assert len(CHANGES) == 14
    assert all(getattr(file_calls, name) is call for name, call in CALLS.items()), "this process is left as it is"
