"""Quantised checkpoints: the formats, the needs of each, and how its weights are kept on a device.

transformers loads them, with help for some (`unpacking.py`). A format is known by the `quant_method` of
config.json. Its weights stay packed where that device computes with them, or are unpacked to the model's dtype when
they are loaded."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import torch

from prefillcli.errors import UsageError
from prefillcli.models.files import layer_number, read_header, weight_files
from prefillcli.models.find import ModelFiles
from prefillcli.models.gguf import tensor_bytes
from prefillcli.models.heads import auto_class
from prefillcli.models.law import FREE_SHARE
from prefillcli.models.open import Opened, refuse_what_cannot_fit, weights_of
from prefillcli.models.unpacking import UNPACKED, why_not_unpacked
from prefillcli.runtime.extras import ALLOWED, FETCHES, require_extra
from prefillcli.walk.forest import UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from prefillcli.walk.walk import LayerSource

Kept = Literal["packed", "unpacked"]
_BASE_MODEL = "take the model as it was before it was quantised, or as a GGUF file"


@dataclass(frozen=True, slots=True)
class QuantisedFormat:
    """A format of quantised weights.

    `cpu` and `cuda` are the ways in which its weights are kept there, None where it does not run. `capability` is the
    least of a CUDA device that computes with packed weights, for which `kernels` are needed as well; without these, a
    format that can be unpacked is unpacked. `extra` brings the packages that it needs everywhere, or `packages` names
    those that are in no extra. `tested` devices are those on which the tests compare it with transformers. A format
    that transformers cannot load has a reason in `refused`.
    """

    method: str
    name: str
    cpu: Kept | None = None
    cuda: Kept | None = None
    extra: str | None = None
    packages: tuple[str, ...] = ()
    capability: tuple[int, int] = (0, 0)
    kernels: tuple[str, ...] = ()
    tested: bool = False
    refused: str | None = None


_NO_LOADER = "transformers {version} has no loader for such checkpoints"

# All formats that transformers knows by name, but for GGUF.
FORMATS: dict[str, QuantisedFormat] = {
    each.method: each
    for each in (
        QuantisedFormat(
            "fp8", "fine-grained FP8", "unpacked", "packed", "fp8", (), (8, 9), ("kernels", "triton"), tested=True
        ),
        QuantisedFormat("mxfp8", "MXFP8", "unpacked", "packed", "fp8", (), (8, 9), ("kernels", "triton"), tested=True),
        QuantisedFormat("mxfp4", "MXFP4", "unpacked", "packed", "fp8", (), (7, 5), ("kernels", "triton"), tested=True),
        QuantisedFormat(
            "compressed-tensors", "compressed-tensors", "unpacked", "unpacked", "compressed-tensors", tested=True
        ),
        QuantisedFormat("bitsandbytes_4bit", "bitsandbytes, 4 bits", "packed", "packed", "bitsandbytes", tested=True),
        QuantisedFormat("bitsandbytes_8bit", "bitsandbytes, 8 bits", "packed", "packed", "bitsandbytes", tested=True),
        QuantisedFormat("torchao", "torchao", "packed", "packed", "torchao", tested=True),
        QuantisedFormat("fbgemm_fp8", "FBGEMM FP8", None, "packed", "fp8", ("fbgemm_gpu",), (9, 0)),
        QuantisedFormat("bitnet", "BitNet", None, "packed", "fp8"),
        QuantisedFormat("gptq", "GPTQ", "unpacked", "unpacked", tested=True),
        QuantisedFormat("awq", "AWQ", "unpacked", "unpacked", tested=True),
        QuantisedFormat("auto-round", "AutoRound", None, "packed", None, ("auto_round",)),
        QuantisedFormat("aqlm", "AQLM", None, "packed", None, ("aqlm", "accelerate")),
        QuantisedFormat("eetq", "EETQ", None, "packed", None, ("kernels", "accelerate")),
        QuantisedFormat("higgs", "HIGGS", None, "packed", None, ("flute", "fast_hadamard_transform", "accelerate")),
        QuantisedFormat("vptq", "VPTQ", None, "packed", None, ("vptq", "accelerate")),
        QuantisedFormat("spqr", "SpQR", None, "packed", None, ("spqr_quant", "accelerate")),
        QuantisedFormat("fp_quant", "FP-Quant", None, "packed", None, ("fp_quant",)),
        QuantisedFormat("quark", "Quark", None, "packed", None, ("quark",)),
        QuantisedFormat("sinq", "SINQ", None, "packed", None, ("sinq",)),
        QuantisedFormat("fouroversix", "Four Over Six", None, "packed", None, ("fouroversix",)),
        QuantisedFormat("hqq", "HQQ", refused=_NO_LOADER),
        QuantisedFormat("quanto", "quanto", refused=_NO_LOADER),
        QuantisedFormat("nvfp4", "NVFP4", refused=_NO_LOADER),
        QuantisedFormat("gemma", "Gemma's own", refused="it is not supported here"),
        QuantisedFormat("metal", "Metal", refused="it is for Apple's GPUs"),
    )
}


@dataclass(frozen=True, slots=True)
class Quantisation:
    """The form in which the weights of a quantised checkpoint are kept on a device.

    `changes` are the differences between the file's own entry and the configuration used to load it. `warning` names
    for the user what scores depend on besides their row. With `rounds_activations` layers round their inputs, so that
    the last bits of a number may decide a whole step.
    """

    format: QuantisedFormat
    kept: Kept
    changes: Mapping[str, Any] = field(default_factory=dict)
    warning: str | None = None
    rounds_activations: bool = False

    def describe(self, dtype: torch.dtype) -> str:
        """Return a description for people: the format and the treatment of the weights."""
        if self.kept == "packed":
            return f"{self.format.name}, packed"
        return f"{self.format.name}, unpacked to {str(dtype).removeprefix('torch.')}"


def plan_quantisation(origin: Path, entry: Mapping[str, Any] | None, device: torch.device) -> Quantisation | None:
    """Return how to load the checkpoint at `origin`, whose config.json has this `quantization_config`; None without
    one.

    Raises UsageError where a package is missing or the device is another. Raises UnsupportedModelError for formats
    that are unknown, that transformers cannot load, or whose scores depend on the rows computed beside them.
    """
    if entry is None:
        return None
    kind = _format(origin, entry)
    kept = _kept(origin, kind, device)
    _require_packages(origin, kind)
    if kind.method == "compressed-tensors":
        return Quantisation(kind, kept, {"dequantize": True}, rounds_activations=_check_activations(origin, entry))
    if kind.method in ("gptq", "awq"):
        if why := why_not_unpacked(entry):
            raise UnsupportedModelError(
                f"{origin}: weights quantised with {kind.name}: {why}\n{_BASE_MODEL}, or --engine vllm"
            )
        layout = "awq" if kind.method == "awq" else entry.get("checkpoint_format", "gptq")
        return Quantisation(kind, kept, {"quant_method": UNPACKED, "layout": layout, "bits": entry.get("bits", 4)})
    if kind.method == "bitsandbytes_8bit":
        warning = None
        if float(entry.get("llm_int8_threshold", 6.0) or 0.0) > 0:
            warning = (
                f"{origin}: bitsandbytes multiplies features with outliers in 16 bits, and finds them in all tokens "
                "that are computed together: a row's score depends on its neighbours in the last digits"
            )
        return Quantisation(kind, kept, warning=warning, rounds_activations=True)
    if kind.method == "torchao":
        return Quantisation(kind, kept, rounds_activations="Dynamic" in str(entry.get("quant_type")))
    if kept == "unpacked":
        return Quantisation(kind, kept, {"dequantize": True})
    return Quantisation(kind, kept, rounds_activations=True)


_ROUNDED_TOLERANCE = 0.15  # of the largest logit, where a last bit may decide a step of an activation


def rehearsal_tolerance(files: ModelFiles, device: torch.device) -> float | None:
    """Return the allowed difference of a quantised model's logits in a rehearsal, as a share of the largest; None: the
    usual one."""
    quantisation = plan_quantisation(files.origin, files.quantised, device)
    return _ROUNDED_TOLERANCE if quantisation is not None and quantisation.rounds_activations else None


def _format(origin: Path, entry: Mapping[str, Any]) -> QuantisedFormat:
    method = str(entry.get("quant_method") or "")
    if method in ("", "bitsandbytes") and (entry.get("load_in_8bit") or entry.get("load_in_4bit")):
        method = "bitsandbytes_4bit" if entry.get("load_in_4bit") else "bitsandbytes_8bit"
    kind = FORMATS.get(method)
    if kind is None:
        raise UnsupportedModelError(
            f"{origin}: its weights are quantised as {method[:40] or 'nothing that config.json names'!r}, "
            f"which transformers does not know\n{_BASE_MODEL}, or --engine vllm"
        )
    if kind.refused:
        from transformers import __version__

        why = kind.refused.format(version=__version__)
        raise UnsupportedModelError(f"{origin}: its weights are quantised with {kind.name}: {why}\n{_BASE_MODEL}")
    return kind


def _kept(origin: Path, kind: QuantisedFormat, device: torch.device) -> Kept:
    kept = kind.cuda if device.type == "cuda" else kind.cpu
    if device.type not in ("cpu", "cuda") and kept == "packed":
        kept = None
    if kept is None:
        raise UsageError(
            f"{origin}: weights quantised with {kind.name} run on CUDA devices only, not on {device}\n"
            f"{_BASE_MODEL}, or --device cuda"
        )
    if kept == "packed" and device.type == "cuda":
        able = torch.cuda.get_device_capability(device) >= kind.capability
        if not able and kind.cpu != "unpacked":
            least = ".".join(map(str, kind.capability))
            raise UsageError(
                f"{origin}: weights quantised with {kind.name} need a CUDA device of compute capability {least} or "
                f"more\n{_BASE_MODEL}"
            )
        if not able or not all(map(find_spec, kind.kernels)):
            return "unpacked"
    return kept


def _require_packages(origin: Path, kind: QuantisedFormat) -> None:
    # Raise UsageError if a package is missing that the format needs.
    if kind.extra is not None:
        require_extra(kind.extra, f"{origin}: weights quantised with {kind.name}")
    for package in kind.packages:
        if find_spec(package) is None:
            fetches = f", or may not fetch code from a hub: {ALLOWED}=1 allows it" if package == FETCHES else ""
            raise UsageError(
                f"{origin}: weights quantised with {kind.name}: the package {package} is not installed{fetches}\n"
                f"install it as its own page explains, or {_BASE_MODEL}"
            )


def _check_activations(origin: Path, entry: Mapping[str, Any]) -> bool:
    # Whether a compressed-tensors checkpoint rounds activations. Raises UnsupportedModelError where their scale is
    # found in all tokens of a call.
    rounds = False
    for group in (entry.get("config_groups") or {}).values():
        for each in ("input_activations", "output_activations"):
            taken = group.get(each) if isinstance(group, Mapping) else None
            rounds |= taken is not None
            if taken and taken.get("dynamic") is True and taken.get("strategy") in ("tensor", "channel"):
                raise UnsupportedModelError(
                    f"{origin}: its activations are scaled by the largest of all tokens that are computed together, "
                    "so a row's score would depend on its neighbours\ntake a checkpoint with scales per token"
                )
    return rounds


_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class WeightsPlan:
    """The place of a model's weights: here all on the device. A subclass may keep them elsewhere.

    `bytes` are all of them, `taken` those that they take of the device's free memory.
    """

    bytes: int
    taken: int
    mode: ClassVar[str] = "resident"  # in `run.json`
    place: ClassVar[str] = "all in memory"  # for people

    def load(
        self, files: ModelFiles, device: torch.device, *, trust_remote_code: bool
    ) -> tuple[PreTrainedModel, LayerSource | None]:
        """Load the model, ready to be walked, with the source of its layers if they are not on the device.

        Raises UsageError, ResourceError or UnsupportedModelError.
        """
        from prefillcli.models.load import load_model
        from prefillcli.walk.model_ends import decoder_layers
        from prefillcli.walk.walk import LayerSource

        model = load_model(files, device, trust_remote_code=trust_remote_code)
        if files.read_layers is None:
            return model, None
        return model, LayerSource(list(decoder_layers(model).layers)[: files.read_layers])


class _SavedTensor(NamedTuple):
    """A tensor in a file; `dtype` is None for one that stays as it is saved, whatever the model's dtype."""

    name: str
    dtype: torch.dtype | None
    numbers: int
    bytes: int


