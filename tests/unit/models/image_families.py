"""Tiny folders of models that read images, each with a processor and a chat template as its family has them.

`make_family` writes one; `eager_logits` is transformers' whole forward over it.
"""

from __future__ import annotations

import importlib
import json
import warnings
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

from prefillcli.models.image_processing import processor_class

TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 400,
    "max_position_embeddings": 4096,
    "pad_token_id": 258,
    "bos_token_id": 259,
    "eos_token_id": 260,
}
_PAD, _BOS, _EOS = "<pad>", "<bos>", "<eos>"


Ids = Callable[[str], int]


@dataclass(frozen=True)
class Family:
    """What is peculiar to a family: its special tokens, its template's text for an image, and its configuration."""

    tokens: Sequence[str]  # from id 261 on
    written: str  # what a chat template writes for an image
    config: Callable[[Ids], PreTrainedConfig]
    processor: str
    images: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)
    tokenizer: dict[str, str] = field(default_factory=dict)


def _siglip() -> dict[str, Any]:
    return {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 32,
        "patch_size": 8,
    }


def _smolvlm(ids: Ids) -> PreTrainedConfig:
    return transformers.SmolVLMConfig(
        text_config={"model_type": "llama", **TEXT},
        vision_config={"model_type": "smolvlm_vision", **_siglip()},
        image_token_id=ids("<image>"),
        scale_factor=2,
        pad_token_id=258,
        tie_word_embeddings=False,
    )


def _idefics3(ids: Ids) -> PreTrainedConfig:
    return transformers.Idefics3Config(
        text_config={"model_type": "llama", **TEXT},
        vision_config={"model_type": "idefics3_vision", **_siglip()},
        image_token_id=ids("<image>"),
        scale_factor=2,
        pad_token_id=258,
        tie_word_embeddings=False,
    )


_PINPOINTS = [[32, 32], [32, 64], [64, 32], [64, 64], [32, 96], [96, 32]]


def _llava_onevision(ids: Ids) -> PreTrainedConfig:
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


def _llava(ids: Ids) -> PreTrainedConfig:
    return transformers.LlavaConfig(
        text_config={"model_type": "llama", **TEXT},
        vision_config={"model_type": "clip_vision_model", **_siglip()},
        image_token_id=ids("<image>"),
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
        tie_word_embeddings=False,
    )


def _llava_next(ids: Ids) -> PreTrainedConfig:
    return transformers.LlavaNextConfig(
        text_config={"model_type": "mistral", **TEXT},
        vision_config={"model_type": "clip_vision_model", **_siglip()},
        image_token_id=ids("<image>"),
        image_grid_pinpoints=_PINPOINTS,
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
        tie_word_embeddings=False,
    )


def _internvl(ids: Ids) -> PreTrainedConfig:
    return transformers.InternVLConfig(
        text_config={"model_type": "qwen2", **TEXT},
        vision_config={**_siglip(), "image_size": [32, 32], "patch_size": [8, 8]},
        image_token_id=ids("<IMG_CONTEXT>"),
        image_seq_length=4,
        downsample_ratio=0.5,
        tie_word_embeddings=False,
    )


def _mistral3(ids: Ids) -> PreTrainedConfig:
    return transformers.Mistral3Config(
        text_config={"model_type": "mistral", **TEXT},
        vision_config={"model_type": "pixtral", **_siglip(), "image_size": 96, "head_dim": 8},
        image_token_id=ids("[IMG]"),
        spatial_merge_size=2,
        vision_feature_layer=-1,
        tie_word_embeddings=False,
    )


_SLIDES = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 3}


def _gemma3(ids: Ids) -> PreTrainedConfig:
    return transformers.Gemma3Config(
        text_config={**TEXT, **_SLIDES, "query_pre_attn_scalar": 16},
        vision_config={"vision_use_head": False, **_siglip()},
        mm_tokens_per_image=4,
        boi_token_id=ids("<start_of_image>"),
        eoi_token_id=ids("<end_of_image>"),
        image_token_id=ids("<image_soft_token>"),
        tie_word_embeddings=False,
    )


