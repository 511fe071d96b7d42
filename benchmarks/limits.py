"""A limit on the memory that this process may allocate: what a longest prompt is proven under."""

from __future__ import annotations

import gc
import resource
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from prefillcli.runtime.memory import process_memory, reserved_memory, trim_heap


@contextmanager
def enforced(device: str, budget: int) -> Iterator[int]:
    """Within this context, allocating more than `budget` bytes above the present allocation fails; gives the limit.

    On the CPU RLIMIT_DATA enforces it, which counts heap and anonymous mappings when they are made, touched or not. On
    CUDA torch's allocator does.
    """
    gc.collect()
    if device.startswith("cuda"):
        own = torch.device(device)
        own = torch.device("cuda", torch.cuda.current_device()) if own.index is None else own
        torch.cuda.empty_cache()
        limit = reserved_memory(own) + budget
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / torch.cuda.mem_get_info(own)[1]), own)
        try:
            yield limit
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, own)
        return
    trim_heap()
    limit = process_memory("VmData") + budget
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, before[1]))
    try:
        yield limit
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