def weight_bytes(files: ModelFiles, device: torch.device) -> int:
    """Return the number of bytes of the device's free memory that the loaded weights take, at least.

    On the CPU, weights saved in the model's dtype stay mapped files, whose memory counts as free: only converted
    weights take any.
    """
    total = 0
    for tensor in _saved_tensors(files, device):
        if device.type != "cpu":
            total += tensor.numbers * files.dtype.itemsize if tensor.dtype else tensor.bytes
        elif tensor.dtype not in (None, files.dtype):
            total += tensor.numbers * files.dtype.itemsize
    return total


def plan_resident(opened: Opened, *, draft: bool = True) -> WeightsPlan:
    """Plan all weights on the device. Raises ResourceError if it certainly has no room for them, and with `draft` for
    those of the draft beside them."""
    refuse_what_cannot_fit(opened, draft=draft)
    return WeightsPlan(sum(layer_bytes(opened.files, opened.device).values()), weights_of(opened, draft=False))


def free_beside_draft(opened: Opened, budget: int) -> int:
    """Return the number of bytes that are free with model and draft loaded, where packs have this `budget` with the
    model alone."""
    return max(round(budget / FREE_SHARE) - draft_bytes(opened), 0)


def draft_bytes(opened: Opened) -> int:
    """Return the number of bytes of the device's free memory that the weights of the small models take, at least; 0
    without any."""
    found = 0
    for each in opened.small:
        found += weight_bytes(each.files, opened.device)
        if each.narrow is not None:  # beside those that are read to make them
            found += sum(tensor.numbers for tensor in _saved_tensors(each.files, opened.device) if tensor.dtype)
    return found


