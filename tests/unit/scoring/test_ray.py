"""`prefill score --runner ray`: real actors, machines that go away, drivers that are killed. `make test-ray`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import chdir, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from prefillcli.core.scorer import Granularity
from tests.jobs.jobs import beside_answers, read_report, score, write_parquet
from tests.jobs.models import save_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed here; make test-ray brings its own"),
    pytest.mark.filterwarnings("ignore"),  # Ray's own
]

ROOT = Path(__file__).parents[3]
ROWS = 240
SIZES = {"memory": "64MiB", "pack_tokens": 2048}  # so that packs do not depend on what is free
DRIVER = """
import sys
from functools import partial
import prefillcli.scoring.score as job
from prefillcli.cli import main
from prefillcli.core.scorer import Granularity
job.score_job = partial(job.score_job, granularity=Granularity(batch_rows=10, window_rows=40, flush_seconds=0.0))
main()
"""
"""The command with small windows, which writes what is finished at once."""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model that takes its time, an input, and the output of one process."""
    folder = tmp_path_factory.mktemp("job")
    save_model(folder / "model", hidden=256, layers=4)
    prompts: list[str | None] = [
        f"{i} {'fox dog quick ' * (20 + i % 40)}number {i * 7919}\nAnswer:" for i in range(ROWS)
    ]
    prompts[5] = None
    write_parquet(folder / "in.parquet", id=[f"r{i}" for i in range(ROWS)], prompt=prompts)
    with pytest.MonkeyPatch.context() as patch:  # the windows of DRIVER
        patch.setattr("tests.jobs.jobs.granularity", Granularity(batch_rows=10, window_rows=40))
        flags = {
            "model": folder / "model",
            "id_column": "id",
            "threads": 1,
            "empty_text": "error",
            **SIZES,
        }  # the actors have one thread too
        done = score(folder / "in.parquet", folder / "one.parquet", **flags)
    assert done["exit_code"] == 3  # for the row without a prompt
    return folder


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two machines of one core each, as far as Ray can tell."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        with chdir(ROOT):
            head = {"num_cpus": 1, "include_dashboard": False, "dashboard_port": None}
            machines = Cluster(initialize_head=True, head_node_args=head)
        add_second(machines)
        yield machines
        machines.shutdown()


def add_second(machines: Any) -> None:
    """Add the second machine, which outlives the test's folder: workers of Ray start in the folder of their machine,
    and MKL does not load in one that is gone."""
    with chdir(ROOT):
        machines.second = machines.add_node(num_cpus=1)


class Driver:
    """`prefill score --runner ray --workers 2` on the job's input, in another process."""

    def __init__(self, job: Path, *flags: object, address: str | None = None) -> None:
        words: list[object] = ["score", job / "in.parquet", "-m", job / "model", "-o", "out.parquet"]
        words += ["--empty-text", "error", "--id-column", "id", "--runner", "ray", "--workers", "2"]
        words += [word for name, value in SIZES.items() for word in ("--" + name.replace("_", "-"), value)]
        words += ["--ray-address", address] if address else []
        environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        self._files = [Path(name).open("w") for name in ("stdout", "stderr")]  # noqa: SIM115 - closed in `end`
        self._process = subprocess.Popen(
            [sys.executable, "-c", DRIVER, *map(str, [*words, *flags])],
            stdout=self._files[0],
            stderr=self._files[1],
            env=environment | {"PYTHONPATH": str(ROOT)},
        )

    def wait_until(self, condition: Callable[[], Any], seconds: float = 400.0) -> Any:
        end = time.monotonic() + seconds
        while not (found := condition()):
            assert self._process.poll() is None, Path("stderr").read_text()
            assert time.monotonic() < end, "waited too long"
            time.sleep(0.02)
        return found

    def wait_until_they_work(self, root: int | None = None) -> list[int]:
        """Process numbers of the actors when there are two and some rows are written."""
        return self.wait_until(lambda: len(parts()) > 2 and len(found := actors(root or self.pid)) == 2 and found)

    def send(self, signum: int) -> None:
        self._process.send_signal(signum)

    @property
    def pid(self) -> int:
        return self._process.pid

    def end(self, seconds: float = 400.0) -> dict[str, Any]:
        """The last line on stdout, which must be the only one; empty after a kill."""
        code = self._process.wait(seconds)
        for file in self._files:
            file.close()
        lines = Path("stdout").read_text().splitlines()
        if code < 0:
            return {}
        assert len(lines) == 1, lines
        said = json.loads(lines[0])
        assert said["exit_code"] == code
        return dict(said)


def descendants(root: int) -> dict[int, str]:
    """Titles of the processes below one, by number."""
    parents, titles = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError):
            pid = int(folder.name)
            parents[pid] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            titles[pid] = (folder / "cmdline").read_bytes().decode(errors="replace")
    found: set[int] = {root}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return {pid: titles[pid] for pid in found - {root} if pid in titles}


