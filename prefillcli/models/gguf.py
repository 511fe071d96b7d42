"""Models in GGUF format: opened without reading a weight.

transformers makes the configuration of a file's header, and `gguf_tokenizer.py` the tokenizer. That takes seconds, so
both are kept as an ordinary model folder. The weights stay in the file (`placement.py`); vLLM alone gets them as
safetensors, in such a folder.
"""

from __future__ import annotations

import errno
import fcntl
import math
import os
import re
import shutil
import struct
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers import modeling_gguf_pytorch_utils as reader
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from prefillcli.errors import PrefillError, ResourceError, UsageError, brief, out_of_resource
from prefillcli.models.completeness import bounded, quiet_transformers
from prefillcli.models.files import GGUF_MAGIC, check_ranges, layer_number
from prefillcli.models.gguf_header import POINTER_BIAS, POINTER_HEAD, GgufHeader, GgufTensor, read_gguf_header
from prefillcli.models.gguf_tokenizer import is_split_unknown, make_tokenizer, unknown_settings
from prefillcli.rows.proof import ModelContents, hash_value
from prefillcli.runtime import log
from prefillcli.runtime.user_cache import cache_folder
from prefillcli.runtime.version import version_of
from prefillcli.walk.forest import UnsupportedModelError
from prefillcli.walk.packed import FLOATS, blocks_bytes