def layer_bytes(files: ModelFiles, device: torch.device) -> dict[int | None, int]:
    """Return the number of bytes of the weights in the model's dtype, by the number of their layer; None for all
    others."""
    found: dict[int | None, int] = defaultdict(int)
    for tensor in _saved_tensors(files, device):
        if files.read_layers is not None and (layer_number(tensor.name) or 0) >= files.read_layers:
            continue
        found[layer_number(tensor.name)] += tensor.numbers * files.dtype.itemsize if tensor.dtype else tensor.bytes
    return dict(found)


def _saved_tensors(files: ModelFiles, device: torch.device) -> Iterator[_SavedTensor]:
    # The tensors in a model's files; quantised weights that are unpacked in their form on the device, as those of GGUF
    # files are.
    if files.gguf is not None:
        for each in files.gguf.tensors:
            yield _SavedTensor(each.name, torch.uint8, each.numbers, tensor_bytes(each))
        return
    quantisation = plan_quantisation(files.origin, files.quantised, device)
    if quantisation is not None and quantisation.kept == "unpacked":
        yield from _unpacked_tensors(files)
        return
    for path in weight_files(files.path):
        for name, tensor in read_header(path).items():
            begin, end = tensor["data_offsets"]
            yield _SavedTensor(name, _FLOATS.get(tensor["dtype"]), prod(tensor["shape"]), end - begin)


def _unpacked_tensors(files: ModelFiles) -> Iterator[_SavedTensor]:
    # The tensors of a quantised model after loading; tensors that are whole in the files keep their dtype.
    whole = {
        name: _FLOATS.get(tensor["dtype"])
        for path in weight_files(files.path)
        for name, tensor in read_header(path).items()
    }
    config = copy.deepcopy(files.config)
    vars(config).pop("quantization_config", None)
    with torch.device("meta"):
        empty = auto_class(files.head).from_config(config, dtype=files.dtype)
    for name, tensor in {id(each): (name, each) for name, each in empty.state_dict(keep_vars=True).items()}.values():
        yield _SavedTensor(name, whole.get(name) or torch.uint8, tensor.numel(), tensor.nbytes)
