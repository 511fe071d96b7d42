"""The device that computes."""

from __future__ import annotations

import torch

from prefillcli.errors import ResourceError, UsageError

KINDS = ("cpu", "cuda", "mps")


def choose_device(name: str) -> torch.device:
    """The torch device of `--device`. Raises UsageError or, for a device that is not there, ResourceError.

    `auto` takes a CUDA device where there is one, else the CPU. An Apple GPU (`mps`) is taken by its name alone.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"--device {name}: no such kind of device; use cpu, cuda, cuda:N or mps") from None
    if device.type not in KINDS:
        raise UsageError(f"--device {name}: only cpu, cuda and mps are supported")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        found = f"--device {name}: {torch.cuda.device_count()} CUDA devices found"
        if torch.version.cuda is None and torch.version.hip is None:
            found += f"\ntorch {torch.__version__} is built for CPUs; install a CUDA build of it"
        raise ResourceError(found)
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ResourceError(f"--device {name}: no Apple GPU found, or this torch is built without support for it")
    return device


def other_devices(device: torch.device) -> list[str]:
    """The devices of this machine besides this one, as `--device` calls them."""
    found = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    found += ["mps"] if torch.backends.mps.is_available() else []
    own = f"cuda:{device.index or 0}" if device.type == "cuda" else device.type
    return [name for name in found if name != own]
