"""The benchmark beside busy programs runs whole jobs and compares them."""

from __future__ import annotations

import json

import pytest
import typer
from typer.testing import CliRunner

from benchmarks import neighbour


@pytest.mark.nightly
def test_every_way_runs_alone_and_beside_others(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = []
    start = neighbour._busy

    def noted(programs: int):
        busy.append(programs)
        return start(programs)

    monkeypatch.setattr(neighbour, "_busy", noted)
    app = typer.Typer()
    app.command()(neighbour.main)
    words = ["--rounds", "1", "--limit", "10", "--neighbours", "1", "--way", "auto", "--way", "spinning"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert busy == [0, 1, 0, 1]
    medians = json.loads(result.stdout.splitlines()[-1])["medians"]
    assert list(medians) == ["auto", "spinning"]
    assert min(each["alone_over_best"] for each in medians.values()) == 1
    assert f"spinning, alone: {medians['spinning']['alone']:.2f} s on {neighbour.CORES} to" in result.stderr
