"""A test is run in a copy of the project from which its protection was taken."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from tests.removals.removal import ROOT, Edit
from tests.warm import Warm

_COPIED = ["prefillcli", "tests", "benchmarks", "recipes", "samples", "schema", "docs"]
_FILES = ["pyproject.toml", "README.md", "Makefile", "CHANGELOG.md", "LICENSE"]
_RAY = ("tests/runners/test_ray", ROOT / ".venv-ray" / "bin" / "python")
_AIRFLOW = ROOT / ".venv-airflow" / "bin" / "airflow"
_BROKEN = r"^E +(NameError|UnboundLocalError|ImportError)\b.*"


class Outcome(Enum):
    """What a test says without its protection."""

    FAILED = "fails, as it should"
    HUNG = "DOES NOT END, OR ONLY AFTER --seconds"
    PASSED = "PASSES WITHOUT ITS PROTECTION"
    BROKEN = "THE EDIT BREAKS THE PROGRAM"
    SKIPPED = "was skipped"
    NOT_RUN = "COULD NOT BE RUN"


@dataclass(frozen=True, slots=True)
class Trial:
    """How one test ended, and the first line that says why."""

    outcome: Outcome
    reason: str


@contextmanager
def copied_project() -> Iterator[Path]:
    """A copy of the project, with its bytecode but without what else was built in it."""
    with tempfile.TemporaryDirectory(prefix="removals-", ignore_cleanup_errors=True) as made:
        folder = Path(made)
        for name in _COPIED:
            shutil.copytree(ROOT / name, folder / name)
        for name in _FILES:
            shutil.copy(ROOT / name, folder)
        yield folder


@contextmanager
def edited(project: Path, edits: tuple[Edit, ...]) -> Iterator[None]:
    """`project` with these edits made, and afterwards as it was.

    Raises ValueError for one that has not one place, and for one that leaves names undefined: that a test fails then
    proves nothing.
    """
    before: dict[Path, tuple[str, os.stat_result]] = {}
    try:
        for edit in edits:
            if (places := edit.places(project)) != 1:
                raise ValueError(f"{edit.file} has {places} times: {edit.old!r}")
            path = project / edit.file
            text = path.read_text()
            before.setdefault(path, (text, path.stat()))
            path.write_text(text.replace(edit.old, edit.new))
        if wrong := _undefined_names([path for path in sorted(before) if path.suffix == ".py"]):
            raise ValueError(wrong)
        yield
    finally:
        for path, (text, stat) in before.items():
            path.write_text(text)
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # its bytecode holds again


def _undefined_names(paths: list[Path]) -> str:
    """The first that ruff finds, or a syntax error; empty if there is none."""
    if not paths:
        return ""
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821,F822,F823", "--quiet"]
    done = subprocess.run([*command, "--output-format", "concise", *paths], capture_output=True, text=True)
    return (done.stdout + done.stderr).strip().partition("\n")[0] if done.returncode else ""


def run_test(project: Path, test: str, seconds: float, warm: Warm) -> Trial:
    """Run `test` in `project`, for at most so long, and in the environment that has what it needs."""
    quiet = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # of a plugin that was imported with the libraries
    words = ["pytest", "-x", "-q", "-p", "no:cacheprovider", *quiet, "--tb=short", test]
    environment = os.environ | {
        "PYTHONPATH": str(project),
        "PYTHONDONTWRITEBYTECODE": "1",  # an edit within a second of another would run the other's bytecode
        "OMP_NUM_THREADS": "1",
        "AIRFLOW": str(_AIRFLOW) if _AIRFLOW.exists() else "",
    }
    if test.startswith(_RAY[0]) and _RAY[1].exists():
        warm = Warm(_RAY[1], libraries=())
    code, out, error = warm.run(project, words, folder=project, environment=environment, seconds=seconds)
    if code is None:
        return Trial(Outcome.HUNG, f"it was ended after {seconds:.0f} s")
    return judged(code, error + out)


def judged(code: int, output: str) -> Trial:
    """What pytest's exit code and output say."""
    said = re.search(r"^E +(?!Traceback)(\S.*)$", output, re.MULTILINE)
    reason = said[1].strip() if said else output.strip().rpartition("\n")[2]
    if broken := re.search(_BROKEN, output, re.MULTILINE):
        return Trial(Outcome.BROKEN, broken[0])
    if code == 0:
        passed = re.search(r"^\d+ passed", output, re.MULTILINE)
        return Trial(Outcome.PASSED if passed else Outcome.SKIPPED, reason)
    if code < 0:
        return Trial(Outcome.NOT_RUN, f"ended by signal {-code}")
    return Trial(Outcome.FAILED if code == 1 else Outcome.NOT_RUN, reason)