def _gemma4(seen: str | None, **text: Any) -> Callable[[Ids], PreTrainedConfig]:
    def build(ids: Ids) -> PreTrainedConfig:
        kinds = ["sliding_attention", "full_attention"] * 2
        return transformers.Gemma4Config(
            text_config={
                **TEXT,
                **_SLIDES,
                "num_hidden_layers": 4,
                "layer_types": kinds,
                "global_head_dim": 16,
                "use_bidirectional_attention": seen,
                "vocab_size_per_layer_input": 400,
                **text,
            },
            vision_config={
                **_siglip(),
                "num_key_value_heads": 4,
                "head_dim": 8,
                "pooling_kernel_size": 2,
                "position_embedding_size": 320,
            },
            audio_config=None,
            boi_token_id=ids("<|image>"),
            eoi_token_id=ids("<image|>"),
            image_token_id=ids("<|image|>"),
            video_token_id=ids("<|video|>"),
            audio_token_id=ids("<|audio|>"),
            tie_word_embeddings=False,
        )

    return build


def _lfm2_vl(ids: Ids) -> PreTrainedConfig:
    return transformers.Lfm2VlConfig(
        text_config={"model_type": "lfm2", **TEXT, "layer_types": ["conv", "full_attention", "conv"]},
        vision_config={"model_type": "siglip2_vision_model", **_siglip(), "num_patches": 16, "vision_use_head": False},
        image_token_id=ids("<image>"),
        projector_hidden_size=48,
        tie_word_embeddings=False,
    )


def _rope(*sections: int, **more: Any) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(sections), **more}
    return {"rope_parameters": rope}


def _qwen(kind: str, vision: dict[str, Any], **text: Any) -> Callable[[Ids], PreTrainedConfig]:
    def build(ids: Ids) -> PreTrainedConfig:
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


def _glm(kind: str, **text: Any) -> Callable[[Ids], PreTrainedConfig]:
    def build(ids: Ids) -> PreTrainedConfig:
        config: type[PreTrainedConfig] = getattr(transformers, kind)
        return config(
            text_config={**TEXT, **text},
            vision_config={**_QWEN25_EYES, "out_hidden_size": 64, "image_size": 64},
            image_token_id=ids("<|image|>"),
            video_token_id=ids("<|video|>"),
            image_start_token_id=ids("<|begin_of_image|>"),
            image_end_token_id=ids("<|end_of_image|>"),
            tie_word_embeddings=False,
        )

    return build


_QWEN2_EYES = {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 4, "mlp_ratio": 2, "patch_size": 8}
_QWEN25_EYES = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 4,
    "patch_size": 8,
    "out_hidden_size": 64,
}
_QWEN3_EYES = {**_QWEN25_EYES, "num_position_embeddings": 64}
_MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_RECURS = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_QWEN35_ROPE = _rope(2, 1, 1, mrope_interleaved=True, partial_rotary_factor=0.5)
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

