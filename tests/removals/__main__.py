"""`python -m tests.removals`: what protects from each fault of docs/reliability.md goes, and its tests must fail."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from queue import Empty, SimpleQueue

from tests.removals.removal import Removal, removals
from tests.removals.trial import Outcome, Trial, copied_project, edited, run_test
from tests.warm import Warm

_TABLE = """# What is taken out, and the test that fails then

Each promise of [reliability.md](reliability.md) is kept by some lines of the program. `make removals` takes them out
of a copy, one place at a time, and runs the tests that the row names: each must fail.

{day}, {minutes:.0f} minutes with {processes} processes, {counts}.

| taken out for | from | test | it | because |
| --- | --- | --- | --- | --- |
"""


@dataclass(frozen=True, slots=True)
class Result:
    """One test without one protection."""

    removal: Removal
    test: str
    trial: Trial
    judgement: str
    seconds: float


def main(words: list[str] | None = None, folder: Path = Path(__file__).parent) -> int:
    """The exit code: 1 if a test does not fail without its protection."""
    parser = argparse.ArgumentParser(prog="python -m tests.removals", description=__doc__)
    parser.add_argument("words", nargs="*", metavar="WORDS", help="only rows or tests that contain one of these")
    parser.add_argument("--intact", action="store_true", help="take nothing out: each test must pass")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seconds", type=float, default=600.0, help="a test is ended after so long")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin none after so long")
    parser.add_argument("--table", type=Path, metavar="FILE", help="write what was found as a table of Markdown")
    asked = parser.parse_args(words)
    chosen = [
        (removal, test)
        for removal in removals(folder)
        for test in removal.tests
        if not asked.words or any(word in f"{removal.fault} {test}" for word in asked.words)
    ]
    if asked.intact:
        chosen = list({test: (removal, test) for removal, test in chosen}.values())
    if not chosen:
        parser.error("no row or test contains this")
    left: SimpleQueue[tuple[Removal, str]] = SimpleQueue()
    for each in chosen:
        left.put(each)
    begun = time.monotonic()
    end = begun + 60 * asked.minutes
    with ThreadPoolExecutor(asked.processes) as pool:
        shares = pool.map(lambda _: list(_results(left, end, asked.intact, asked.seconds)), range(asked.processes))
        found = [result for share in shares for result in share]
    minutes = (time.monotonic() - begun) / 60
    counts = Counter(result.judgement for result in found)
    told = ", ".join(f"{count} {what}" for what, count in sorted(counts.items()))
    if len(found) < len(chosen):
        told += f", {len(chosen) - len(found)} not begun"
    print(f"{len(chosen)} tests in {minutes:.0f} minutes: {told}")
    if asked.table:
        rows = sorted(found, key=lambda result: chosen.index((result.removal, result.test)))
        day = date.today().isoformat()
        head = _TABLE.format(day=day, minutes=minutes, processes=asked.processes, counts=told)
        asked.table.write_text(head + "".join(map(_row, rows)))
    return 1 if counts["wrong"] else 0


def _results(left: SimpleQueue[tuple[Removal, str]], end: float, intact: bool, seconds: float) -> Iterator[Result]:
    """Try what is left, one after the other, in a copy of the project."""
    with copied_project() as project, closing(Warm()) as warm:
        while time.monotonic() < end:
            try:
                removal, test = left.get_nowait()
            except Empty:
                return
            begun = time.monotonic()
            try:
                with edited(project, () if intact else removal.edits):
                    trial = run_test(project, test, seconds, warm)
            except ValueError as error:
                trial = Trial(Outcome.NOT_RUN, str(error))
            result = Result(removal, test, trial, _judgement(trial, intact), time.monotonic() - begun)
            said = f"{trial.outcome.value} ({result.seconds:.0f} s): {trial.reason}"
            print(f"{removal.name}\n    {test}\n    {result.judgement}: {said}", flush=True)
            yield result


def _row(result: Result) -> str:
    """A line of the table."""
    fault, test = result.removal.name, result.test.rpartition("::")[2]
    files = ", ".join(dict.fromkeys(Path(edit.file).name for edit in result.removal.edits))
    because = _short(result.trial.reason.replace("|", r"\|").replace("`", "'"))
    outcome = result.trial.outcome.value.partition(",")[0]
    return f"| {fault} | {files} | {test} | {outcome} | `{because}` |\n"


def _short(text: str, most: int = 70) -> str:
    return text if len(text) <= most else f"{text[: most - 3].rpartition(' ')[0]} ..."  # no half of an option


def _judgement(trial: Trial, intact: bool) -> str:
    if trial.outcome is Outcome.SKIPPED:
        return "skipped"
    return "right" if trial.outcome is (Outcome.PASSED if intact else Outcome.FAILED) else "wrong"


if __name__ == "__main__":
    sys.exit(main())
