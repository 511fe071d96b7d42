"""A signal stops a run in whatever phase it is, soon and with a report; what it had written goes on."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.jobs.jobs import read_output, read_report, texts, without_seconds, write_parquet
from tests.jobs.processes import Command, Hold

ROWS = 70
CODES = {signal.SIGTERM: 143, signal.SIGINT: 130}
TEMPLATE = "{{ prompt }} So:"
EVALUATE = ("--truth", "truth")

#: A function that is running in each phase, and options with which it is.
PHASES: dict[str, tuple[Hold, tuple[str, ...]]] = {
    "read": (Hold("prefillcli.scoring.score:open_rows"), ()),
    "hash": (Hold("prefillcli.rows.proof:content_digest"), ()),
    "open the output": (Hold("prefillcli.rows.output.sink:find_resumable"), ()),
    "load": (Hold("prefillcli.models.load:load_model"), ()),
    "render": (Hold("prefillcli.prompts.templates:Renderer.render", 2), ("--template", TEMPLATE)),
    "tokenize": (Hold("prefillcli.prompts.builder:PromptBuilder._prompts", 2), ()),
    "plan": (Hold("prefillcli.scoring.loop:plan_requests"), ()),
    "model": (Hold("prefillcli.engines.torch:TorchEngine.answer", 4), ()),
    "exits": (Hold("prefillcli.reading.exits.learning:ExitLearning.learn"), ("--exit",)),
    "write": (Hold("prefillcli.rows.output.parts:write_part", 2), ()),
    "publish": (Hold("prefillcli.rows.output.sink:commit"), ()),
    "evaluate": (Hold("prefillcli.judging.evaluation:evaluate_output"), EVALUATE),
}
#: The same with two workers, whose driver neither loads nor computes.
DRIVER: dict[str, tuple[Hold, tuple[str, ...]]] = {
    **{name: PHASES[name] for name in PHASES if name not in ("load", "model")},
    "start": (Hold("prefillcli.scoring.runners.processes:ProcessCrew.start"), ()),
    "load": (Hold("prefillcli.scoring.runners.pool:Dispatcher.wait"), ()),
    "model": (Hold("prefillcli.scoring.runners.pool:Dispatcher.wait", 5), ()),
    "end": (Hold("prefillcli.scoring.runners.pool:Pool.ask_for_reports"), ()),
}


def make_input() -> Path:
    answers = ["Yes" if i % 3 else "No" for i in range(ROWS)]
    return write_parquet("in.parquet", prompt=texts(ROWS), id=[f"r{i}" for i in range(ROWS)], truth=answers)


def arguments(model: Path, *more: str) -> list[object]:
    return ["score", "in.parquet", "-m", model, "--id-column", "id", "--pack-tokens", 64, "-o", "out.parquet", *more]


def assert_interrupted(command: Command, signum: int) -> None:
    """It ends, also where it is held, with the signal's exit code, and a report and a summary that say so."""
    command.send(signum)
    assert command.end() == CODES[signal.Signals(signum)], command.stderr
    report = read_report()
    assert (report["status"], report["exit_code"]) == ("interrupted", CODES[signal.Signals(signum)])
    (line,) = Path("stdout").read_text().splitlines()
    assert json.loads(line)["status"] == "interrupted"
    assert "Traceback" not in command.stderr
    assert "continue with --resume" in command.stderr


def near(value: object) -> object:
    """What a number compares equal to; anything else is itself."""
    return pytest.approx(value, rel=0, abs=1e-5) if isinstance(value, float) else value


def assert_goes_on(model: Path, *more: str) -> None:
    """A resumed run writes what one that nothing stops writes, and leaves nothing behind.

    Up to the last digits of float32: which of two workers gets a pack, and so what of its prefix is computed again, is
    not the same each time.
    """
    for output in ("out.parquet", "whole.parquet"):
        command = Command(*arguments(model, *more, "--resume"), "-o", output)
        assert command.end() == 0, command.stderr
    for row, whole in zip(without_seconds("out.parquet"), without_seconds("whole.parquet"), strict=True):
        assert {name: near(value) for name, value in row.items()} == whole
    assert len(read_output("out.parquet")) == ROWS
    assert not list(Path().rglob("*.prefill-tmp"))
    assert not list(Path("out.parquet.prefill").glob("part-*"))


def assert_stops(model: Path, hold: Hold, signum: int, *more: str, grace_seconds: float | None = None) -> None:
    """A run that is held somewhere stops there, and goes on."""
    make_input()
    command = Command(*arguments(model, *more), hold=hold, grace_seconds=grace_seconds)
    command.wait_until_held()
    assert_interrupted(command, signum)
    assert_goes_on(model, *more)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("phase", ["hash", "open the output", "tokenize", "model", "publish"])
