"""The newest flash attention: what torch takes in the place of its own, by `torch.nn.attention`.

FA3 and FA4 are packages beside torch. The newest that is installed stays in place if it agrees with explicit scores
where flash attention is used, with heads as wide as those of each model that this process has loaded: these packages
refuse some widths. Otherwise torch's own stays. Torch has one for all devices and models.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import torch
from torch.nn import attention as torch_attention

from prefillcli.errors import brief
from prefillcli.models.rehearsal import DeviceRecord, settle_paths
from prefillcli.models.shape import NoCostModel, Shape
from prefillcli.runtime import log
from prefillcli.walk.attention import WIDEST
from prefillcli.walk.attention_checks import check_paths, lacks

_PATHS = ("varlen-flash", "flash-cuda")
_needed: dict[tuple[torch.device, torch.dtype, int], None] = {}  # what models were loaded with
_not_taken: dict[str, str] = {}  # in this process, and why
_taken: list[str] = []  # by this module


def settle_attention(device: torch.device, dtype: torch.dtype, config: Any) -> None:
    """Settle how attention is computed before a model of this `dtype` and `config` computes on `device`: by torch's
    own paths that agree (`settle_paths`, whose errors are raised), and by the newest flash attention."""
    _put_away()
    settle_paths(device, dtype)
    settle_flash(device, dtype, _head_widths(config))


def _head_widths(config: Any) -> Iterator[int]:
    # Those that flash attention takes.
    for each in config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config]:
        with suppress(NoCostModel):  # a layer without heads
            width = getattr(each, "qk_head_dim", None) or Shape(each).head_width
            if width <= WIDEST:
                yield width


def settle_flash(
    device: torch.device, dtype: torch.dtype, widths: Iterable[int], *, anew: bool = False
) -> dict[str, str | None]:
    """Take the newest flash attention that agrees in this `dtype` on `device`, with heads of these widths.

    Gives the implementations, newest first, with the reason why one is not taken: None for the last one, which is. It
    is empty where flash attention is not for the device and dtype, or somebody else has chosen one. Outcomes are
    remembered, and found `anew` if asked for.
    """
    current = current_flash()
    if lacks("varlen-flash", device, dtype) is not None or (current is not None and current not in _taken):
        return {}
    _needed.update(dict.fromkeys((device, dtype, width) for width in widths))
    found: dict[str, str | None] = {}
    names: list[str] = getattr(torch_attention, "list_flash_attention_impls", list)() if _needed else []
    for name in sorted(names, reverse=True):
        why = _not_taken.get(name) or _why_not(name, anew)
        found[name] = why
        if why is None:
            break
        _not_taken[name] = why
        _put_away()
    return found


def current_flash() -> str | None:
    """The implementation that is in the place of torch's own; None if that is."""
    current: str | None = getattr(torch_attention, "current_flash_attention_impl", lambda: None)()
    return current


def _put_away() -> None:
    if current_flash() in _taken:
        torch_attention.restore_flash_attention_impl()


def _why_not(name: str, anew: bool) -> str | None:
    # Takes an implementation, unless it is known not to agree. Gives the reason if it does not.
    for device, dtype, width in _needed:
        record, key = DeviceRecord(device), f"{name} at {width}/{str(dtype).removeprefix('torch.')}"
        if anew or key not in record.paths:
            why = _take(name)
            if why is not None:
                return why
            checks = check_paths(_PATHS, device, dtype, width=width)
            record.paths[key] = next((each.why for each in checks if each.status in ("differs", "fails")), None)
            record.save()
            if record.paths[key] is not None:
                log.warning(f"attention on {device} goes without {name}: {record.paths[key]}")
        if record.paths[key] is not None:
            return record.paths[key]
    return _take(name)


def _take(name: str) -> str | None:
    # Gives the reason if it cannot be taken.
    if current_flash() != name:
        try:
            torch_attention.activate_flash_attention_impl(name)
        except Exception as error:  # of an import, and of what registers its kernels
            return brief(error)
        _taken.append(name)
    return None
