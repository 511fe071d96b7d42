"""Commands, as processes of their own, whose standard streams are closed, full, or pipes that nobody reads."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import strategies as st

from tests.fuzz.command import prefill
from tests.fuzz.fuzzer import Fuzzer
from tests.fuzz.workplace import Workplace
from tests.jobs.jobs import read_output, texts

_ROOT = Path(__file__).parent.parent.parent
_ROWS = {"prompt": [*texts(30), None], "answer": ["Yes", "No"] * 15 + ["Yes"]}
_SCORE = (
    *("score", "in.parquet", "-m", "MODEL", "-o", "out.parquet", "--pack-tokens", "400", "--threads", "1"),
    *("--max-error-rate", "1"),
)
_COMMANDS = (
    (*_SCORE, "--progress-interval", "0.001"),
    (*_SCORE, "--quiet"),
    (*_SCORE, "--log-format", "json"),
    (*_SCORE, "--template", "{{ prompt or 'x' }}", "--debug"),
    (*_SCORE, "--workers", "2", "--log-format", "json"),
    (*_SCORE, "--dry-run"),
    (*_SCORE[:-1], "0"),
    ("verify", "old.parquet", "in.parquet"),
    ("verify", "in.parquet"),
    ("status", "old.parquet"),
    ("status", "nowhere.parquet", "--quiet"),
    ("calibrate", "old.parquet", "--truth-from", "in.parquet", "--truth", "answer", "-o", "c.json"),
    ("inspect", "in.parquet", "-m", "MODEL", "--row", "3"),
    ("score", "missing.parquet"),
    ("nonsense",),
    ("score", "--help"),
    ("--version",),
)
_WAYS = ("as it is", "closed", "full", "gone")
_SECONDS = 100.0


def _check(drawn: Any, place: Workplace) -> None:
    """A command ends as it does with all its streams, writes the same, and touches nothing else."""
    command, stdin_closed, stdout, stderr = drawn
    wanted = _undisturbed(command, place)
    before = _prepare(place)
    code, said = _run(command, place, "<&-" if stdin_closed else "", stdout, stderr)
    found = (code, _written())
    assert found[0] == wanted[0], (found[0], wanted[0], said)
    assert found == wanted
    assert _digests(place) == before, "a file that is only read has changed"
    if stdout == "as it is" and wanted[0] and command[0] != "nonsense":
        assert json.loads(said.splitlines()[-1])["exit_code"] == code, said


_known: dict[tuple[Path, tuple[str, ...]], tuple[int, Any]] = {}


def _undisturbed(command: tuple[str, ...], place: Workplace) -> tuple[int, Any]:
    """The exit code of a command whose streams are files, and what it writes. It runs in this process."""
    key = (place.folder, command)
    if key not in _known:
        _prepare(place)
        _known[key] = prefill(*_words(command, place)).exit_code, _written()
    return _known[key]


def _prepare(place: Workplace) -> dict[str, str]:
    """A folder with an input and a finished output; gives the digests of all that is only read."""
    finished = place.folder / "old.parquet"
    if not finished.exists():
        pq.write_table(pa.table(_ROWS), "in.parquet")
        assert prefill(*_words(_SCORE, place), "--quiet").exit_code == 0
        shutil.copy("out.parquet", finished)
    with place.emptied():
        pq.write_table(pa.table(_ROWS), "in.parquet")
        shutil.copy(finished, "old.parquet")
    return _digests(place)


def _words(command: tuple[str, ...], place: Workplace) -> list[str]:
    return [place.model if word == "MODEL" else word for word in command]


def _digests(place: Workplace) -> dict[str, str]:
    kept = [Path("in.parquet"), Path("old.parquet"), *sorted(Path(place.model).iterdir())]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in kept}


def _written() -> Any:
    """What a command has written, without times."""
    rows = read_output("out.parquet") if Path("out.parquet").exists() else None
    for row in rows or ():
        row["seconds"] = None
    report = json.loads(Path("out.run.json").read_text()) if Path("out.run.json").exists() else {}
    fitted = Path("c.json").read_text() if Path("c.json").exists() else None
    return rows, report.get("status"), report.get("exit_code"), report.get("rows"), fitted


def _run(command: tuple[str, ...], place: Workplace, stdin: str, stdout: str, stderr: str) -> tuple[int, str]:
    """Exit code, and what the command said where somebody listens."""
    signs = {"closed": "{}>&-", "full": "{}>/dev/full"}
    redirected = f"{stdin} {signs.get(stdout, '').format(1)} {signs.get(stderr, '').format(2)}"
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PREFILL_")}
    kept |= {"PYTHONPATH": str(_ROOT), "HF_HUB_OFFLINE": "1"}
    read, write = os.pipe()
    os.close(read)
    try:
        with open("said", "w+b") as listening:
            process = subprocess.Popen(
                [
                    "/bin/sh",
                    "-c",
                    f'exec "$@" {redirected}',
                    "sh",
                    sys.executable,
                    "-m",
                    "prefillcli",
                    *_words(command, place),
                ],
                stdin=subprocess.DEVNULL,
                stdout=write if stdout == "gone" else listening,
                stderr=write if stderr == "gone" else subprocess.DEVNULL,
                env=kept,
                start_new_session=True,
            )
            try:
                code = process.wait(_SECONDS)
            finally:
                process.kill()
                process.wait()
            listening.seek(0)
            return code, listening.read().decode()
    finally:
        os.close(write)


STREAMS = Fuzzer(
    "streams",
    st.tuples(st.sampled_from(_COMMANDS), st.booleans(), st.sampled_from(_WAYS), st.sampled_from(_WAYS)),
    _check,
    per_round=6,
)
