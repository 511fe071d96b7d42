"""`python -m benchmarks.replay`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from benchmarks.replay import POLICIES, RATES, main
from tests.profile.making import made_curve, made_profile
from tests.score.models import save_model


def test_policies_stand_side_by_side(tmp_path: Path) -> None:
    """A second for each token and for nothing else, and a cache for two or three histories."""
    profile = made_profile(settings={"model": str(save_model(tmp_path / "model"))}, budget_bytes=64 << 20)
    profile.completion = made_curve(0.0, 1.0, 0.0)
    (tmp_path / "profile.json").write_text(profile.sealed())
    app = typer.Typer()
    app.command()(main)
    flags = ["--profile", str(tmp_path / "profile.json"), "--scale", "0.1", "--cache-tokens", "4000"]
    done = CliRunner().invoke(app, flags)
    assert done.exit_code == 0, done.output
    apart, mixed, credit = json.loads(done.stdout)
    assert credit["requests"] == 60
    assert {each["computed_tokens"] for each in credit["at_once"]} == {credit["tokens"]}  # nothing is shared
    assert mixed["tokens"] == apart["tokens"] == 1000 * 15 + 50 * (apart["unique_tokens"] - 1000 * 15)
    fifo, srjf, calibrated, plan = mixed["at_once"]
    assert [each["policy"] for each in mixed["at_once"]] == [*POLICIES, "prefix-tree"]
    assert plan["computed_tokens"] == mixed["unique_tokens"] <= calibrated["computed_tokens"]
    assert calibrated["computed_tokens"] <= srjf["computed_tokens"] < fifo["computed_tokens"] < mixed["tokens"]
    for each in mixed["at_once"]:
        assert each["seconds"] == pytest.approx(each["computed_tokens"])
        assert each["mean"] < each["p99"] <= each["seconds"]
    rates = [each["rate"] for each in mixed["rates"] if each["policy"] == "fifo"]
    assert len(rates) == RATES
    assert rates[0] == pytest.approx(1000 / mixed["tokens"] / 2)
    usual, none, much = credit["lambdas"]  # more weight on waiting: the worst case falls and the mean rises
    assert none["mean"] < usual["mean"] < much["mean"]
    assert none["p99"] > usual["p99"] > much["p99"]
