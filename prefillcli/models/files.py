"""What a model's files must be before anything is built from them: whole, and of numbers that make sense.

All checks read JSON and headers only, and know no torch. Each raises UsageError that names the file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any

from prefillcli.errors import UsageError

_MOST_JSON = 32 << 20  # bytes of a JSON file; the largest configurations have some hundred kilobytes
_MOST_HEADER = 100 << 20  # bytes, as the safetensors library has it
_ITEM_BYTES = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "U16": 2, "I16": 2, "F16": 2,
               "BF16": 2, "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8}  # fmt: skip

#: Least and most of the whole numbers that a configuration must not have otherwise, under the names of all families.
_WHOLE = {
    **dict.fromkeys(("vocab_size", "padded_vocab_size"), (1, 1 << 24)),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers", "num_decoder_layers"), (1, 4096)),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim"), (1, 1 << 20)),
    **dict.fromkeys(("num_attention_heads", "num_heads", "n_head", "n_heads"), (1, 1 << 16)),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), (1, 1 << 16)),
    **dict.fromkeys(("head_dim",), (1, 1 << 16)),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), (0, 1 << 40)),
    **dict.fromkeys(("original_max_position_embeddings", "sliding_window"), (0, 1 << 40)),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok"), (0, 1 << 16)),
}
_REAL = frozenset({"rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon", "rope_theta"})
_OTHER_PARTS = ("vision", "audio")  # of a model for several kinds of input, with numbers of their own
_WHOLE_FILE = "model.safetensors"
_EMBEDDING = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")


def check_config(path: Path) -> None:
    """Refuse a `config.json` with numbers that no model has, wherever in it they are."""
    content = read_json(path)
    if not isinstance(content, dict):
        raise UsageError(f"{path}: not a JSON object")
    for name, value in _entries(content):
        if value is None or isinstance(value, list | dict):
            continue
        if name in _WHOLE:
            low, high = _WHOLE[name]
            if type(value) is not int or not low <= value <= high:
                raise UsageError(f"{path}: {name} is {_short(value)}; it is a whole number from {low:,} to {high:,}")
        elif name in _REAL and (type(value) not in (int, float) or not math.isfinite(value) or value < 0):
            raise UsageError(f"{path}: {name} is {_short(value)}; it is a finite number, not below 0")


def check_weights(folder: Path, files: Sequence[Path], config: Any) -> None:
    """Refuse weight files that are not whole, that are missing, or that are of another model than `config`.

    `config` is the text model's configuration.
    """
    headers = {file.name: read_header(file) for file in files}
    index = folder / "model.safetensors.index.json"
    if _WHOLE_FILE in headers:  # transformers loads this one, whatever else is there
        headers = {_WHOLE_FILE: headers[_WHOLE_FILE]}
    elif index.is_file():
        headers = {place: headers[place] for place in _check_index(index, headers)}
    tensors = {name: tensor for header in headers.values() for name, tensor in header.items()}
    numbered = {number for name in tensors if (number := _layer(name)) is not None}
    layers = getattr(config, "num_hidden_layers", None)
    if numbered and isinstance(layers, int) and layers > max(numbered) + 1:
        raise UsageError(f"{folder}: config.json says {layers:,} layers, the weights have {max(numbered) + 1:,}")
    embeddings = [tensor["shape"] for name, tensor in tensors.items() if name.endswith(_EMBEDDING)]
    wide = getattr(config, "word_embed_proj_dim", None) or getattr(config, "hidden_size", None)
    if len(embeddings) == 1 and len(embeddings[0]) == 2 and wide and not hasattr(config, "embedding_size"):
        rows, width = embeddings[0]
        if (rows, width) != (config.vocab_size, wide):
            raise UsageError(
                f"{folder}: the weights have other shapes than config.json says: {rows:,} tokens of {width:,} numbers "
                f"are embedded, not {config.vocab_size:,} of {wide:,}"
            )


def read_json(path: Path, *, most: int = _MOST_JSON) -> Any:
    """What a JSON file of at most `most` bytes holds."""
    try:
        size = path.stat().st_size
        if size > most:
            raise UsageError(f"{path}: {size:,} bytes; a file of this kind has no more than {most:,}")
        return json.loads(path.read_bytes())
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else error
        raise UsageError(f"{path}: not JSON: {why}") from None


def read_header(file: Path) -> dict[str, Any]:
    """Names and descriptions of the tensors in a safetensors file, which hold together and are all there."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 2 <= length <= min(size, _MOST_HEADER):
                raise ValueError("no header")
            header: dict[str, Any] = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        end = max((_end_of(name, tensor) for name, tensor in header.items()), default=0)
    except OSError as error:
        raise UsageError(f"{file}: cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else error
        raise UsageError(f"{file}: not a safetensors file ({why})") from None
    if 8 + length + end != size:
        raise UsageError(f"{file}: truncated: {size} bytes, its header asks for {8 + length + end}")
    return header


def _check_index(index: Path, headers: dict[str, dict[str, Any]]) -> set[str]:
    """The files that an index names."""
    content = read_json(index)
    places = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(places, dict) or not all(isinstance(place, str) for place in places.values()):
        raise UsageError(f"{index}: no weight_map, which says which file holds each tensor")
    for name, place in places.items():
        if place not in headers:
            raise UsageError(f"{index}: names {_short(place)}, which is not there; the model is not complete")
        if name not in headers[place]:
            raise UsageError(f"{index}: says that {place} holds {_short(name)}, and it does not")
    return set(places.values())


def _end_of(name: str, tensor: dict[str, Any]) -> int:
    """Where a tensor ends in its file. Raises ValueError if its shape and its bytes do not agree."""
    begin, end = tensor["data_offsets"]
    shape = tensor["shape"]
    if not all(type(number) is int and number >= 0 for number in (begin, end, *shape)):
        raise ValueError(f"{_short(name)} has no shape or no place")
    width = _ITEM_BYTES.get(tensor["dtype"])
    if end < begin or (width is not None and end - begin != prod(shape) * width):
        raise ValueError(f"{_short(name)} has {end - begin:,} bytes, which its shape {_short(shape)} does not take")
    return int(end)


def _layer(name: str) -> int | None:
    """The first number in a tensor's name: which layer it is of."""
    return next((int(part) for part in name.split(".") if part.isdecimal() and len(part) < 10), None)


def _entries(content: Any) -> Iterator[tuple[str, Any]]:
    """All names with their values, at any depth, but for those of parts that do not read text."""
    waiting = [content]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            yield from value.items()
            value = [part for name, part in value.items() if not any(other in name for other in _OTHER_PARTS)]
        if isinstance(value, list):
            waiting.extend(value)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
