"""What every error keeps to."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import prefillcli
from prefillcli.errors import PrefillError, resumable
from prefillcli.rows.filesystems import explained, writing

_ADVISES = re.compile(r"(continue|run again|goes on|go on) with --resume|--resume goes on")


def test_a_message_that_quotes_something_very_long_leaves_out_its_middle() -> None:
    message = str(PrefillError("t.jinja, line 1: unknown tag '" + "x" * 100_000 + "'\nwrite {{ prompt }}"))
    assert len(message) <= 3000
    assert message.startswith("t.jinja, line 1: unknown tag 'x")
    assert message.endswith("\nwrite {{ prompt }}")
    assert str(PrefillError(message)) == message, "it is not cut again when another process raises it anew"


def test_a_message_of_a_usual_length_stays_whole() -> None:
    message = "no such file: " + "/a/path" * 300
    assert str(PrefillError(message)) == message


@pytest.mark.parametrize(("possible", "wanted"), [(True, "continue with --resume"), (False, "run again")])
def test_advice_to_resume_is_given_only_where_that_works(possible: bool, wanted: str) -> None:
    with resumable(possible):
        with pytest.raises(PrefillError) as full, writing("out.parquet"):
            raise OSError(28, "No space left on device")
        said = [str(full.value), explained(TimeoutError("slow")), explained(PermissionError("no"))]
    for message in said:
        assert message.endswith((wanted, f"{wanted} when it answers"))
        assert possible == ("--resume" in message)
    with pytest.raises(PrefillError) as outside, writing("out.parquet"):
        raise OSError(28, "No space left on device")
    assert "--resume" not in str(outside.value)


def test_no_other_place_knows_whether_a_job_can_be_resumed() -> None:
    """But `prefill status` and what refuses an existing output: both are about a job that left one."""
    package = Path(prefillcli.__file__).parent
    found = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if any(_ADVISES.search(line) for line in path.read_text().splitlines())
    }
    assert found == {"errors.py", "tools/status.py", "rows/output/resumption.py"}
