"""Memory of this machine, of a device, and of processes: the only reader of /proc and control groups for it.

All numbers are bytes. A number that the system does not report is None, or raises where the docstring names an error.
"""

from __future__ import annotations

import ctypes
import gc
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from prefillcli.errors import ResourceError

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

#: The variables that configure torch's allocator of device memory. Every supported version of torch reads the first.
_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
_PROC = Path("/proc")
_GROUP = Path("/sys/fs/cgroup")


def available_memory(device: torch.device) -> int:
    """Return the number of free bytes of the device, or of the host within the limit of its control group. Raises
    ResourceError."""
    if device.type == "cuda":
        return _free_or_unused(device)
    if device.type == "mps":
        return _free_of_apple_gpu()
    free = []
    with suppress(OSError, KeyError):
        free.append(_meminfo()["MemAvailable"])
    with suppress(OSError, ValueError):  # no control group of version 2, or no limit: "max"
        free.append(_group("memory.max") - _group("memory.current"))
    if not free:
        raise ResourceError("cannot tell how much memory is free on this system; give --memory")
    return max(min(free), 0)


def loadable_memory(device: torch.device) -> int | None:
    """Return the most bytes that weights on `device` can take; None if this system does not report them."""
    if device.type == "cuda":
        return _free_or_unused(device)
    if device.type == "mps":
        return _free_of_apple_gpu()
    try:
        found = _meminfo()
        most = found["MemAvailable"] + found["SwapFree"]
    except (OSError, KeyError, ValueError):
        return None
    # A control group counts pages of files as used although it can drop them: only those without a file are certain.
    with suppress(OSError, ValueError):
        limit = _group("memory.max") + _group("memory.swap.max")
        most = min(most, max(limit - _group_used(), 0))
    return most


