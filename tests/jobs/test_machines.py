"""Machines that lack something: handles, space, a home, rights, a locale, a clock that runs."""

from __future__ import annotations

import datetime
import itertools
import json
import os
import random
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from prefillcli.errors import ResourceError, UsageError
from prefillcli.options.commands import ScoreSettings
from prefillcli.options.load import load_settings
from prefillcli.rows.output.store import open_store
from prefillcli.runtime.user_cache import KeptEntries
from tests.jobs.jobs import read_output, read_report, score, texts, without_seconds, write_jsonl, write_parquet
from tests.jobs.processes import Command, Hold

ROOT = Path(__file__).parents[2]
ROWS = 40
SCORE = [sys.executable, "-m", "prefillcli", "score"]


def make_input() -> Path:
    return write_parquet("in.parquet", prompt=texts(ROWS), id=[f"r{i}" for i in range(ROWS)])


def arguments(model: Path, *more: object) -> list[object]:
    return ["score", "in.parquet", "-m", model, "--id-column", "id", "--pack-tokens", 64, "-o", "out.parquet", *more]


def limit(kind: int, most: int) -> None:
    resource.setrlimit(kind, (most, most))


def limit_more_files(more: int) -> None:
    """Allow so many open files more than there are."""
    used = {int(name) for name in os.listdir("/proc/self/fd")}
    free = (number for number in itertools.count() if number not in used)
    limit(resource.RLIMIT_NOFILE, next(itertools.islice(free, more, None)))


def assert_whole(model: Path) -> None:
    """The job, gone on with where nothing lacks, has the rows of one that nothing happened to."""
    for output in ("out.parquet", "whole.parquet"):
        command = Command(*arguments(model, "--resume"), "-o", output)
        assert command.end() == 0, command.stderr
    assert without_seconds("out.parquet") == without_seconds("whole.parquet")
    assert len(without_seconds("out.parquet")) == ROWS


def summary() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path("stdout").read_text().splitlines()[-1])
    return found


def too_few_handles(model: Path, more: int, *options: object) -> bool:
    """Whether a run with this many handles ends for want of them; then it says so."""
    command = Command(*arguments(model, "--overwrite", *options), prepare=partial(limit_more_files, more))
    code = command.end()
    if "--workers" not in options:  # there the server of multiprocessing that forks them prints one of its own
        assert "Traceback" not in command.stderr
    if code == 0:
        return False
    assert code == 5, command.stderr
    assert "oo many open files" in command.stderr
    assert summary()["exit_code"] == 5
    return True


def test_a_run_with_too_few_file_handles_says_so(model: Path) -> None:
    make_input()
    assert too_few_handles(model, 1)
    assert_whole(model)


@pytest.mark.nightly
@pytest.mark.parametrize("options", [("--template", "{{ prompt }}"), ("--workers", 2)], ids=["template", "workers"])
def test_too_few_file_handles_at_any_point_lose_no_row(model: Path, options: tuple[object, ...]) -> None:
    make_input()
    more = 1
    while too_few_handles(model, more, *options):
        assert_whole(model)
        more += 1
    assert 2 < more < 60
    print(f"\n{more - 1} limits of file handles were too few")


def forget_temporary_folder() -> None:
    """Let `tempfile` look for it again."""
    tempfile.tempdir = None


