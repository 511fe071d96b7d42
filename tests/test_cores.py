"""How many cores a process may use: affinity, control groups, and what others leave."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from prefillcli.runtime import cores
from prefillcli.runtime.cores import Left, allowed, quotas

EIGHT = frozenset(range(8))
V2 = "31 23 0:28 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup rw,nsdelegate"
V1 = "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw shared:9 - cgroup cgroup rw,cpu,cpuacct"


def machine(root: Path, groups: str, mounts: str, **files: str) -> Path:
    """A /proc and a /sys/fs/cgroup as the kernel shows them; names of `files` have __ for a slash."""
    for name, text in {"proc/self/cgroup": groups, "proc/self/mountinfo": mounts}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name.replace("__", "/").replace("_d_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


def quota_v1(folder: str, quota: int, period: int = 100_000) -> dict[str, str]:
    return {f"{folder}__cpu_d_cfs_quota_us": str(quota), f"{folder}__cpu_d_cfs_period_us": str(period)}


def test_without_a_quota_the_cores_of_the_mask_are_allowed(tmp_path: Path) -> None:
    assert allowed(tmp_path, EIGHT) == 8, "nothing to read"
    root = machine(tmp_path, "0::/job", V2, job__cpu_d_max="max 100000")
    assert allowed(root, EIGHT) == 8
    assert allowed(root, frozenset({5})) == 1


def test_the_tightest_quota_from_the_own_group_up_counts(tmp_path: Path) -> None:
    files = {"a__cpu_d_max": "250000 100000", "a__b__cpu_d_max": "max 100000", "a__b__c__cpu_d_max": "80000 20000"}
    root = machine(tmp_path, "0::/a/b/c", V2, **files, other__cpu_d_max="100000 100000")
    assert [quota.cores for quota in quotas(root)] == [4, 2.5]
    assert allowed(root, EIGHT) == 3
    assert allowed(root, frozenset({1, 7})) == 2


@pytest.mark.parametrize(("cores", "threads"), [(0.1, 1), (1, 1), (1.4, 1), (1.5, 2), (2, 2)])
def test_half_of_a_core_counts_as_one_and_there_is_always_one(tmp_path: Path, cores: float, threads: int) -> None:
    assert allowed(machine(tmp_path, "0::/", V2, cpu_d_max=f"{int(cores * 1e5)} 100000"), EIGHT) == threads


def test_both_versions_may_be_mounted_at_once(tmp_path: Path) -> None:
    mounts = f"{V1}\n{V2.replace('/sys/fs/cgroup', '/sys/fs/cgroup/unified')}"
    files = quota_v1("cpu,cpuacct__batch", 300_000) | quota_v1("cpu,cpuacct", -1)
    root = machine(tmp_path, "9:memory:/far\n4:cpu,cpuacct:/batch\n0::/job", mounts, **files)
    assert allowed(root, EIGHT) == 3
    assert allowed(machine(root, "4:cpu,cpuacct:/batch\n0::/job", mounts, unified__job__cpu_d_max="2 1"), EIGHT) == 2


@pytest.mark.parametrize("path", ["/docker/abc", "/", "/../../elsewhere"], ids=["host's name", "own name", "outside"])
def test_a_container_sees_its_own_group_where_the_hierarchy_is_mounted(tmp_path: Path, path: str) -> None:
    seen = "/docker/abc" if path == "/docker/abc" else "/"
    mounts = V1.replace("0:29 / ", f"0:29 {seen} ")
    assert allowed(machine(tmp_path, f"4:cpuacct,cpu:{path}", mounts, **quota_v1("cpu,cpuacct", 200_000)), EIGHT) == 2


class Clock:
    """The clock of a process that computes on `own` cores."""

    def __init__(self, own: float) -> None:
        self.now, self.own = 100.0, own

    def monotonic(self) -> float:
        return self.now

    def process_time(self) -> float:
        return self.now * self.own


def stat(root: Path, *busy: float) -> None:
    """Seconds that each core has worked, half of them in the kernel."""
    ticks = [int(seconds * os.sysconf("SC_CLK_TCK") / 2) for seconds in busy]
    lines = [f"cpu{core} {each} 0 {each} 7000 80 0 0 900 0 0" for core, each in enumerate(ticks)]
    (root / "proc").mkdir(exist_ok=True)
    (root / "proc/stat").write_text("\n".join(["cpu  1 2 3 4 5 6 7 8 9 10", *lines, "intr 1 2"]))


def test_what_others_use_of_the_own_cores_is_not_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(own=1.5)
    monkeypatch.setattr(cores, "time", clock)
    stat(tmp_path, 50, 50, 50, 50)
    left = Left(tmp_path, frozenset({0, 1, 2}))
    clock.now += 0.1
    assert left.cores() is None, "too short to say anything"
    clock.now += 9.9
    stat(tmp_path, 60, 60, 54, 60)  # 2.4 cores of the mask, of these 1.5 by this process; another one elsewhere
    assert left.cores() == pytest.approx(3 - 0.9)
    clock.now += 10
    stat(tmp_path, 67, 68, 54, 60)  # nobody else
    assert left.cores() == pytest.approx(3)


@pytest.mark.parametrize("version", [1, 2])
def test_others_in_a_group_with_a_quota_use_it_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    clock = Clock(own=1.0)
    monkeypatch.setattr(cores, "time", clock)

    def used(seconds: int) -> None:
        if version == 1:
            files = quota_v1("cpu,cpuacct__a", 400_000) | {"cpu,cpuacct__a__cpuacct_d_usage": f"{seconds}000000000"}
            machine(tmp_path, "4:cpu,cpuacct:/a", V1, **files)
        else:
            files = {"a__cpu_d_max": "400000 100000", "a__cpu_d_stat": f"usage_usec {seconds}000000\nuser_usec 7"}
            machine(tmp_path, "0::/a", V2, **files)

    used(70)
    left = Left(tmp_path, EIGHT)
    clock.now += 10
    used(105)
    assert left.cores() == pytest.approx(4 - 2.5)


@pytest.fixture
def one_core() -> Iterator[Path]:
    """A control group of this machine whose processes get one core together."""
    mounts = [line.split()[1:4] for line in Path("/proc/mounts").read_text().splitlines()]
    made = None
    try:
        for point, kind, options in mounts:
            folder = Path(point) / f"prefill-test-{os.getpid()}"
            if kind == "cgroup" and "cpu" in options.split(","):
                folder.mkdir()
                made = folder
                (folder / "cpu.cfs_quota_us").write_text("100000")
                break
            if kind == "cgroup2" and "cpu" in (Path(point) / "cgroup.subtree_control").read_text().split():
                folder.mkdir()
                made = folder
                (folder / "cpu.max").write_text("100000 100000")
                break
        else:
            pytest.skip("no control group for processors is mounted here")
        yield made
    except OSError as error:
        pytest.skip(f"cannot make a control group here: {error}")
    finally:
        if made is not None:
            made.rmdir()


def test_a_real_control_group_limits_the_threads(one_core: Path) -> None:
    code = "from prefillcli.runtime.cores import allowed; print(allowed(mask=frozenset(range(64))))"
    join = f"echo $$ > {one_core}/cgroup.procs && exec {sys.executable} -c '{code}'"
    done = subprocess.run(["sh", "-c", join], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "1\n"
