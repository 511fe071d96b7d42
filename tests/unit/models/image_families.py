"""Tiny folders of models that read images, each with a processor and a chat template as its family has them.

`make_family` writes one; `eager_logits` is transformers' whole forward over it.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL.Image import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 400,
    "max_position_embeddings": 4096,
    "pad_token_id": 256,
    "bos_token_id": 257,
    "eos_token_id": 258,
}
_PAD, _BOS, _EOS = "<pad>", "<bos>", "<eos>"


@dataclass(frozen=True)
class Family:
    """What is peculiar to a family: its special tokens, its template's text for an image, and its configuration."""

    tokens: Sequence[str]  # from id 259 on
    written: str  # what a chat template writes for an image
    config: Callable[[Callable[[str], int]], PreTrainedConfig]
    processor: str
    images: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)
    tokenizer: dict[str, str] = field(default_factory=dict)


def _siglip(**changes: Any) -> dict[str, Any]:
    return {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 32,
        "patch_size": 8,
        **changes,
    }


def _smolvlm(ids: Callable[[str], int]) -> PreTrainedConfig:
    return transformers.SmolVLMConfig(
        text_config={"model_type": "llama", **TEXT},
        vision_config={"model_type": "smolvlm_vision", **_siglip()},
        image_token_id=ids("<image>"),
        scale_factor=2,
        pad_token_id=256,
        tie_word_embeddings=False,
    )


def _idefics3(ids: Callable[[str], int]) -> PreTrainedConfig:
    return transformers.Idefics3Config(
        text_config={"model_type": "llama", **TEXT},
        vision_config={"model_type": "idefics3_vision", **_siglip()},
        image_token_id=ids("<image>"),
        scale_factor=2,
        pad_token_id=256,
        tie_word_embeddings=False,
    )


_PINPOINTS = [[32, 32], [32, 64], [64, 32], [64, 64], [32, 96], [96, 32]]


def _llava_onevision(ids: Callable[[str], int]) -> PreTrainedConfig:
    return transformers.LlavaOnevisionConfig(
        text_config={"model_type": "qwen2", **TEXT},
        vision_config={"model_type": "siglip_vision_model", "vision_use_head": False, **_siglip()},
        image_token_id=ids("<image>"),
        video_token_id=ids("<video>"),
        image_grid_pinpoints=_PINPOINTS,
        vision_aspect_ratio="anyres_max_9",
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        tie_word_embeddings=False,
    )


def _rope(*sections: int, **more: Any) -> dict[str, Any]:
    return {
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(sections), **more}
    }


def _qwen(
    kind: str, vision: dict[str, Any], text: dict[str, Any]
) -> Callable[[Callable[[str], int]], PreTrainedConfig]:
    def build(ids: Callable[[str], int]) -> PreTrainedConfig:
        config: type[PreTrainedConfig] = getattr(transformers, kind)
        return config(
            text_config={**TEXT, **text},
            vision_config=vision,
            image_token_id=ids("<|image_pad|>"),
            video_token_id=ids("<|video_pad|>"),
            vision_start_token_id=ids("<|vision_start|>"),
            vision_end_token_id=ids("<|vision_end|>"),
            tie_word_embeddings=False,
        )

    return build


_SMOL_TOKENS = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", "<video>"] + [
    f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)
]
_SMOL_IMAGES = {
    "do_image_splitting": True,
    "size": {"longest_edge": 96},
    "max_image_size": {"longest_edge": 32},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
_QWEN_TOKENS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<|vision_pad|>"]
_QWEN_WRITTEN = "<|vision_start|><|image_pad|><|vision_end|>"
_QWEN_IMAGES = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 8,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 32 * 32, "longest_edge": 96 * 96},
}

