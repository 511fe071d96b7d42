"""A model's directory: found, and checked by what its files say before any weight is read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from prefillcli.errors import UsageError, brief
from prefillcli.models.families import longest_prompt, refusal
from prefillcli.models.files import check_config
from prefillcli.models.safetensors import check_weights
from prefillcli.prefill.forest import UnsupportedModelError


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model directory as its JSON files describe it. `config` is the text model's configuration."""

    path: Path
    family: str
    config: Any
    dtype: torch.dtype

    @property
    def max_length(self) -> int:
        """Longest prompt, in tokens, that the walk scores as the model's own forward does."""
        return longest_prompt(self.config)


def find_model(name: str, revision: str | None = None, *, option: str = "--model") -> Path:
    """The directory of `name`: itself if it is one, else a snapshot of the hub model (configuration, tokenizer and
    safetensors only). Raises UsageError that names the `option`."""
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise UsageError(f"{option} {name}: no such directory")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.py"]
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise UsageError(f"{option} {name}: not found locally or on the hub ({brief(error)})") from None


def read_model_files(
    path: Path, *, dtype: str = "auto", device: str = "cpu", trust_remote_code: bool = False, walk: bool = True
) -> ModelFiles:
    """Check that `path` holds a causal language model, and one that can be walked if `walk`, without reading weights.

    Raises UsageError for a directory that is none, UnsupportedModelError for an architecture that is refused.
    """
    if not (path / "config.json").is_file():
        raise UsageError(f"{path}: no config.json, so this is not a model directory")
    weights = sorted(path.glob("*.safetensors"))
    if not weights:
        others = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf") for p in path.glob(pattern))
        found = f" (found {', '.join(others[:3])}, which is not read: only safetensors are)" if others else ""
        raise UsageError(f"{path}: no .safetensors file{found}")
    check_config(path / "config.json")
    try:
        whole = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:  # each family has checks of its own, or none
        raise UsageError(f"{path}/config.json: {brief(error)}") from None
    config = whole.get_text_config()
    causal = config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or trust_remote_code
    if why := refusal(whole, config, causal=causal, walk=walk):
        elsewhere = refusal(whole, config, causal=causal, walk=False) is None
        other = " (prefill score --engine hf or vllm may)" if elsewhere else ""
        raise UnsupportedModelError(f"{config.model_type} {why}; it cannot be walked layer by layer{other}")
    chosen = getattr(torch, dtype) if dtype != "auto" else (config.dtype or whole.dtype or torch.float32)
    if dtype == "auto" and device == "cpu" and chosen == torch.float16:
        chosen = torch.float32  # float16 is slow and inexact on CPUs
    check_weights(path, weights, config)
    return ModelFiles(path, config.model_type, config, chosen)
