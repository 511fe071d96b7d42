"""Tiny multimodal models whose text model has no class of its own: built whole, with the smallest eyes."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from tests.unit.walk.tiny_models import EXPERTS, redraw, sized

_EYES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "intermediate_size", "embed_dim", "vision_output_dim"), 16),
    **dict.fromkeys(("depth", "num_hidden_layers", "num_global_layers"), 1),
    **dict.fromkeys(("num_heads", "num_attention_heads", "attention_heads", "num_key_value_heads"), 2),
    "fullatt_block_indexes": [0],
    "deepstack_visual_indexes": [0],
    "out_hidden_size": 64,
    "image_size": 28,
    "patch_size": 14,
}


def _rope(*sections: int) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(sections)}}


#: By family, what its text model needs besides the general sizes.
WHOLE: dict[str, dict[str, Any]] = {
    "ernie4_5_vl_moe": {
        **_rope(3, 3, 2),
        "moe_intermediate_size": [32, 16],
        "moe_num_experts": EXPERTS,
        "moe_k": 2,
    },
    "glm4v": _rope(2, 3, 3),
    "glm4v_moe": _rope(1, 1, 2),
    "glm_ocr": _rope(2, 3, 3),
    "hunyuan_vl": _rope(2, 3, 3),
    "paddleocr_vl": _rope(2, 3, 3),
    "qwen2_5_vl": _rope(2, 3, 3),
    "qwen2_vl": _rope(2, 3, 3),
    "qwen3_vl": _rope(2, 3, 3),
    "qwen3_vl_moe": _rope(2, 3, 3),
    "step3p7": {},
}


def whole_class(family: str) -> type[PreTrainedModel]:
    """The class of a multimodal family."""
    return getattr(transformers, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[family])


def make_whole_config(family: str) -> PreTrainedConfig:
    """The configuration of a multimodal family at test size."""
    kind = whole_class(family).config_class
    whole = kind()
    parts = {name: getattr(whole, name) for name in kind.sub_configs}
    text = whole.get_text_config(decoder=True)
    for name, part in parts.items():
        if part is text:
            parts[name] = sized(type(part), WHOLE[family])
        else:
            known = part.to_dict()
            parts[name] = type(part)(**{size: value for size, value in _EYES.items() if size in known})
    return kind(**parts)


def make_whole_model(family: str) -> PreTrainedModel:
    """A multimodal model, in float32 and eval mode."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = whole_class(family)._from_config(make_whole_config(family), attn_implementation="eager")
    return redraw(model.eval())
