"""The memory that a model's weights take, from the headers of their files."""

from __future__ import annotations

from math import prod

import torch

from prefillcli.models.find import ModelFiles
from prefillcli.models.safetensors import read_header, weight_files

_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def weight_bytes(files: ModelFiles, device: torch.device) -> int:
    """Bytes of the device's free memory that the loaded weights take, at least.

    On the CPU, weights saved in the model's dtype stay mapped files, whose memory counts as free: only converted
    weights take any.
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
