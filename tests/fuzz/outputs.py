"""What is promised of an output, whatever its input was."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from prefillcli.rows.records import ErrorCode
from tests.fuzz.command import Run, prefill
from tests.jobs.jobs import read_output

_FINISHED = (0, 3)
_WITHOUT_SCORES = ("no row was scored", "the input has no rows")  # exit code 1, and the output is there


def require_all_rows(run: Run, inputs: str, rows: int | None = None) -> list[dict[str, Any]]:
    """The rows of the output, if the run ended with one: each is a score or an error, and `prefill verify` agrees.

    `rows` is how many the input has, where that is known. Without an output, none lies there.
    """
    output = run.summary.get("output")
    without_scores = str(run.summary.get("error")).startswith(_WITHOUT_SCORES)
    if (run.exit_code not in _FINISHED and not without_scores) or output is None:
        assert output is None or not Path(output).is_file(), "a failed run has left an output"
        return []
    found = read_output(output)
    errors = sum(map(_is_error, found))
    counts = run.summary["rows"]
    assert rows is None or len(found) == rows, (len(found), rows)
    assert (
        counts["total"] == len(found) == counts["scored"] + counts["errors"] + counts["skipped"] + counts["empty"]
    ), counts
    assert errors == len(found) - counts["scored"], counts
    report = json.loads(Path(run.summary["report"]).read_text(), parse_constant=lambda name: 1 / 0)
    assert report["rows"]["total"] == len(found)
    assert run.exit_code == (1 if not counts["scored"] else 3 if counts["errors"] else 0)
    verified = prefill("verify", output, inputs, "--quiet")
    assert verified.exit_code == 0, verified.stderr
    return found


def _is_error(row: dict[str, Any]) -> bool:
    """Whether the row has an error in the place of its score. Raises AssertionError if it has both or neither."""
    if row["error"] is not None:
        assert row["error"] in set(ErrorCode)
        assert row["score"] is None
        assert row["error_detail"]
        assert len(row["error_detail"]) < 2_000, row["error_detail"][:200]
        return True
    assert math.isfinite(row["score"])
    if "target_tokens" in row:  # a log-probability
        assert row["score"] <= 0
    else:
        assert 0 <= row["score"] <= 1
        assert row["prediction"] is not None
    assert row["prompt_tokens"] > 0
    return False