def _free_or_unused(device: torch.device) -> int:
    # Bytes of a CUDA device that nobody has reserved, or that this process has reserved without using them.
    import torch

    unused = reserved_memory(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + unused


def _free_of_apple_gpu() -> int:
    # The recommended maximum of bytes for an Apple GPU, less those that this process has taken.
    import torch

    return max(torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory(), 0)


def reserved_memory(device: torch.device) -> int:
    """Return the number of bytes that torch's allocator has taken of a CUDA device, whether or not tensors use them.

    A limit counts these bytes, so every measurement of a device counts them too.
    """
    import torch

    return int(torch.cuda.memory_reserved(device))


def reserved_at_peak(step: Callable[[], T], device: torch.device) -> tuple[T, int]:
    """Return the result of `step`, and the bytes of a CUDA device that were reserved at its peak above those before
    it."""
    import torch

    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()  # else a step that reuses freed memory would seem to need none
    torch.cuda.reset_peak_memory_stats(device)
    before = reserved_memory(device)
    result = step()
    torch.cuda.synchronize(device)
    return result, int(torch.cuda.max_memory_reserved(device)) - before


def with_peak(step: Callable[[], T], device: torch.device | None = None) -> tuple[T, int | None]:
    """Return the result of `step`, and the bytes at its peak above those in use before, in this process.

    For a CUDA `device` these are torch's reserved bytes, else the host's. None off Linux, because it resets and reads
    VmHWM. Memory that earlier steps freed is returned to the system first: otherwise a step that reuses it would seem
    to need none.
    """
    gc.collect()
    if device is not None and device.type == "cuda":
        return reserved_at_peak(step, device)
    trim_heap()
    try:
        reset_peak_memory()
        before = process_memory("VmRSS")
    except OSError:
        return step(), None
    result = step()
    return result, max(0, process_memory("VmHWM") - before)


def prepare_allocator(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let segments of device memory grow, so that packs of many sizes leave no unusable holes. Call it before CUDA
    starts. The user's settings of the allocator stay. For commands: a library leaves the environment to the program
    that imports it."""
    if not any(name in environment for name in _ALLOCATOR):
        environment[_ALLOCATOR[0]] = "expandable_segments:True"


def device_capacity(device: torch.device) -> int:
    """Return the whole memory of the device, or of the host within the limit of its control group."""
    if device.type != "cpu":
        import torch

        cuda = device.type == "cuda"
        return int(torch.cuda.mem_get_info(device)[1] if cuda else torch.mps.recommended_max_memory())
    most = total_memory()
    with suppress(OSError, ValueError):
        most = min(most, _group("memory.max"))
    return most


def process_memory(field: str, pid: int | None = None) -> int:
    """Return a line of /proc/PID/status, such as VmRSS, VmHWM or VmData. Raises OSError where there is none."""
    for line in _process(pid, "status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc has no {field}")


def resident_memory(pid: int | None = None) -> int:
    """Return the number of bytes that a process has in memory. Raises OSError where the system does not report
    them."""
    return int(_process(pid, "statm").read_text().split()[1]) * resource.getpagesize()


def proportional_memory(pid: int | None = None) -> int | None:
    """Return the number of bytes of a process, with shared pages divided among their users (proportional set size);
    None off Linux."""
    with suppress(OSError, ValueError, StopIteration):
        lines = _process(pid, "smaps_rollup").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("Pss:")).split()[1]) * 1024
    return None


def resident_memory_of(pid: int) -> int:
    """Return the number of bytes that another process has in memory; 0 if the system does not report them."""
    with suppress(OSError, ValueError, IndexError):
        return resident_memory(pid)
    told = subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, check=False)  # noqa: S603, S607
    return int(told.stdout.strip() or 0) * 1024


def device_memory() -> int:
    """Return the number of bytes of tensors on the CUDA devices, if torch has set them up."""
    cuda: Any = getattr(sys.modules.get("torch"), "cuda", None)  # may be in the middle of its import
    if not getattr(cuda, "is_initialized", bool)():
        return 0
    return sum(cuda.memory_allocated(i) for i in range(cuda.device_count()))


def peak_memory() -> dict[str, int]:
    """Return the most bytes used so far: by the process (`host`), and by tensors on the devices (`device`)."""
    torch = sys.modules.get("torch")  # a run that failed early has not waited for it
    device = 0
    if torch is not None and torch.cuda.is_available():
        device = sum(torch.cuda.max_memory_allocated(i) for i in range(torch.cuda.device_count()))
    return {"host": peak_resident_memory(), "device": device}


def peak_resident_memory() -> int:
    """Return the most that this process has had in memory."""
    with suppress(OSError):  # on Linux getrusage may give the peak of the process that started this one
        return process_memory("VmHWM")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def reset_peak_memory() -> None:
    """Restart VmHWM from the present use. Raises OSError off Linux."""
    (_PROC / "self/clear_refs").write_text("5")


def total_memory() -> int:
    """Return the whole memory of the host."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _process(pid: int | None, name: str) -> Path:
    return _PROC / ("self" if pid is None else str(pid)) / name


def _meminfo() -> dict[str, int]:
    lines = (_PROC / "meminfo").read_text().splitlines()
    return {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}


def _group(name: str) -> int:
    return int((_GROUP / name).read_text())


def _group_used() -> int:
    # Bytes that a control group cannot drop: pages without a file, in memory or swapped out; 0 if it does not report
    # them.
    with suppress(OSError, ValueError, KeyError):
        lines = dict(line.split() for line in (_GROUP / "memory.stat").read_text().splitlines())
        return int(lines["anon"]) + int(lines["shmem"]) + _group("memory.swap.current")
    return 0


def trim_heap() -> None:
    """Return malloc's free memory to the system; glibc only, elsewhere nothing happens."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc
_SMALL_BUDGET = 1 << 30  # of it, what malloc keeps between large blocks is a part that counts


def set_malloc(mapped: int, kept: int) -> None:
    """Take blocks of `mapped` bytes, from now on, from the system and return them to it; of others malloc keeps `kept`
    bytes that are free at the heap's end. glibc only; it maps all of 32 MiB."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, mapped)
        mallopt(_M_TRIM_THRESHOLD, kept)


def keep_blocks(budget: int | None = None) -> None:
    """Let malloc keep the memory of what a layer's calls compute, for walks with this budget.

    These tensors come and go with each chunk. Left to itself, malloc may return their pages each time, and the system
    fills them with zeros: that took up to a tenth of a walk's time.
    """
    set_malloc((8 if budget is not None and budget < _SMALL_BUDGET else 32) << 20, 64 << 20)


# Numbers of bytes as people write them.


_TOO_LARGE = 1 << 63
_SIZE = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)(i?)B?\s*$", re.IGNORECASE)


def parse_size(text: str | int) -> int:
    """Return the number of bytes of a size like `8GiB`, `500MB` or `1048576`. Raises ValueError."""
    match = _SIZE.match(str(text))
    if match is None:
        raise ValueError(f"{text!r} is not a size: use 8GiB, 500MB or 1048576")
    number, prefix, binary = match.groups()
    size = float(number) * (1024 if binary else 1000) ** " KMGT".index(prefix.upper() or " ")
    if size < 1:
        raise ValueError("must be more than 0")
    if size >= _TOO_LARGE:
        raise ValueError("must be less than 8EiB")
    return int(size)
