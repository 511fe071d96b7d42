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
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tests.jobs.jobs import Reference

_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5


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
    tokenizer: Mapping[str, Any] | None = None,
    systemone: str | None = None,
) -> Path:
    """The model of a folder in GGUF format at `path`, matrices quantised as `kind`; the first file where it is split.

    `settings` of the family replace those of the model, or drop them where they are None; `tensors` are added to its.
    So do those of the `tokenizer`, without `tokenizer.ggml.`. `systemone` is a template of typed decisions.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    names = [path] if parts == 1 else [part_of(path, number, parts) for number in range(1, parts + 1)]
    arrays = [*_tensors(model, architecture), *(tensors or {}).items()]
    for number, file in enumerate(names):
        writer = GGUFWriter(file, architecture)
        if number == 0:
            _write_settings(writer, model.config, architecture, settings or {})
            least = model.config.vocab_size if architecture.startswith("qwen35") else 0
            _write_tokenizer(writer, folder, least, tokenizer or {})
            if systemone is not None:
                writer.add_string("tokenizer.chat_template.systemone", systemone)
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


def _write_tokenizer(writer: GGUFWriter, folder: Path, least: int, changes: Mapping[str, Any]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda each: each[1])
    special = set(tokenizer.all_special_ids)
    unused = [f"[PAD{number}]" for number in range(len(vocabulary), least)]  # as llama.cpp fills them up
    kinds = [_CONTROL if number in special else _NORMAL for _, number in vocabulary]
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    fields = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": [*(token for token, _ in vocabulary), *unused],
        "token_type": [*kinds, *[_UNUSED] * len(unused)],
        "merges": [" ".join(each) for each in merges],
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "chat_template": tokenizer.chat_template,
    }
    _add_tokenizer(writer, fields | dict(changes))


# Files of a tokenizer alone.


def write_tokenizer(path: Path, fields: Mapping[str, Any]) -> Path:
    """Write a GGUF file of a tokenizer alone: its settings `tokenizer.ggml.*` are `fields`, without that prefix."""
    writer = GGUFWriter(path, "llama")
    _add_tokenizer(writer, fields)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: GGUFWriter, fields: Mapping[str, Any]) -> None:
    add = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string, list: writer.add_array}
    for name, value in fields.items():
        place = {"general.name": name, "chat_template": "tokenizer.chat_template"}.get(name, f"tokenizer.ggml.{name}")
        if value is not None:
            add[type(value)](place, value)


def tokenizer_fields(folder: Path, *, model: str, pre: str) -> dict[str, Any]:
    """Return the settings of a file for the tokenizer of a folder, as llama.cpp's converter writes them."""
    spec = json.loads((folder / "tokenizer.json").read_text())
    named = json.loads((folder / "tokenizer_config.json").read_text())
    added = {token["id"]: token for token in spec["added_tokens"]}
    names = {number: token for token, number in spec["model"]["vocab"].items()}
    names |= {number: token["content"] for number, token in added.items()}
    count = max(names) + 1
    kinds = [_UNUSED if number not in names else _NORMAL for number in range(count)]
    for number, token in added.items():
        kinds[number] = _CONTROL if token["special"] else _USER_DEFINED
    tokens = [names.get(number, f"[PAD{number}]") for number in range(count)]
    fields: dict[str, Any] = {"model": model, "pre": pre, "tokens": tokens, "token_type": kinds}
    if model == "llama":
        fields["scores"] = [-float(number) for number in range(count)]
    else:
        merges = spec["model"]["merges"]
        fields["merges"] = [each if isinstance(each, str) else " ".join(each) for each in merges]
    for name in ("bos", "eos"):
        token = named.get(f"{name}_token")
        token = token["content"] if isinstance(token, dict) else token
        if token in tokens:
            fields[f"{name}_token_id"] = tokens.index(token)
    return fields


SPLIT_TEXT = "I'm OK, it'S 1234567 a_b=f(x1)!!\n\n  Über\t été 日本한국 HTTPGet c'est.\r\n   '''5% ½ end  "
_LONGEST = 12  # bytes of a token


def splitting_fields(text: str, **changes: Any) -> dict[str, Any]:
    """Return a byte-level tokenizer's settings by which each word of `text` is one token, and its tokens show how the
    text was split. One word, `Zz`, is a token that no merge makes."""
    spelling = bytes_to_unicode()
    letters = "".join(spelling[byte] for byte in text.encode())
    starts = range(len(letters) - 1)
    parts = {letters[at : at + size] for at in starts for size in range(2, min(_LONGEST, len(letters) - at) + 1)}
    tokens = [*sorted(spelling.values()), *sorted(parts, key=lambda part: (len(part), part)), "Zz"]
    merges = [f"{part[:at]} {part[at:]}" for part in tokens if part in parts for at in range(1, len(part))]
    added = {
        "<s>": _CONTROL,
        "<\uff5cUser\uff5c>": _CONTROL,
        "<\uff5cend\u2581of\uff5c>": _USER_DEFINED,
        "<think>": _USER_DEFINED,
    }
    fields = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": [*tokens, *added],
        "token_type": [_NORMAL] * len(tokens) + list(added.values()),
        "merges": merges,
        "bos_token_id": len(tokens),
    }
    return {name: value for name, value in (fields | changes).items() if value is not None}
