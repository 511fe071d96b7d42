"""The command `prefill score`: exit codes, what goes to stdout and stderr, the report."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from typer.main import get_command
from typer.testing import CliRunner, Result

from prefillcli.cli import app
from tests.jobs.jobs import Reference, beside_answers, read_output, read_report, texts, write_jsonl, write_parquet

STABLE_KEYS = {
    "schema_version", "status", "exit_code", "error", "rows", "tokens", "seconds", "rows_per_second",
    "tokens_per_second", "peak_memory_bytes", "packs", "settings", "versions", "fingerprint", "audits",
}  # fmt: skip
STABLE_PARTS = {
    "rows": {"total", "scored", "errors", "errors_by_code"},
    "tokens": {"prompt", "unique", "computed", "kept"},
    "seconds": {"total", "read", "render", "tokenize", "plan", "load", "model", "write"},
    "peak_memory_bytes": {"host", "device"},
}


def prefill(*arguments: object, environment: dict[str, str] | None = None) -> Result:
    """The command in this process."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env=environment or {})


def last_line(stdout: str) -> dict:
    """The one line on stdout."""
    (line,) = stdout.splitlines()
    assert ": " not in line.replace('": ', "")[:20], "the line is compact"
    return json.loads(line)


def assert_stable_report(path: str) -> dict:
    report = read_report(path)
    assert report.keys() >= STABLE_KEYS
    for part, keys in STABLE_PARTS.items():
        assert report[part].keys() >= keys
    rows = report["rows"]
    assert rows["total"] == rows["scored"] + rows["errors"] + rows["skipped"] + rows["empty"]
    return report


@pytest.mark.parametrize("command", [[], *([name] for name in get_command(app).commands)])
def test_h_is_help(command: list[str]) -> None:
    assert prefill(*command, "-h").stdout == prefill(*command, "--help").stdout


def test_help_groups_every_option() -> None:
    shown = prefill("score", "--help-all").stdout
    for name in ("--output", "--labels", "--resume", "--overwrite", "--recipe", "--on-long", "--memory"):
        assert name in shown
    for panel in ("Input", "Output", "Model", "Prompts", "Answers", "Memory and speed", "Run"):
        assert f"\n{panel}:\n" in shown


def test_version_is_data() -> None:
    assert prefill("--version").stdout.strip()[0].isdigit()


def test_a_run_prints_one_line_of_json_and_writes_its_report(model: Path, reference: Reference) -> None:
    prompts = texts(6)
    source = write_parquet("in.parquet", prompt=prompts)
    done = prefill("score", source, "--model", model)
    assert done.exit_code == 0
    line = last_line(done.stdout)
    assert (line["status"], line["exit_code"]) == ("complete", 0)
    assert (line["output"], line["report"]) == ("in.scores.parquet", "in.scores.run.json")
    assert line["rows"]["scored"] == 6
    mean = statistics.mean(reference.answer(text).score for text in prompts)
    assert line["mean_score"] == pytest.approx(mean, abs=1e-5)
    assert "6 scored of 6" in done.stderr
    assert "\r" not in done.stderr
    report = assert_stable_report("in.scores.run.json")
    assert (report["status"], report["error"]) == ("complete", None)
    assert report["tokens"]["prompt"] == sum(reference.answer(text).prompt_tokens for text in prompts)
    assert report["tokens_per_second"] == pytest.approx(report["tokens"]["prompt"] / report["seconds"]["total"])
    assert report["settings"]["model"] == str(model)
    assert report["fingerprint"].keys() >= {"input", "model", "labels"}
    assert report["versions"].keys() >= {"prefillcli", "torch", "transformers"}
    assert report["peak_memory_bytes"]["host"] > 50 << 20


def test_a_failure_prints_its_line_and_writes_its_report(model: Path) -> None:
    source = write_parquet("in.parquet", prompt=texts(2))
    done = prefill("score", source, "-m", model, "--prompt-column", "text", "-o", "o.parquet", "--report", "r/r.json")
    assert done.exit_code == 2
    line = last_line(done.stdout)
    assert (line["status"], line["exit_code"], line["report"]) == ("failed", 2, "r/r.json")
    report = assert_stable_report("r/r.json")
    assert (report["status"], report["exit_code"]) == ("failed", 2)
    assert "'text'" in report["error"]
    assert not Path("o.parquet").exists()


