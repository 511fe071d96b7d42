"""Memory that a process allocates: its peak, and a limit on it.

The same quantity is measured and limited. On the CPU that is private memory as the system maps it, touched or not
(VmData, which RLIMIT_DATA bounds), on CUDA what torch's allocator has reserved, with the holes that nothing fits in.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import re
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prefillcli.errors import PrefillError
from prefillcli.runtime.memory import process_memory, reserved_at_peak, reserved_memory, resident_memory, trim_heap

if TYPE_CHECKING:
    import torch

#: Blocks from this size on are mapped by themselves and go back to the system as soon as they are freed. glibc raises
#: its own limit to the largest block freed so far, up to 32 MiB, and keeps smaller ones in a heap with holes: short
#: prompts would seem to need up to twice as much memory for each token as long ones.
_MAPPED_BYTES = 32 << 10
_M_MMAP_THRESHOLD = -3


def peak_bytes(step: Callable[[], object], device: str) -> int:
    """Bytes at the peak of `step` above what was allocated before. Raises PrefillError off Linux."""
    gc.collect()
    if device.startswith("cuda"):
        return reserved_at_peak(step, _cuda(device))[1]
    trim_heap()
    # The peak of the address space (VmPeak) cannot be reset. So the present size is raised to that peak, by space
    # without access, which the limit does not count: a later peak is then due to the step.
    below = _memory("VmPeak") - _memory("VmSize")
    room = mmap.mmap(-1, below, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=0) if below else nullcontext()
    with room:
        size = _memory("VmSize")
        step()
        return _memory("VmPeak") - size


def resident(device: str) -> int:
    """Bytes in use: reserved on the device, or resident in this process."""
    if device.startswith("cuda"):
        return reserved_memory(_cuda(device))
    return resident_memory()


@dataclass(slots=True)
class Enforcement:
    """A limit on what the process may allocate, in bytes: the host's private memory, or the device's reserved."""

    device: str
    limit: int

    def excess(self, error: BaseException) -> int | None:
        """Bytes beyond the limit that the failed allocation would have taken.

        None where that is not known: the error does not name the size, or raising it freed some memory.
        """
        asked = re.search(r"tried to allocate (\d+) bytes|Tried to allocate ([\d.]+) ([KMG])iB", str(error))
        if asked is None:
            return None
        size = int(asked[1]) if asked[1] else int(float(asked[2]) * 1024 ** ("KMG".index(asked[3]) + 1))
        beyond = _counted(self.device) + size - self.limit
        return beyond if beyond > 0 else None


@contextmanager
def enforced(device: str, budget: int) -> Iterator[Enforcement]:
    """Within this context, allocating more than `budget` bytes above what is allocated now fails.

    On the CPU by RLIMIT_DATA, which counts heap and anonymous mappings when they are made, touched or not. On CUDA
    torch's allocator refuses.
    """
    gc.collect()
    if device.startswith("cuda"):
        import torch

        torch.cuda.empty_cache()
        limit, own = _counted(device) + budget, _cuda(device)
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / torch.cuda.mem_get_info(own)[1]), own)
        try:
            yield Enforcement(device, limit)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, own)
        return
    trim_heap()
    limit = _counted(device) + budget
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, before[1]))
    try:
        yield Enforcement(device, limit)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def make_malloc_exact() -> None:
    """Make allocated memory follow used memory, without holes left by large blocks. glibc only."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)


def _counted(device: str) -> int:
    """What the limit counts."""
    if device.startswith("cuda"):
        return reserved_memory(_cuda(device))
    return _memory("VmData")


def _cuda(device: str) -> torch.device:
    """The device, whichever is the current one."""
    import torch

    found = torch.device(device)
    return torch.device("cuda", torch.cuda.current_device()) if found.index is None else found


def _memory(field: str) -> int:
    try:
        return process_memory(field)
    except OSError:
        raise PrefillError("this system does not report the memory of a process; Linux does") from None
