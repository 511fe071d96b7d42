"""The documentation against the code it speaks of."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from prefillcli.cli import app
from prefillcli.settings import ScoreSettings
from prefillcli.data.rows import ERROR_CODES
from prefillcli.report.run import RunReport

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")])


def options(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text))


def test_every_option_is_documented_and_in_the_help() -> None:
    wanted = {"--" + name.replace("_", "-") for name in ScoreSettings.model_fields if name != "inputs"}
    wanted |= {"--no-chat", "--recipe"}
    shown = CliRunner(env={"COLUMNS": "300", "TERMINAL_WIDTH": "300"}).invoke(app, ["score", "--help"]).output
    assert options(shown) - {"--help"} == wanted
    assert wanted <= options((ROOT / "docs" / "score.md").read_text())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_page_names_an_option_that_does_not_exist(page: Path) -> None:
    known = {"--" + name.replace("_", "-") for name in ScoreSettings.model_fields} | {
        "--no-chat",
        "--recipe",
        "--help",
    }
    known |= {"--case", "--dtype", "--model", "--rounds", "--scale"}  # of the benchmark
    assert options(page.read_text()) <= known


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_named_files_exist(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert (page.parent / target).exists(), target
    for name in re.findall(
        r"`((?:prefillcli|data|plan|prefill|engines|report|tests|recipes|docs|samples)/[\w/.]*)`", text
    ):
        assert (ROOT / name).exists() or (ROOT / "prefillcli" / name).exists(), name


def test_every_error_code_and_report_key_is_documented() -> None:
    text = (ROOT / "docs" / "score.md").read_text()
    for code in ERROR_CODES:
        assert f"| `{code}` |" in text
    for key in RunReport.model_fields:
        assert f"`{key}`" in text, key
