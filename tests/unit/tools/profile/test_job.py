"""The job of `prefill profile`: what is refused before anything is measured, and what comes of the measurements."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from prefillcli.errors import PrefillError
from prefillcli.forecast.profile import MODES, Profile
from prefillcli.tools.profile import measuring, profile_job
from tests.jobs.jobs import texts, write_jsonl, write_parquet
from tests.jobs.models import save_model
from tests.jobs.test_command import last_line, prefill
from tests.unit.tools.profile.making import made_profile


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "plain")


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Stands in for the measurements; what was measured is listed."""
    made, done = made_profile(), []

    def times(*_: object) -> object:
        done.append("completion")
        return 64 << 20, 64, made.completion

    def of_mode(name: str, *_: object) -> object:
        done.append("modes")
        return made.mode(name) or made.modes[0]

    monkeypatch.setattr(measuring, "in_child", times)
    monkeypatch.setattr(measuring, "profile_mode", of_mode)
    monkeypatch.chdir(tmp_path)
    return done


def profile(*arguments: object) -> dict:
    return last_line(prefill("profile", "--quiet", *arguments).stdout)


def load() -> Profile:
    return Profile.load("profile.json")


def test_the_plan_of_an_input_is_that_of_a_dry_run(model: Path) -> None:
    source = write_jsonl("in.jsonl", [{"prompt": text} for text in [*texts(40), None]])
    flags = (source, "-m", model, "--memory", "64MiB", "--price-per-hour", 3)
    line = profile(*flags)
    assert line["exit_code"] == 0
    dry = last_line(
        prefill("score", *flags, "--dry-run", "--quiet", "--profile", "profile.json", "--max-error-rate", 1).stdout
    )
    assert dry["exit_code"] == 0, dry
    for key in ("rows", "predicted_seconds", "predicted_price"):
        assert line[key] == dry[key] is not None
    survey = load().survey
    assert survey is not None
    report = json.loads(Path("in.scores.dry-run.json").read_text())["survey"]
    assert {**survey.model_dump(mode="json"), "seconds": None} == {**report, "seconds": None}
    assert "41 to score" not in Path("profile.html").read_text()
    assert "40 to score of 41" in Path("profile.html").read_text()


def test_the_budget_of_the_measurements_is_that_of_the_plan(model: Path) -> None:
    source = write_jsonl("in.jsonl", [{"prompt": text} for text in texts(4)])
    limits = []
    for flags in ((), ("--memory", "64MiB")):
        assert profile(source, "-m", model, *flags)["exit_code"] == 0
        limits.append(load().survey.limits)
    assert limits[0] == limits[1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("in.parquet", "--labels", "No,No way"), "begins label 'No way'"),
        (("in.parquet", "--keep", "0.2"), "needs --draft"),
        (("in.parquet", "--keep", "auto"), "for a whole job"),
        (("in.parquet", "--limit", "3", "--sample", "3"), "one of them"),
        (("in.parquet", "-o", "scores.parquet"), "names the JSON file"),
        (("--limit", "3"), "--limit needs INPUT"),
    ],
)
def test_what_is_wrong_is_told_before_anything_is_measured(
    arguments: tuple[str, ...], said: str, model: Path, measured: list[str]
) -> None:
    write_parquet("in.parquet", prompt=texts(3))
    line = profile("-m", model, *arguments)
    assert (line["exit_code"], measured) == (2, []), line
    assert said in line["error"]


def test_a_damaged_input_costs_no_measurements(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise PrefillError("in.parquet: damaged")

    monkeypatch.setattr(profile_job, "survey", broken)
    write_parquet("in.parquet", prompt=texts(3))
    line = profile("in.parquet", "-m", model)
    assert (line["exit_code"], line["status"], line["output"]) == (1, "failed", "profile.json")
    assert load().modes
    assert load().survey is None


def test_without_a_good_curve_nothing_is_predicted_and_that_is_told(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weak = made_profile().completion.model_copy(update={"error": 0.5})
    monkeypatch.setattr(measuring, "in_child", lambda *_: (64 << 20, 64, weak))
    source = write_jsonl("in.jsonl", [{"prompt": text} for text in texts(4)])
    done = prefill("profile", "--quiet", source, "-m", model, "--price-per-hour", 3)
    line = last_line(done.stdout)
    assert (line["exit_code"], line["error_on_new"]) == (0, 0.5)
    assert "is 50%, and 25% is the most" in line["no_completion"]
    assert (line["predicted_seconds"], line["predicted_price"]) == (None, None)
    assert "warning: no completion times: its mean error" in done.stderr
    assert load().no_completion == line["no_completion"]
    assert load().modes


def test_what_is_not_given_is_quick_and_full_is_thorough(model: Path) -> None:
    for flags, wanted in (
        ((), {"mode": ["full", "hybrid"], "fit_seconds": 10, "confirm_seconds": 20}),
        (("--full",), {"mode": list(MODES), "fit_seconds": 60, "confirm_seconds": 120}),
        (("--full", "--mode", "chunked", "--fit-seconds", "3"), {"mode": ["chunked"], "fit_seconds": 3}),
    ):
        assert profile("-m", model, *flags)["exit_code"] == 0
        assert load().settings | wanted == load().settings


def test_the_next_step_is_named(model: Path) -> None:
    done = prefill("profile", "-m", model)
    assert f"next: prefill score YOUR.parquet -m {model} --dry-run" in done.stderr


def test_the_next_command_finds_the_profile(model: Path) -> None:
    write_parquet("in.parquet", prompt=texts(3))
    Path("of here").mkdir()
    done = prefill("profile", "in.parquet", "-m", model, "--dtype", "float32", "-o", "of here/profile.json")
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("next: ")]
    words = shlex.split(line.removeprefix("next: ").partition(" shows ")[0])
    assert words[0] == "prefill"
    foreseen = prefill(*words[1:])
    assert "by of here/profile.json" in foreseen.stderr
