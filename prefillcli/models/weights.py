"""The memory that a model's weights take, from the headers of their files, and whether they are loaded or streamed."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch

from prefillcli.errors import ResourceError, UsageError
from prefillcli.models.find import ModelFiles
from prefillcli.models.heads import auto_class
from prefillcli.models.open import Opened, WeightsChoice, refuse_what_cannot_fit
from prefillcli.models.quantised import plan_quantisation
from prefillcli.models.safetensors import layer_number, read_header, weight_files
from prefillcli.runtime import memory
from prefillcli.runtime.memory import parse_size

STREAMED_SHARE = 1 / 4  # of the free memory, for streamed weights where no --weights-memory is given

STREAMED_TO = ("cpu", "cuda")
"""Kinds of devices that weights can be streamed to."""

_ALIGNMENT_BYTES = 1 << 20  # for the gaps between the tensors of two layers

_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class WeightsPlan:
    """How a model's weights are kept: `bytes` are all of them, `memory` those on the device at a time, at most."""

    streamed: bool
    bytes: int
    memory: int


class _SavedTensor(NamedTuple):
    """A tensor in a file; `dtype` is None for one that stays as it is saved, whatever the model's dtype."""

    name: str
    dtype: torch.dtype | None
    numbers: int
    bytes: int


def weight_bytes(files: ModelFiles, device: torch.device) -> int:
    """Bytes of the device's free memory that the loaded weights take, at least.

    On the CPU, weights saved in the model's dtype stay mapped files, whose memory counts as free: only converted
    weights take any.
    """
    total = 0
    for tensor in _saved_tensors(files, device):
        if device.type != "cpu":
            total += tensor.numbers * files.dtype.itemsize if tensor.dtype else tensor.bytes
        elif tensor.dtype not in (None, files.dtype):
            total += tensor.numbers * files.dtype.itemsize
    return total


def plan_weights(opened: Opened, choice: WeightsChoice, *, draft: bool = True, share: float = 1.0) -> WeightsPlan:
    """Whether the weights are loaded or streamed, and in how much memory.

    `auto` streams where they do not fit in the device's memory, or in `--weights-memory`, if they can be
    streamed. With `draft` those of the draft, which stay in memory, have to fit as well. `share` is the part of the
    memory that streamed weights may take: other workers take the rest. Raises ResourceError where it is certain that
    the device has no room.
    """
    sizes = _layer_bytes(opened.files, opened.device)
    total, most = sum(sizes.values()), memory.loadable_memory(opened.device)
    small = draft_bytes(opened) if draft else 0
    free = None if most is None else max(most - small, 0)
    allowed = parse_size(choice.weights_memory) if choice.weights_memory else None
    limit = min((each for each in (allowed, free) if each is not None), default=total)
    streamable = opened.files.quantised is None and opened.files.part_of is None and not opened.adapters
    streamable = streamable and opened.device.type in STREAMED_TO
    if choice.weights == "resident" or (choice.weights == "auto" and (total <= limit or not streamable)):
        refuse_what_cannot_fit(opened, draft=draft)
        return WeightsPlan(False, total, total)
    if opened.device.type not in STREAMED_TO:
        raise UsageError(
            f"--weights stream: weights are streamed to CPUs and CUDA devices, not to {opened.device}\n"
            "take --weights resident, or --device cpu"
        )
    given = None if allowed is None else int(allowed * share)  # resident weights are shared between workers
    layers = sorted((size for number, size in sizes.items() if number is not None), reverse=True)
    least = sizes.get(None, 0) + sum(layers[:1]) * min(2, len(layers))
    if free is not None and max(least, given or 0) > free:
        dtype = str(opened.files.dtype).removeprefix("torch.")
        asked = f"--weights-memory {choice.weights_memory}" if given else "embedding, head and two layers"
        and_draft = " beside the draft" if small else ""
        raise ResourceError(
            f"{opened.files.origin}: the weights take {total / 2**30:.1f} GiB in {dtype}, and even streamed, {asked} "
            f"take more than the {free / 2**30:.1f} GiB that {opened.device} has free{and_draft}\n"
            "take a smaller model, or another --dtype or --device"
        )
    enough = least + least // 50 + _ALIGNMENT_BYTES
    most_memory = given or max(enough, int((free or 0) * STREAMED_SHARE * share))
    return WeightsPlan(True, total, min(most_memory, max(total, enough)))


def draft_bytes(opened: Opened) -> int:
    """Bytes of the device's free memory that the draft's weights take, at least; 0 without a draft."""
    return 0 if opened.draft is None else weight_bytes(opened.draft, opened.device)


def _layer_bytes(files: ModelFiles, device: torch.device) -> dict[int | None, int]:
    """Bytes of the weights in the model's dtype, by the number of their layer; None for all others."""
    found: dict[int | None, int] = defaultdict(int)
    for tensor in _saved_tensors(files, device):
        found[layer_number(tensor.name)] += tensor.numbers * files.dtype.itemsize if tensor.dtype else tensor.bytes
    return dict(found)


def _saved_tensors(files: ModelFiles, device: torch.device) -> Iterator[_SavedTensor]:
    """The tensors in a model's files; of GGUF files as they will be in the cache, and of quantised weights that are
    unpacked on the device as they will be there."""
    if files.gguf is not None and not files.saved:
        for each in files.gguf.tensors:
            yield _SavedTensor(each.name, files.dtype, each.numbers, each.numbers * files.dtype.itemsize)
        return
    quantisation = plan_quantisation(files.origin, files.quantised, device)
    if quantisation is not None and quantisation.kept == "unpacked":
        yield from _unpacked_tensors(files)
        return
    for path in weight_files(files.path):
        for name, tensor in read_header(path).items():
            begin, end = tensor["data_offsets"]
            yield _SavedTensor(name, _FLOATS.get(tensor["dtype"]), prod(tensor["shape"]), end - begin)


def _unpacked_tensors(files: ModelFiles) -> Iterator[_SavedTensor]:
    """The tensors of a quantised model once it is loaded; those that are whole in the files have their dtype there."""
    whole = {
        name: _FLOATS.get(tensor["dtype"])
        for path in weight_files(files.path)
        for name, tensor in read_header(path).items()
    }
    config = copy.deepcopy(files.config)
    vars(config).pop("quantization_config", None)
    with torch.device("meta"):
        empty = auto_class(files.head).from_config(config, dtype=files.dtype)
    for name, tensor in {id(each): (name, each) for name, each in empty.state_dict(keep_vars=True).items()}.values():
        yield _SavedTensor(name, whole.get(name) or torch.uint8, tensor.numel(), tensor.nbytes)
