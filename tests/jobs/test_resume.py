"""Whatever stops a job, going on with it gives what an undisturbed run would have given."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from prefillcli.core.scorer import Granularity
from prefillcli.engines.torch import TorchEngine
from prefillcli.rows.output.sink import Sink
from tests.jobs import jobs
from tests.jobs.jobs import read_output, read_report, score, texts, without_seconds, write_jsonl, write_parquet
from tests.jobs.models import CHAT_TEMPLATE, save_model
from tests.jobs.processes import Command, Hold, cut_small_windows, flush_often

ROWS = 70
PACK_TOKENS = 64
ANSWER = "prefillcli.engines.torch:TorchEngine.answer"
REPLACE = "prefillcli.runtime.file_calls:replace_file"


@pytest.fixture(autouse=True)
def _small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    cut_small_windows(monkeypatch)


def make_input() -> Path:
    """Rows of which some are errors, some equal."""
    prompts: list[str | None] = [*texts(ROWS - 5), None, *texts(2), "", "fox"]
    return write_parquet("in.parquet", prompt=prompts, id=[f"r{i}" for i in range(ROWS)])


def flags(model: Path) -> dict[str, Any]:
    return {"model": model, "id_column": "id", "pack_tokens": PACK_TOKENS, "max_error_rate": 0.5}


def arguments(model: Path, *more: str) -> list[object]:
    given = ["--id-column", "id", "--pack-tokens", PACK_TOKENS, "--max-error-rate", 0.5, "-o", "out.parquet", *more]
    return ["score", "in.parquet", "-m", model, *given]


def parts() -> list[Path]:
    return sorted(Path("out.parquet.prefill").glob("part-*.parquet"))


@dataclass(frozen=True)
class Undisturbed:
    """What a run that nothing stops gives."""

    rows: list[dict[str, Any]]
    report: dict[str, Any]


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("whole"))
        cut_small_windows(patch)
        assert score(make_input(), **flags(model))["exit_code"] == 0
        return Undisturbed(without_seconds("out.parquet"), read_report())


def assert_resumes(model: Path, whole: Undisturbed) -> dict[str, Any]:
    """The job goes on to the undisturbed output; the report of the resumed run."""
    summary = score("in.parquet", resume=True, **flags(model))
    assert summary["exit_code"] == 0
    assert len(whole.rows) == ROWS
    assert without_seconds("out.parquet") == whole.rows
    assert summary["rows"] == whole.report["rows"]
    assert not parts()
    assert not list(Path().rglob("*.prefill-tmp"))
    return read_report()


#: Where a job is killed.
KILLED = {
    "before the first pack": Hold(ANSWER, 1),
    "in the first window": Hold(ANSWER, 4),
    "in a later window": Hold(ANSWER, 11),
    "before anything is written": Hold(REPLACE, 1, "manifest.json"),
    "a part half written": Hold(REPLACE, 3, ".parquet"),
    "before the output": Hold("prefillcli.rows.output.sink:Sink.finish"),
    "the output half written": Hold(REPLACE, 1, "/out.parquet"),
    "the output there, but not marked": Hold(REPLACE, 3, "manifest.json"),
    "before the parts are removed": Hold("prefillcli.rows.output.sink:Sink._delete_parts", 2),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("hold", KILLED.values(), ids=KILLED)
def test_resume_after_kill_loses_no_row(model: Path, whole: Undisturbed, hold: Hold) -> None:
    make_input()
    command = Command(*arguments(model), hold=hold)
    command.wait_until_held()
    safe = len(parts())
    command.kill()
    report = assert_resumes(model, whole)
    assert report["resumed"] is (safe > 0)
    if safe:  # packs of a window begun may run again, for the prefixes that later ones hold
        assert report["packs"] <= whole.report["packs"]
        assert report["tokens"]["prompt"] < whole.report["tokens"]["prompt"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["out.jsonl", "parts/"])
def test_resume_after_kill_into_other_forms_of_output(model: Path, name: str) -> None:
    rows = [{"prompt": text, "id": i, "more": {"i": [i, None]}} for i, text in enumerate(texts(30))]
    write_jsonl("in.jsonl", rows)
    given = ["score", "in.jsonl", "-m", model, "--pack-tokens", 64, "--keep-columns", "more", "-o", name]
    for hold in (Hold(ANSWER, 4), Hold("prefillcli.rows.output.sink:Sink._delete_parts", 1)):
        command = Command(*given, "--resume", hold=hold)
        command.wait_until_held()
        command.kill()
    more = {"model": model, "pack_tokens": 64, "keep_columns": "more"}
    assert score("in.jsonl", name, resume=True, **more)["exit_code"] == 0
    score("in.jsonl", f"whole-{name}", **more)
    assert without_seconds(name) == without_seconds(f"whole-{name}")


def test_a_signal_stops_a_template_that_runs_long(model: Path) -> None:
    make_input()
    long = "{% if id == 'r25' %}{% for i in range(9000) if range(90000)|sort %}{% endfor %}{% endif %}"
    command = Command(*arguments(model), "--template", long + "{{ prompt or '' }}", grace_seconds=60)
    command.wait_until(lambda: len(parts()) >= 3)
    sent = time.monotonic()
    command.send(signal.SIGTERM)
    assert command.end() == 143
    assert time.monotonic() - sent < 8, "the row alone takes ten seconds of processor time"
    assert read_report()["status"] == "interrupted"
    assert len(parts()) >= 3


def test_another_job_is_refused_and_told_what_differs(
    model: Path, whole: Undisturbed, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_input()
    write_parquet("other.parquet", prompt=texts(ROWS), id=[f"r{i}" for i in range(ROWS)])
    other_model = save_model(tmp_path / "other", seed=5)
    other_tokenizer = save_model(tmp_path / "chat", chat_template=CHAT_TEMPLATE)
    command = Command(*arguments(model), hold=Hold(ANSWER, 4))
    command.wait_until_held()
    command.kill()
    safe = [path.read_bytes() for path in parts()]
    for changed, part in (
        ({"model": other_model}, "model"),
        ({"model": other_tokenizer, "chat": False}, "tokenizer"),
        ({"template": "{{ prompt }} So:"}, "prompt"),
        ({"labels": "No,Yes"}, "labels"),
        ({"temperature": 2.0}, "settings"),
        ({"inputs": "other.parquet"}, "input"),
    ):
        resume = part != "settings"
        summary = score(**{"inputs": "in.parquet", **flags(model), "resume": resume, **changed})
        assert summary["exit_code"] == 4, changed
        message = capsys.readouterr().err
        assert "out.parquet belongs to another job: different " in message
        assert part in message.splitlines()[0].partition("different ")[2].split(", ")
        assert "--overwrite" in message
    same = score("in.parquet", **flags(model))
    assert same["exit_code"] == 2
    assert "--resume" in capsys.readouterr().err
    assert [path.read_bytes() for path in parts()] == safe
    assert_resumes(model, whole)
    assert score("in.parquet", **{**flags(model), "temperature": 2.0})["exit_code"] == 4
    assert score("in.parquet", **flags(model))["exit_code"] == 2
    before = Path("out.parquet").read_bytes()
    again = score("in.parquet", resume=True, **flags(model))
    assert (again["exit_code"], again["rows"]["total"]) == (0, ROWS)
    assert Path("out.parquet").read_bytes() == before
    assert read_report()["rows_per_second"] == 0, "nothing was scored this time"
    assert score("in.parquet", overwrite=True, **{**flags(model), "temperature": 2.0})["exit_code"] == 0


def test_the_same_model_elsewhere_and_the_same_data_elsewhere_are_the_same_job(model: Path, tmp_path: Path) -> None:
    source = make_input()
    command = Command(*arguments(model), hold=Hold(ANSWER, 4))
    command.wait_until_held()
    command.kill()
    shutil.copytree(model, tmp_path / "copy")
    Path("moved").mkdir()
    shutil.copy(source, "moved/data.parquet")
    summary = score("moved/data.parquet", resume=True, **{**flags(model), "model": tmp_path / "copy"})
    assert summary["exit_code"] == 0
    assert read_report()["resumed"] is True


@pytest.mark.parametrize("stopped", [False, True])
def test_a_run_that_has_not_changed_the_output_leaves_its_report(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stopped: bool
) -> None:
    make_input()
    if stopped:
        command = Command(*arguments(model), seconds_per_pack=0.05)
        command.wait_until(lambda: len(parts()) >= 3)
        command.send(signal.SIGTERM)
        assert command.end() == 143
    else:
        assert score("in.parquet", **flags(model))["exit_code"] == 0
    reports = [Path(name) for name in ("out.run.json", "out.run.html")]
    before = [path.read_bytes() for path in reports]

    def fails(code: int, *, dies: str | None = None, **changed: Any) -> None:
        with monkeypatch.context() as patch:
            if dies is not None:
                patch.setattr(dies, lambda *_, **__: 1 / 0)
            given = flags(model) | {"metrics_file": "metrics.prom"} | changed
            summary = score(given.pop("inputs", "in.parquet"), **given)
        assert (summary["exit_code"], summary["report"], summary["page"]) == (code, None, None)
        assert summary["error"] in capsys.readouterr().err
        assert f"prefill_run_exit_code {code}\n" in Path("metrics.prom").read_text()
        assert [path.read_bytes() for path in reports] == before

    fails(2)
    fails(4, labels="No,Yes")
    fails(2, id_column="nowhere", resume=True)
    fails(2, template="{{ promt }}", overwrite=True)
    fails(2, model="nowhere", resume=True)
    fails(2, inputs="nowhere.parquet", overwrite=True)
    fails(1, dies="prefillcli.scoring.score.open_inputs", overwrite=True)
    if not stopped:  # the output is there until there is another one
        fails(1, dies="prefillcli.models.load.load_model", overwrite=True)


def test_an_output_that_no_job_of_ours_wrote_is_left_alone(model: Path) -> None:
    make_input()
    shutil.copy("in.parquet", "out.parquet")
    before = Path("out.parquet").read_bytes()
    for resume in (True, False):
        assert score("in.parquet", resume=resume, **flags(model))["exit_code"] == 4
    assert Path("out.parquet").read_bytes() == before


def test_overwrite_starts_over(model: Path, whole: Undisturbed) -> None:
    make_input()
    command = Command(*arguments(model), hold=Hold(ANSWER, 4))
    command.wait_until_held()
    command.kill()
    assert score("in.parquet", overwrite=True, **flags(model))["exit_code"] == 0
    assert read_report()["packs"] == whole.report["packs"]
    assert without_seconds("out.parquet") == whole.rows


def test_two_processes_on_one_output(model: Path, whole: Undisturbed, capsys: pytest.CaptureFixture[str]) -> None:
    make_input()
    command = Command(*arguments(model), hold=Hold(ANSWER, 4))
    command.wait_until_held()
    safe = parts()
    for more in ({"resume": True}, {"overwrite": True}):
        assert score("in.parquet", **flags(model), **more)["exit_code"] == 5
        assert "in use by process" in capsys.readouterr().err
    assert parts() == safe
    command.kill()
    assert_resumes(model, whole)


def test_a_lock_file_that_nobody_holds_does_not_matter(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_input()
    Path("out.parquet.prefill").mkdir()
    with Path("out.parquet.prefill/lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert score("in.parquet", **flags(model))["exit_code"] == 5
    assert score("in.parquet", **flags(model))["exit_code"] == 0


@pytest.mark.parametrize(
    ("ending", "call"), [("manifest.json", 1), (".parquet", 1), (".parquet", 4), ("/out.parquet", 1)]
)
def test_a_full_disk_keeps_what_is_there(
    model: Path,
    whole: Undisturbed,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    ending: str,
    call: int,
) -> None:
    make_input()
    replace, calls = os.replace, 0

    def full(source: str, target: str) -> None:
        nonlocal calls
        calls += str(target).endswith(ending)
        if calls >= call and not str(target).endswith("run.json"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replace(source, target)

    with monkeypatch.context() as patch:
        flush_often(patch)
        patch.setattr("os.replace", full)
        assert score("in.parquet", **flags(model))["exit_code"] == 5
    message = capsys.readouterr().err
    assert "no space left" in message
    assert "--resume" in message
    assert read_report()["exit_code"] == 5
    assert len(parts()) >= (call - 1 if ending == ".parquet" else 0)
    assert not Path("out.parquet").exists()
    assert_resumes(model, whole)


def test_a_disk_that_is_really_full(
    model: Path, whole: Undisturbed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("a small file system needs root")
    try:
        make_input()
        out = str(disk / "out.parquet")
        with monkeypatch.context() as patch:
            flush_often(patch)
            summary = score("in.parquet", out, report=tmp_path / "r.json", **flags(model))
        assert (summary["exit_code"], summary["status"]) == (5, "failed")
        safe = len(list(disk.glob("out.parquet.prefill/part-*.parquet")))
        assert safe > 2
        subprocess.run(["mount", "-o", "remount,size=4m", str(disk)], check=True)
        assert score("in.parquet", out, resume=True, **flags(model))["exit_code"] == 0
        assert without_seconds(out) == whole.rows
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_truncated_gzip_keeps_the_windows_before_the_damage(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [
        {"prompt": text, "id": f"r{i}", "noise": random.Random(i).randbytes(2000).hex()}
        for i, text in enumerate(texts(300))
    ]
    data = write_jsonl("in.jsonl.gz", lines).read_bytes()
    Path("in.jsonl.gz").write_bytes(data[: len(data) * 3 // 4])
    summary = score("in.jsonl.gz", **flags(model))
    message = capsys.readouterr().err
    assert (summary["exit_code"], summary["status"]) == (1, "failed")
    assert "in.jsonl.gz" in message
    assert "damaged" in message
    assert not Path("out.parquet").exists()
    safe = [path.name for path in parts()]
    assert len(safe) > 5
    assert summary["rows"]["scored"] >= 100
    again = score("in.jsonl.gz", resume=True, **flags(model))
    assert again["exit_code"] == 1
    assert [path.name for path in parts()] == safe
    assert read_report()["tokens"]["computed"] == 0
    Path("in.jsonl.gz").write_bytes(data)
    assert score("in.jsonl.gz", resume=True, **flags(model))["exit_code"] == 4
    assert "different input" in capsys.readouterr().err
    assert score("in.jsonl.gz", overwrite=True, **flags(model))["exit_code"] == 0
    assert len(read_output("out.parquet")) == 300


@pytest.mark.parametrize("seconds", [1.0, 4.0])
def test_what_is_computed_is_saved_within_twenty_seconds(
    model: Path, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    """By a clock on which each pack takes this long: no window ends, and the scores are those of another clock."""
    monkeypatch.setattr(jobs, "granularity", Granularity())
    source, given = make_input(), flags(model) | {"pack_tokens": 30}
    score(source, "other.parquet", **given)
    now, saved = [0.0], [0.0]
    answer, write = TorchEngine.answer, Sink.write

    def slowly(self: TorchEngine, *more: Any) -> Any:
        now[0] += seconds
        return answer(self, *more)

    def noted(self: Sink, *more: Any, **named: Any) -> None:
        write(self, *more, **named)
        saved.append(now[0])

    monkeypatch.setattr("prefillcli.scoring.recorder.time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(TorchEngine, "answer", slowly)
    monkeypatch.setattr(Sink, "write", noted)
    assert score(source, **given)["exit_code"] == 0
    assert saved[1] <= 5 + 2 * seconds
    assert max(np.diff(saved)) <= 20
    assert now[0] > 20
    assert len(saved) <= 3 + now[0] / 10, "parts are few, however long the run"
    assert without_seconds() == without_seconds("other.parquet")


def test_ids_repeated_across_a_resume_are_still_errors(model: Path) -> None:
    write_parquet("in.parquet", prompt=texts(ROWS), id=[f"r{i % 60}" for i in range(ROWS)])
    command = Command(*arguments(model), hold=Hold(ANSWER, 11))
    command.wait_until_held()
    command.kill()
    assert score("in.parquet", resume=True, **flags(model))["exit_code"] == 0
    errors = [row["error"] for row in read_output("out.parquet")]
    assert errors == [None] * 60 + ["duplicate_id"] * 10
