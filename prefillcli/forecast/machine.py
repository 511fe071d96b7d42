"""The machine that a profile was made on."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from pydantic import BaseModel


class Machine(BaseModel):
    """What decides how fast a model runs here."""

    cpu: str  # model name
    cores: int  # that this process may use
    threads: int  # that torch uses
    memory_bytes: int  # of the host, in all
    gpu: str | None = None  # name of the profiled device, if it is one


def this_machine(device: str) -> Machine:
    """The machine as it is now; `device` as torch writes it ("cpu", "cuda:0")."""
    import torch

    return Machine(
        cpu=_cpu_name(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        gpu=torch.cuda.get_device_name(device) if device.startswith("cuda") else None,
    )


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
