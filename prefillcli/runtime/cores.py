"""The processor cores that this process may use, and those that other programs leave to it.

Linux shows this in /proc and in the control groups of the process: its own group and every group above it may have a
quota (version 1: `cpu.cfs_quota_us`, version 2: `cpu.max`; both may be mounted at once). An unreadable file limits
nothing: on other systems the operating system's count of cores stands.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

ROOT = Path("/")
SHORTEST = 0.5  # seconds between two looks


def affinity() -> frozenset[int]:
    """Return the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def cpu_name(root: Path = ROOT) -> str:
    """Return the processor's model name, as far as the system reports it."""
    return _cpuinfo(root, "model name") or platform.processor() or platform.machine()


def cpu_flags(root: Path = ROOT) -> list[str]:
    """Return the processor's instruction sets and other features, in order, as far as the system reports it."""
    return sorted(_cpuinfo(root, "flags", "Features").split())


def _cpuinfo(root: Path, *names: str) -> str:
    # The value of the first line with one of these names; empty without one.
    with suppress(OSError):
        lines = (root / "proc/cpuinfo").read_text().splitlines()
        return next((line.partition(":")[2].strip() for line in lines if line.startswith(names)), "")
    return ""


@dataclass(frozen=True, slots=True)
class Quota:
    """A control group that gets no more than `cores` cores for all its processes together."""

    folder: Path
    cores: float

    def used(self) -> float | None:
        """Return the seconds of processor time that the group's processes have taken so far; None if unknown."""
        with suppress(OSError, ValueError, StopIteration):
            lines = (self.folder / "cpu.stat").read_text().splitlines()
            return int(next(line for line in lines if line.startswith("usage_usec ")).split()[1]) / 1e6
        with suppress(OSError, ValueError):
            return int((self.folder / "cpuacct.usage").read_text()) / 1e9
        return None


def quotas(root: Path = ROOT) -> list[Quota]:
    """Return the quotas of this process's control groups, the innermost first. `root` holds proc and the mounts."""
    return [Quota(folder, cores) for folder in _groups(root) if (cores := _cores(folder)) is not None]


def allowed(root: Path = ROOT, mask: frozenset[int] | None = None) -> int:
    """Return the number of threads that can compute at a time: one for each core of the affinity `mask` (by default
    the process's), but no more than the tightest quota allows. Half a core counts as one."""
    cores = len(affinity() if mask is None else mask)
    return max(1, min([cores, *(int(quota.cores + 0.5) for quota in quotas(root))]))


