"""How many processor cores this process may use, and how many are left to it.

Linux says it in /proc and in the control groups that the process is in: its own one and every one above it may have a
quota (version 1: `cpu.cfs_quota_us`, version 2: `cpu.max`; both may be mounted at once). What cannot be read limits
nothing: on other systems the operating system's count of cores stands.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

ROOT = Path("/")
SHORTEST = 0.5  # seconds between two looks


def affinity() -> frozenset[int]:
    """The cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def cpu_name(root: Path = ROOT) -> str:
    """The processor's model name, as far as the system tells."""
    with suppress(OSError):
        for line in (root / "proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def cpu_flags(root: Path = ROOT) -> list[str]:
    """The processor's instruction sets and other features, in order, as far as the system tells."""
    with suppress(OSError):
        for line in (root / "proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return sorted(line.partition(":")[2].split())
    return []


@dataclass(frozen=True, slots=True)
class Quota:
    """A control group that gets no more than `cores` cores for all its processes together."""

    folder: Path
    cores: float

    def used(self) -> float | None:
        """Seconds of processor time that the group's processes have taken so far; None if that is not told here."""
        with suppress(OSError, ValueError, StopIteration):
            lines = (self.folder / "cpu.stat").read_text().splitlines()
            return int(next(line for line in lines if line.startswith("usage_usec ")).split()[1]) / 1e6
        with suppress(OSError, ValueError):
            return int((self.folder / "cpuacct.usage").read_text()) / 1e9
        return None


def quotas(root: Path = ROOT) -> list[Quota]:
    """The quotas of this process's control groups, the innermost first. `root` holds proc and the mounts."""
    found = []
    for folder in _groups(root):
        cores = _cores(folder)
        if cores is not None:
            found.append(Quota(folder, cores))
    return found


def allowed(root: Path = ROOT, mask: frozenset[int] | None = None) -> int:
    """Threads that can compute at a time: one for each core of the affinity `mask` (by default the process's), but no
    more than the tightest quota holds. Half a core counts as one."""
    cores = len(affinity() if mask is None else mask)
    return max(1, min([cores, *(int(quota.cores + 0.5) for quota in quotas(root))]))


def core_groups(count: int, root: Path = ROOT, mask: frozenset[int] | None = None) -> list[list[int]]:
    """The cores of the affinity `mask` (by default the process's), shared out evenly to so many groups, neighbours
    together. Empty groups where a quota allows fewer cores than the mask has, or there are fewer cores than groups:
    which cores are free is then for the kernel to say."""
    cores = sorted(affinity() if mask is None else mask)
    if allowed(root, frozenset(cores)) < len(cores) or len(cores) < count or not hasattr(os, "sched_setaffinity"):
        return [[] for _ in range(count)]
    return [cores[len(cores) * i // count : len(cores) * (i + 1) // count] for i in range(count)]


class Left:
    """Looks at what others leave of the cores that this process may use."""

    def __init__(self, root: Path = ROOT, mask: frozenset[int] | None = None) -> None:
        self._root = root
        self._mask = affinity() if mask is None else mask
        self._quotas = quotas(root)
        self._before = self._look()

    def cores(self, shortest: float = SHORTEST) -> float | None:
        """Cores that were left since the call before, or since this was made; None if that is not `shortest` seconds
        ago. The kernel counts in hundredths of a second."""
        if time.monotonic() - self._before.at < shortest:
            return None
        now = self._look()
        passed = now.at - self._before.at
        own = now.own - self._before.own
        left = [len(self._mask) - _others(now.busy, self._before.busy, own) / passed]
        for quota, used, before in zip(self._quotas, now.used, self._before.used, strict=True):
            left.append(quota.cores - _others(used, before, own) / passed)
        self._before = now
        return max(0.0, min(left))

    def _look(self) -> _Look:
        return _Look(
            at=time.monotonic(),
            own=time.process_time(),
            busy=_busy(self._root, self._mask),
            used=[quota.used() for quota in self._quotas],
        )


@dataclass(frozen=True, slots=True)
class _Look:
    """Seconds: on the clock; of processor time by this process, by all on its cores, by each group with a quota."""

    at: float
    own: float
    busy: float | None
    used: list[float | None]


def _others(now: float | None, before: float | None, own: float) -> float:
    """Seconds that others have taken between two looks; 0 where that is not told."""
    return 0.0 if now is None or before is None else max(0.0, now - before - own)


def _busy(root: Path, mask: frozenset[int]) -> float | None:
    """Seconds that the cores of `mask` have worked since the machine started, all together."""
    try:
        lines = (root / "proc/stat").read_text().splitlines()
    except OSError:
        return None
    ticks = 0
    for line in lines:
        name, *fields = line.split()
        if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in mask:
            user, nice, system, _idle, _waiting, irq, softirq = map(int, fields[:7])
            ticks += user + nice + system + irq + softirq
    return ticks / os.sysconf("SC_CLK_TCK")


def _groups(root: Path) -> Iterator[Path]:
    """Folders of the process's control groups that may have a quota, and of those above them, as far as they are seen.

    /proc/self/cgroup names the group from the hierarchy's root, /proc/self/mountinfo which part of the hierarchy is
    mounted where: in a container often the container's own group alone.
    """
    try:
        lines = os.fsdecode((root / "proc/self/cgroup").read_bytes()).splitlines()
        mounts = os.fsdecode((root / "proc/self/mountinfo").read_bytes()).splitlines()
    except OSError:
        return
    paths = {}
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if not controllers:
            paths["cgroup2"] = PurePosixPath(group)
        elif "cpu" in controllers.split(","):
            paths["cgroup"] = PurePosixPath(group)
    for line in mounts:
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        if kind not in paths or (kind == "cgroup" and "cpu" not in options.split(",")):
            continue
        seen, point = before.split(" ")[3:5]
        top, path = root / point.replace("\\040", " ").lstrip("/"), paths.pop(kind)
        folder = top / path.relative_to(seen) if path.is_relative_to(seen) and ".." not in path.parts else top
        yield folder
        while folder != top:
            folder = folder.parent
            yield folder


def _cores(folder: Path) -> float | None:
    """The quota of a group in cores, None without one."""
    for read in (_quota_v2, _quota_v1):
        try:
            quota, period = read(folder)
            if quota > 0 and period > 0:
                return quota / period
        except (OSError, ValueError):
            continue  # the file is not there, or says "max"
    return None


def _quota_v2(folder: Path) -> tuple[int, int]:
    quota, period = (folder / "cpu.max").read_text().split()
    return int(quota), int(period)


def _quota_v1(folder: Path) -> tuple[int, int]:
    return int((folder / "cpu.cfs_quota_us").read_text()), int((folder / "cpu.cfs_period_us").read_text())
