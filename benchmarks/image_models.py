"""Models that read images, with random weights, and pictures for them."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForImageTextToText,
    Idefics3Config,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2VLConfig,
)

from benchmarks.runners import ROOT

PAD, BEGIN, END = "<pad>", "<begin>", "<end>"


class Size(NamedTuple):
    """The text model, and the width, depth and heads of the vision tower."""

    text: dict[str, Any]
    vision: tuple[int, int, int]


SIZES = {
    "256M": Size(
        {
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "vocab_size": 49_280,
        },
        (768, 12, 12),
    ),
    "tiny": Size(
        {
            "hidden_size": 128,
            "intermediate_size": 192,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "vocab_size": 2_000,
        },
        (32, 1, 2),
    ),
}
_IDEFICS = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
_IDEFICS += [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
_QWEN = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]


def random_model(family: str, size: str, edge: int, folder: Path) -> Path:
    """Write a model into a folder: `idefics3`, which SmolVLM is too, or `qwen2_vl`, of the size of SmolVLM-256M.

    A picture becomes 64 tokens for each tile of 512 x 512 pixels, with a longest edge of `edge` pixels, or 1 token for
    28 x 28 of its pixels.
    """
    text, (width, depth, heads) = SIZES[size]
    own = {**text, "max_position_embeddings": 8_192, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    tokenizer = _tokenizer(family, text["vocab_size"])
    ids = tokenizer.convert_tokens_to_ids
    config: PreTrainedConfig
    if family == "idefics3":
        vision = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": depth}
        vision |= {"num_attention_heads": heads, "image_size": 512, "patch_size": 16}
        config = Idefics3Config(
            text_config={"model_type": "llama", **own},
            vision_config={"model_type": "idefics3_vision", **vision},
            image_token_id=ids("<image>"),
            scale_factor=4,
            pad_token_id=0,
        )
        images: dict[str, Any] = {"image_processor_type": "Idefics3ImageProcessor", "do_image_splitting": True}
        images |= {"size": {"longest_edge": edge}, "max_image_size": {"longest_edge": 512}}
        images |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
        processor = {"processor_class": "Idefics3Processor", "image_seq_len": 64}
    else:
        config = Qwen2VLConfig(
            text_config={
                **own,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 12, 12]},
            },
            vision_config={
                "depth": depth, "embed_dim": width, "num_heads": heads, "mlp_ratio": 4, "patch_size": 14,
                "hidden_size": text["hidden_size"],
            },
            image_token_id=ids("<|image_pad|>"),
            video_token_id=ids("<|video_pad|>"),
            vision_start_token_id=ids("<|vision_start|>"),
            vision_end_token_id=ids("<|vision_end|>"),
        )  # fmt: skip
        images = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 14, "merge_size": 2}
        images |= {"temporal_patch_size": 2, "size": {"shortest_edge": 56 * 56, "longest_edge": edge * edge}}
        processor = {"processor_class": "Qwen2VLProcessor"}
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(config, dtype=torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(images))
    (folder / "processor_config.json").write_text(json.dumps(processor))
    return folder


def _tokenizer(family: str, vocabulary: int) -> PreTrainedTokenizerFast:
    # Made of the documentation, so that a question has about as many tokens as with a real one.
    special, written = (_IDEFICS, "<image>") if family == "idefics3" else (_QWEN, "".join(_QWEN[i] for i in (0, 2, 1)))
    base = Tokenizer(models.BPE())
    base.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    base.decoder = decoders.ByteLevel()
    known = [PAD, BEGIN, END, *special]
    trainer = trainers.BpeTrainer(
        vocab_size=min(vocabulary, 8_000),
        special_tokens=[AddedToken(each, special=True) for each in known],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    base.train_from_iterator((each.read_text("utf-8") for each in sorted((ROOT / "docs").glob("*.md"))), trainer)
    template = (
        "{{ bos_token }}{% for message in messages %}{{ message['role'] + '\\n' }}"
        "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
        "{% if part['type'] == 'image' %}" + written + "{% else %}{{ part['text'] }}{% endif %}"
        "{% endfor %}{% endif %}{{ eos_token + '\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant\\n' }}{% endif %}"
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=base, pad_token=PAD, bos_token=BEGIN, eos_token=END, chat_template=template
    )


def picture(seed: int, width: int = 640, height: int = 480) -> bytes:
    """A JPEG of soft spots with some noise, which is as large as a photo."""
    from PIL import Image

    rng = np.random.default_rng(seed)
    spots = Image.fromarray(rng.integers(0, 256, (6, 8, 3), np.uint8)).resize(
        (width, height), Image.Resampling.BICUBIC
    )
    noisy = np.asarray(spots) + rng.normal(0, 8, (height, width, 3))
    file = io.BytesIO()
    Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=90)
    return file.getvalue()
