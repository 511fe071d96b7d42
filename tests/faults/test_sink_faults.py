"""Every call of a sink fails once, in every way: the output is absent or whole, and a resumed job writes the same."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from prefillcli.data.output.target import SUCCESS, Target
from prefillcli.data.output.verification import Verification
from prefillcli.errors import OutputBusyError
from tests.data.outputs import EXPECTED, FINGERPRINT, WINDOWS, open_sink, read, score_all
from tests.faults.file_faults import Fault, Kind
from tests.faults.loops import Job, fail_each
from tests.faults.nursery import Nursery, Outcome

OLD = FINGERPRINT | {"model": "old"}
FRESH = ["o.parquet", "o.jsonl.gz", "o/"]
OLDER = ["o.parquet over an older one", "o/ over an older one", "o/ beside other files"]


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery() as nursery:
        yield nursery


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


def rows_shown(output: str) -> list[dict[str, Any]] | None:
    """What a reader finds; None for nothing."""
    if output.endswith("/"):
        if not os.path.isdir(output) or SUCCESS not in os.listdir(output):
            return None
        return read(output)
    return read(output) if os.path.exists(output) else None


def proven(output: str) -> bool:
    """Whether `prefill verify` finds nothing wrong."""
    verification = Verification(Target.parse(output))
    verification.run()
    return not verification.problems


class Checks:
    """What must hold of an output in a folder after a fault."""

    def __init__(self, nursery: Nursery, name: str, older: list[dict[str, Any]] | None, others: list[str]) -> None:
        self._nursery = nursery
        self._name = name
        self._allowed = [None, EXPECTED] if older is None else [None, EXPECTED, older]
        self._others = others

    def absent_or_whole(self, folder: Path) -> None:
        shown = rows_shown(f"{folder}/{self._name}")
        assert any(shown == each for each in self._allowed)
        if proven(f"{folder}/{self._name}"):
            assert shown is not None

    def kept_out(self, folder: Path) -> None:
        """While a run hangs nothing is half there, and no other run gets in beside it."""
        self.absent_or_whole(folder)
        work = Path(f"{folder}/{self._name}".rstrip("/") + ".prefill")
        if work.is_dir() and (work / "manifest.json").exists():
            with pytest.raises(OutputBusyError):
                open_sink(f"{folder}/{self._name}", fingerprint=OLD, overwrite=True)

    def goes_on(self, folder: Path, outcome: Outcome, kind: Kind) -> None:
        """Whatever has happened, the job is told to go on, and the output is that of an undisturbed one."""
        output = f"{folder}/{self._name}"
        self.absent_or_whole(folder)
        if outcome.done:
            assert rows_shown(output) == EXPECTED
            assert proven(output)
        elif outcome.refusal is not None:
            assert kind is not Kind.SHORT
            assert str(folder) in outcome.refusal
        job = partial(score_into, self._name)
        again = self._nursery.run(None, partial(job, resume=True), folder)
        if again.refusal is not None and "belongs to another job" in again.refusal:
            assert rows_shown(output) not in (None, EXPECTED)
            again = self._nursery.run(None, partial(job, overwrite=True), folder)
        assert again.done, again
        assert rows_shown(output) == EXPECTED
        assert proven(output)
        name = self._name.rstrip("/")
        assert sorted(os.listdir(f"{folder}/{name}.prefill")) == ["lock", "manifest.json"]
        assert sorted(os.listdir(folder)) == sorted([name, f"{name}.prefill"])
        if self._name.endswith("/"):
            names = [SUCCESS, *(f"part-0000{n}.parquet" for n in range(3)), *self._others]
            assert sorted(os.listdir(output)) == sorted(names)


def job_of(nursery: Nursery, place: Path, case: str, kind: Kind) -> Job:
    name, _, circumstance = case.partition(" ")
    begin = older = None
    others = ["notes.txt"] if circumstance == "beside other files" else []
    if circumstance:
        begin = place / "begin"
        begin.mkdir()
        older = score_older(name, begin)
        for other in others:
            (begin / name / other).write_text("mine")
    checks = Checks(nursery, name, older, others)
    run = partial(score_into, name, overwrite=bool(circumstance))
    return Job(run, partial(_go_on, checks, kind), begin, checks.kept_out)


def _go_on(checks: Checks, kind: Kind, folder: Path, outcome: Outcome) -> None:
    checks.goes_on(folder, outcome, kind)


@pytest.mark.nightly
@pytest.mark.parametrize("case", [*FRESH, *OLDER])
@pytest.mark.parametrize("kind", Kind)
def test_every_call_of_a_job_may_fail(
    nursery: Nursery, tmp_path: Path, case: str, kind: Kind, count_faults: Callable[[str, int], None]
) -> None:
    job = job_of(nursery, tmp_path, case, kind)
    count_faults(kind.meaning, fail_each(nursery, tmp_path, job, kind))