_GLM: dict[str, Any] = {
    "tokens": ["<|begin_of_image|>", "<|image|>", "<|end_of_image|>", "<|video|>"],
    "written": "<|begin_of_image|><|image|><|end_of_image|>",
}
_GLM_ROPE = _rope(2, 1, 1, partial_rotary_factor=0.5)
_SQUARE = {"size": {"height": 32, "width": 32}}
_CROPPED = {
    "size": {"shortest_edge": 32},
    "do_center_crop": True,
    "crop_size": {"height": 32, "width": 32},
}
_GEMMA4: dict[str, Any] = {
    "tokens": ["<|image>", "<image|>", "<|image|>", "<|video|>", "<|audio>", "<audio|>", "<|audio|>"],
    "written": "\n\n<|image|>\n\n",
    "processor": "Gemma4Processor",
    "images": {
        "image_processor_type": "Gemma4ImageProcessor",
        "patch_size": 8,
        "pooling_kernel_size": 2,
        "max_soft_tokens": 70,
    },
    "tokenizer": {
        "boi_token": "<|image>",
        "eoi_token": "<image|>",
        "image_token": "<|image|>",
        "boa_token": "<|audio>",
        "eoa_token": "<audio|>",
        "audio_token": "<|audio|>",
    },
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
    "llava": Family(
        tokens=["<image>"],
        written="<image>\n",
        config=_llava,
        processor="LlavaProcessor",
        images={"image_processor_type": "CLIPImageProcessor", **_SQUARE, **_CROPPED},
        settings={
            "patch_size": 8,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        },
    ),
    "llava_next": Family(
        tokens=["<image>"],
        written="<image>\n",
        config=_llava_next,
        processor="LlavaNextProcessor",
        images={
            "image_processor_type": "LlavaNextImageProcessor",
            "image_grid_pinpoints": _PINPOINTS,
            **_CROPPED,
        },
        settings={
            "patch_size": 8,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        },
    ),
    "internvl": Family(
        tokens=["<img>", "</img>", "<IMG_CONTEXT>", "<video>"],
        written="<IMG_CONTEXT>\n",
        config=_internvl,
        processor="InternVLProcessor",
        images={
            "image_processor_type": "GotOcr2ImageProcessor",
            "crop_to_patches": False,
            "min_patches": 1,
            "max_patches": 6,
            **_SQUARE,
        },
        settings={"image_seq_length": 4},
        tokenizer={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
    ),
    "qwen2_vl": Family(
        tokens=_QWEN_TOKENS,
        written=_QWEN_WRITTEN,
        config=_qwen("Qwen2VLConfig", _QWEN2_EYES, **_rope(2, 3, 3)),
        processor="Qwen2VLProcessor",
        images=_QWEN_IMAGES,
    ),
    "qwen2_5_vl": Family(
        tokens=_QWEN_TOKENS,
        written=_QWEN_WRITTEN,
        config=_qwen(
            "Qwen2_5_VLConfig",
            {**_QWEN25_EYES, "window_size": 32, "fullatt_block_indexes": [1]},
            **_rope(2, 3, 3),
        ),
        processor="Qwen2_5_VLProcessor",
        images=_QWEN_IMAGES,
    ),
    "qwen3_vl": Family(
        tokens=_QWEN_TOKENS,
        written=_QWEN_WRITTEN,
        config=_qwen(
            "Qwen3VLConfig",
            {**_QWEN3_EYES, "deepstack_visual_indexes": [0, 1]},
            **_rope(2, 3, 3, mrope_interleaved=True),
        ),
        processor="Qwen3VLProcessor",
        images=_QWEN_IMAGES,
    ),
    "qwen3_vl_moe": Family(
        tokens=_QWEN_TOKENS,
        written=_QWEN_WRITTEN,
        config=_qwen(
            "Qwen3VLMoeConfig",
            {**_QWEN3_EYES, "deepstack_visual_indexes": [0, 1]},
            **_rope(2, 3, 3, mrope_interleaved=True),
            **_MIXTURE,
        ),
        processor="Qwen3VLProcessor",
        images=_QWEN_IMAGES,
    ),
    "qwen3_5": Family(
        tokens=_QWEN_TOKENS,
        written=_QWEN_WRITTEN,
        config=_qwen("Qwen3_5Config", _QWEN3_EYES, **_QWEN35_ROPE, **_RECURS),
        processor="Qwen3VLProcessor",
        images=_QWEN_IMAGES,
    ),
    "qwen3_5_moe": Family(
        tokens=_QWEN_TOKENS,
        written=_QWEN_WRITTEN,
        config=_qwen(
            "Qwen3_5MoeConfig",
            _QWEN3_EYES,
            **_QWEN35_ROPE,
            **_RECURS,
            **_MIXTURE,
            shared_expert_intermediate_size=32,
        ),
        processor="Qwen3VLProcessor",
        images=_QWEN_IMAGES,
    ),
    "gemma3": Family(
        tokens=["<start_of_image>", "<end_of_image>", "<image_soft_token>"],
        written="<start_of_image>",
        config=_gemma3,
        processor="Gemma3Processor",
        images={"image_processor_type": "Gemma3ImageProcessor", **_SQUARE, "do_pan_and_scan": None},
        settings={"image_seq_length": 4},
        tokenizer={
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
            "image_token": "<image_soft_token>",
        },
    ),
    "gemma4": Family(config=_gemma4(None, hidden_size_per_layer_input=16, num_kv_shared_layers=2), **_GEMMA4),
    "gemma4_vision": Family(config=_gemma4("vision", hidden_size_per_layer_input=0), **_GEMMA4),
    "mistral3": Family(
        tokens=["[IMG]", "[IMG_BREAK]", "[IMG_END]"],
        written="[IMG]",
        config=_mistral3,
        processor="PixtralProcessor",
        images={"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 96}, "patch_size": 8},
        settings={"patch_size": 8, "spatial_merge_size": 2},
    ),
    "glm4v": Family(
        config=_glm("Glm4vConfig", **_GLM_ROPE),
        processor="Glm4vProcessor",
        images={**_QWEN_IMAGES, "image_processor_type": "Glm4vImageProcessor"},
        **_GLM,
    ),
    "glm46v": Family(
        config=_glm("Glm46VConfig", model_type="glm4v_text", **_GLM_ROPE),
        processor="Glm46VProcessor",
        images={**_QWEN_IMAGES, "image_processor_type": "Glm46VImageProcessor"},
        **_GLM,
    ),
    "glm4v_moe": Family(
        config=_glm(
            "Glm4vMoeConfig",
            **_rope(1, 1, 2, partial_rotary_factor=0.5),
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=1,
        ),
        processor="Glm4vProcessor",
        images={**_QWEN_IMAGES, "image_processor_type": "Glm4vImageProcessor"},
        **_GLM,
    ),
}


#: A family whose processor has no form for Pillow alone.
NEEDS_TORCHVISION = {
    "lfm2_vl": Family(
        tokens=["<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"]
        + [f"<|img_row_{row}_col_{column}|>" for row in range(1, 5) for column in range(1, 5)],
        written="<image>",
        config=_lfm2_vl,
        processor="Lfm2VlProcessor",
        images={
            "image_processor_type": "Lfm2VlImageProcessor",
            "encoder_patch_size": 8,
            "tile_size": 32,
            "min_tiles": 2,
            "max_tiles": 4,
            "min_image_tokens": 1,
            "max_image_tokens": 4,
            "max_num_patches": 16,
            "size": {"height": 32, "width": 32},
        },
    ),
}


#: Those that `make test` runs: each way in which a model reads images is among them. `make test-matrix` runs all.
_USUAL = {"smolvlm", "llava_onevision", "qwen3_vl", "qwen3_5", "gemma3"}
EACH_FAMILY = [pytest.param(name, marks=() if name in _USUAL else pytest.mark.matrix) for name in FAMILIES]


def make_family(name: str, folder: Path) -> Path:
    """Write a model of this family into a folder, with random weights in float32, and return the folder."""
    family = (FAMILIES | NEEDS_TORCHVISION)[name]
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer(family)
    tokenizer.save_pretrained(folder)
    config = family.config(tokenizer.convert_tokens_to_ids)
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="eager")
        for name, each in model.named_parameters():
            if each.dim() > 1:
                torch.nn.init.normal_(each, std=0.1)
            elif name.endswith("q_norm.weight"):  # attention is not so sharp that it magnifies what is rounded
                torch.nn.init.constant_(each, 0.3)
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(family.images))
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": family.processor, **family.settings}))
    return folder


