"""The command `prefill`, run in this process with nothing from the environment, and what it promises of every end."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest.mock import patch

import typer

from prefillcli import cli
from prefillcli.errors import Interrupted, PrefillError
from prefillcli.scoring import shell

EXIT_CODES = frozenset({0, 1, 2, 3, 4, 99})
"""Those of docs/score.md, without 5 and the signals: few examples are large enough to exhaust anything."""
EXHAUSTED = 5
MOST_MESSAGE = 4_000
"""Characters of an error: what was given is quoted in it, and examples are shorter than that."""
_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "PASSIVE"}


@dataclass(frozen=True, slots=True)
class Run:
    """How a run of the command ended."""

    exit_code: int
    summary: dict[str, Any]
    stderr: str


def prefill(*words: str, environment: Mapping[str, str] | None = None, may_exhaust: bool = False) -> Run:
    """Run the command and check what is promised of every end.

    Raises what escapes from it, and AssertionError for an error that names no cause: one that is not typed. A run that
    `may_exhaust` memory or files may say so.
    """
    stdout, stderr = io.StringIO(), io.StringIO()
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PREFILL_")}
    with (
        _noting_errors() as errors,
        patch.dict(os.environ, kept | _ENVIRONMENT | dict(environment or {}), clear=True),
        patch.object(sys, "argv", ["prefill", *words]),
        patch.object(cli, "app", _made()),
        redirect_stdout(stdout),
        redirect_stderr(stderr),
    ):
        try:
            cli.main()
            code: Any = 0
        except SystemExit as end:
            code = end.code or 0
    run = Run(code, _summary(stdout.getvalue(), code), stderr.getvalue())
    _require_typed(errors, run)
    _require_promised(run, EXIT_CODES | {EXHAUSTED} if may_exhaust else EXIT_CODES, debug="--debug" in words)
    return run


@cache
def _made() -> Any:
    """The command line as `app` makes it anew in each call."""
    return typer.main.get_command(cli.app)


def _summary(stdout: str, code: int) -> dict[str, Any]:
    """The last line on stdout, which is there at every end but that of a help page."""
    lines = stdout.splitlines()
    if not lines or (code == 0 and not lines[-1].startswith("{")):
        return {}
    summary: dict[str, Any] = json.loads(lines[-1], parse_constant=_refuse_constant)
    return summary


def _require_typed(errors: Sequence[BaseException], run: Run) -> None:
    for error in errors:
        if not isinstance(error, PrefillError | Interrupted):
            raise AssertionError(f"an error without a type: {run.stderr[-1000:]}") from error


def _require_promised(run: Run, codes: Set[int], *, debug: bool) -> None:
    assert run.exit_code in codes, (run.exit_code, run.stderr[-1000:])
    assert debug or "Traceback" not in run.stderr, run.stderr[-2000:]
    assert "--debug shows where" not in run.stderr, run.stderr[-1000:]
    assert "cannot write the page" not in run.stderr, run.stderr[-1000:]
    if run.exit_code == 0:
        return
    assert run.summary["exit_code"] == run.exit_code
    said = run.summary.get("error") or run.stderr
    assert said, "it fails without a word"
    assert len(said) <= MOST_MESSAGE, said[:200]
    if "error" in run.summary and run.summary["error"] != "see stderr" and run.exit_code != 3:
        assert len(said.splitlines()) <= 3, said


@contextmanager
def _noting_errors() -> Iterator[list[BaseException]]:
    """The errors that end jobs, before they become a line on stderr."""
    noted: list[BaseException] = []
    fail = shell.fail

    def noting(error: BaseException, *given: Any, **flags: Any) -> None:
        noted.append(error)
        fail(error, *given, **flags)

    with patch.object(shell, "fail", noting):
        yield noted


def _refuse_constant(name: str) -> None:
    raise AssertionError(f"{name} in JSON")
