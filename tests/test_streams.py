"""A reader that goes away takes messages with it, and nothing else."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

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
