"""Tiny GGUF files, written with llama.cpp's own package from random models, as its converter would write them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel

from tests.jobs.jobs import Reference

_CONTROL, _NORMAL, _UNUSED = 3, 1, 5


class GgufReference(Reference):
    """A GGUF file under transformers' own eager forward, as transformers reads it, in float32."""

    def __init__(self, file: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        self._model = AutoModelForCausalLM.from_pretrained(
            file.parent,
            gguf_file=file.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.float32,
            attn_implementation="eager",
        ).eval()

    def save(self, folder: Path) -> Path:
        """The same model and tokenizer as a folder with safetensors."""
        vars(self._model.config).pop("quantization_config", None)
        self._model.hf_quantizer = None
        self._model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        return folder


def write_gguf(
    path: Path,
    folder: Path,
    *,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    architecture: str = "llama",
    settings: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
    parts: int = 1,
) -> Path:
    """The model of a folder in GGUF format at `path`, matrices quantised as `kind`; the first file where it is split.

    `settings` of the family replace those of the model, or drop them where they are None; `tensors` are added to its.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    names = [path] if parts == 1 else [part_of(path, number, parts) for number in range(1, parts + 1)]
    arrays = [*_tensors(model, architecture), *(tensors or {}).items()]
    for number, file in enumerate(names):
        writer = GGUFWriter(file, architecture)
        if number == 0:
            _write_settings(writer, model.config, architecture, settings or {})
            _write_tokenizer(writer, folder, model.config.vocab_size if architecture.startswith("qwen35") else 0)
        if parts > 1:
            writer.add_uint16("split.no", number)
            writer.add_uint16("split.count", parts)
            writer.add_int32("split.tensors.count", len(arrays))
        for name, array in arrays[number::parts]:
            quantised = array.ndim > 1 and "conv1d" not in name
            chosen = kind if quantised else GGMLQuantizationType.F32
            writer.add_tensor(name, gguf.quantize(array, chosen), raw_dtype=chosen)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return names[0]


def part_of(path: Path, number: int, parts: int) -> Path:
    """What llama.cpp calls a part, counted from 1."""
    return path.with_name(f"{path.stem}-{number:05}-of-{parts:05}.gguf")


def rotary_factors(model: PreTrainedModel) -> np.ndarray:
    """What llama.cpp saves of scaled rotary frequencies: what they are divided by."""
    rope = model.config.rope_parameters
    width = model.config.head_dim
    plain = 1.0 / rope["rope_theta"] ** (np.arange(0, width, 2) / width)
    return (plain / model.get_decoder().rotary_emb.inv_freq.numpy()).astype(np.float32)


def _tensors(model: PreTrainedModel, architecture: str) -> Iterator[tuple[str, np.ndarray]]:
    layers, qwen35 = model.config.num_hidden_layers, architecture.startswith("qwen35")
    names = gguf.get_tensor_name_map(next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == architecture), layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        array = tensor.numpy()
        if qwen35:
            yield from _of_qwen35(names, name, array, model.config)
            continue
        heads = {"q_proj": model.config.num_attention_heads, "k_proj": model.config.num_key_value_heads}
        for part, count in heads.items():
            if architecture == "llama" and f".{part}." in name:  # llama.cpp rotates neighbouring numbers
                array = array.reshape(count, 2, -1, array.shape[-1]).swapaxes(1, 2).reshape(array.shape)
        yield names.get_name(name, try_suffixes=(".weight", ".bias")), np.ascontiguousarray(array)


def _of_qwen35(names: Any, name: str, array: np.ndarray, config: Any) -> Iterator[tuple[str, np.ndarray]]:
    # As llama.cpp saves them: norms from 1 on, decay as it is multiplied, a convolution without its middle axis, and
    # value heads by their place behind a key head. Experts' gates and what they gate apart.
    if "norm" in name and "linear_attn" not in name:
        array = array + 1
    elif name.endswith("A_log"):
        array = -np.exp(array)
    elif "conv1d" in name:
        array = array[:, 0]
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads

    def tiled(rows: np.ndarray) -> np.ndarray:
        return rows.reshape(keys, values // keys, -1, *rows.shape[1:]).swapaxes(0, 1).reshape(rows.shape)

    if name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
        before = 2 * keys * config.linear_key_head_dim
        array = np.concatenate([array[:before], tiled(array[before:])])
    elif name.endswith(("A_log", "dt_bias", "in_proj_a.weight", "in_proj_b.weight", "in_proj_z.weight")):
        array = tiled(array)
    elif name.endswith("out_proj.weight"):
        array = tiled(array.T).T
    if name.endswith("experts.gate_up_proj"):
        parts = dict(zip(("gate", "up"), np.split(array, 2, axis=1), strict=True))
    elif name.endswith("experts.down_proj"):
        parts = {"down": array}
    else:
        own = (
            f"blk.{name.split('.')[2]}.ssm_dt.bias" if name.endswith("dt_bias") else names.get_name(name, (".weight",))
        )
        yield own, np.ascontiguousarray(array[0] if "shared_expert_gate" in name else array)
        return
    for part, experts in parts.items():
        yield f"blk.{name.split('.')[2]}.ffn_{part}_exps.weight", np.ascontiguousarray(experts)


def _write_settings(writer: GGUFWriter, config: Any, architecture: str, changes: Mapping[str, Any]) -> None:
    values = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": getattr(config, "intermediate_size", None),
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "rope.dimension_count": config.head_dim,
        "vocab_size": config.vocab_size,
        **changes,
    }
    for name, value in values.items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        if isinstance(value, list):
            writer.add_array(f"{architecture}.{name}", value)
        elif value is not None:
            add[type(value)](f"{architecture}.{name}", value)


def _write_tokenizer(writer: GGUFWriter, folder: Path, least: int) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda each: each[1])
    special = set(tokenizer.all_special_ids)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    unused = [f"[PAD{number}]" for number in range(len(vocabulary), least)]  # as llama.cpp fills them up
    writer.add_token_list([*(token for token, _ in vocabulary), *unused])
    kinds = [_CONTROL if number in special else _NORMAL for _, number in vocabulary]
    writer.add_token_types([*kinds, *[_UNUSED] * len(unused)])
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_token_merges([" ".join(each) for each in merges])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)
