"""Tiny checkpoints of models that also have eyes, with random weights: text in one file, all else in another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from tests.unit.walk.tiny_models import class_names, make_tiny_config, redraw

TEXT_FILE, OTHER_FILE = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 2, 4]}
#: The settings of the text model of each family, beside the usual tiny ones.
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma3": {},
    "llama4": {},
    "mllama": {"cross_attention_layers": [1]},
    "mistral3": {},
    "llava": {},
    "qwen2_5_vl": {"rope_parameters": _ROPE},
    "qwen3_vl": {"rope_parameters": _ROPE},
    "qwen3_5": {},
}
_EYES = {
    **dict.fromkeys(("hidden_size", "intermediate_size", "embed_dim", "vision_output_dim"), 32),
    **dict.fromkeys(("projector_input_dim", "projector_output_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "num_attention_heads", "depth", "num_heads", "attention_heads"), 2),
    "deepstack_visual_indexes": [0],
    "fullatt_block_indexes": [0],
    "intermediate_layers_indices": [0],
    "out_hidden_size": 64,
    "num_global_layers": 1,
    "num_position_embeddings": 16,
    "image_size": 28,
    "patch_size": 14,
}


_LIKE = "qwen3"  # has the sizes of text models that are in no registry
_OWN = ("model_type", "architectures", "transformers_version", "rope_parameters", "layer_types", "dtype")


def make_whole(family: str) -> PreTrainedModel:
    """The whole model, in eval mode, in float32."""
    default = AutoConfig.for_model(family)
    text, eyes = default.get_text_config(), default.vision_config
    like = make_tiny_config(text.model_type if text.model_type in class_names() else _LIKE).to_dict()
    sizes = {name: like[name] for name in text.to_dict() if name in like and name not in _OWN}
    tiny = type(text)(**sizes, **FAMILIES[family])
    seen = {name: value for name, value in _EYES.items() if name in eyes.to_dict()}
    config = type(default)(
        text_config=tiny.to_dict(), vision_config={**seen, "model_type": eyes.model_type}, tie_word_embeddings=False
    )
    kind = getattr(transformers, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[family])
    with torch.random.fork_rng():
        torch.manual_seed(7)  # with other decays of qwen3_5, float32 may be 4e-4 off for the whole model too
        model = kind._from_config(config, attn_implementation="eager")
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
