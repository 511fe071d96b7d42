"""Model families: those that are verified, and the quirks of others that keep them from being walked.

A family is the `model_type` of a text configuration.
"""

from __future__ import annotations

from typing import Any

#: Families whose walk the tests compare with their own eager forward, as people write them. Every other one must agree
#: with its own forward in a rehearsal when it is loaded.
VERIFIED = {
    "llama": "Llama",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "mistral": "Mistral",
    "gemma2": "Gemma 2",
    "gemma3_text": "Gemma 3",
    "phi3": "Phi-3",
    "olmo2": "OLMo 2",
    "qwen3_moe": "Qwen3-MoE",
    "mixtral": "Mixtral",
    "gpt_oss": "gpt-oss",
}

_FOR_BOTH = "keeps its keys in a cache for encoders and decoders"
_TOGETHER = "keeps the states of all layers together, in no cache of transformers"
#: Families that cannot be walked layer by layer, and why. Other engines may score them.
UNWALKED = {
    "blt": "cuts bytes into patches with another model, and its layers read those",
    "cpmant": "puts learned tokens before each prompt",
    "hrm_text": "goes through its layers several times",
    "megatron-bert": _FOR_BOTH,
    "openai-gpt": "keeps no cache, and does not attend through the interface of transformers",
    "qwen4_exp_text": "looks up n-grams of the tokens before in its layers",
    "recurrent_gemma": "keeps its states in its modules, and its convolutions forget them in a call of several tokens",
    "reformer": "has reversible layers with two streams, and hashes the keys of a whole prompt",
    "rembert": _FOR_BOTH,
    "rwkv": _TOGETHER,
    "xlm": "changes the residual stream between its layers",
    "xlnet": "has memories in the place of a cache",
    "xlstm": _TOGETHER,
}

#: Position encodings that change all positions once a prompt passes a length.
LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})


#: Kinds of layers, in a configuration's `layer_types`, that see a selection of the tokens before.
SELECTIVE_LAYERS = frozenset(
    {
        "compressed_sparse_attention",
        "heavily_compressed_attention",
        "indexed_attention",
        "minimax_m3_sparse",
    }
)

#: Families whose position encodings stay float32, whatever the model's dtype.
FLOAT32_ROTARY = frozenset({"olmo2"})


#: Families of images and text whose text attends in both directions before the answer.
BOTH_WAYS = frozenset({"paligemma", "pi0"})

#: Families that attend in both directions unless their configuration says that they are decoders.
ENCODERS = frozenset(
    {"bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert",
     "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl", "xmod"}
)  # fmt: skip

#: Tokens that a family embeds beside those of its vocabulary.
EXTRA_TOKENS = {"mllama_text_model": 8, "moshi": 1}


def refusal(whole: Any, text: Any, *, causal: bool) -> str | None:
    """Why a model cannot be scored; None if its configuration gives no reason.

    `whole` is its configuration, `text` that of its text model, `causal` whether there is a causal language model of
    its family.
    """
    if getattr(whole, "is_encoder_decoder", False):
        return "is an encoder-decoder: its encoder reads a prompt, and its decoder only what it writes"
    if getattr(whole, "model_type", None) in BOTH_WAYS:
        return "reads a prompt in both directions"
    if not causal:
        return "has no causal language model in transformers"
    if getattr(text, "model_type", None) in ENCODERS and not getattr(text, "is_decoder", False):
        return "is an encoder, which attends in both directions (is_decoder is false in its configuration)"
    both_ways = getattr(text, "use_bidirectional_attention", False)  # "vision": only within an image
    if both_ways not in (None, False, "vision") or not getattr(text, "is_causal", True):
        return "attends in both directions, so it does not predict the next token"
    return None


def sees_nothing(text: Any) -> bool:
    """Whether layers have a sliding window of no token: transformers then masks all, and each kernel makes something
    else of that."""
    known = hasattr(type(text), "sliding_window")  # others keep the entry, and do not read it
    slides = "sliding_attention" in (getattr(text, "layer_types", None) or ["sliding_attention"])
    return known and slides and getattr(text, "sliding_window", None) == 0


def selects_keys(text: Any) -> bool:
    """Whether layers see tokens that an indexer selects or compresses, of which an attention function is not told."""
    return bool(SELECTIVE_LAYERS.intersection(getattr(text, "layer_types", None) or ()))


def length_switch(text: Any) -> int:
    """The longest prompt before the one way of encoding positions that longer prompts have instead; 0 without one."""
    rope = getattr(text, "rope_parameters", None) or {}
    return int(rope.get("original_max_position_embeddings") or 0) if rope.get("rope_type") == "longrope" else 0


def longest_prompt(text: Any, *, apart: bool = False) -> int:
    """Longest prompt, in tokens, that can be scored together with shorter ones as the model itself does.

    Position encodings that change all positions once a prompt passes a length make short and long prompts different
    models, so they end at that length. Where long prompts are planned apart, they may be longer than `length_switch`.
    """
    longest = int(getattr(text, "max_position_embeddings", 0) or 1 << 30)
    if text.model_type == "doge":  # beyond it, its layers drop keys, and others where a prompt comes in parts
        longest = min(longest, int(text.keep_window_size))
    rope = getattr(text, "rope_parameters", None) or {}
    if apart and length_switch(text):
        return longest
    for one in [rope, *(v for v in rope.values() if isinstance(v, dict))]:
        if one.get("rope_type") in LENGTH_DEPENDENT_ROPE:
            longest = min(longest, int(one.get("original_max_position_embeddings") or longest))
    return longest
