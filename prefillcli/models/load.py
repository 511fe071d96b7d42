"""A model's weights, loaded with transformers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from prefillcli.errors import UsageError, brief
from prefillcli.models.families import VERIFIED
from prefillcli.models.find import ModelFiles
from prefillcli.models.rehearsal import rehearse
from prefillcli.prefill.forest import ATTENTION, UnsupportedModelError, register


def load_model(files: ModelFiles, device: torch.device, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """Load the weights onto `device`, ready to be walked.

    Raises UnsupportedModelError if the walk of a family that is not verified differs from its own eager forward.
    """
    register()
    model = load_weights(files, device, attention=ATTENTION, trust_remote_code=trust_remote_code)
    if not isinstance(getattr(model.get_decoder(), "layers", None), nn.ModuleList):
        raise UnsupportedModelError(f"{files.family} keeps its decoder layers where the walk does not find them")
    if files.family not in VERIFIED:
        rehearse(model, files.config)
    return model


def load_weights(
    files: ModelFiles, device: torch.device, *, attention: str | None = None, trust_remote_code: bool = False
) -> PreTrainedModel:
    """The model on `device` as transformers makes it, from safetensors only; `attention` as it is called there (None:
    what transformers takes by itself). Raises UsageError."""
    with _quiet_transformers():
        try:
            model, info = AutoModelForCausalLM.from_pretrained(
                files.path,
                dtype=files.dtype,
                attn_implementation=attention,
                use_safetensors=True,
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
            )
        except (OSError, ValueError, RuntimeError, ImportError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            if "ignore_mismatched_sizes" in str(error):
                raise UsageError(f"{files.path}: the shapes of the weights are not those of config.json") from None
            raise UsageError(f"{files.path}: cannot load the weights: {brief(error)}") from None
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise UsageError(f"{files.path}: the weights lack {len(missing)} tensors, {missing[0]} among them")
    model = model.to(device).eval()
    model.requires_grad_(False)
    return model


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """No progress bars or advice from transformers while it loads; errors are raised."""
    level = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()
