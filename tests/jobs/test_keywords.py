"""The keyword arguments of `prefillcli.Scorer` and `prefillcli.score` are the options of `prefill score`."""

from __future__ import annotations

import inspect
import os
import pydoc
import re
import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import pytest

import prefillcli
from prefillcli.options.commands import ScoreSettings
from prefillcli.options.keywords import FileOptions, ScorerOptions

ROOT = Path(__file__).parents[2]
OF_SCORER, OF_FILES = get_type_hints(ScorerOptions), get_type_hints(FileOptions)


def test_signatures_list_the_options_with_their_defaults() -> None:
    for function, own, options in (
        (prefillcli.Scorer, {"model"}, OF_SCORER),
        (prefillcli.Scorer.score, {"self", "rows", "progress", "on_error"}, OF_FILES),
        (prefillcli.score, {"rows", "model", "progress", "on_error"}, OF_SCORER | OF_FILES),
    ):
        parameters = inspect.signature(function).parameters  # type: ignore[arg-type]
        assert set(parameters) == own | set(options)
        for name in options:
            assert parameters[name].default == ScoreSettings.options()[name].default
        explained = pydoc.plain(pydoc.render_doc(function.__init__ if function is prefillcli.Scorer else function))
        told = dict(re.findall(r"^ +(\w+): (\w+)", explained, re.MULTILINE))
        for name in options:
            assert (ScoreSettings.options()[name].description or "").startswith(told[name])


@pytest.mark.parametrize("name", sorted({*ScoreSettings.options()} - {*OF_SCORER, *OF_FILES, "model"}))
def test_an_option_of_jobs_is_refused(name: str) -> None:
    for call in (prefillcli.Scorer, lambda model, **options: prefillcli.score(["x"], model, **options)):
        owner = "Scorer" if call is prefillcli.Scorer else r"score\(\)"
        with pytest.raises(prefillcli.UsageError, match=f"^{owner} has no option '{name}': it is for jobs"):
            call("models/judge", **{name: 1})


def test_other_names_are_refused_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(prefillcli.UsageError, match=r"score\(\) has no option 'tempalte'; did you mean 'template'\?"):
        prefillcli.score(["x"], tempalte="x")  # type: ignore[call-arg]
    with pytest.raises(prefillcli.UsageError, match="keep='auto' chooses one rate for a whole job"):
        prefillcli.Scorer(keep="auto")  # type: ignore[arg-type]


def test_the_environment_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFILL_MODEL", "none")
    monkeypatch.setenv("PREFILL_KEEP", "0.2")
    with pytest.raises(prefillcli.UsageError, match="other"):
        prefillcli.Scorer("other")


SCRIPT = """
import pyarrow as pa
from pathlib import Path
import prefillcli

with prefillcli.Scorer(Path("judge"), template="{{ post }}", labels=["Yes", "No"], memory=1 << 30) as scorer:
    table: pa.Table = scorer.score([{"post": "x"}], progress=True)
    files = scorer.score("posts.parquet", id_column="id", limit=10)
try:
    prefillcli.score(pa.table({"prompt": ["x"]}), "judge", keep=0.2, draft="small", on_error="raise")
except prefillcli.FailedRowsError as error:
    print(error.table)
prefillcli.score(["x"], lables="Yes,No")
prefillcli.score(["x"], on_long="cut")
prefillcli.Scorer("judge", limit=3)
scorer.score(3)
prefillcli.scores
"""
CONFIGURATION = """
[mypy]
strict = True
[mypy-prefillcli.*,pyarrow.*]
follow_imports = skip
ignore_missing_imports = True
[mypy-prefillcli,prefillcli.library.session,prefillcli.options.keywords,prefillcli.options.load,prefillcli.errors]
follow_imports = silent
"""


@pytest.mark.nightly
def test_a_users_script_is_checked_by_mypy(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "mypy.ini").write_text(CONFIGURATION)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--no-error-summary", "--cache-dir", os.devnull, "script.py"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    lines = SCRIPT.splitlines()
    wrong = {int(line.split(":")[1]) for line in done.stdout.splitlines() if ": error:" in line}
    assert done.stderr == ""
    assert [lines[number - 1] for number in sorted(wrong)] == lines[-5:], done.stdout
    assert {line.partition("error: ")[0] for line in done.stdout.splitlines() if "prefillcli/" in line} == set()
