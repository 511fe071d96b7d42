"""A model without weights, on the meta device, and whether it is as large as the weights in its files."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from math import prod
from pathlib import Path
from threading import get_ident
from typing import Any

import torch
from safetensors import safe_open
from torch.nn.modules import module as hooks
from transformers import PreTrainedModel
from transformers.initialization import TORCH_INIT_FUNCTIONS
from transformers.utils import logging as transformers_logging

from prefillcli.errors import UsageError, counted
from prefillcli.models.files import read_header, weight_files
from prefillcli.models.heads import ClassHead, auto_class
from prefillcli.models.multimodal import TextPart, no_advice

# Messages of transformers while it loads.


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' progress bars and advice; errors are raised. Tensors of the meta device, which have no
    numbers, get no initial ones: torch takes longer for that than for all else of an empty model."""
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    first = dict(TORCH_INIT_FUNCTIONS)
    _begin_with({name: partial(_unless_empty, function) for name, function in first.items()})
    try:
        with no_advice():
            yield
    finally:
        _begin_with(first)
        if bars:
            transformers_logging.enable_progress_bar()


def _begin_with(functions: Mapping[str, Callable[..., Any]]) -> None:
    # From now on parameters get their initial numbers from these functions, in torch and in transformers.
    TORCH_INIT_FUNCTIONS.update(functions)
    for name, function in functions.items():
        setattr(torch.nn.init, name, function)


def _unless_empty(function: Callable[..., Any], tensor: Any, *args: Any, **kwargs: Any) -> Any:
    return tensor if tensor.is_meta else function(tensor, *args, **kwargs)


def limit_kernel_advice(device_type: str) -> None:
    """On CPUs, leave out the advice to install kernels for recurrent layers: there are none for CPUs."""
    logger = logging.getLogger("transformers.integrations.hub_kernels")
    change = logger.addFilter if device_type == "cpu" else logger.removeFilter
    change(_is_no_fallback)


def _is_no_fallback(record: logging.LogRecord) -> bool:
    return "falling back to its reference" not in record.getMessage()


def limit_cast_advice() -> None:
    """Leave out the message of bitsandbytes at each product of 8 bits, that it computes in float16."""
    logging.getLogger("bitsandbytes.autograd._functions").addFilter(_is_no_cast)


def _is_no_cast(record: logging.LogRecord) -> bool:
    return "inputs will be cast" not in record.getMessage()


_TIMES = 4  # times a model's numbers that may be built: tied tensors are counted at each assignment
_BESIDE = 1 << 27  # numbers that are in no file: tables of positions and masks
_MODULES = 64  # for each tensor in the files


def build_empty(whole: Any, head: ClassHead | None, part: TextPart | None, dtype: torch.dtype) -> PreTrainedModel:
    """Build the model that transformers loads with this configuration, or its text part, without weights."""
    with quiet_transformers(), torch.device("meta"):
        kind, config = (auto_class(head), whole) if part is None else (part.kind, part.config)
        build: Callable[..., PreTrainedModel] = kind.from_config if part is None else kind._from_config
        return build(config, dtype=dtype, attn_implementation="eager")


def refuse_larger(
    file: Path, model: Callable[[], PreTrainedModel], tensors: Mapping[str, Mapping[str, Any]], *, packed: bool
) -> None:
    """Build an empty model, and raise UsageError as early as possible if it is larger than the tensors in its files.

    Its configuration is in `file`. In `packed` tensors, each bit may be a number. Loading checks that every tensor
    fits. Before that, this bounds the memory and time that a configuration can take. Loading also reports models that
    cannot be built.
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
    except Exception:  # some families need a package, which other engines do without
        return
    own = {id(each): each.numel() for each in (*built.parameters(), *built.buffers())}
    if sum(own.values()) > numbers + numbers // 4 + _BESIDE:
        raise _too_large(file, numbers)


@contextmanager
def bounded(file: Path, numbers: int, tensors: int) -> Iterator[None]:
    """Let this thread build a model, inside the block, of about `numbers` numbers in `tensors` tensors at most.

    `file` describes the model. Raises UsageError as soon as it is certainly larger.
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
        "a number in it for the model's width, depth or length must be wrong"
    )


