"""Memory that a process allocates: its peak, and a limit on it.

The same quantity is measured and limited. On the CPU that is private memory as the system maps it, touched or not
(VmData, which RLIMIT_DATA bounds), on CUDA what torch's allocator has given out or, for the limit, has reserved.
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

from prefillcli.errors import PrefillError
from prefillcli.runtime.memory import process_memory, resident_memory, trim_heap

#: Blocks from this size on are mapped by themselves and go back to the system as soon as they are freed. glibc raises
#: its own limit to the largest block freed so far, up to 32 MiB, and keeps smaller ones in a heap with holes: short
#: prompts would seem to need up to twice as much memory for each token as long ones.
_MAPPED_BYTES = 32 << 10
_M_MMAP_THRESHOLD = -3


def peak_bytes(step: Callable[[], object], device: str) -> int:
    """Bytes at the peak of `step` above what was allocated before. Raises PrefillError off Linux."""
    gc.collect()
    if device.startswith("cuda"):
        import torch

        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        torch.cuda.synchronize()
        return int(torch.cuda.max_memory_allocated()) - before
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
    """Bytes in use: of tensors on the device, or resident in this process."""
    if device.startswith("cuda"):
        import torch

        return int(torch.cuda.memory_allocated())
    return resident_memory()


@dataclass(slots=True)
class Enforcement:
    """A limit on what the process may allocate, in bytes: all private memory of the host, or the device's tensors."""

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
        limit = _counted(device) + budget
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / torch.cuda.mem_get_info()[1]))
        try:
            yield Enforcement(device, limit)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        return
    trim_heap()
    limit = _counted(device) + budget
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, before[1]))
    try:
        yield Enforcement(device, limit)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory ran out."""
    words = ("not enough memory", "can't allocate memory", "could not create a memory", "bad_alloc", "out of memory")
    return isinstance(error, MemoryError) or any(word in str(error) for word in words)


def make_malloc_exact() -> None:
    """Make allocated memory follow used memory, without holes left by large blocks. glibc only."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)


def _counted(device: str) -> int:
    """What the limit counts."""
    if device.startswith("cuda"):
        import torch

        return int(torch.cuda.memory_reserved())
    return _memory("VmData")


def _memory(field: str) -> int:
    try:
        return process_memory(field)
    except OSError:
        raise PrefillError("this system does not report the memory of a process; Linux does") from None
