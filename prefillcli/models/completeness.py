"""Whether a model and its weights belong together: each parameter has its tensor, and each tensor is taken.

transformers says what it has loaded, and knows for some families which tensors need no place. Others that may be left
over are listed here, each with its reason. The scores would lack anything else, so the model is refused.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from safetensors import safe_open

from prefillcli.errors import UsageError
from prefillcli.models.safetensors import read_header, weight_files

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

    `info` is what transformers says of loading it. The safetensors files are in `folder`, and `quantised` or not.
    """
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise UsageError(f"{origin}: the weights lack {len(missing)} tensors, {missing[0]} among them")
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
                f"{origin}: {name} is not finite\n"
                "a number of config.json must be wrong that says how positions are encoded"
            )


def _without_reason(model: Any, names: Collection[str], *, quantised: bool) -> list[str]:
    """Those of the names that no reason is known for."""
    heads = _VOCABULARY_HEADS if model.get_output_embeddings() is None else _OTHER_HEADS
    known = re.compile("|".join((*_COMPUTED, *_LATER_TOKENS, *heads, *(_ROUNDING if quantised else ()))))
    own = {name for name, _ in model.named_buffers()}  # which the model computes itself
    taken = tuple(model.state_dict())
    ahead = {found[1] for name in names if (found := _LAYER.match(name)) is not None}
    ahead -= {layer for layer in ahead if any(name.startswith(layer) for name in taken)}
    return [n for n in names if n not in own and not known.search(n) and not n.startswith(tuple(ahead))]


def _adds_nothing(folder: Path, name: str) -> bool:
    """Whether a tensor is a bias of zeros, which some programs save for each layer without one."""
    for path in weight_files(folder) if name.endswith(".bias") else ():
        if name in read_header(path):
            with safe_open(path, framework="pt") as file:
                return not file.get_tensor(name).any()
    return False
