"""Models that were trained for typed decisions are not asked in a layout that is not theirs, unless that is wanted."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from prefillcli.errors import UsageError
from prefillcli.models.decision_models import decision_type, require_layout
from tests.jobs.jobs import score, write_parquet
from tests.jobs.models import save_model

MARKS: dict[str, tuple[dict[str, Any], str]] = {
    "decider": ({"decider_config.json": {}}, "decider (by decider_config.json)"),
    "pplx-decider": ({"decision_config.json": {"format_version": 1}}, "pplx-decider (by decision_config.json)"),
    "kev": ({"adapter_config.json": {}, "training_config.json": {}}, "kev (by training_config.json)"),
    "nimble": ({"adapter_config.json": {}, "schema_config.json": {}}, "nimble (by schema_config.json)"),
    "lev": ({"adapter_config.json": {}, "calibration.json": {}}, "lev (by calibration.json)"),
}
UNMARKED: dict[str, dict[str, Any]] = {
    "a training's settings beside a whole model": {"training_config.json": {}, "calibration.json": {}},
    "temperatures of something else": {"temperatures.json": {"cpu": 71}},
    "temperatures by question, which any model may have": {"temperatures.json": {"noul": 1.4, "choice": 0.9}},
    "an adapter": {"adapter_config.json": {}},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "plain")


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def marked(folder: Path, files: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("kind", MARKS)
def test_a_folder_says_that_its_model_needs_a_layout_of_its_own(kind: str, tmp_path: Path) -> None:
    files, said = MARKS[kind]
    folder = marked(tmp_path / "model", files)
    with pytest.raises(UsageError) as caught:
        require_layout(folder, "--first", "auto")
    text = str(caught.value)
    assert text.startswith(f"--first {folder}: a decision model")
    assert said in text
    assert "--layout generic" in text
    require_layout(folder, "--first", "generic")


@pytest.mark.parametrize("what", UNMARKED)
def test_other_files_of_these_names_say_nothing(what: str, tmp_path: Path) -> None:
    assert decision_type(marked(tmp_path / "model", UNMARKED[what])) is None


@pytest.mark.parametrize(
    "content", ['{"noul": 0}', '{"score": -1.5}', '{"choice": "1"}', '{"noul": NaN}', '{"noul": true}']
)
def test_temperatures_are_numbers_above_0(tmp_path: Path, content: str) -> None:
    (tmp_path / "temperatures.json").write_text(content)
    with pytest.raises(UsageError, match="and must be a number above 0\nmend it, or leave all of them out"):
        require_layout(tmp_path, "--model", "auto")
    require_layout(tmp_path, "--model", "generic")


@pytest.mark.parametrize("option", ["model", "first", "draft"])
def test_a_job_refuses_such_a_model_but_as_a_draft(
    model: Path, tmp_path: Path, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(model, tmp_path / "decider"))
    marked(folder, {"decision_config.json": {}})
    write_parquet("in.parquet", prompt=["a prompt of some words " * 20] * 2)
    flags: dict[str, Any] = {"model": model, option: folder}
    if option == "draft":
        assert score("in.parquet", keep=0.5, **flags)["exit_code"] == 0
        return
    assert score("in.parquet", **flags)["exit_code"] == 2
    assert "decision_config.json: format_version is null, and only 1 is read" in capsys.readouterr().err
