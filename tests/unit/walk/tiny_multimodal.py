"""Tiny multimodal models, built whole, with the smallest eyes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from tests.unit.walk.tiny_models import CHANGES, EXPERTS, redraw, sized

TEXT_FILE, OTHER_FILE = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
_EYES: dict[str, Any] = {
    **dict.fromkeys(("projector_input_dim", "projector_output_dim", "num_position_embeddings"), 16),
    "intermediate_layers_indices": [0],
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


#: Families whose text model has no class of its own, and what it needs besides the general sizes.
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


def make_whole_config(family: str, **changes: object) -> PreTrainedConfig:
    """The configuration of a multimodal family at test size, with `changes` outside of its parts."""
    kind = whole_class(family).config_class
    whole = kind()
    parts = {name: getattr(whole, name) for name in kind.sub_configs}
    text = whole.get_text_config(decoder=True)
    for name, part in parts.items():
        if part is text:
            parts[name] = sized(type(part), WHOLE.get(family, CHANGES.get(part.model_type, {})))
        else:
            known = part.to_dict()
            parts[name] = type(part)(**{size: value for size, value in _EYES.items() if size in known})
    return kind(**parts, **changes)


def make_whole_model(family: str, **changes: object) -> PreTrainedModel:
    """A multimodal model, in float32 and eval mode."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = whole_class(family)._from_config(make_whole_config(family, **changes), attn_implementation="eager")
    return redraw(model.eval())


def save_whole(folder: Path, model: PreTrainedModel) -> None:
    """Save it. What is not of the text model is not a number in a file of its own."""
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    seen = {name: each for name, each in tensors.items() if any(p in name for p in ("vision", "visual", "projector"))}
    (folder / "model.safetensors").unlink()
    save_file({name: each for name, each in tensors.items() if name not in seen}, folder / TEXT_FILE)
    save_file({name: torch.full_like(each, float("nan")) for name, each in seen.items()}, folder / OTHER_FILE)
    places = {name: OTHER_FILE if name in seen else TEXT_FILE for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