@pytest.fixture
def full_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder on a disk without room."""
    folder = tmp_path / "full"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("a small file system needs root")
    try:
        (folder / "ballast").write_bytes(bytes(4096))
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_temporary_folder_stops_no_run(model: Path, full_folder: Path, tmp_path: Path) -> None:
    make_input()
    environment = {"TMPDIR": str(full_folder), "XDG_CACHE_HOME": str(tmp_path / "empty")}
    command = Command(
        *arguments(model, "--dtype", "bfloat16"), environment=environment, prepare=forget_temporary_folder
    )
    assert command.end() == 0, command.stderr
    assert len(without_seconds("out.parquet")) == ROWS
    assert list(full_folder.iterdir()) == [full_folder / "ballast"]


def test_an_upload_that_finds_the_temporary_folder_full_says_which(
    monkeypatch: pytest.MonkeyPatch, full_folder: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(full_folder))
    store = open_store("memory://night/scores")
    message = r"no space left on the device for \S*/full \(for memory://night"
    with pytest.raises(ResourceError, match=message), store.create("part.parquet") as file:
        file.write(bytes(100_000))
    assert store.names() == []


def test_an_input_that_vanishes_while_the_job_runs_is_told(model: Path) -> None:
    make_input()
    command = Command(*arguments(model), hold=Hold("prefillcli.engines.torch:TorchEngine.answer", 4))
    command.wait_until_held()
    os.rename("in.parquet", "elsewhere")
    command.let_go()
    assert command.end() == 4
    assert "in.parquet is gone while the job ran" in command.stderr
    assert "--resume" in command.stderr
    os.rename("elsewhere", "in.parquet")
    assert_whole(model)


class JumpingClock:
    """The wall clock of a machine that somebody sets again and again, by years."""

    def __init__(self) -> None:
        self._random = random.Random(0)
        self._time = time.time

    def time(self) -> float:
        return max(0.0, self._time() + self._random.uniform(-5e7, 5e7))

    def time_ns(self) -> int:
        return int(self.time() * 1e9)


class JumpingDatetime(datetime.datetime):
    """Its `now` is that of a `JumpingClock`."""

    clock = JumpingClock()

    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> JumpingDatetime:
        return cls.fromtimestamp(cls.clock.time(), tz)


def let_the_clock_jump() -> None:
    clock = JumpingClock()
    time.time, time.time_ns = clock.time, clock.time_ns
    datetime.datetime = JumpingDatetime  # type: ignore[misc]
    for name, module in list(sys.modules.items()):
        if name.startswith("prefillcli.") and isinstance(getattr(module, "datetime", None), type):
            module.datetime = JumpingDatetime  # type: ignore[attr-defined]


@pytest.mark.nightly
def test_a_clock_that_jumps_decides_nothing(model: Path) -> None:
    make_input()
    command = Command(
        *arguments(model), hold=Hold("prefillcli.engines.torch:TorchEngine.answer", 8), prepare=let_the_clock_jump
    )
    command.wait_until_held()
    command.kill()
    command = Command(*arguments(model, "--resume"), prepare=let_the_clock_jump)
    assert command.end() == 0, command.stderr
    assert read_report()["resumed"] is True
    seconds = {name: value for name, value in read_report()["seconds"].items() if value is not None}
    assert all(0 <= value < 60 for value in seconds.values())
    assert all(row["seconds"] >= 0 for row in read_output("out.parquet"))
    assert_whole(model)


def service(**more: str) -> dict[str, str]:
    """An environment with what a system gives a service: no home, no locale."""
    return {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "LC_ALL": "C", "OMP_NUM_THREADS": "1", **more}


@pytest.mark.nightly
def test_without_home_and_locale_and_with_a_strict_umask_the_scores_are_the_same(model: Path) -> None:
    write_jsonl("größe.jsonl", [{"id": f"ä{i}", "prompt": f"漢字 {text}"} for i, text in enumerate(texts(5))])
    flags = ["-m", str(model), "--id-column", "id", "--template", "{{ prompt }} — so?", "-o", "erste größe.jsonl"]
    ended = subprocess.run(
        [*SCORE, "größe.jsonl", *flags], env=service(), umask=0o077, capture_output=True, check=False, timeout=120
    )
    assert ended.returncode == 0, ended.stderr.decode()
    template = "{{ prompt }} — so?"
    assert score("größe.jsonl", "own.jsonl", model=model, id_column="id", template=template)["exit_code"] == 0
    assert without_seconds("own.jsonl") == without_seconds("erste größe.jsonl")
    assert [row["id"] for row in without_seconds("own.jsonl")] == [f"ä{i}" for i in range(5)]
    Path("job.yaml").write_text("template: '{{ prompt }} — so?'\n", encoding="utf-8")
    Path("größe.jsonl").rename("in.jsonl")
    ascii_only = service(PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")  # else Python takes UTF-8 for the locale C
    named = ["-m", str(model), "--id-column", "id", "--recipe", "job.yaml", "-o", "out.jsonl"]
    ended = subprocess.run([*SCORE, "in.jsonl", *named], env=ascii_only, capture_output=True, check=False, timeout=120)
    assert ended.returncode == 0, ended.stderr.decode()
    assert without_seconds("out.jsonl") == without_seconds("erste größe.jsonl")
    made = list(Path().rglob("erste größe*"))
    assert len(made) >= 3
    assert all(path.stat().st_mode & 0o077 == 0 for path in made), "others may read it"


def test_a_user_without_a_home_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # as for a user whom the system does not know
    kept = KeptEntries("digests.json")
    assert not kept.write({"a": 1})
    assert kept.read() == {}
    assert not list(Path().iterdir()), "no folder called ~"


@pytest.mark.parametrize("value", ["{{ prompt }} \udce4", ["in.parquet", "gr\udcf6\udce9e.parquet"]])
def test_text_that_is_not_utf_8_is_refused(value: Any) -> None:
    name = "template" if isinstance(value, str) else "inputs"
    with pytest.raises(UsageError, match=r"is not UTF-8: .*udc.*\n(write it in UTF-8|set LC_ALL)"):
        load_settings(ScoreSettings, {"inputs": ["in.parquet"], name: value}, environment={})


def test_a_file_name_that_is_not_utf_8_does_not_cost_the_report(model: Path) -> None:
    os.mkdir("day")
    make_input().rename("day/gr\udcf6\udce9e.parquet")
    assert score("day", model=model)["exit_code"] == 1
    assert "cannot read day/gr\udcf6\udce9e.parquet" in read_report()["error"]


@pytest.mark.nightly
def test_a_user_who_is_not_root_on_a_read_only_root_scores(model: Path, tmp_path: Path) -> None:
    make_input()
    Path("writable").mkdir()
    if subprocess.run(["unshare", "-m", "unshare", "-U", "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("name spaces need root")
    script = ["mount --make-rprivate /", "mount -t tmpfs tmpfs writable", "cp in.parquet writable/"]
    script += ["chmod 777 writable", "mount -o remount,ro,bind /", "cd writable", "! touch /proof 2>/dev/null"]
    line = [*SCORE, "in.parquet", "-m", str(model), "-o", "out.parquet"]
    command = " && ".join([*script, shlex.join(["unshare", "-U", *line]), "cat out.run.json >&2"])
    ended = subprocess.run(
        ["unshare", "-m", "sh", "-c", command], env=service(), capture_output=True, text=True, check=False, timeout=120
    )
    if "remount" in ended.stderr or "mount:" in ended.stderr:
        pytest.skip(f"this machine allows no mounts: {ended.stderr}")
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["rows"]["scored"] == ROWS
