"""A reader that goes away takes messages with it, and nothing else."""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from prefillcli.runtime import log
from prefillcli.runtime.clock import Progress

ROOT = Path(__file__).parent.parent
SCORE = [sys.executable, "-m", "prefillcli", "score", str(ROOT / "samples" / "labeling.parquet"), "--overwrite"]


def start(folder: Path, *flags: str) -> subprocess.Popen[bytes]:
    """The command with pipes for both streams that nobody reads."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [*SCORE, "-m", str(ROOT / "samples" / "models" / "draft"), "-o", str(folder / "out.parquet"), *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    process.stderr.close()
    return process


def report(folder: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((folder / "out.run.json").read_text())
    return found


@pytest.mark.slow
def test_a_run_without_readers_ends_well(tmp_path: Path) -> None:
    assert start(tmp_path, "--limit", "40", "--progress-interval", "0.001").wait(120) == 0
    assert report(tmp_path)["status"] == "complete"


@pytest.mark.nightly
@pytest.mark.slow
def test_a_signal_after_the_readers_have_gone_is_still_reported(tmp_path: Path) -> None:
    process = start(tmp_path, "--pack-tokens", "64", "--progress-interval", "0.001")
    end = time.monotonic() + 60
    while not (tmp_path / "out.parquet.prefill").exists() and time.monotonic() < end:
        time.sleep(0.01)
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 143
    assert report(tmp_path)["status"] == "interrupted"


def shell(redirected: str, words: list[str], folder: Path) -> subprocess.Popen[bytes]:
    """A command whose standard streams a shell has closed or redirected."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(["/bin/sh", "-c", f'"$@" {redirected}', "sh", *words], cwd=folder, env=environment)


def test_streams_that_are_closed_or_full_change_no_exit_code(tmp_path: Path) -> None:
    prefill = [sys.executable, "-m", "prefillcli"]
    running = [
        (shell("<&- >&-", [*prefill, "--version"], tmp_path), 0),
        (shell(">&- 2>&-", [*prefill, "status", "none.parquet"], tmp_path), 2),
        (shell("2>&- >out", [*prefill, "status", "x.y"], tmp_path), 2),
        (shell(">/dev/full 2>/dev/full", [*prefill, "nonsense"], tmp_path), 2),
    ]
    assert [process.wait(60) for process, _ in running] == [code for _, code in running]
    assert json.loads((tmp_path / "out").read_text())["exit_code"] == 2


def test_no_file_takes_the_place_of_a_closed_stream(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"0123456789")
    program = (
        "import os, subprocess, sys\n"
        "from prefillcli.runtime.log import survive_closed_streams\n"
        "survive_closed_streams()\n"
        "with open('file', 'r+b') as file:\n"
        "    for number in (1, 2): os.write(number, b'warning of a library')\n"
        "    print('a line', file=sys.stderr, flush=True)\n"
        "    subprocess.run(['/bin/sh', '-c', 'echo of a child && echo too >&2'], check=True)\n"
    )
    for redirected in ("<&- >&- 2>&-", "2>&-", "<&- 2>&-", "<&- >&-"):
        assert shell(redirected, [sys.executable, "-c", program], tmp_path).wait(60) == 0, redirected
    assert (tmp_path / "file").read_bytes() == b"0123456789"


def test_a_program_without_stderr_is_not_ended_by_a_warning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    for stderr in (None, Full()):
        monkeypatch.setattr(sys, "stderr", stderr)
        log.warning("of the library")
        with Progress(2, interval=0) as progress:
            progress.advance(1)
        monkeypatch.undo()
    assert capsys.readouterr().out == ""


@pytest.mark.nightly
@pytest.mark.slow
def test_a_job_whose_streams_are_closed_scores_all_rows(tmp_path: Path) -> None:
    words = [*SCORE, "-m", str(ROOT / "samples" / "models" / "draft"), "-o", "out.parquet", "--limit", "6"]
    words += ["--template", "{{ text }}", "--workers", "2", "--progress-interval", "0.001"]
    assert shell("<&- >&- 2>&-", words, tmp_path).wait(120) == 0
    assert report(tmp_path)["status"] == "complete"
    assert pq.read_table(tmp_path / "out.parquet")["error"].null_count == 6