def core_groups(count: int, root: Path = ROOT, mask: frozenset[int] | None = None) -> list[list[int]]:
    """Return the cores of the affinity `mask` (by default the process's), divided evenly among `groups` groups,
    neighbours together. The groups are empty if a quota allows fewer cores than the mask has, or there are fewer cores
    than groups: then the kernel chooses among the free cores."""
    cores = sorted(affinity() if mask is None else mask)
    if allowed(root, frozenset(cores)) < len(cores) or len(cores) < count or not hasattr(os, "sched_setaffinity"):
        return [[] for _ in range(count)]
    return [cores[len(cores) * i // count : len(cores) * (i + 1) // count] for i in range(count)]


class Left:
    """Measures how much other programs leave of the cores that this process may use."""

    def __init__(self, root: Path = ROOT, mask: frozenset[int] | None = None) -> None:
        self._root = root
        self._mask = affinity() if mask is None else mask
        self._quotas = quotas(root)
        self._before = self._look()

    def cores(self, shortest: float = SHORTEST) -> float | None:
        """Return the number of cores that were left since the last call, or since this was made; None if less than
        `shortest` seconds have passed. The kernel counts in hundredths of a second."""
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
    # Seconds that others have taken between two looks; 0 if unknown.
    return 0.0 if now is None or before is None else max(0.0, now - before - own)


def _busy(root: Path, mask: frozenset[int]) -> float | None:
    # Seconds that the cores of `mask` have worked since the machine started, all together.
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
    # Folders of the process's control groups that may have a quota, and of the visible groups above them.
    # /proc/self/cgroup names the group from the hierarchy's root. /proc/self/mountinfo shows which part of the
    # hierarchy is mounted where: in a container often only the container's own group.
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
    # The quota of a group in cores, None without one.
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        with suppress(OSError, ValueError):  # a file is not there, or has "max"
            quota, period = map(int, " ".join((folder / name).read_text() for name in names).split())
            if quota > 0 and period > 0:
                return quota / period
    return None


# The number of computing threads, how they wait for one another, and how much generated code for products they keep.
#
# torch's operators run on OpenMP threads, which divide each operator evenly and wait for the last thread. By default
# OpenMP waits by spinning for some milliseconds. On free cores that is the fastest way; beside another program it
# takes the core from the thread that the others wait for.
#
# On CPUs, oneDNN generates code for each shape of product. Two caches keep it for the last thousand shapes, with half
# a megabyte or more for each. Chunk lengths keep changing, so a process grew by hundreds of megabytes. One pack has
# few shapes, and generating their code again takes hardly any time beside computing them.


#: A user's settings of OpenMP's threads in the environment; a number or a place given there is not changed.
_NUMBERS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY")
#: The number of shapes of products whose code is kept, in oneDNN and in torch.
_KEPT_PRODUCTS = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32", "LRU_CACHE_CAPACITY": "32"}
_LOOK = 0.2  # seconds of looking at the cores, at least, before anything is computed
_begun: Left | None = None  # a command's look at the cores, if it decides how threads wait
# The share of the allowed threads that run even if others use all cores: a job that always gave way would never end.
LEAST_SHARE = 0.5


def prepare(asked: int | Literal["auto"], environment: MutableMapping[str, str] = os.environ) -> None:
    """Prepare the process, once a command has its options: tokenising takes as many threads as computing, code is kept
    for few products, and the look at the cores begins. The user's settings in the environment stay. For commands: a
    library leaves the environment to the program that imports it."""
    global _begun
    for name, number in _KEPT_PRODUCTS.items():
        environment.setdefault(name, number)
    _begun = None if any(environment.get(name) for name in _WAITING) else Left()
    if asked != "auto":
        environment.setdefault("RAYON_NUM_THREADS", str(asked))
    elif not given_numbers(environment):
        environment.setdefault("RAYON_NUM_THREADS", str(allowed()))


def choose_waiting(environment: MutableMapping[str, str] = os.environ) -> None:
    """Choose how threads wait, just before torch is imported: they sleep if the cores were not free since
    `prepare`."""
    global _begun
    if _begun is not None and not _free(_begun):
        environment["OMP_WAIT_POLICY"] = "PASSIVE"
    _begun = None


class Threads:
    """The threads that torch computes with in this process.

    A given number stands. `auto` begins with as many as affinity and quotas allow. Each `adjust` then takes the cores
    that others have left since the last one, but at least half of those allowed. `auto` changes nothing if the
    environment sets the number or the place of threads.
    """

    def __init__(self, asked: int | Literal["auto"], left: Left | None = None) -> None:
        import torch

        self._left = None
        if asked != "auto":
            torch.set_num_threads(asked)
        elif not given_numbers(os.environ):
            torch.set_num_threads(allowed())
            self._left = left or Left()
        self.most = torch.get_num_threads()  # the threads that may run
        self.ran: list[int] = []  # the fewest and the most threads that have computed; empty at first
        _limit_arrow(self.most)

    def resume(self) -> None:
        """Set as many as may run again, if something else has set another number since."""
        import torch

        torch.set_num_threads(self.most)
        _limit_arrow(self.most)

    def adjust(self) -> None:
        """Choose the number for the next computation; it changes at most every half second."""
        import torch

        cores = None if self._left is None else self._left.cores()
        if cores is not None:
            torch.set_num_threads(threads_for(cores, self.most))
        now = torch.get_num_threads()
        self.ran = [min([now, *self.ran]), max([now, *self.ran])]


@contextmanager
def left_as_found() -> Iterator[None]:
    """Give torch and Arrow as many threads after the block as before, whatever was set inside. For a library."""
    import pyarrow
    import torch

    computing, reading = torch.get_num_threads(), pyarrow.cpu_count()
    try:
        yield
    finally:
        torch.set_num_threads(computing)
        pyarrow.set_cpu_count(reading)


def _free(left: Left) -> bool:
    # Whether nobody else uses the cores that this process may use. Spinning threads spend a quota, too.
    if quotas():
        return False
    while (cores := left.cores(_LOOK)) is None:
        time.sleep(_LOOK / 10)
    return threads_for(cores, allowed()) == allowed()


def threads_for(cores: float, most: int) -> int:
    """Return the number of threads for this many free cores, `most` if all are free: one for each whole core, and one
    more for half a core."""
    return min(most, max(int(cores + 0.5), int(most * LEAST_SHARE + 0.5), 1))


def given_numbers(environment: Mapping[str, str]) -> list[str]:
    """Return the variables in which a user has set how many threads compute, or where."""
    return [name for name in _NUMBERS if environment.get(name)]


def _limit_arrow(threads: int) -> None:
    arrow = sys.modules.get("pyarrow")
    if arrow is not None and arrow.cpu_count() > threads:
        arrow.set_cpu_count(threads)
