"""A model without weights, on the meta device, and whether it is as large as the weights that are there for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from threading import get_ident
from typing import Any

import torch
from torch.nn.modules import module as hooks
from transformers import PreTrainedModel

from prefillcli.errors import UsageError
from prefillcli.models.heads import ClassHead, auto_class
from prefillcli.models.multimodal import TextPart
from prefillcli.models.transformers_log import quiet_transformers

_TIMES = 4  # what is built for a model's numbers: tied tensors are counted whenever they are assigned
_BESIDE = 1 << 27  # numbers that are in no file: tables of positions and masks
_MODULES = 64  # for each tensor in the files


def build_empty(whole: Any, head: ClassHead | None, part: TextPart | None, dtype: torch.dtype) -> PreTrainedModel:
    """The model that is loaded with this configuration of transformers, or the text part of it, without weights."""
    with quiet_transformers(), torch.device("meta"):
        kind, config = (auto_class(head), whole) if part is None else (part.kind, part.config)
        build: Callable[..., PreTrainedModel] = kind.from_config if part is None else kind._from_config
        return build(config, dtype=dtype, attn_implementation="eager")


def refuse_larger(
    file: Path, model: Callable[[], PreTrainedModel], tensors: Mapping[str, Mapping[str, Any]], *, packed: bool
) -> None:
    """Build an empty model, and raise UsageError, as soon as it can, if it is larger than the tensors in its files.

    Its configuration is in `file`. Of `packed` tensors, each bit may be a number. That every tensor fits is found when
    they are loaded: this bounds what is made of a configuration before that, in memory and time. What cannot be built
    is told there, too.
    """
    numbers = sum(
        8 * (each["data_offsets"][1] - each["data_offsets"][0]) if packed else prod(each["shape"])
        for each in tensors.values()
    )
    try:
        with bounded(file, numbers, len(tensors)):
            built = model()
    except UsageError:
        raise
    except Exception:  # some families want a package, which other engines do without
        return
    own = {id(each): each.numel() for each in (*built.parameters(), *built.buffers())}
    if sum(own.values()) > numbers + numbers // 4 + _BESIDE:
        raise _too_large(file, numbers)


@contextmanager
def bounded(file: Path, numbers: int, tensors: int) -> Iterator[None]:
    """What this thread builds inside may be a model of so many numbers in so many tensors, give or take.

    What is built is described in `file`. Raises UsageError as soon as it is certainly larger.
    """
    left, thread = [_TIMES * numbers + _BESIDE, _MODULES * tensors + 10_000], get_ident()

    def count(_: Any, name: str, added: Any) -> None:
        if added is None or get_ident() != thread:
            return
        if isinstance(added, torch.Tensor):
            left[0] -= added.numel()
        else:
            left[1] -= 1
        if min(left) < 0:
            raise _too_large(file, numbers)

    handles = [
        hooks.register_module_parameter_registration_hook(count),
        hooks.register_module_buffer_registration_hook(count),
        hooks.register_module_module_registration_hook(count),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _too_large(file: Path, numbers: int) -> UsageError:
    return UsageError(
        f"{file}: describes a model that is larger than its weights, which have {numbers:,} numbers\n"
        "a number in it that says how wide, deep or long the model is must be wrong"
    )