def actors(root: int) -> list[int]:
    """The actors below a process, the oldest first."""
    found = [pid for pid, title in descendants(root).items() if title.startswith("ray::WorkerActor")]
    return sorted(found, key=lambda pid: float(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]))


def parts() -> list[Path]:
    """What is written of the output so far."""
    return list(Path("out.parquet.prefill").glob("part-*.parquet"))


def gone(pids: Iterator[int] | list[int]) -> bool:
    return not any(Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids)


def assert_same(wanted_path: Path) -> None:
    """The output is that of one process, but for the seconds and the last digits of what was computed again."""
    found, wanted = pq.read_table("out.parquet"), pq.read_table(wanted_path)
    assert found.schema.equals(wanted.schema)
    for name in set(wanted.column_names) - {"seconds"}:
        rows = zip(found[name].to_pylist(), wanted[name].to_pylist(), strict=True)
        for row, (value, expected) in enumerate(rows):
            close = pytest.approx(expected, abs=1e-5) if isinstance(expected, float) else expected
            assert value == close, (name, row)


def test_two_actors_write_the_file_of_one_process_and_say_nothing(job: Path) -> None:
    driver = Driver(job, "--quiet")
    assert driver.end()["exit_code"] == 3
    assert_same(job / "one.parquet")
    counted, named = beside_answers(Path("stderr").read_text())
    assert "1 of 240 rows are errors" in counted
    assert named == "r5: null_prompt: the prompt is null"
    workers = read_report("out.run.json")["workers"]
    assert {each["number"] for each in workers} <= {0, 1}
    assert sum(each["tokens"] for each in workers) == read_report("out.run.json")["tokens"]["computed"]


def test_an_actor_that_is_killed_loses_no_row(job: Path) -> None:
    driver = Driver(job)
    os.kill(driver.wait_until_they_work()[0], signal.SIGKILL)
    assert driver.end()["exit_code"] == 3
    assert_same(job / "one.parquet")
    assert "A worker died or was killed" in Path("stderr").read_text()


def test_a_machine_that_is_lost_loses_no_row(job: Path, cluster: Any) -> None:
    driver = Driver(job, "--worker-resources", "num_cpus=1", address=cluster.address)
    driver.wait_until_they_work(os.getpid())
    cluster.remove_node(cluster.second, allow_graceful=False)
    try:
        assert driver.end()["exit_code"] == 3
    finally:
        add_second(cluster)
    assert_same(job / "one.parquet")
    assert "Raylet is terminated" in Path("stderr").read_text()


def test_a_driver_that_is_killed_takes_its_actors_along_and_resume_goes_on(job: Path, cluster: Any) -> None:
    driver = Driver(job, address=cluster.address)
    left = driver.wait_until_they_work(os.getpid())
    driver.send(signal.SIGKILL)
    driver.end()
    assert not Path("out.parquet").exists()
    end = time.monotonic() + 60
    while not gone(left):
        assert time.monotonic() < end, "the actors live on"
        time.sleep(0.05)
    resumed = Driver(job, "--resume", address=cluster.address)
    assert resumed.end()["exit_code"] == 3
    assert read_report("out.run.json")["resumed"]
    every = [tokens or 0 for tokens in pq.read_table("out.parquet")["computed_tokens"].to_pylist()]
    assert read_report("out.run.json")["tokens"]["computed"] < sum(every)
    assert_same(job / "one.parquet")


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_job_its_actors_and_its_ray(job: Path, signum: int) -> None:
    driver = Driver(job)
    driver.wait_until_they_work()
    below = list(descendants(driver.pid))
    driver.send(signum)
    assert driver.end(60)["exit_code"] == 128 + signum
    said = Path("stderr").read_text()
    assert "continue with --resume" in said
    assert "Traceback" not in said
    assert "Exception ignored" not in said
    assert gone(below)


def test_what_has_no_room_is_an_error_that_says_so(job: Path, cluster: Any) -> None:
    driver = Driver(job, "--worker-resources", "special=1", "--set", "ray_timeout=2", address=cluster.address)
    said = driver.end(60)
    assert said["exit_code"] == 5
    assert (
        "no room for a worker for 2 s: it asks for special=1, num_cpus=1; the cluster is 2 machines" in said["error"]
    )


def test_a_machine_that_is_too_small_is_an_error_at_once(job: Path) -> None:
    said = Driver(job, "--worker-resources", "num_cpus=1000").end(60)
    assert said["exit_code"] == 5
    assert "num_cpus=1000: 2 workers ask for more than the" in said["error"]


def test_an_address_where_nothing_answers_is_an_error(job: Path) -> None:
    said = Driver(job, address="127.0.0.1:1").end(90)
    assert said["exit_code"] == 5
    assert "--ray-address 127.0.0.1:1: cannot be joined" in said["error"]