FAMILIES: dict[str, Family] = {
    "smolvlm": Family(
        tokens=_SMOL_TOKENS,
        written="<image>",
        config=_smolvlm,
        processor="SmolVLMProcessor",
        images={"image_processor_type": "SmolVLMImageProcessor", **_SMOL_IMAGES},
        settings={"image_seq_len": 4},
    ),
    "idefics3": Family(
        tokens=_SMOL_TOKENS,
        written="<image>",
        config=_idefics3,
        processor="Idefics3Processor",
        images={"image_processor_type": "Idefics3ImageProcessor", **_SMOL_IMAGES},
        settings={"image_seq_len": 4},
    ),
    "llava_onevision": Family(
        tokens=["<image>", "<video>"],
        written="<image>\n",
        config=_llava_onevision,
        processor="LlavaOnevisionProcessor",
        images={
            "image_processor_type": "LlavaOnevisionImageProcessor",
            "image_grid_pinpoints": _PINPOINTS,
            "size": {"height": 32, "width": 32},
        },
        settings={"num_image_tokens": 16, "vision_feature_select_strategy": "full"},
    ),
    "qwen2_vl": Family(
        tokens=_QWEN_TOKENS,
        written=_QWEN_WRITTEN,
        config=_qwen(
            "Qwen2VLConfig",
            {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 4, "mlp_ratio": 2, "patch_size": 8},
            _rope(2, 3, 3),
        ),
        processor="Qwen2VLProcessor",
        images=_QWEN_IMAGES,
    ),
}


def make_family(name: str, folder: Path) -> Path:
    """Write a model of this family into a folder: random weights in float32, processor, tokenizer and chat template."""
    family = FAMILIES[name]
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer(family)
    tokenizer.save_pretrained(folder)
    config = family.config(tokenizer.convert_tokens_to_ids)
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="eager")
        for each in model.parameters():
            torch.nn.init.normal_(each, std=0.2 if each.dim() > 1 else 0.5)
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(family.images))
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": family.processor, **family.settings}))
    return folder


def _tokenizer(family: Family) -> PreTrainedTokenizerFast:
    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    base = Tokenizer(models.BPE(vocab=letters, merges=[("Ċ", "Ċ")] if "ĊĊ" in letters else []))
    base.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    base.decoder = decoders.ByteLevel()
    base.add_special_tokens([AddedToken(each, special=True) for each in (_PAD, _BOS, _EOS, *family.tokens)])
    template = (
        "{{ bos_token }}{% for message in messages %}{{ message['role'] + '\\n' }}"
        "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
        "{% for part in message['content'] %}"
        "{% if part['type'] == 'image' %}{{ "
        + json.dumps(family.written)
        + " }}{% else %}{{ part['text'] }}{% endif %}"
        "{% endfor %}{% endif %}{{ eos_token + '\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant\\n' }}{% endif %}"
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=base,
        pad_token=_PAD,
        bos_token=_BOS,
        eos_token=_EOS,
        chat_template=template,
        extra_special_tokens=dict(family.tokenizer),
    )


def open_processor(folder: Path) -> Any:
    """Open transformers' own processor of a folder, without its part for videos, which torchvision would make."""
    family = next(each for each in FAMILIES.values() if each.processor == _processor_name(folder))
    kind = getattr(transformers, family.processor)
    module = importlib.import_module(kind.__module__)
    if getattr(module, "num2words", str) is None:  # a package that SmolVLM's processor needs for videos alone
        module.num2words = str  # type: ignore[attr-defined]
    images = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    parts = {"image_processor": images, "tokenizer": tokenizer}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "check_argument_for_proper_class", lambda *_: None)
        return kind(**{name: parts.get(name) for name in kind.get_attributes()}, **family.settings)


def _processor_name(folder: Path) -> str:
    name: str = json.loads((folder / "processor_config.json").read_text())["processor_class"]
    return name


def load_whole(folder: Path) -> PreTrainedModel:
    """Load the whole model, in float32 with eager attention."""
    return transformers.AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def eager_logits(folder: Path, said: str | list[dict[str, Any]], images: Sequence[Image]) -> tuple[Tensor, Tensor]:
    """Return the token ids [tokens] and logits [tokens, vocabulary] of transformers' whole forward.

    `said` is a text that has its family's placeholders, or messages whose image parts are rendered as the folder's
    chat template does, with a generation prompt.
    """
    processor = open_processor(folder)
    if not isinstance(said, str):
        said = processor.tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
    given = processor(
        text=[said], images=[list(images)] if images else None, return_tensors="pt", add_special_tokens=False
    )
    with torch.no_grad():
        logits = load_whole(folder)(**given).logits[0]
    return given["input_ids"][0], logits