# Whether a model and its weights belong together: each parameter has its tensor, and each tensor is taken.
#
# transformers reports the loaded tensors, and knows for some families which tensors need no place. Others that may be
# left over are listed here, each with its reason. Any other tensor would be missing from the scores, so the model is
# refused.


_COMPUTED = (
    r"(^|\.)(original_)?inv_freq$",  # rotary encodings follow from the configuration
    r"\.rotary_emb\.(cos|sin)_cached$",
    r"(^|\.)position_ids$",
    r"(^|\.)(attn|attention)\.(bias|masked_bias|causal_mask)$",  # attention masks of old GPT checkpoints
    r"(^|\.)(en|de)coder\.version$",  # a mark of fairseq
)
_LATER_TOKENS = (r"(^|\.)mtp(_layers|_block)?\.",)  # layers that guess the tokens after the next one
_OTHER_HEADS = (r"^(score|v_head)\.",)  # of classes and of training, beside the vocabulary's head
_VOCABULARY_HEADS = (r"^(lm_head|embed_out)\.",)  # beside a head of classes
_ROUNDING = (
    r"\.(SCB|weight_format|g_idx)$",  # how bitsandbytes and GPTQ have packed a weight
    r"\.([qkv]|kv|input|output)(_global)?_(scale|zero_point)(_inv)?$",  # of caches and activations in few bits
)
_LAYER = re.compile(r"^(.*\blayers\.\d+\.)eh_proj\.")  # joins two tokens: only layers that guess later ones have it


def require_complete(
    origin: Path, model: Any, info: dict[str, Any], folder: Path | None = None, *, quantised: bool = False
) -> None:
    """Raise UsageError if `model` has a parameter that no tensor filled, or its files a tensor that nothing takes, or
    if its configuration gives rotary frequencies that are not finite: kernels read those as anything.

    `info` is transformers' report on loading it. The safetensors files are in `folder`, `quantised` or not.
    """
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise UsageError(f"{origin}: the weights lack {counted(len(missing), 'tensor')}, {missing[0]} among them")
    left = sorted(_without_reason(model, info["unexpected_keys"], quantised=quantised))
    left = [name for name in left if folder is None or not _adds_nothing(folder, name)]
    if left:
        raise UsageError(
            f"{origin}: {len(left)} tensors of the weights have no place in a {type(model).__name__} of this "
            f"configuration, {left[0]} among them\ntake the config.json that belongs to these weights"
        )
    for name, tensor in model.named_buffers():
        if name.endswith("inv_freq") and not tensor.is_meta and not tensor.isfinite().all():
            raise UsageError(
                f"{origin}: {name} is not finite\na number of config.json for the encoding of positions must be wrong"
            )


def _without_reason(model: Any, names: Collection[str], *, quantised: bool) -> list[str]:
    # The names for which no reason is known.
    heads = _VOCABULARY_HEADS if model.get_output_embeddings() is None else _OTHER_HEADS
    known = re.compile("|".join((*_COMPUTED, *_LATER_TOKENS, *heads, *(_ROUNDING if quantised else ()))))
    own = {name for name, _ in model.named_buffers()}  # which the model computes itself
    taken = tuple(model.state_dict())
    ahead = {found[1] for name in names if (found := _LAYER.match(name)) is not None}
    ahead -= {layer for layer in ahead if any(name.startswith(layer) for name in taken)}
    return [n for n in names if n not in own and not known.search(n) and not n.startswith(tuple(ahead))]


def _adds_nothing(folder: Path, name: str) -> bool:
    # Whether a tensor is a bias of zeros, which some programs save for each layer without one.
    for path in weight_files(folder) if name.endswith(".bias") else ():
        if name in read_header(path):
            with safe_open(path, framework="pt") as file:
                return not file.get_tensor(name).any()
    return False