def test_quiet_leaves_warnings_and_errors(model: Path) -> None:
    source = write_parquet("in.parquet", prompt=["fox", None])
    given = ("score", source, "-m", model, "-q", "--empty-text", "error")
    assert prefill(*given, "--max-error-rate", "0.5").stderr.startswith("prefill: warning: ")
    stderr = beside_answers(prefill(*given, "--overwrite").stderr)
    assert stderr[0].startswith("prefill: 1 of 2 rows")
    assert len(stderr) == 2
    Path("data").mkdir()
    write_parquet("data/a.parquet", prompt=["fox"])
    Path("data/notes.txt").write_text("x")
    assert "notes.txt" in prefill("score", "data", "-m", model, "-q").stderr


def test_progress_lines_off_a_terminal_are_plain_and_say_when(model: Path) -> None:
    before = datetime.now(UTC).replace(microsecond=0)
    source = write_parquet("in.parquet", prompt=texts(12))
    arguments = ("score", source, "-m", model, "--pack-tokens", "40", "--overwrite")
    done = prefill(*arguments, "--progress-interval", "0.001")
    lines = [line for line in done.stderr.splitlines() if "tokens/s" in line and line.startswith("prefill: ")]
    assert len(lines) > 2
    assert "of 12 rows" in lines[0]
    times = [datetime.fromisoformat(line.split()[1]) for line in lines]
    assert times == sorted(times)
    assert before <= times[0] <= times[-1] <= datetime.now(UTC)  # with their offset from UTC
    assert "\r" not in done.stderr
    assert len(last_line(done.stdout)["report"])


def test_error_rows_above_the_allowed_rate_end_with_3(model: Path) -> None:
    source = write_parquet("in.parquet", prompt=["fox", None, "dog", ""])
    given = ("score", source, "-m", model, "--empty-text", "error")
    strict = prefill(*given)
    assert strict.exit_code == 3
    assert "2 of 4 rows" in strict.stderr
    line = last_line(strict.stdout)
    assert (line["status"], line["exit_code"]) == ("complete", 3)
    assert line["rows"]["errors_by_code"] == {"null_prompt": 1, "empty_prompt": 1}
    assert len(read_output("in.scores.parquet")) == 4
    assert prefill(*given, "--overwrite", "--max-error-rate", "0.4").exit_code == 3
    assert prefill(*given, "--overwrite", "--max-error-rate", "0.5").exit_code == 0


@pytest.mark.parametrize("dry", [(), ("--dry-run",)])
def test_the_first_error_rows_are_named_with_their_reason(dry: tuple[str, ...], model: Path) -> None:
    rows = [{"id": f"a{number}", "text": "fox"} for number in range(9)]
    del rows[1]["text"], rows[4]["text"], rows[6]["text"], rows[8]["text"]
    rows[4]["id"] = "a\x1b[31m4"
    source = write_jsonl("in.jsonl", rows)
    given = ("score", source, "-m", model, "--template", "{{ text }}", "--id-column", "id")
    done = prefill(*given, *dry)
    assert done.exit_code == 3
    said = done.stderr[done.stderr.index("4 of 9 rows") :].splitlines()[:5]
    names = ["a1", "a␛[31m4", "a6"]
    for name, line in zip(names, said[1:4], strict=True):
        assert line.startswith(f"{name}: missing_column: ")
        assert "text" in line
    assert ": missing_column: " not in said[4]
    assert last_line(done.stdout)["error"].splitlines()[1].startswith(f"{names[0]}: missing_column")


@pytest.mark.parametrize("flags", [(), ("--on-long", "skip"), ("--min-label-mass", 0.5)])
def test_a_run_that_scored_no_row_has_failed_whatever_else_is_wrong(flags: tuple[str, ...], model: Path) -> None:
    source = write_parquet("in.parquet", prompt=["a long fox " * 50] * 3)
    given = ("score", source, "-m", model, "--max-length", 40, *flags)
    done = prefill(*given, "--max-error-rate", 1)
    assert done.exit_code == 1
    line = last_line(done.stdout)
    assert (line["status"], line["rows"]["total"], line["rows"]["scored"]) == ("failed", 3, 0)
    assert "no row was scored" in line["error"]
    if "--min-label-mass" not in flags:
        assert prefill(*given, "--dry-run", "--max-error-rate", 1).exit_code == 1
    strict = prefill(*given, "--overwrite")
    assert (strict.exit_code, last_line(strict.stdout)["status"]) == (1, "failed")
    assert strict.stderr.count("prompt_too_long: ") == (0 if "--on-long" in flags else 2)  # of three lines at most


