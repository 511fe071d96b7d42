"""The image of Containerfile: `make test-container` builds it, and podman runs it."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import time
from pathlib import Path

import pytest

from tests.jobs.jobs import read_report, write_jsonl

IMAGE = os.environ.get("IMAGE", "")
#: No file outside the volumes can be written, and there is no network.
RUN = [
    "--rm",
    "--read-only",
    "--read-only-tmpfs=false",
    "--network",
    "none",
    *shlex.split(os.environ.get("RUN_FLAGS", "")),
]

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not IMAGE, reason="make test-container builds the image")]


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    volumes = ["-v", f"{folder}:/data", "-v", "prefill-test-cache:/cache"]
    command = [*shlex.split(os.environ["PODMAN"]), "run", *RUN, *volumes, IMAGE, *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tmp_path.chmod(0o777)  # another user's
    return tmp_path


def test_it_scores_as_another_user_without_network_on_a_file_system_that_cannot_be_written(folder: Path) -> None:
    write_jsonl(folder / "in.jsonl", [{"prompt": f"Is {at} odd? Answer:"} for at in range(5)])
    out, error = (done := start(folder, "score", "in.jsonl", "-o", "out.jsonl")).communicate(timeout=120)
    assert done.returncode == 0, error
    assert json.loads(out.splitlines()[-1])["rows"]["scored"] == 5
    assert (folder / "out.jsonl").stat().st_uid not in (0, (folder / "in.jsonl").stat().st_uid)
    assert read_report(folder / "out.run.json")["status"] == "complete"


def test_sigterm_ends_it_with_what_it_has_scored(folder: Path) -> None:
    write_jsonl(folder / "in.jsonl", [{"prompt": f"{at} is a number. " * 200} for at in range(20_000)])
    running = start(folder, "score", "in.jsonl", "-o", "out.jsonl")
    end = time.monotonic() + 60
    while not (folder / "out.jsonl.prefill" / "manifest.json").exists():
        assert time.monotonic() < end
        assert running.poll() is None, running.communicate()
        time.sleep(0.1)
    running.terminate()  # podman hands it on to the first process
    _, error = running.communicate(timeout=60)
    assert running.returncode == 143, error
    assert read_report(folder / "out.run.json")["status"] == "interrupted"
