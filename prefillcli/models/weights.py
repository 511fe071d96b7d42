"""What a model's weights take, by the headers of their files."""

from __future__ import annotations

from math import prod
from pathlib import Path

import torch

from prefillcli.models.files import read_header, read_json
from prefillcli.models.model import ModelFiles

_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def weight_bytes(files: ModelFiles, device: torch.device) -> int:
    """Bytes of the device's free memory that the loaded weights take, at least.

    On the CPU weights that are saved in the model's dtype stay mapped files, whose memory counts as free: only those
    that are converted take any.
    """
    total = 0
    for path in weight_files(files.path):
        for tensor in read_header(path).values():
            begin, end = tensor["data_offsets"]
            saved = _FLOATS.get(tensor["dtype"])
            if device.type != "cpu":
                total += prod(tensor["shape"]) * files.dtype.itemsize if saved else end - begin
            elif saved not in (None, files.dtype):
                total += prod(tensor["shape"]) * files.dtype.itemsize
    return total


def loadable_bytes(device: torch.device) -> int | None:
    """Bytes that weights on `device` can take at the very most; None if this system does not tell."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        most = sum(int(fields[name].split()[0]) * 1024 for name in ("MemAvailable", "SwapFree"))
    except (OSError, KeyError, ValueError):
        return None
    try:  # a control group counts files' pages as used, which it can drop: its limit alone is certain
        group = Path("/sys/fs/cgroup")
        most = min(most, sum(int((group / name).read_text()) for name in ("memory.max", "memory.swap.max")))
    except (OSError, ValueError):
        pass  # no control group, or "max": no limit
    return most


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of a model directory that transformers loads; some directories hold a second copy."""
    whole, index = path / "model.safetensors", path / "model.safetensors.index.json"
    if whole.is_file():
        return [whole]
    if index.is_file():
        names = set(read_json(index).get("weight_map", {}).values())
        return sorted(path / name for name in names if (path / name).is_file())
    return []
