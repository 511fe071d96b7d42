"""A model's directory or GGUF file: found, and checked by its files' headers and settings before any weight is
read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from prefillcli.errors import PrefillError, UsageError, brief, out_of_resource
from prefillcli.models.completeness import build_empty, refuse_larger
from prefillcli.models.files import (
    CLASSIFIER,
    check_config,
    check_files,
    check_generation_config,
    check_weights,
    find_weights,
    quoted,
    read_tensors,
    refuse_code_elsewhere,
)
from prefillcli.models.gguf import GgufModel, describe_gguf, open_gguf, prune_cached
from prefillcli.models.heads import Activation, ClassHead, HeadChoice, find_head
from prefillcli.models.multimodal import read_config, text_part
from prefillcli.models.shape import is_encoder, longest_prompt, refusal, sees_nothing
from prefillcli.rows.proof import gguf_parts
from prefillcli.walk.forest import UnsupportedModelError


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model as its files describe it. `config` is the text model's configuration.

    `part_of` is the family of a multimodal model of which only the text model is loaded, else None. `head` is the
    classification head that is read; None for the vocabulary's.

    `quantised` is the entry of config.json on quantised weights, if there is one.

    `dtype` is the one that it computes in. Where that is neither the saved nor the requested one, `dtype_why` gives
    the reason.

    Of its layers the first `read_layers` are read, where those above are not needed; None: all.

    `path` is its directory. For a model in GGUF format, this is a directory with configuration and tokenizer that
    prefill keeps of it.
    """

    path: Path
    family: str
    config: Any
    dtype: torch.dtype
    gguf: GgufModel | None = None
    part_of: str | None = None
    head: ClassHead | None = None
    quantised: Mapping[str, Any] | None = None
    dtype_why: str | None = None
    read_layers: int | None = None

    @property
    def origin(self) -> Path:
        """The directory or GGUF file that the user knows."""
        return self.path if self.gguf is None else self.gguf.origin

    @property
    def activation(self) -> Activation:
        """The kind of function that turns the model's outputs into numbers."""
        return "softmax" if self.head is None else self.head.activation

    @property
    def encoder(self) -> bool:
        """True if it is an encoder with a classification head, which reads a whole text in both directions."""
        return self.head is not None and is_encoder(self.config)

    @property
    def max_length(self) -> int:
        """Longest prompt, in tokens, that is scored together with shorter ones as the model's own forward does."""
        return longest_prompt(self.config)

    @property
    def max_length_apart(self) -> int:
        """The same limit, where long prompts share nothing with shorter ones."""
        return longest_prompt(self.config, apart=True)


def read_model_files(
    path: Path,
    *,
    dtype: str = "auto",
    trust_remote_code: bool = False,
    head: HeadChoice = "auto",
) -> ModelFiles:
    """Check, without reading weights, that `path` holds a causal language model, or, by `head`, one with a
    classification head instead of the vocabulary's. With the dtype `auto` it is as saved.

    Raises UsageError for a directory without a model, UnsupportedModelError for an architecture that is refused.
    """
    parts = gguf_parts(path)
    gguf = open_gguf(path, parts) if parts else None
    folder = path if gguf is None else describe_gguf(gguf)
    check_files(folder)
    tensors = {} if gguf is not None else read_tensors(folder, find_weights(folder))
    longest = max((side for tensor in tensors.values() for side in tensor["shape"]), default=None)
    check_config(folder / "config.json", longest)
    check_generation_config(folder / "generation_config.json")
    if trust_remote_code:
        refuse_code_elsewhere(folder)
    with _described_by(folder / "config.json"):
        whole = read_config(folder, trust_remote_code=trust_remote_code)
        config = whole.get_text_config()
        if not isinstance(config, PreTrainedConfig):
            raise UsageError(f"{folder}/config.json: a {whole.model_type} model has no text_config")
        if sees_nothing(config):
            raise UsageError(f"{folder}/config.json: sliding_window is 0; a window has one token at least, or is null")
        part = text_part(whole) if gguf is None else None
        causal = part is not None or config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or trust_remote_code
        named = any(name.endswith(CLASSIFIER) for name in whole.architectures or ())
        encoder = named and head != "vocabulary" and is_encoder(config)
        if not encoder and (why := refusal(whole, config, causal=causal)):
            raise UnsupportedModelError(f"{folder}: a model of type {whole.model_type} cannot score prompts: it {why}")
        longest_prompt(config)
        found = None if gguf is not None else find_head(folder, whole, head, multimodal=part is not None)
    if gguf is not None and head in ("probability", "value"):
        raise UsageError(f"--head {head}: {path} is a GGUF model, of which only the vocabulary's head is read")
    said = (getattr(each, "quantization_config", None) for each in (whole, config))
    quantised = next((each for each in said if isinstance(each, Mapping)), None)
    own = config.dtype or whole.dtype or torch.float32 if gguf is None else gguf.dtype
    if not isinstance(own, torch.dtype):
        raise UsageError(f"{folder}/config.json: dtype is {quoted(own)}; it must be a name like float32")
    chosen = getattr(torch, dtype) if dtype != "auto" else own
    if gguf is None:
        check_weights(folder, tensors, config, quantised=quantised is not None)
        if type(whole).__module__.startswith("transformers."):  # the user trusts the model's own code
            model = partial(build_empty, whole, found, part, chosen)
            refuse_larger(folder / "config.json", model, tensors, packed=quantised is not None)
    part_of = None if part is None else whole.model_type
    return ModelFiles(folder, config.model_type, config, chosen, gguf, part_of, found, quantised)


def in_dtype(files: ModelFiles, dtype: torch.dtype) -> ModelFiles:
    """Return the same model, to be computed in another dtype."""
    return replace(files, dtype=dtype)


@contextmanager
def _described_by(file: Path) -> Iterator[None]:
    # Errors from building a configuration name its file: transformers' families raise any error for wrong content.
    try:
        yield
    except PrefillError:
        raise
    except Exception as error:
        if out_of_resource(error):
            raise
        raise UsageError(f"{file}: transformers makes no model of it: {brief(error)}") from None


def prune_cache(files: ModelFiles, most: int) -> None:
    """Make room in the cache, which takes about `most` bytes, for a GGUF model that will be used."""
    if files.gguf is not None:
        prune_cached(most)
