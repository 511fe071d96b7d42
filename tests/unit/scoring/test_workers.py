"""`prefill score --workers`: processes of this machine, and what becomes of a job when they are lost."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prefillcli.scoring.runners.pool import AnswerTask, Task
from prefillcli.scoring.runners.processes import ProcessCrew
from tests.jobs.jobs import (
    Reference,
    assert_scored,
    read_output,
    read_report,
    score,
    texts,
    write_jsonl,
    write_parquet,
)
from tests.jobs.models import save_model
from tests.jobs.processes import Command, cut_small_windows

PACK_TOKENS = 64
POISON = "poison"


@pytest.fixture(autouse=True)
def _small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    cut_small_windows(monkeypatch, flush_seconds=0.0)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def prompts() -> list[str]:
    return texts(70)


@pytest.fixture
def rows(prompts: list[str]) -> Path:
    """Good rows, and between them some that cannot be scored."""
    good = [{"id": f"r{number}", "prompt": text} for number, text in enumerate(prompts)]
    return write_jsonl(
        "rows.jsonl", [*good[:30], {"id": "null", "prompt": None}, *good[30:], {"id": "r3", "prompt": "x"}]
    )


def flags(model: Path, **more: Any) -> dict[str, Any]:
    return {"model": model, "id_column": "id", "pack_tokens": PACK_TOKENS, "max_error_rate": 0.5, **more}


def assert_same(found: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    """But for the seconds; scores within 1e-6."""
    assert [row["id"] for row in found] == [row["id"] for row in wanted]
    for own, other in zip(found, wanted, strict=True):
        for name, value in other.items():
            if isinstance(value, float) and name != "seconds":
                assert abs(own[name] - value) <= (1e-6 if name == "score" else 1e-5), name
            elif name != "seconds":
                assert own[name] == value, name


@pytest.fixture
def alone(rows: Path, model: Path) -> list[dict[str, Any]]:
    """What one process writes."""
    assert score(rows, "alone.parquet", **flags(model))["exit_code"] == 0
    return read_output("alone.parquet")


def worker_processes(driver: int) -> list[int]:
    """The processes below one that do not run Python's own servers."""
    parents = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(status.parent.name)] = int(fields[1])
    below, found = {driver}, []
    while more := [pid for pid, parent in parents.items() if parent in below and pid not in below]:
        below.update(more)
        found += more
    return [pid for pid in found if parents[pid] != driver]  # children of the fork server


def test_two_workers_write_what_one_process_does(
    rows: Path, prompts: list[str], model: Path, reference: Reference, alone: list[dict[str, Any]]
) -> None:
    assert score(rows, "two.parquet", **flags(model, workers=2))["exit_code"] == 0
    found = read_output("two.parquet")
    assert_same(found, alone)
    assert_scored([row for row in found if row["error"] is None], [reference.answer(text) for text in prompts])
    report = read_report("two.run.json")
    assert [worker["number"] for worker in report["workers"]] in ([0], [0, 1])  # the second may begin too late
    assert all(worker["seconds"] >= 0 and worker["host_bytes"] > 0 for worker in report["workers"])
    assert sum(worker["packs"] for worker in report["workers"]) == report["packs"]
    assert sum(worker["tokens"] for worker in report["workers"]) == report["tokens"]["computed"]
    assert report["tokens"]["computed"] >= read_report("alone.run.json")["tokens"]["computed"]


def test_workers_run_other_engines(rows: Path, model: Path, alone: list[dict[str, Any]]) -> None:
    more = {"model": model, "id_column": "id", "max_error_rate": 0.5, "workers": 2}
    assert score(rows, "two.parquet", engine="hf", **more)["exit_code"] == 0
    for own, other in zip(read_output("two.parquet"), alone, strict=True):
        assert own["error"] == other["error"]
        assert other["error"] or abs(own["score"] - other["score"]) < 1e-5


def test_drafts_and_audits_work_in_workers(rows: Path, model: Path, draft: Path) -> None:
    more = {"draft": draft, "keep": 0.5, "keep_last": 4, "compress_above": 10, "audit": 12, "select_chunk": 2}
    for name, workers in (("one", 1), ("two", 2)):
        assert score(rows, f"{name}.parquet", **flags(model, workers=workers, **more))["exit_code"] == 0
    found, wanted = read_output("two.parquet"), read_output("one.parquet")
    assert_same(found, wanted)
    assert sum(row["method"] == "specprefill" for row in found) > 30
    assert sum(row["audit_score"] is not None for row in found) == 12
    one, two = read_report("one.run.json"), read_report("two.run.json")
    assert two["tokens"]["draft"] == one["tokens"]["draft"] > 0
    for name in ("rows", "flips"):
        assert two["audits"]["answer"][name] == one["audits"]["answer"][name]


