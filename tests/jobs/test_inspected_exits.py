"""`prefill inspect --exit-profile`: a row leaves where the job let it leave."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from prefillcli.options.commands import InspectSettings
from prefillcli.options.load import load_settings
from prefillcli.tools import inspect
from prefillcli.tools.inspection import Inspection
from tests.jobs.jobs import read_output
from tests.jobs.test_exits import LABELS, LAYERS, data, deep_model, exited  # noqa: F401 - fixtures


def inspected(monkeypatch: pytest.MonkeyPatch, **given: Any) -> tuple[dict[str, Any], list[Inspection]]:
    """The last line on stdout, and what was shown."""
    shown: list[Inspection] = []
    monkeypatch.setattr(inspect, "print_inspection", lambda what, *_, **__: shown.append(what))
    settings = load_settings(InspectSettings, {"labels": LABELS, "dtype": "float32"} | given, environment={})
    return inspect.inspect_job(settings), shown


def test_a_row_leaves_where_the_job_let_it_leave(
    exited: Path,  # noqa: F811
    data: Path,  # noqa: F811
    deep_model: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = read_output(exited / "out.jsonl")
    profile = exited / "out.exit.json"
    exits = [each["layer"] + 1 for each in json.loads(profile.read_text())["exits"]]
    left = [row for row in rows if row["exit_layer"] is not None][::40]
    assert len(left) >= 3
    for row in left:
        line, (shown,) = inspected(
            monkeypatch, inputs=[str(data)], model=str(deep_model), row=str(row["row"]), exit_profile=str(profile)
        )
        assert line["status"] == "complete"
        assert shown.margins is not None
        assert shown.margins.left == row["exit_layer"]
        guesses = {each.layers: each.guess for each in shown.margins.layers if each.guess is not None}
        assert list(guesses) == exits
        assert guesses[row["exit_layer"]].prediction == row["prediction"]
        assert shown.margins.layers[-1].layers == LAYERS


def test_exits_of_another_model_or_other_labels_are_refused(
    exited: Path,  # noqa: F811
    data: Path,  # noqa: F811
    deep_model: Path,  # noqa: F811
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = {"inputs": [str(data)], "row": "0", "exit_profile": str(exited / "out.exit.json")}
    line, shown = inspected(monkeypatch, **given, model=str(deep_model), labels="t=t,n=n")
    assert (line["exit_code"], shown) == (2, [])
    assert "different labels" in line["error"]
    line, _ = inspected(monkeypatch, **given, model=str(model))
    assert line["exit_code"] == 2
    assert "different model" in line["error"]
    line, _ = inspected(monkeypatch, **given | {"exit_profile": str(data)}, model=str(deep_model))
    assert "it is not an exit profile" in line["error"]