def write_joined(parts: Sequence[GgufHeader], path: Path) -> None:
    """Join the headers of a split model's parts in one file at `path`, which must not exist yet.

    The tensors are holes in the file: it describes the model, and takes no room on the disk.
    """
    first = parts[0]
    settings = [raw for name, raw in first.raw.items() if not name.startswith("split.")]
    table, end = [], 0
    for tensor in (tensor for part in parts for tensor in part.tensors):
        name = tensor.name.encode()
        shape = struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *tensor.shape[::-1])
        table.append(struct.pack("<Q", len(name)) + name + shape + struct.pack("<IQ", tensor.kind, end))
        end += -(-tensor_bytes(tensor) // first.alignment) * first.alignment
    head = GGUF_MAGIC + struct.pack("<IQQ", first.version, len(table), len(settings)) + b"".join(settings + table)
    start = -(-len(head) // first.alignment) * first.alignment
    with path.open("xb") as file:
        file.write(head)
        file.truncate(start + end)


def tensor_bytes(tensor: GgufTensor) -> int:
    """Return the number of bytes of a tensor in its file; its kind must be known to the package `gguf`."""
    return blocks_bytes(tensor.kind, tensor.numbers)


# Whether a GGUF file is whole, and whether transformers builds the model that the file describes.
#
# transformers takes over the settings of a file that it knows, and drops the others. A model read without one of its
# settings gives wrong scores and no error, so it is refused here.


# The least and the largest value of a family's whole numbers; some are lists with one for each layer.
_WHOLE = {
    "block_count": (1, 4096),
    "context_length": (1, 1 << 40),
    "embedding_length": (1, 1 << 20),
    "feed_forward_length": (1, 1 << 24),
    "attention.head_count": (1, 1 << 16),
    "attention.head_count_kv": (0, 1 << 16),
    "attention.key_length": (1, 1 << 16),
    "rope.dimension_count": (0, 1 << 16),
    "expert_count": (0, 1 << 16),
    "vocab_size": (1, 1 << 24),
}

_ROTARY_FACTORS = "rope_freqs.weight"  # divisors of the rotary frequencies, in Llama 3.1 and later
_AS_SAFETENSORS = "take the model as safetensors"


def check_parts(parts: Sequence[GgufHeader]) -> None:
    """Refuse files that are cut short, of several models, or hold numbers that cannot be read. Raises UsageError."""
    first = parts[0]
    if not first.architecture:
        raise UsageError(f"{first.path}: no general.architecture, so its family is unknown")
    for name, (low, high) in _WHOLE.items():
        value = first.setting(name)
        for each in value if isinstance(value, list) else [value]:
            if each is not None and (type(each) is not int or not low <= each <= high):
                raise UsageError(
                    f"{first.path}: {first.architecture}.{name} is {each!r}; "
                    f"it must be a whole number from {low:,} to {high:,}"
                )
    _check_split(parts)
    told = first.setting("block_count")
    names = [each.name for part in parts for each in part.tensors if each.name.startswith("blk.")]
    layers = 1 + max((number for name in names if (number := layer_number(name)) is not None), default=-1)
    if told is not None and layers and told != layers:
        raise UsageError(
            f"{first.path}: damaged: {first.architecture}.block_count is {told}; its tensors are of {layers} layers"
        )
    for part in parts:
        for tensor in part.tensors:
            _check_kind(part, tensor)
        ranges = ((each.offset, each.offset + tensor_bytes(each), each.name) for each in part.tensors)
        try:
            check_ranges(ranges, part.size - part.data_start, alignment=part.alignment)
        except ValueError as error:
            raise UsageError(f"{part.path}: damaged: {error}\ncopy or download it again") from None


def _check_split(parts: Sequence[GgufHeader]) -> None:
    for number, part in enumerate(parts):
        count = part.fields.get("split.count", 0)
        if count not in (0, len(parts)) or (len(parts) > 1 and part.fields.get("split.no") != number):
            raise UsageError(
                f"{part.path}: is part {part.fields.get('split.no', 0) + 1} of {count or 1} of a model, "
                f"but its name does not show that\ngive the parts the names that they had, like "
                f"{part.path.stem}-00001-of-{count or 1:05}.gguf"
            )
    names = [tensor.name for part in parts for tensor in part.tensors]
    wanted = parts[0].fields.get("split.tensors.count", len(names)) if len(parts) > 1 else len(names)
    if wanted != len(names) or len(set(names)) != len(names):
        raise UsageError(f"{parts[0].path}: its parts are not of one model: {len(names)} tensors, not {wanted}")


def _check_kind(part: GgufHeader, tensor: GgufTensor) -> None:
    import gguf

    known = {kind.value: kind.name for kind in gguf.GGMLQuantizationType}
    if tensor.kind not in known:
        raise UsageError(
            f"{part.path}: {tensor.name} has quantisation {tensor.kind}, which the package gguf does not know\n"
            "update it (pip install -U gguf), or take a file with another quantisation"
        )
    kind = gguf.GGMLQuantizationType(tensor.kind)
    numbers, size = gguf.GGML_QUANT_SIZES[kind]
    try:
        gguf.dequantize(np.zeros((1, size), dtype=np.uint8), kind)
    except NotImplementedError:
        raise UsageError(
            f"{part.path}: {tensor.name} has quantisation {kind.name}, which cannot be read\n"
            "take a file with another quantisation, Q4_K_M or Q8_0 for example"
        ) from None
    if tensor.shape[-1] % numbers:
        raise UsageError(
            f"{part.path}: damaged: {tensor.name} has rows of {tensor.shape[-1]:,} numbers in {kind.name}"
        )


def complete_config(parts: Sequence[GgufHeader], config: Any) -> None:
    """Add the settings that transformers did not read to its configuration of a model.

    Raises UsageError for settings that it has no place for.
    """
    header = parts[0]
    if config.model_type == "phi3" and header.setting("attention.sliding_window"):
        config.sliding_window = header.setting("attention.sliding_window")
    _add_rotary_factors(parts, config)
    rope = _rope(config)
    scaling = header.setting("rope.scaling.type")
    if scaling not in (None, "none", rope.get("rope_type")):
        raise UsageError(
            f"{header.path}: its positions are scaled ({scaling}), which transformers does not read from GGUF\n"
            f"{_AS_SAFETENSORS}"
        )
    if all(header.setting(name) is None for name in _EPSILONS):
        raise UsageError(f"{header.path}: damaged: no {header.architecture}.{_EPSILONS[0]}, and no layer_norm_epsilon")
    for name, read in _SETTINGS.items():
        told, taken = header.setting(name), read(config)
        if isinstance(told, int | float) and not math.isclose(told, taken or 0, rel_tol=1e-4):
            raise UsageError(
                f"{header.path}: {header.architecture}.{name} is {told:g}, which transformers does not read from "
                f"GGUF: it takes {taken or 0:g}\n{_AS_SAFETENSORS}"
            )


def check_tensors(parts: Sequence[GgufHeader], model: PreTrainedModel, wanted: int, known: Mapping[str, str]) -> None:
    """Refuse files with more or fewer numbers than the `wanted` ones of transformers' model, or with tensors whose
    names that model lacks: `known` are their names in it, by those in the file with `.weight` at their end or without.
    What the model leaves out is not counted. Raises UsageError."""
    left_out = _left_out(model)
    pointed = parts[0].setting("decision.type") is not None
    names = {**known, **{f"{name}.weight": own for name, own in known.items()}}
    tensors = [
        each
        for part in parts
        for each in part.tensors
        if each.name != _ROTARY_FACTORS
        and not left_out(names.get(each.name, ""))
        and not (pointed and each.name in (POINTER_HEAD, POINTER_BIAS))
    ]
    strange = [each.name for each in tensors if each.name not in names]
    if strange:
        raise UsageError(
            f"{parts[0].path}: {len(strange)} of its tensors have no place in the {model.config.model_type} that "
            f"transformers makes of its settings, {strange[0]} among them\n{_AS_SAFETENSORS}"
        )
    held = sum(each.numbers for each in tensors)
    if held != wanted:
        raise UsageError(
            f"{parts[0].path}: its tensors hold {held:,} numbers; the {model.config.model_type} that transformers "
            f"makes of it has {wanted:,}\n{_AS_SAFETENSORS}"
        )


def _left_out(model: PreTrainedModel) -> Callable[[str], bool]:
    # Whether a model leaves out a tensor of this name, as those that predict a second token.
    rules = [re.compile(each) for each in model._keys_to_ignore_on_load_unexpected or ()]
    return lambda name: any(rule.search(name) for rule in rules)


def _add_rotary_factors(parts: Sequence[GgufHeader], config: Any) -> None:
    # Take over the rotary factors of Llama 3.1 and later, which llama.cpp saves as a tensor.
    found = [(part, tensor) for part in parts for tensor in part.tensors if tensor.name == _ROTARY_FACTORS]
    if not found:
        return
    part, tensor = found[0]
    factors = np.fromfile(part.path, "<f4", tensor.numbers, offset=part.data_start + tensor.offset)
    rope = _rope(config)
    scaled = {
        "rope_type": "llama3",
        "rope_theta": rope.get("rope_theta"),
        "factor": float(factors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    if tensor.kind == 0 and np.allclose(factors, 1):
        return
    known = tensor.kind == 0 and rope.get("rope_type") == "default"
    if not known or not np.allclose(factors, _llama3(scaled, 2 * len(factors)), rtol=1e-3):
        raise UsageError(
            f"{part.path}: {_ROTARY_FACTORS} scales its positions in a way that transformers does not read from GGUF\n"
            f"{_AS_SAFETENSORS}"
        )
    config.rope_parameters = scaled


def _llama3(rope: Mapping[str, Any], width: int) -> Any:
    # The factors of `rope_type: llama3` for heads of this width, float64 [width / 2].
    waves = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, width, 2) / width)
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    turns = rope["original_max_position_embeddings"] / waves
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return 1 / ((1 - smooth) / factor + smooth)


def _rope(config: Any) -> Mapping[str, Any]:
    # The rotary encoding of all layers, or of those that attend to all tokens.
    rope = getattr(config, "rope_parameters", None) or {}
    inner: Mapping[str, Any] = rope.get("full_attention", rope)
    return inner


def _first(*names: str) -> Callable[[Any], Any]:
    return lambda config: next((getattr(config, name) for name in names if getattr(config, name, None)), None)


def _rotary_width(config: Any) -> float:
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    share = _rope(config).get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1.0
    return float(int(width * share))


_EPSILONS = ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon")  # each family has one
_EPSILON = _first("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
_EXPERTS = _first("num_experts", "num_local_experts", "n_routed_experts")
# Settings of a file that change the model's results, and their places in transformers' configuration.
_SETTINGS: dict[str, Callable[[Any], Any]] = {
    "attention.sliding_window": _first("sliding_window"),
    **dict.fromkeys(_EPSILONS, _EPSILON),
    "attn_logit_softcapping": _first("attn_logit_softcapping"),
    "final_logit_softcapping": _first("final_logit_softcapping"),
    "rope.freq_base": lambda config: _rope(config).get("rope_theta"),
    "rope.dimension_count": _rotary_width,
    "expert_count": _EXPERTS,
    "expert_used_count": _first("num_experts_per_tok"),
    "logit_scale": _first("logit_scale"),
    "embedding_scale": _first("embedding_multiplier"),
    "residual_scale": _first("residual_multiplier"),
    "attention.scale": _first("attention_multiplier"),
}


# Models made of GGUF files, kept for the next start: folders in `$XDG_CACHE_HOME/prefillcli/gguf`.
#
# A folder is made beside its place, written to the disk and renamed, under a lock: it is whole or absent. It carries
# digests of its files, so that a damaged folder is made again. A process that uses a folder holds another lock of it,
# which ends with the process however that ends; a folder goes under the same lock, first to another name.


_PROOF = "prefillcli.digest"  # its time is that of the last use
_SPARE = 64 << 20  # bytes of the disk that stay free
UNUSED_DAYS = 30  # after which a folder goes

_kept: list[tempfile.TemporaryDirectory[str]] = []  # until this process ends
_used: dict[Path, int] = {}  # the open locks of the folders that this process uses


def find_cached(name: str) -> Path | None:
    """Find the folder of this name, if it is whole. It stays there until this process ends."""
    folder = _place(name)
    with suppress(OSError):  # where the cache cannot be written, nobody removes anything
        if folder not in _used and folder.is_dir():
            handle = os.open(_lock_file(folder, "use"), os.O_WRONLY | os.O_CREAT, 0o644)
            fcntl.flock(handle, fcntl.LOCK_SH)
            _used[folder] = handle
        os.utime(folder / _PROOF)
    try:
        proof = (folder / _PROOF).read_text()
        return folder if proof == _digest(folder) else None
    except (OSError, PrefillError, ValueError):
        return None


def make_cached(name: str, make: Callable[[Path], None], *, size: int) -> Path | None:
    """Return the folder of this name; if it is missing, `make` fills it with about `size` bytes.

    None, with a warning, if the cache has no room for it or cannot be written. Other errors of `make` pass.
    """
    place = _place(name)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with _locked(_lock_file(place, "lock")):
            found = find_cached(name)
            if found is not None:
                return found
            free = shutil.disk_usage(place.parent).free
            if free < size + _SPARE:
                raise OSError(errno.ENOSPC, f"{size / 2**30:.1f} GiB wanted, {free / 2**30:.1f} GiB free")
            folder = Path(tempfile.mkdtemp(dir=place.parent, prefix=f"{name}.", suffix=_UNFINISHED))
            try:
                make(folder)
                _seal(folder)
                if place.exists():  # damaged
                    shutil.rmtree(place)
                os.rename(folder, place)
                _sync(place.parent)
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
            return find_cached(name)
    except OSError as error:
        log.warning(f"{place.parent}: nothing is cached: {error.strerror or error}")
        return None


def prune_cached(most: int, wanted: int = 0) -> None:
    """Remove folders that no process uses: those unused for `UNUSED_DAYS`, then those used longest ago, until the
    others and `wanted` bytes more take `most` bytes at most. Unfinished folders of killed processes go too."""
    parent = _place("_").parent
    for folder in parent.glob(f"*{_UNFINISHED}"):
        name = folder.name.rsplit(".", 2)[0]
        with suppress(OSError), _locked(_lock_file(parent / name, "lock"), fcntl.LOCK_EX | fcntl.LOCK_NB):
            shutil.rmtree(folder, ignore_errors=True)
    found = sorted(_entries(parent))
    taken, oldest = wanted + sum(size for _, size, _ in found), time.time() - UNUSED_DAYS * 86400
    for used, size, folder in found:
        if (used < oldest or taken > most) and folder not in _used:
            with suppress(OSError), _locked(_lock_file(folder, "use"), fcntl.LOCK_EX | fcntl.LOCK_NB):
                going = folder.with_name(f"{folder.name}.pruned{_UNFINISHED}")
                os.rename(folder, going)
                shutil.rmtree(going, ignore_errors=True)
                taken -= size


def cache_use() -> tuple[Path, int]:
    """Return the folder of the cache, and the bytes of the models in it."""
    parent = _place("_").parent
    return parent, sum(size for _, size, _ in _entries(parent))


def _entries(parent: Path) -> Iterator[tuple[float, int, Path]]:
    # The time of its last use, the bytes and the folder of each model.
    for proof in parent.glob(f"*/{_PROOF}"):
        if not proof.parent.name.endswith(_UNFINISHED):
            with suppress(OSError):
                yield proof.stat().st_mtime, sum(each.stat().st_size for each in proof.parent.iterdir()), proof.parent


def make_once(make: Callable[[Path], None]) -> Path:
    """Return a folder filled by `make`, removed when this process ends."""
    folder = tempfile.TemporaryDirectory(prefix="prefill-gguf-", ignore_cleanup_errors=True)
    make(Path(folder.name))
    _kept.append(folder)
    return Path(folder.name)


def _place(name: str) -> Path:
    return cache_folder() / "gguf" / name


def _digest(folder: Path) -> str:
    contents = ModelContents(folder)
    return f"{contents.model()} {contents.tokenizer()}\n"


def _seal(folder: Path) -> None:
    (folder / _PROOF).write_text(_digest(folder))
    for file in folder.iterdir():
        file.chmod(0o644)
        _sync(file)
    folder.chmod(0o755)
    _sync(folder)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


_UNFINISHED = ".tmp"  # the end of the name of a folder that is being made or removed


def _lock_file(place: Path, kind: str) -> Path:
    # `lock`: of several processes that want the same folder, one makes it and the others wait. `use`: see above.
    return place.with_name(f"{place.name}.{kind}")


@contextmanager
def _locked(path: Path, how: int = fcntl.LOCK_EX) -> Iterator[None]:
    # With LOCK_NB it raises OSError if another process has the lock.
    with path.open("w") as file:
        fcntl.flock(file, how)
        yield


_FORMAT = 3  # of the cached folders
TOKENIZER_BYTES = 64 << 20  # a large one as files


@dataclass(frozen=True, slots=True)
class GgufModel:
    """A model's GGUF files, checked. `origin` is the file or folder that the user named.

    `contents` are the files at the time of opening, `digest` stands for the model that prefill makes of them.
    """

    origin: Path
    parts: tuple[GgufHeader, ...]
    contents: ModelContents
    digest: str

    @property
    def tensors(self) -> Iterator[GgufTensor]:
        return (tensor for part in self.parts for tensor in part.tensors)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the computation: that of the saved numbers, or bfloat16 where they are quantised."""
        kinds = {tensor.kind for tensor in self.tensors}
        if kinds <= FLOATS.keys():
            return next((FLOATS[kind] for kind in (30, 1) if kind in kinds), torch.float32)
        return torch.bfloat16

    def nbytes(self, dtype: torch.dtype) -> int:
        """Return the number of bytes of the weights in this dtype."""
        return dtype.itemsize * sum(tensor.numbers for tensor in self.tensors)

    def bytes_around(self, dtype: torch.dtype) -> int:
        """Return the bytes of the weights outside the decoder layers: those in blocks stay so, others have this
        dtype."""
        return sum(
            dtype.itemsize * each.numbers if each.kind in FLOATS else tensor_bytes(each)
            for each in self.tensors
            if layer_number(each.name) is None
        )

    def cached_name(self, dtype: torch.dtype | None = None) -> str:
        """Return the name in the cache: of configuration and tokenizer, or of the whole model in a `dtype`."""
        stem = re.sub(r"[^\w.-]", "_", self.parts[0].path.stem)[:60]
        return f"{stem}-{self.digest[:24]}" + (f"-{dtype}".replace("torch.", "") if dtype else "")


def open_gguf(path: Path, files: Sequence[Path]) -> GgufModel:
    """Check the GGUF `files` that `path` names. Reads their headers, and hashes them unless their digest is known.

    Raises UsageError for files that are damaged or cannot be read.
    """
    contents = ModelContents(path)
    contents.begin()
    parts = tuple(read_gguf_header(file) for file in files)
    check_parts(parts)
    _tell_unknown(parts[0])
    made_by = [_FORMAT, version_of("transformers"), version_of("gguf")]
    return GgufModel(path, parts, contents, hash_value([contents.model(), *made_by]))


def _tell_unknown(header: GgufHeader) -> None:
    unknown = unknown_settings(header.fields)
    if unknown:
        log.warning(f"{header.path}: not known here, and not applied: {', '.join(unknown)}")
    if is_split_unknown(header.fields):
        log.warning(
            f"{header.path}: no tokenizer.ggml.pre, so texts are split by llama.cpp's default, which is right for few "
            "models: convert the model again with a current llama.cpp"
        )


def describe_gguf(model: GgufModel) -> Path:
    """Make a folder with the model's configuration and tokenizer. Raises UsageError for files that transformers
    cannot read."""
    make = partial(_describe, model)
    return make_cached(model.cached_name(), make, size=TOKENIZER_BYTES) or make_once(make)


def _describe(model: GgufModel, folder: Path) -> None:
    header = model.parts[0]
    with _reading(model), _whole_file(model.parts) as file:
        config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
        complete_config(model.parts, config)
        config._name_or_path = ""
        if config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            held = [tensor.numbers for tensor in model.tensors]
            with torch.device("meta"), bounded(header.path, sum(held), len(held)):
                empty = AutoModelForCausalLM.from_config(config)
            numbers = {id(each): each.numel() for each in empty.state_dict(keep_vars=True).values()}
            check_tensors(model.parts, empty, sum(numbers.values()), tensor_rules(model, empty).names)
            config.architectures = [type(empty).__name__]
        config.save_pretrained(folder)
        whole = read_gguf_header(header.path, whole=True)
        make_tokenizer(whole.fields, header.path).save_pretrained(folder)
    model.contents.require_unchanged()


#: Makes numbers of a model of those of a file, float32 of the tensor's shape.
Change = Callable[[np.ndarray[Any, np.dtype[np.float32]]], np.ndarray[Any, np.dtype[np.float32]]]


class TensorRules(Protocol):
    """transformers' rules for the tensors of a GGUF file: their `names` in the model, and how their numbers change.
    Tensors of all experts have their names without `.weight`."""

    @property
    def names(self) -> Mapping[str, str]:
        """By names in the file."""

    def of(self, tensor: GgufTensor) -> tuple[str | None, Change | None]:
        """Return a tensor's name in the model, None where it has none; and what changes its numbers, if anything
        does."""


def tensor_rules(gguf: GgufModel, model: PreTrainedModel) -> TensorRules:
    """Return the rules for the tensors of a model that may be on the meta device. Raises UsageError."""
    builder = _conversions().get(gguf.parts[0].architecture)
    return _TableRules(gguf, model) if builder is None else _ConversionRules(gguf, model, builder(model.config))


def _conversions() -> Mapping[str, Callable[[Any], list[Any]]]:
    # By family, what makes the conversions of its tensors; none in an older transformers.
    with suppress(ImportError):
        found: Mapping[str, Callable[[Any], list[Any]]]
        found = import_module("transformers.integrations.gguf.gguf_conversion_mapping").GGUF_ARCHS
        return found
    return {}


class _ConversionRules:
    """Those of the families whose tensors transformers converts as it does those of safetensors."""

    def __init__(self, gguf: GgufModel, model: PreTrainedModel, mapping: Sequence[Any]) -> None:
        renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
        converters = [each for each in mapping if isinstance(each, WeightConverter)]
        by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
        wanted, left_out = model.state_dict(), _left_out(model)
        self.names: dict[str, str] = {}
        self._changes: dict[str, Change] = {}
        for tensor in gguf.tensors:
            name, pattern = rename_source_key(tensor.name, renamings, converters)
            if name in wanted or left_out(name):
                self.names[_without_experts(tensor.name)] = name
            if pattern is not None and len(by_pattern[pattern].source_patterns) == 1:
                self._changes[tensor.name] = partial(_converted, by_pattern[pattern].operations)

    def of(self, tensor: GgufTensor) -> tuple[str | None, Change | None]:
        """As of `TensorRules`."""
        return self.names.get(_without_experts(tensor.name)), self._changes.get(tensor.name)


def _without_experts(name: str) -> str:
    return name.removesuffix(".weight") if name.endswith("_exps.weight") else name


def _converted(operations: Sequence[Any], array: Any) -> Any:
    tensor = torch.from_numpy(array)
    for each in operations:
        (tensor,) = each.convert({"": tensor}, source_patterns=[""], target_patterns=[""]).values()
    return tensor.numpy()


class _TableRules:
    """Those of the other families: names by the package `gguf`, and a class that processes a family's tensors.

    Tensors that differ in the number of their layer alone are changed alike."""

    def __init__(self, gguf: GgufModel, model: PreTrainedModel) -> None:
        kind = reader.TENSOR_PROCESSORS.get(gguf.parts[0].architecture, reader.TensorProcessor)
        self._processor = kind(config=model.config.to_dict())
        with _reading(gguf):
            self.names: dict[str, str] = reader.get_gguf_hf_weights_map(model, self._processor)
        self._known: dict[tuple[str, tuple[int, ...]], tuple[bool, str | None]] = {}

    def of(self, tensor: GgufTensor) -> tuple[str | None, Change | None]:
        """As of `TensorRules`."""
        key = _NUMBER.sub("", tensor.name), tensor.shape
        if key not in self._known:
            before = np.broadcast_to(np.float32(-1), tensor.shape)  # one number: it takes no memory
            name, after = self._changed(tensor.name, before)
            self._known[key] = after is not before, None if name == tensor.name else name
        changes, own = self._known[key]
        return own or self.names.get(tensor.name), partial(self._change, tensor.name) if changes else None

    def _change(self, name: str, array: Any) -> Any:
        return self._changed(name, array)[1]

    def _changed(self, name: str, array: Any) -> tuple[str, Any]:
        # The numbers as the model has them; their name, or that in the model where transformers looks up none.
        kept: dict[str, Any] = {"tensors": {}}
        found = self._processor.process(array, name, tensor_key_mapping=self.names, parsed_parameters=kept)
        if found.name is not None:
            return found.name, found.weights
        if len(kept["tensors"]) != 1:
            raise UnsupportedModelError(f"transformers makes several tensors of {name}, which is not known here")
        ((own, tensor),) = kept["tensors"].items()
        return own, tensor.numpy()


_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


class _Settings:
    """Stands in for the reader of the package `gguf`, which takes 10 s for the tokens of a large vocabulary."""

    def __init__(self, path: str | Path) -> None:
        header = read_gguf_header(Path(path), whole=True)
        self.tensors = header.tensors
        self.fields = {name: _Setting(value) for name, value in header.fields.items()}


class _Setting:
    """A setting's values, as transformers takes them from that reader."""

    types = ()

    def __init__(self, value: Any) -> None:
        self.parts = value if isinstance(value, list) else [value]
        self.data = range(len(self.parts))


def _as_it_is(value: Any, types: Any) -> Any:
    return value


_FULL = ("No space left on device", "Disk quota exceeded", "File too large")


@contextmanager
def _reading(model: GgufModel) -> Iterator[None]:
    # transformers with a faster reader of headers, and without progress bars. Errors name the file; those of a full
    # disk and full memory pass.
    import gguf

    faster: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
        (gguf, "GGUFReader", cache(_Settings)),
        (gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map)),  # it is made anew for each module of a model
        (reader, "_gguf_parse_value", _as_it_is),
    )
    before = [(module, name, getattr(module, name)) for module, name, _ in faster]
    for module, name, function in faster:
        setattr(module, name, function)
    try:
        with quiet_transformers():
            yield
    except PrefillError:
        raise
    except Exception as error:  # the reader raises anything for files that it does not know
        if any(text in str(error) for text in _FULL):
            raise OSError(28, "no space left on the device") from None
        if out_of_resource(error):
            raise
        family = model.parts[0].architecture
        raise UsageError(
            f"{model.origin}: transformers cannot read this {family!r} model from GGUF: {brief(error)}\n"
            "take the model as safetensors"
        ) from None
    finally:
        for module, name, function in before:
            setattr(module, name, function)


@contextmanager
def _whole_file(parts: Sequence[GgufHeader]) -> Iterator[Path]:
    # The one file of a model, or a file of its joined headers that exists as long as it is read.
    if len(parts) == 1:
        yield parts[0].path
        return
    with tempfile.TemporaryDirectory(prefix="prefill-gguf-") as folder:
        file = Path(folder, parts[0].path.name)
        try:
            write_joined(parts, file)
        except OSError as error:
            raise ResourceError(f"{parts[0].path}: its parts cannot be joined in {folder}: {error.strerror}") from None
        yield file
