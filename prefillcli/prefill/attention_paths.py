"""The ways in which attention is computed, by name, and which of them are ruled out on a device."""

from __future__ import annotations

import torch

#: Each way and what it is. "blocks" runs everywhere; where another is ruled out, blocks take its place.
PATHS: dict[str, str] = {
    "blocks": "explicit scores in float32, some keys at a time",
    "flash-cpu": "PyTorch's flash attention for CPUs",
    "products": "products in bfloat16 whose scores stay in the cache, on CPUs with instructions for them",
    "kernel": "a whole chunk in one call of the compiled kernel, on CPUs with AVX512-BF16",
    "flash-cuda": "PyTorch's flash attention for CUDA",
    "varlen-flash": "the same for many sequences of different lengths in one call",
    "flex": "compiled flex attention, for soft caps",
}

_ruled_out: dict[tuple[str, torch.device], str] = {}


def rule_out(path: str, device: torch.device, why: str) -> None:
    """Let no attention on `device` be computed this way in this process. Raises KeyError for an unknown one."""
    if path not in PATHS:
        raise KeyError(path)
    _ruled_out[path, _plain(device)] = why


def only_blocks(device: torch.device, why: str) -> None:
    """Let attention on `device` be computed with explicit scores alone."""
    for path in PATHS:
        if path != "blocks" and may_take(path, device):
            rule_out(path, device, why)


def may_take(path: str, device: torch.device) -> bool:
    """Whether attention on `device` may be computed this way."""
    return (path, _plain(device)) not in _ruled_out


def ruled_out(device: torch.device) -> dict[str, str]:
    """The ways that are ruled out on `device`, and why."""
    return {path: why for (path, where), why in _ruled_out.items() if where == _plain(device)}


def allow_all() -> None:
    """Forget what was ruled out."""
    _ruled_out.clear()


def _plain(device: torch.device) -> torch.device:
    """The device with its number: "cuda" is the first one."""
    return torch.device(device.type, 0) if device.type != "cpu" and device.index is None else device