@pytest.mark.parametrize(("name", "content"), [("in.jsonl", "\n"), ("in.csv", "prompt,id\n"), ("in.csv", "")])
def test_an_input_without_rows_is_no_success(name: str, content: str, model: Path) -> None:
    Path(name).write_text(content)
    given = ("score", name, "-m", model)
    assert prefill(*given, "--dry-run").exit_code == 1
    first = prefill(*given)
    line = last_line(first.stdout)
    assert (first.exit_code, line["status"], line["rows"]["total"]) == (1, "failed", 0)
    assert "the input has no rows" in line["error"]
    assert "--skip-empty" in line["error"]
    assert pq.read_table("in.scores.parquet").num_rows == 0
    assert {"score", "prediction", "error"} <= set(pq.read_table("in.scores.parquet").column_names)
    report = Path(line["report"])
    assert (json.loads(report.read_text())["exit_code"], Path(line["page"]).is_file()) == (1, True)
    for more, code in ((["--resume"], 1), (["--resume", "--skip-empty"], 99), (["--overwrite"], 1)):
        done = prefill(*given, *more)
        assert (done.exit_code, json.loads(report.read_text())["exit_code"]) == (code, code), more
        assert last_line(done.stdout)["report"] == str(report)


def test_too_small_a_memory_budget_ends_with_5(model: Path) -> None:
    source = write_parquet("in.parquet", prompt=["fox"])
    done = prefill("score", source, "-m", model, "--memory", "1MiB")
    assert done.exit_code == 5
    assert "--memory" in done.stderr


def test_an_unexpected_error_shows_its_traceback_with_debug_alone(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(*_: object) -> None:
        raise ZeroDivisionError("kaputt")

    monkeypatch.setattr("prefillcli.engines.torch.TorchEngine.answer", answer)
    source = write_parquet("in.parquet", prompt=["fox"])
    plain = prefill("score", source, "-m", model)
    debug = prefill("score", source, "-m", model, "--debug")
    assert plain.exit_code == debug.exit_code == 1
    assert "kaputt" in last_line(plain.stdout)["error"]
    assert "--debug" in plain.stderr
    assert "Traceback" not in plain.stderr
    assert "Traceback" in debug.stderr


def test_running_out_of_memory_ends_with_5(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("prefillcli.engines.torch.TorchEngine.answer", answer)
    done = prefill("score", write_parquet("in.parquet", prompt=["fox"]), "-m", model)
    assert done.exit_code == 5
    assert "out of memory" in done.stderr


def test_unknown_options_and_commands_name_the_nearest() -> None:
    for arguments, nearest in ((["score", "in.parquet", "--lables", "a,b"], "--labels"), (["scor"], "score")):
        done = prefill(*arguments)
        assert done.exit_code == 2
        assert nearest in done.stderr
        assert "Traceback" not in done.stderr


def test_the_installed_command_keeps_data_and_talk_apart(model: Path) -> None:
    source = write_parquet("in.parquet", prompt=texts(3))
    command = [sys.executable, "-W", "error", "-m", "prefillcli", "score", str(source), "-m", str(model)]
    done = subprocess.run(command, capture_output=True, env={**os.environ, "TERM": "xterm-256color"})
    assert done.returncode == 0, done.stderr
    assert last_line(done.stdout.decode())["rows"]["scored"] == 3
    assert b"\r" not in done.stderr
    assert b"\x1b" not in done.stderr
    assert b"Warning" not in done.stderr


@pytest.mark.nightly
def test_libraries_that_are_imported_say_nothing(model: Path) -> None:
    """Some of those that transformers imports where they are installed do so in this environment."""
    assert find_spec("torchao") is not None
    write_parquet("in.parquet", prompt=texts(2))
    command = [sys.executable, "-m", "prefillcli", "score", "in.parquet", "--model", str(model), "--quiet"]
    assert beside_answers(subprocess.run(command, capture_output=True, text=True).stderr) == []
