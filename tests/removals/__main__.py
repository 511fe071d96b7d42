"""`python -m tests.removals`: what protects from each fault of docs/reliability.md goes, and its tests must fail."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.removals.removal import Removal, removals
from tests.removals.trial import Outcome, Trial, copied_project, edited, run_test


def main(words: list[str] | None = None, folder: Path = Path(__file__).parent) -> int:
    """The exit code: 1 if a test does not fail without its protection."""
    parser = argparse.ArgumentParser(prog="python -m tests.removals", description=__doc__)
    parser.add_argument("words", nargs="*", metavar="WORDS", help="only rows or tests that contain one of these")
    parser.add_argument("--intact", action="store_true", help="take nothing out: each test must pass")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seconds", type=float, default=600.0, help="a test is ended after so long")
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
    shares = [chosen[first :: asked.processes] for first in range(asked.processes)]
    begun = time.monotonic()
    with ThreadPoolExecutor(asked.processes) as pool:
        counts = sum(pool.map(lambda share: _share(share, asked.intact, asked.seconds), shares), Counter[str]())
    told = ", ".join(f"{count} {what}" for what, count in sorted(counts.items()))
    print(f"{len(chosen)} tests in {(time.monotonic() - begun) / 60:.0f} minutes: {told}")
    return 1 if counts["wrong"] else 0


def _share(share: list[tuple[Removal, str]], intact: bool, seconds: float) -> Counter[str]:
    counts = Counter[str]()
    with copied_project() as project:
        for removal, test in share:
            begun = time.monotonic()
            try:
                with edited(project, () if intact else removal.edits):
                    trial = run_test(project, test, seconds)
            except ValueError as error:
                trial = Trial(Outcome.NOT_RUN, str(error))
            judgement = _judgement(trial, intact)
            counts[judgement] += 1
            said = f"{trial.outcome.value} ({time.monotonic() - begun:.0f} s): {trial.reason}"
            print(f"{removal.name}\n    {test}\n    {judgement}: {said}", flush=True)
    return counts


def _judgement(trial: Trial, intact: bool) -> str:
    if trial.outcome is Outcome.SKIPPED:
        return "skipped"
    return "right" if trial.outcome is (Outcome.PASSED if intact else Outcome.FAILED) else "wrong"


if __name__ == "__main__":
    sys.exit(main())
