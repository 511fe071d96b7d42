"""A model's weights, loaded with transformers."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from prefillcli.errors import PrefillError, UsageError, brief, out_of_resource
from prefillcli.models.completeness import limit_cast_advice, limit_kernel_advice, quiet_transformers, require_complete
from prefillcli.models.files import READOUT
from prefillcli.models.find import ModelFiles
from prefillcli.models.gguf import TOKENIZER_BYTES, GgufModel, make_cached
from prefillcli.models.gguf_header import POINTER_BIAS, POINTER_HEAD
from prefillcli.models.heads import auto_class
from prefillcli.models.multimodal import load_text_part, read_config
from prefillcli.models.newest_flash import settle_attention
from prefillcli.models.placement import read_all, read_outside
from prefillcli.models.rehearsal import prove_model
from prefillcli.models.weights import Quantisation, plan_quantisation, rehearsal_tolerance
from prefillcli.runtime.clock import step
from prefillcli.walk.forest import ATTENTION, register
from prefillcli.walk.model_ends import embedding_device

if TYPE_CHECKING:
    from prefillcli.models.open import Opened


def load_model(files: ModelFiles, device: torch.device, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """Load the weights onto `device`, ready to be walked.

    A family that is not verified is rehearsed; on a device that the tests do not know, every family is. The model then
    has the forest attention, or one of transformers where it is walked with its own cache. Raises
    UnsupportedModelError if both walks differ from its own eager forward.
    """
    register()
    limit_kernel_advice(device.type)
    settle_attention(device, files.dtype, files.config)
    try:
        model = load_weights(files, device, attention=ATTENTION, trust_remote_code=trust_remote_code)
    except KeyError:  # some families have a table of attention classes, and no other attention
        try:
            model = load_weights(files, device, attention="eager", trust_remote_code=trust_remote_code)
        except KeyError as error:
            raise UsageError(f"{files.path}: cannot load the weights: no {brief(error)}") from None
    prove_model(model, files, tolerance=rehearsal_tolerance(files, device))
    return model


def load_weights(
    files: ModelFiles, device: torch.device, *, attention: str | None = None, trust_remote_code: bool = False
) -> PreTrainedModel:
    """Load the model on `device`, built by transformers from safetensors or GGUF only. `attention` is transformers'
    name for one (None: its own choice). Raises UsageError."""
    quantisation = plan_quantisation(files.origin, files.quantised, device)
    with quiet_transformers():
        try:
            if files.gguf is not None:
                return _placed(files, *_load_gguf(files.gguf, files, attention), device)
            if files.part_of is not None:
                return _placed(files, *load_text_part(files.path, files.dtype, attention), device)
            model, info = auto_class(files.head).from_pretrained(
                files.path,
                dtype=files.dtype,
                attn_implementation=attention,
                use_safetensors=True,
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
                **_further_arguments(files, quantisation, device, trust_remote_code),
            )
        except KeyError:
            raise
        except Exception as error:  # transformers raises any type for wrong files
            if out_of_resource(error) or isinstance(error, PrefillError):
                raise
            if "ignore_mismatched_sizes" in str(error):
                raise UsageError(f"{files.path}: the shapes of the weights are not those of config.json") from None
            raise UsageError(f"{files.path}: cannot load the weights: {brief(error)}") from None
    if quantisation is not None and quantisation.kept == "unpacked" and files.dtype == torch.float32:
        nn.Module.float(model)  # transformers unpacks some experts to bfloat16, whatever the dtype is
    return _placed(files, model, info, device)


def _load_gguf(gguf: GgufModel, files: ModelFiles, attention: str | None) -> tuple[PreTrainedModel, dict[str, Any]]:
    # The model on the CPU with all weights unpacked, and transformers' report on loading it.
    config = read_config(files.path)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config, dtype=files.dtype)
    given = read_all(gguf, empty, files.dtype)
    gguf.contents.require_unchanged()
    model, info = type(empty).from_pretrained(
        None,
        config=config,
        state_dict=given,
        dtype=files.dtype,
        attn_implementation=attention,
        output_loading_info=True,
    )
    return model, info


def add_own_head(model: PreTrainedModel, opened: Opened) -> None:
    """Give a model the head of its layout, if that has one of its own, instead of that of its vocabulary. Raises
    UsageError, ContentChangedError and ResourceError."""
    if opened.points:
        _add_pointer_head(model, opened.files)
    elif opened.layout is not None and opened.layout.form.readout:
        _add_readout(model, opened.files, [token for (token,) in opened.layout.codes.values()])


class _PointerHead(nn.Linear):
    """A small head that is computed in float32, because its outputs are multiplied with one another."""

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden.float())


class _CodeHead(nn.Linear):
    """A head for a few tokens of a vocabulary, in float32; the logits of all others are -inf."""

    def __init__(self, weight: Tensor, tokens: Sequence[int], vocabulary: int) -> None:
        super().__init__(weight.shape[1], len(weight), bias=False, device="meta")
        self.load_state_dict({"weight": weight}, assign=True)
        self.register_buffer("_tokens", torch.tensor(tokens), persistent=False)
        self._vocabulary = vocabulary

    def forward(self, hidden: Tensor) -> Tensor:
        logits = super().forward(hidden.float())
        whole = logits.new_full((*logits.shape[:-1], self._vocabulary), -torch.inf)
        return whole.index_copy_(-1, self.get_buffer("_tokens"), logits)


def _add_readout(model: PreTrainedModel, files: ModelFiles, tokens: Sequence[int]) -> None:
    # The rows of the answers of a decision model, which these tokens stand for. Raises UsageError.
    file, config = files.path / READOUT, model.config.get_text_config()
    try:
        weight = load_file(file)["weight"].float()
    except (SafetensorError, KeyError, OSError) as error:
        raise UsageError(f"{file}: {brief(error)}") from None
    if weight.shape != (len(tokens), config.hidden_size) or not weight.isfinite().all():
        raise UsageError(
            f"{file}: weight has the shape {list(weight.shape)}, and must be finite numbers of the shape "
            f"{[len(tokens), config.hidden_size]}\nget it again"
        )
    head = _CodeHead(weight, tokens, config.vocab_size)
    model.set_output_embeddings(head.requires_grad_(False).to(embedding_device(model)))


def _add_pointer_head(model: PreTrainedModel, files: ModelFiles) -> None:
    # The head of a decision model that compares options with their question. Raises UsageError, ContentChangedError
    # and ResourceError.
    if files.gguf is None:
        raise UsageError(f"{files.origin}: such a head is read of GGUF files alone")
    found = read_outside(files.gguf, (POINTER_HEAD, POINTER_BIAS))
    weight, bias = found[POINTER_HEAD], found.get(POINTER_BIAS)
    hidden = model.config.get_text_config().hidden_size
    if weight.shape[1:] != (hidden,) or len(weight) % 2 or (bias is not None and len(bias) != len(weight)):
        raise UsageError(f"{files.origin}: {POINTER_HEAD} has the shape {list(weight.shape)}\nconvert it again")
    head = _PointerHead(hidden, len(weight), bias=bias is not None, device="meta")
    head.load_state_dict({"weight": weight} | ({} if bias is None else {"bias": bias}), assign=True)
    model.set_output_embeddings(head.requires_grad_(False).to(embedding_device(model)))


_SHARD = "2GB"  # of saved weights, copied in memory at a time while they are written


def saved_weights(files: ModelFiles) -> Path | None:
    """Return the folder with a model's safetensors. Those of a GGUF model are made in the cache; None where it has no
    room for them. Raises UsageError and ResourceError."""
    gguf = files.gguf
    if gguf is None:
        return files.path

    def make(folder: Path) -> None:
        step(f"converting {gguf.origin.name} to safetensors, once", at_once=True)
        model = load_weights(files, torch.device("cpu"))
        with quiet_transformers():
            model.save_pretrained(folder, max_shard_size=_SHARD)
        for file in files.path.iterdir():
            if file.is_file() and not (folder / file.name).exists():
                (folder / file.name).write_bytes(file.read_bytes())

    return make_cached(gguf.cached_name(files.dtype), make, size=TOKENIZER_BYTES + gguf.nbytes(files.dtype))


def _further_arguments(
    files: ModelFiles, quantisation: Quantisation | None, device: torch.device, trust_remote_code: bool
) -> dict[str, Any]:
    """Return further arguments to transformers: the configuration, and what the device and a quantised checkpoint
    need."""
    config = read_config(files.path, trust_remote_code=trust_remote_code)
    if quantisation is None:
        return {"config": config} | ({"device_map": {"": device}} if loads_onto(device) else {})
    limit_cast_advice()
    config.quantization_config = {**config.quantization_config, **quantisation.changes}
    # Packed weights must not be moved, and transformers would take a CUDA device if it found one.
    return {"config": config} | ({"device_map": {"": device}} if quantisation.kept == "packed" else {})


def loads_onto(device: torch.device) -> bool:
    """Return whether each tensor goes to the device as it is read, not through a whole model in host memory."""
    return device.type == "cuda" and find_spec("accelerate") is not None


def _placed(files: ModelFiles, model: Any, info: dict[str, Any], device: torch.device) -> PreTrainedModel:
    require_complete(files.origin, model, info, files.path, quantised=files.quantised is not None)
    on_device = getattr(model, "hf_device_map", None) is not None
    placed: PreTrainedModel = (model if on_device else model.to(device)).eval()
    placed.requires_grad_(False)
    return placed
