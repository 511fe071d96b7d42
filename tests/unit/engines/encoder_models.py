"""Tiny encoders with a classification head: random weights, and a tokenizer trained in place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedTokenizerFast

#: What each family needs besides the general sizes.
FAMILIES: dict[str, dict[str, Any]] = {
    "albert": {"embedding_size": 16},
    "bert": {},
    "camembert": {},
    "deberta": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_biased_input": False},
    "deberta-v2": {
        "relative_attention": True,
        "pos_att_type": ["c2p", "p2c"],
        "position_buckets": 8,
        "position_biased_input": False,
        "share_att_key": True,
        "type_vocab_size": 0,
    },
    "distilbert": {"dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 4},
    "electra": {"embedding_size": 16},
    "modernbert": {"local_attention": 8, "global_attn_every_n_layers": 2, "sep_token_id": 2, "cls_token_id": 1},
    "mpnet": {},
    "roberta": {"type_vocab_size": 1},
    "xlm-roberta": {"type_vocab_size": 1},
}
#: Their first token has the position behind that of padding, and their tokenizers write two separators in a pair.
LIKE_ROBERTA = ("camembert", "mpnet", "roberta", "xlm-roberta")
MAX_LENGTH = 64
_SPECIAL = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"}


def save_encoder(folder: Path, family: str = "bert", **settings: Any) -> Path:
    """Save an encoder that takes at most `MAX_LENGTH` tokens, with outputs that spread over a few units."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        ["The quick brown fox saw a lazy dog"] * 20,
        trainers.BpeTrainer(
            vocab_size=320,
            special_tokens=list(_SPECIAL.values()),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    like_roberta = family in LIKE_ROBERTA
    tokenizer.post_processor = (
        processors.RobertaProcessing(("[SEP]", 2), ("[CLS]", 1))
        if like_roberta
        else processors.TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
        )
    )
    types = [] if like_roberta or family in ("distilbert", "modernbert") else ["token_type_ids"]
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_input_names=["input_ids", "attention_mask", *types], **_SPECIAL
    ).save_pretrained(folder)
    sizes = {
        "vocab_size": 320,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": MAX_LENGTH + like_roberta,
        "pad_token_id": 0,
    }
    config = AutoConfig.for_model(family, **{**sizes, **FAMILIES[family], **settings})
    model = AutoModelForSequenceClassification.from_config(config)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 2 * weight.shape[-1] ** -0.5, generator=generator)
    model.save_pretrained(folder)
    return folder
