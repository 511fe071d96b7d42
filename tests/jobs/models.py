"""Tiny model directories: a byte-level BPE tokenizer trained in place and a model with random weights."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as transformers_logging

VOCABULARY = 400
MAX_LENGTH = 2048
CHAT_TEMPLATE = (
    "<s>{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]\n{% endif %}"
)
_SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
_TEXTS = ["The quick brown fox. Answer: Yes", "Answer: No Yes yes no", "Yes\nNo\nyes\nno"]


def randomise(model: PreTrainedModel, seed: int) -> None:
    """Give a model random weights whose logits spread over a few units."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, weight.shape[-1] ** -0.5, generator=generator)


def save_model(
    path: Path,
    *,
    chat_template: str | None = None,
    seed: int = 0,
    layers: int = 2,
    hidden: int = 64,
    family: str = "llama",
    classifies: bool = False,
    words: str = "",
    steady: bool = False,
    **sizes: object,
) -> Path:
    """Save a model of random weights whose logits spread over a few units, and its tokenizer (BOS first).

    One that `classifies` has a head of sequence classification. The tokenizer learns the `words` too. The layers of a
    `steady` one change little, so that its answer follows from the last word. `sizes` are further settings of the
    family's configuration.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        [*_TEXTS, words] * 20,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=["<s>", "</s>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 0)]
    )
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=chat_template, **_SPECIAL).save_pretrained(path)
    model = (AutoModelForSequenceClassification if classifies else AutoModelForCausalLM).from_config(
        AutoConfig.for_model(
            family,
            vocab_size=VOCABULARY,
            hidden_size=hidden,
            intermediate_size=2 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=hidden // 4,
            max_position_embeddings=MAX_LENGTH,
            bos_token_id=0,
            eos_token_id=1,
            **sizes,
        )
    )
    randomise(model, seed)
    if steady:
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.o_proj.weight.mul_(0.03)
                layer.mlp.down_proj.weight.mul_(0.03)
    transformers_logging.disable_progress_bar()
    model.save_pretrained(path)
    return path
