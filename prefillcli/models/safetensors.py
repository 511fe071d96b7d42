"""Safetensors files: their headers, and whether a directory holds the weights of the model that its config.json says.

Headers only are read, and no torch is needed. The checks raise UsageError that names the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from prefillcli.errors import UsageError
from prefillcli.models.families import EXTRA_TOKENS
from prefillcli.models.files import quoted, read_json

# Where the tensors of a file begin and end.


def check_ranges(ranges: Iterable[tuple[int, int, str]], size: int, *, alignment: int = 1) -> None:
    """Raise ValueError unless the tensors of a file fill its `size` bytes of data one after the other.

    `ranges` are the first byte of each tensor, the byte behind its last, and its name, in any order. Each begins at a
    multiple of `alignment`, and fewer bytes than that lie between two of them and behind the last one.
    """
    end, before = 0, ""
    for begin, stop, name in sorted(ranges):
        if begin % alignment:
            raise ValueError(f"{name} begins at byte {begin:,} of the data, which is not a multiple of {alignment}")
        if begin < end:
            raise ValueError(f"{name} and {before} share bytes")
        if begin - end >= alignment:
            raise ValueError(f"{begin - end:,} bytes before {name} belong to no tensor")
        end, before = stop, name
    if end > size:
        raise ValueError(f"truncated: {size:,} bytes of data, {before} ends after {end:,}")
    if size - end >= alignment:
        raise ValueError(f"{size - end:,} bytes at its end belong to no tensor")


_MOST_HEADER = 100 << 20  # bytes, as the safetensors library has it
_ITEM_BYTES = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "U16": 2, "I16": 2, "F16": 2,
               "BF16": 2, "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8}  # fmt: skip
_WHOLE_NUMBERS = frozenset({"BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64"})

_WHOLE_FILE = "model.safetensors"
_EMBEDDING = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")


def find_weights(folder: Path) -> list[Path]:
    """The safetensors files of a model directory. Raises UsageError for another directory."""
    if not (folder / "config.json").is_file():
        adapter = (folder / "adapter_config.json").is_file()
        advice = "\nit has an adapter: give the model as --model, and this as --adapter" if adapter else ""
        raise UsageError(f"{folder}: no config.json, so this is not a model directory{advice}")
    if (folder / "adapter_config.json").exists():
        raise UsageError(
            f"{folder}: has an adapter beside the model (adapter_config.json), which transformers merges where "
            "PEFT is installed\nmove it into a folder of its own, and give that as --adapter if it is to be merged"
        )
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        if gguf := sorted(folder.glob("*.gguf")):
            raise UsageError(f"{folder}: no .safetensors file\ngive the GGUF file itself: {gguf[0]}")
        others = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in folder.glob(pattern))
        found = f" (found {', '.join(others[:3])}, which is not read: only safetensors and GGUF are)" if others else ""
        raise UsageError(f"{folder}: no .safetensors file{found}")
    return weights


def read_tensors(folder: Path, files: Sequence[Path]) -> dict[str, Any]:
    """Names and descriptions of the tensors that are loaded of a model's `files`.

    Raises UsageError for files that are not whole, or missing.
    """
    headers = {file.name: read_header(file) for file in files}
    index = folder / "model.safetensors.index.json"
    if _WHOLE_FILE in headers:  # transformers loads this one, whatever else is there
        headers = {_WHOLE_FILE: headers[_WHOLE_FILE]}
    elif index.is_file():
        headers = {place: headers[place] for place in _check_index(index, headers)}
    tensors = {name: tensor for header in headers.values() for name, tensor in header.items()}
    if len(tensors) != sum(map(len, headers.values())):
        twice = next(name for name in tensors if sum(name in header for header in headers.values()) > 1)
        raise UsageError(f"{folder}: two of its files hold {quoted(twice)}; files of two models are mixed up")
    return tensors


def check_weights(folder: Path, tensors: Mapping[str, Any], config: Any, *, quantised: bool) -> None:
    """Refuse weights of a model other than `config`, the text model's configuration, says; `quantised` ones or not."""
    for name, tensor in tensors.items():
        if tensor["dtype"] in _WHOLE_NUMBERS and name.endswith(".weight") and not quantised:
            raise UsageError(
                f"{folder}: {quoted(name)} is saved as whole numbers ({tensor['dtype']}), and config.json does not "
                "say how they are quantised\ntake the config.json that belongs to these weights"
            )
    numbered = {number for name in tensors if (number := layer_number(name)) is not None}
    counts = (getattr(config, name, None) for name in ("num_hidden_layers", "num_layers"))
    layers = min((each for each in counts if isinstance(each, int)), default=0)  # longcat also counts halves of layers
    if numbered and layers > max(numbered) + 1:
        raise UsageError(f"{folder}: config.json says {layers:,} layers, the weights have {max(numbered) + 1:,}")
    embeddings = [tensor["shape"] for name, tensor in tensors.items() if name.endswith(_EMBEDDING)]
    wide = getattr(config, "word_embed_proj_dim", None) or getattr(config, "hidden_size", None)
    if len(embeddings) == 1 and len(embeddings[0]) == 2 and wide and not hasattr(config, "embedding_size"):
        rows, width = embeddings[0]
        if (rows - EXTRA_TOKENS.get(config.model_type, 0), width) != (config.vocab_size, wide):
            raise UsageError(
                f"{folder}: the shapes of the weights are not those of config.json: {rows:,} tokens of {width:,} "
                f"numbers are embedded, not {config.vocab_size:,} of {wide:,}"
            )


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of a model directory that transformers loads; some directories hold a second copy."""
    whole, index = path / "model.safetensors", path / "model.safetensors.index.json"
    if whole.is_file():
        return [whole]
    if index.is_file():
        names = set(read_json(index).get("weight_map", {}).values())
        return sorted(path / name for name in names if (path / name).is_file())
    return []


def read_header(file: Path) -> dict[str, Any]:
    """Names and descriptions of the tensors in a safetensors file. Raises UsageError unless the file is whole."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 2 <= length <= min(size, _MOST_HEADER):
                raise ValueError("no header")
            header: dict[str, Any] = json.loads(stream.read(length))
        _check_metadata(header.pop("__metadata__", None))
        ranges = [_range_of(name, tensor) for name, tensor in header.items()]
    except OSError as error:
        raise UsageError(f"{file}: cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else error
        raise UsageError(f"{file}: not a safetensors file ({why})") from None
    try:
        check_ranges(ranges, size - 8 - length)
    except ValueError as error:
        raise UsageError(f"{file}: damaged: {error}\ncopy or download it again") from None
    return header


def data_start(file: Path) -> int:
    """Where the tensors' bytes begin in a safetensors file that `read_header` has taken."""
    with file.open("rb") as stream:
        return 8 + int.from_bytes(stream.read(8), "little")


def _check_index(index: Path, headers: dict[str, dict[str, Any]]) -> set[str]:
    """The files that an index names."""
    content = read_json(index)
    places = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(places, dict) or not all(isinstance(place, str) for place in places.values()):
        raise UsageError(f"{index}: no weight_map, which says which file holds each tensor")
    for name, place in places.items():
        if place not in headers:
            raise UsageError(f"{index}: names {quoted(place)}, which is missing; the model is not complete")
        if name not in headers[place]:
            raise UsageError(f"{index}: says that {place} holds {quoted(name)}, but it does not")
    return set(places.values())


def _check_metadata(found: Any) -> None:
    """Raise ValueError for metadata that the safetensors library does not take."""
    texts = found is None or (isinstance(found, dict) and all(isinstance(value, str) for value in found.values()))
    if not texts:
        raise ValueError(f"its metadata is {quoted(found)}, not a mapping of texts")


def _range_of(name: str, tensor: dict[str, Any]) -> tuple[int, int, str]:
    """Where a tensor lies in the data of its file. Raises ValueError if its shape and its bytes do not agree."""
    begin, end = tensor["data_offsets"]
    shape = tensor["shape"]
    if not all(type(number) is int and number >= 0 for number in (begin, end, *shape)):
        raise ValueError(f"{quoted(name)} has no shape or no place")
    width = _ITEM_BYTES.get(tensor["dtype"])
    if end < begin or (width is not None and end - begin != prod(shape) * width):
        raise ValueError(f"{quoted(name)} has {end - begin:,} bytes, which its shape {quoted(shape)} does not take")
    return begin, end, name


def layer_number(name: str) -> int | None:
    """The first number in a tensor's name: which layer it is of."""
    return next((int(part) for part in name.split(".") if part.isdecimal() and len(part) < 10), None)
