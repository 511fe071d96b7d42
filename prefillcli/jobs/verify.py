"""`prefill verify`: an output against its digests, its own rows, and the input that it says it was made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from prefillcli.data.output.target import Target
from prefillcli.data.output.verification import Verification
from prefillcli.jobs.shell import shell
from prefillcli.runtime import log


@dataclass
class Verified:
    """What the last line on stdout says."""

    output: str
    inputs: list[str]
    status: Literal["complete", "failed", "interrupted"] = "complete"
    exit_code: int = 0
    error: str | None = None
    rows: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def verify_job(output: str, inputs: Sequence[str] = (), *, quiet: bool = False) -> dict[str, Any]:
    """Tell on stderr what is wrong with an output; return the summary for the last line on stdout.

    Nothing is changed. With `inputs` the output must be of these. The exit code in the summary is 1 if anything is
    wrong.
    """
    verified = Verified(output, list(inputs))
    with shell(verified, debug=False) as stop, stop.at_once():
        verification = Verification(Target.parse(output))
        verification.run(inputs)
        verified.rows, verified.problems = verification.rows, verification.problems
    if verified.status != "complete":
        return vars(verified)
    for problem in verified.problems:
        log.error(problem)
    if verified.problems:
        verified.status, verified.exit_code = "failed", 1
        verified.error = verified.problems[0]
    elif not quiet:
        rows = verified.rows
        of = f", and of {', '.join(inputs)}" if inputs else ""
        log.info(
            f"{output} is as it was written{of}: {rows['total']:,} rows, {rows['scored']:,} scored, "
            f"{rows['errors']:,} with an error"
        )
    return vars(verified)
