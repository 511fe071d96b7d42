"""Adapters that PEFT saves, and what PEFT's own forward says of a prompt."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.jobs.jobs import Reference


def save_adapter(model: Path, folder: Path, *, seed: int = 1, task_type: str | None = "CAUSAL_LM", **own: Any) -> Path:
    """Save an adapter of a model whose numbers are random, those saved beside the low-rank parts included."""
    targets = {} if "target_parameters" in own else {"target_modules": ["q_proj", "v_proj", "down_proj"]}
    config = LoraConfig(**({**targets, "r": 4, "lora_alpha": 8, "task_type": task_type} | own))
    generator = torch.Generator().manual_seed(seed)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        wrapped = get_peft_model(AutoModelForCausalLM.from_pretrained(model), config)
        for name, tensor in wrapped.named_parameters():
            saved = "modules_to_save" in name or (own.get("bias") == "all" and name.endswith("bias"))
            if "lora_magnitude" in name:
                tensor.mul_(1 + 0.2 * torch.rand(tensor.shape, generator=generator))
            elif "lora_" in name:
                tensor.copy_(0.1 * torch.randn(tensor.shape, generator=generator))
            elif "trainable_tokens" in name or saved:
                tensor.add_(0.1 * torch.randn(tensor.shape, generator=generator))
        wrapped.save_pretrained(folder)
    return folder


class PeftReference(Reference):
    """A model under transformers' eager forward, with an adapter that PEFT has put around it, not merged."""

    def __init__(self, model: Path, adapter: Path, tokenizer: Path | None = None) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(tokenizer or model)
        self._model = peft_model(model, adapter)


@cache
def peft_model(model: Path, adapter: Path) -> Any:
    """PEFT's model, on the CPU, not merged."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        base = AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager")
        return PeftModel.from_pretrained(base, adapter).eval()


@torch.inference_mode()
def last_logits(model: Any, ids: Sequence[int]) -> torch.Tensor:
    """Logits of the last token, float32 [vocabulary]."""
    return model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0, -1].float()