@pytest.fixture
def killing(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Kills the worker that gets a task of these numbers, counted from 0."""
    numbers: list[int] = []
    count = iter(range(1 << 20))
    send = ProcessCrew.send

    def send_and_kill(crew: ProcessCrew, worker: int, task: Task) -> None:
        send(crew, worker, task)
        if isinstance(task, AnswerTask) and next(count) in numbers:
            os.kill(crew._running[worker].process.pid, signal.SIGKILL)

    monkeypatch.setattr(ProcessCrew, "send", send_and_kill)
    return numbers


def test_killed_workers_lose_no_row(
    rows: Path, model: Path, alone: list[dict[str, Any]], killing: list[int], capfd: pytest.CaptureFixture[str]
) -> None:
    killing += [2, 9]
    assert score(rows, "two.parquet", **flags(model, workers=2))["exit_code"] == 0
    assert_same(read_output("two.parquet"), alone)
    assert capfd.readouterr().err.count("was ended by signal 9 (SIGKILL); its rows are scored again") == 2


@pytest.fixture
def poisoned(model: Path) -> Path:
    """The model, with code that ends its process when it reads a prompt with the poison."""
    shutil.copytree(model, "poisoned")
    tokens = Reference(model).ids(POISON, special=False)
    config = json.loads(Path("poisoned/config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling.Poisoned"}
    Path("poisoned/config.json").write_text(json.dumps(config))
    Path("poisoned/modeling.py").write_text(
        "import os\n\nfrom transformers import LlamaForCausalLM\n\n"
        f"POISON = {str(tokens)[1:-1]!r}\n\n\n"
        "class Poisoned(LlamaForCausalLM):\n"
        "    def _init_weights(self, module):\n"
        "        pass\n\n"
        "    def forward(self, input_ids, **kwargs):\n"
        "        if POISON in str(input_ids[0].tolist()):\n"
        "            os.abort()\n"
        "        return super().forward(input_ids=input_ids, **kwargs)\n"
    )
    return Path("poisoned")


def test_the_row_that_kills_workers_is_an_error_row(prompts: list[str], poisoned: Path, reference: Reference) -> None:
    """A pack has several rows: the others of its pack are scored."""
    rows = write_parquet("rows.parquet", prompt=[*prompts[:4], f"{POISON}! yes or no\nAnswer:", *prompts[4:8]])
    more = {"workers": 2, "trust_remote_code": True, "pack_tokens": 2000}
    assert score(rows, "two.parquet", model=poisoned, max_error_rate=0.5, **more)["exit_code"] == 0
    found = read_output("two.parquet")
    assert [number for number, row in enumerate(found) if row["error"]] == [4]
    assert found[4]["error"] == "worker_lost"
    assert "was ended by signal 6 (SIGABRT)" in found[4]["error_detail"]
    assert_scored(found[:4] + found[5:], [reference.answer(text) for text in prompts[:8]])


def test_a_resumed_job_may_have_another_number_of_workers(
    rows: Path, model: Path, alone: list[dict[str, Any]], killing: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prefillcli.scoring.runners.pool.MOST_LOST", 0)  # the first loss ends the run
    killing.append(12)
    stopped = score(rows, "out.parquet", **flags(model, workers=2))
    assert stopped["exit_code"] == 5
    assert "continue with --resume" in stopped["error"]
    before = read_report("out.run.json")["rows"]["scored"]
    assert 0 < before < 70
    killing.clear()
    assert score(rows, "out.parquet", resume=True, **flags(model, workers=3))["exit_code"] == 0
    assert_same(read_output("out.parquet"), alone)
    assert read_report("out.run.json")["resumed"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_workers_end_with_the_driver_and_a_resume_finishes(
    rows: Path, model: Path, alone: list[dict[str, Any]], signum: int
) -> None:
    line = ["score", rows, "--model", model, "--id-column", "id", "--pack-tokens", PACK_TOKENS]
    line += ["--max-error-rate", 0.5, "-o", "out.parquet", "--quiet"]
    command = Command(*line, "--workers", 2)
    command.wait_until(lambda: list(Path().glob("out.parquet.prefill/part-*")))
    workers = worker_processes(command.pid)
    assert len(workers) == 2
    command.send(signum)
    assert command.end() == (-signum if signum == signal.SIGKILL else 143)
    end = time.monotonic() + 20
    while (left := [pid for pid in workers if Path(f"/proc/{pid}").exists()]) and time.monotonic() < end:
        time.sleep(0.02)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left
    assert score(rows, "out.parquet", resume=True, **flags(model))["exit_code"] == 0
    assert_same(read_output("out.parquet"), alone)


def test_what_workers_cannot_load_is_said_as_by_one_process(rows: Path, model: Path) -> None:
    shutil.copytree(model, "broken")
    config = json.loads(Path("broken/config.json").read_text())
    config["intermediate_size"] *= 2
    Path("broken/config.json").write_text(json.dumps(config))
    one, two = (score(rows, **flags(Path("broken"), workers=workers)) for workers in (1, 2))
    assert two["exit_code"] == one["exit_code"] == 2
    assert two["error"] == one["error"]


def mapped_weights(pids: list[int], file: Path) -> tuple[int, int]:
    """Bytes of a file that processes have in memory: each for itself, and all together (proportional set size)."""
    resident = proportional = 0
    for pid in pids:
        own = ""
        try:
            lines = Path(f"/proc/{pid}/smaps").read_text().splitlines()
        except OSError:  # it has ended since
            continue
        for line in lines:
            if "-" in line.split()[0]:
                own = line
            elif own.endswith(str(file)):
                name, _, rest = line.partition(":")
                resident += int(rest.split()[0]) * 1024 if name == "Rss" else 0
                proportional += int(rest.split()[0]) * 1024 if name == "Pss" else 0
    return resident, proportional


@pytest.mark.nightly
def test_workers_share_the_weights(tmp_path: Path) -> None:
    """Two processes have the file's pages in memory once."""
    folder = save_model(tmp_path / "wide", hidden=512, layers=2)
    weights = folder / "model.safetensors"
    size = weights.stat().st_size
    rows = write_parquet("rows.parquet", prompt=texts(1000))
    line = ["score", rows, "--model", folder, "--pack-tokens", PACK_TOKENS, "-o", "out.parquet", "--quiet"]
    command = Command(*line, "--workers", 2)

    def shared() -> bool:
        """Each has most of the pages, and both together have few more."""
        resident, proportional = mapped_weights(worker_processes(command.pid), weights)
        return resident > 1.6 * size and proportional < 1.1 * size

    try:
        command.wait_until(shared)
    finally:
        command.send(signal.SIGKILL)
        command.end()
