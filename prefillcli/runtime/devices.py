"""The device that computes."""

from __future__ import annotations

import torch

from prefillcli.errors import ResourceError, UsageError


def choose_device(name: str) -> torch.device:
    """The torch device of `--device`. Raises UsageError or, for a device that is not there, ResourceError."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"--device {name}: no such kind of device; use cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"--device {name}: only cpu and cuda are supported")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ResourceError(f"--device {name}: {torch.cuda.device_count()} CUDA devices found")
    return device