def test_a_signal_stops_a_run_that_comes_to_no_safe_point(model: Path, phase: str) -> None:
    hold, more = PHASES[phase]
    assert_stops(model, hold, signal.SIGTERM, *more, grace_seconds=0.5)


@pytest.mark.nightly
@pytest.mark.parametrize("signum", CODES, ids=["SIGTERM", "SIGINT"])
@pytest.mark.parametrize("phase", PHASES)
def test_a_signal_stops_a_run_in_every_phase(model: Path, phase: str, signum: int) -> None:
    hold, more = PHASES[phase]
    assert_stops(model, hold, signum, *more)


@pytest.mark.nightly
@pytest.mark.parametrize("signum", CODES, ids=["SIGTERM", "SIGINT"])
@pytest.mark.parametrize("phase", DRIVER)
def test_a_signal_stops_a_run_with_workers_in_every_phase(model: Path, phase: str, signum: int) -> None:
    hold, more = DRIVER[phase]
    assert_stops(model, hold, signum, "--workers", "2", *more)


def slow_processor() -> None:
    """Make all packs as small as they get on a slow processor."""
    from prefillcli.engines import memory_plan
    from prefillcli.models import dtype as dtypes

    dtypes.operations_per_second = lambda dtype: 1.0
    memory_plan.LEAST_PACK_TOKENS = 64


@pytest.mark.sampled(1)
@pytest.mark.parametrize("signum", CODES, ids=["SIGTERM", "SIGINT"])
def test_a_signal_on_a_slow_processor_keeps_what_is_scored_in_a_window(model: Path, signum: int) -> None:
    make_input()
    given = ["score", "in.parquet", "-m", model, "--id-column", "id"]
    command = Command(*given, "-o", "out.parquet", seconds_per_pack=0.1, prepare=slow_processor)
    command.wait_until(lambda: len(list(Path("out.parquet.prefill").glob("part-*"))) >= 2)
    assert_interrupted(command, signum)
    kept = read_report()["rows"]["scored"]
    assert 0 < kept < 10, "less than a window"
    for output in ("out.parquet", "whole.parquet"):  # a resumed run cuts the same packs, however fast the machine is
        prepare = slow_processor if output == "whole.parquet" else None
        command = Command(*given, "--resume", "-o", output, prepare=prepare)
        assert command.end() == 0, command.stderr
    for row, whole in zip(without_seconds("out.parquet"), without_seconds("whole.parquet"), strict=True):
        assert {name: near(value) for name, value in row.items()} == whole
    assert read_report()["tokens"]["prompt"] < read_report("whole.run.json")["tokens"]["prompt"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("second", CODES, ids=["SIGTERM", "SIGINT"])
def test_a_second_signal_of_either_kind_ends_the_process_at_once(model: Path, second: int) -> None:
    make_input()
    command = Command(*arguments(model), hold=PHASES["model"][0])
    command.wait_until_held()
    command.send(signal.SIGINT)
    time.sleep(0.3)
    command.send(second)
    assert command.end() == -second  # not the exit code of the first one


def test_a_signal_while_the_report_is_written_changes_nothing(model: Path) -> None:
    make_input()
    command = Command(*arguments(model), hold=Hold("prefillcli.report.run:run_html"))
    command.wait_until_held()
    command.send(signal.SIGTERM)
    command.let_go()
    assert command.end() == 0, command.stderr
    assert (read_report()["status"], len(read_output("out.parquet"))) == ("complete", ROWS)


def test_a_report_that_hangs_is_given_up_after_a_signal(model: Path) -> None:
    make_input()
    command = Command(*arguments(model), hold=Hold("prefillcli.report.run:put_text"), grace_seconds=0.5)
    command.wait_until_held()
    command.send(signal.SIGTERM)
    assert command.end() == 143
    (line,) = Path("stdout").read_text().splitlines()
    assert (json.loads(line)["status"], json.loads(line)["report"]) == ("interrupted", None)
    assert not Path("out.run.json").exists()


def test_a_command_that_has_not_begun_its_job_says_that_it_was_stopped() -> None:
    code = (
        "import os, signal, sys, prefillcli.cli as cli, prefillcli.command_line as line\n"
        "line.load_settings = lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM)\n"
        "sys.argv = ['prefill', 'score', 'x']; cli.main()"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 143
    assert json.loads(ended.stdout)["status"] == "interrupted"
    assert ended.stderr == "prefill: stopped by SIGTERM\n"
