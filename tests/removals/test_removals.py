"""docs/reliability.md and what is taken out for its rows belong together; `make removals` runs them all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.removals.__main__ import main
from tests.removals.removal import ROOT, promises, removals
from tests.removals.trial import Outcome, judged

TEST = "tests/test_options.py::test_an_unknown_name_in_the_environment_is_refused"
REMOVAL = """
[[removal]]
fault = "a misspelt"
edits = [{{ file = "prefillcli/options/load.py", old = {}, new = {} }}]
"""
CALL = "    _refuse_unknown_variables(kind, environment)\n"


def test_for_each_test_of_each_row_something_is_taken_out() -> None:
    taken = {(removal.fault, test) for removal in removals() for test in removal.tests}
    promised = {(row.fault, test) for row in promises() for test in row.tests}
    assert sorted(promised - taken) == []


def test_what_is_taken_out_is_in_the_program_once() -> None:
    edits = [edit for removal in removals() for edit in removal.edits]
    assert len(edits) > 100
    for edit in edits:
        assert edit.file.startswith(("prefillcli/", "recipes/", "README.md")), edit
        assert edit.places(ROOT) == 1, edit
        assert edit.old != edit.new, edit


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("old", "new", "code", "said"),
    [
        (CALL, "", 0, "right: fails, as it should"),
        ("values given for each option", "values of each option", 1, "wrong: PASSES WITHOUT ITS PROTECTION"),
        (CALL, "    refuse()\n", 1, "Undefined name `refuse`"),
        ("nowhere in this file", "", 1, "wrong: COULD NOT BE RUN"),
    ],
)
def test_a_test_that_passes_without_its_protection_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, code: int, said: str
) -> None:
    (tmp_path / "one.toml").write_text(REMOVAL.format(json.dumps(old), json.dumps(new)))
    assert main(["--processes", "1"], tmp_path) == code
    told = capsys.readouterr().out
    assert TEST in told
    assert said in told


@pytest.mark.nightly
def test_without_taking_anything_out_the_test_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "one.toml").write_text(REMOVAL.format(json.dumps(CALL), json.dumps("")))
    assert main(["--processes", "1", "--intact"], tmp_path) == 0
    assert "1 right" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ('fault = "no such row"\nedits = []', "0 rows"),
        ('fault = "a"\nedits = []', "rows of the table begin"),
        ('fault = "a misspelt"', "nothing is taken out"),
        ('fault = "a misspelt"\ntests = ["tests/test_docs.py::test_x"]', "does not name"),
    ],
)
def test_what_is_not_of_one_row_is_refused(tmp_path: Path, wrong: str, said: str) -> None:
    (tmp_path / "one.toml").write_text(f"[[removal]]\n{wrong}\n")
    with pytest.raises(ValueError, match=said):
        removals(tmp_path)


def test_what_pytest_says_is_judged() -> None:
    assert judged(0, "1 passed in 0.1s").outcome is Outcome.PASSED
    assert judged(0, "1 skipped in 0.1s").outcome is Outcome.SKIPPED
    assert judged(1, "E       assert 3 == 4\n1 failed in 0.1s").reason == "assert 3 == 4"
    assert judged(2, "E   ImportError: cannot import name").outcome is Outcome.BROKEN
    assert judged(4, "ERROR: not found").outcome is Outcome.NOT_RUN
    assert judged(-9, "").outcome is Outcome.NOT_RUN
