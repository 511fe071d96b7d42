"""The machine that a profile was made on."""

from __future__ import annotations

from pydantic import BaseModel

from prefillcli.runtime.cores import affinity, cpu_name
from prefillcli.runtime.memory import total_memory


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
        cpu=cpu_name(),
        cores=len(affinity()),
        threads=torch.get_num_threads(),
        memory_bytes=total_memory(),
        gpu=torch.cuda.get_device_name(device) if device.startswith("cuda") else None,
    )
