"""A model's directory: what its files say before any weight is read, and the model itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as transformers_logging

from prefillcli.errors import ResourceError, UsageError, brief
from prefillcli.models.files import check_config, check_weights
from prefillcli.plan.pack import Limits
from prefillcli.plan.plan import make_plan
from prefillcli.prefill.forest import ATTENTION, UnsupportedModelError, register
from prefillcli.prefill.walk import LayerWalk

#: Families whose walk is compared with their own eager forward by the tests of this project. Others must agree with
#: it in a rehearsal when they are loaded.
VERIFIED = frozenset(
    {
        "llama",
        "qwen2",
        "qwen3",
        "mistral",
        "gemma2",
        "gemma3_text",
        "phi3",
        "olmo2",
        "qwen3_moe",
        "mixtral",
        "gpt_oss",
    }
)
_WALKABLE_LAYERS = {"full_attention", "sliding_attention", "attention"}
_LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}
_REHEARSAL_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.15, torch.float16: 0.05}


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model directory as its JSON files describe it. `config` is the text model's configuration."""

    path: Path
    family: str
    config: Any
    dtype: torch.dtype

    @property
    def max_length(self) -> int:
        """Longest prompt, in tokens, that the walk scores as the model's own forward does.

        Position encodings that change all positions once a prompt passes a length make short and long prompts
        different models, so they end at that length.
        """
        longest = int(getattr(self.config, "max_position_embeddings", 0) or 1 << 30)
        rope = getattr(self.config, "rope_parameters", None) or {}
        for one in [rope, *(v for v in rope.values() if isinstance(v, dict))]:
            if one.get("rope_type") in _LENGTH_DEPENDENT_ROPE:
                longest = min(longest, int(one.get("original_max_position_embeddings") or longest))
        return longest


def sliding_window(config: Any) -> int | None:
    """How many tokens the layers with a sliding window see, by a text config; None if there are no such layers."""
    window = getattr(config, "sliding_window", None)
    slides = "sliding_attention" in (getattr(config, "layer_types", None) or ["sliding_attention"])
    return int(window) if window and slides and getattr(config, "use_sliding_window", True) else None


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
    _refuse(whole, config, trust_remote_code, walk)
    chosen = getattr(torch, dtype) if dtype != "auto" else (config.dtype or whole.dtype or torch.float32)
    if dtype == "auto" and device == "cpu" and chosen == torch.float16:
        chosen = torch.float32  # float16 is slow and inexact on CPUs
    check_weights(path, weights, config)
    return ModelFiles(path, config.model_type, config, chosen)


def _refuse(whole: Any, config: Any, trust_remote_code: bool, walk: bool) -> None:
    """Say no to what cannot be scored, or not be walked, as far as the configuration tells."""
    family = config.model_type
    why, other = None, ""
    if getattr(whole, "is_encoder_decoder", False):
        why = "is an encoder-decoder"
    elif family not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not trust_remote_code:
        why = "is not a causal language model of transformers"
    elif getattr(config, "use_bidirectional_attention", False) or not getattr(config, "is_causal", True):
        why = "attends in both directions"
    elif walk and (strange := set(getattr(config, "layer_types", None) or ()) - _WALKABLE_LAYERS):
        why, other = f"has layers of type {', '.join(sorted(strange))}", " (prefill score --engine hf or vllm may)"
    if why:
        raise UnsupportedModelError(f"{family} {why}; it cannot be walked layer by layer{other}")


def choose_device(name: str) -> torch.device:
    """The torch device of `--device`. Raises UsageError or, for a device that is not there, ResourceError."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"--device {name}: no such kind of device; use cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"--device {name}: only cpu and cuda are supported")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ResourceError(f"--device {name}: {torch.cuda.device_count()} CUDA devices found")
    return device


def load_model(files: ModelFiles, device: torch.device, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """Load the weights onto `device`, ready to be walked.

    Raises UnsupportedModelError where a family this project does not test differs from its own eager forward.
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
                raise UsageError(f"{files.path}: the weights have other shapes than config.json says") from None
            raise UsageError(f"{files.path}: cannot load the weights: {brief(error)}") from None
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise UsageError(f"{files.path}: the weights lack {len(missing)} tensors, {missing[0]} among them")
    model = model.to(device).eval()
    model.requires_grad_(False)
    return model


def rehearse(model: PreTrainedModel, config: Any) -> None:
    """Walk a few prompts and compare their logits with the model's own eager forward.

    Prompts share prefixes over two levels and spread over chunks and packs. Raises UnsupportedModelError on the
    smallest doubt: a score that is silently wrong is worse than none.
    """
    family, vocabulary = config.model_type, int(config.vocab_size)
    rng = np.random.default_rng(0)
    root, middle = rng.integers(0, vocabulary, 23), rng.integers(0, vocabulary, 11)
    tails = [rng.integers(0, vocabulary, n) for n in (1, 7, 12)]
    prompts = [np.concatenate([root, middle, tail]).astype(np.int32) for tail in tails]
    prompts += [
        np.concatenate([root, tails[2]]).astype(np.int32),
        rng.integers(0, vocabulary, 19).astype(np.int32),
    ]
    device = model.get_input_embeddings().weight.device
    try:
        model.set_attn_implementation("eager")
        with torch.inference_mode():
            wanted = [
                model(input_ids=torch.as_tensor(p, dtype=torch.long, device=device)[None], use_cache=False).logits[
                    0, -1
                ]
                for p in prompts
            ]
        model.set_attn_implementation(ATTENTION)
        walk = LayerWalk(model, chunk_tokens=9)
        try:
            found: dict[int, torch.Tensor] = {}
            for pack in make_plan(prompts, Limits(48, 1 << 20, held_tokens=1 << 20)).packs:
                logits = torch.cat(list(walk.read_logits(pack)))
                found |= {n: logits[i] for i, (_, numbers) in enumerate(pack.reads) for n in numbers}
        finally:
            walk.close()
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{family} cannot be walked layer by layer: {error}") from None
    except (RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError) as error:
        raise UnsupportedModelError(
            f"{family} cannot be walked layer by layer: {type(error).__name__}: {brief(error)}"
        ) from error
    window = sliding_window(config)
    if window is not None and window not in walk.windows:
        raise UnsupportedModelError(f"{family} does not tell its attention function of its sliding window")
    worst = max(float((found[i] - w.float()).abs().max()) for i, w in enumerate(wanted))
    scale = max(float(w.float().abs().max()) for w in wanted)
    if not worst <= _REHEARSAL_TOLERANCE[wanted[0].dtype] * max(scale, 1.0):
        raise UnsupportedModelError(
            f"{family} cannot be walked layer by layer: its logits differ by {worst:.2g} from its own forward"
        )


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """No progress bars and advice from transformers while it loads; what matters is raised."""
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