def _tokenizer(family: Family) -> PreTrainedTokenizerFast:
    # Line feeds join, as in real vocabularies: text around an image is tokenised with its neighbours.
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ĊĊ", "ĊĊĊ"]
    numbers = {word: number for number, word in enumerate(words)}
    base = Tokenizer(models.BPE(vocab=numbers, merges=[("Ċ", "Ċ"), ("ĊĊ", "Ċ")]))
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
    family = next(
        each for each in (FAMILIES | NEEDS_TORCHVISION).values() if each.processor == _processor_name(folder)
    )
    kind = processor_class(transformers.AutoConfig.from_pretrained(folder).model_type)
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
    kind = transformers.AutoModelForImageTextToText
    return kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def eager_logits(folder: Path, said: str | list[dict[str, Any]], images: Sequence[Image]) -> tuple[Tensor, Tensor]:
    """Return the token ids [tokens] and logits [tokens, vocabulary] of transformers' whole forward.

    `said` is a text that has its family's placeholders, or messages whose image parts are rendered as the folder's
    chat template does, with a generation prompt.
    """
    processor = open_processor(folder)
    if not isinstance(said, str):
        said = processor.tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # GLM's processor makes an array of a tensor
        given = processor(
            text=[said], images=[list(images)] if images else None, return_tensors="pt", add_special_tokens=False
        )
    with torch.no_grad():
        logits = load_whole(folder)(**given).logits[0]
    return given["input_ids"][0], logits
