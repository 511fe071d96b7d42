"""A tiny model with random weights of every causal language model that transformers knows.

A family is a name of transformers' registry of causal language models. All get the general sizes that their
configuration knows; `CHANGES` is what a family needs besides, so that it can be built, has every kind of layer that it
knows, and windows, blocks and selections that are shorter than the prompts of a test.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCABULARY = 211
WINDOW = 11  # shorter than prompts, and no multiple of a chunk
EXPERTS = 4

#: Sizes under all names that configurations have for them.
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "emb_dim", "embedding_size"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "dff", "n_inner", "d_inner", "ffn_hidden_size"), 96),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "feed_forward_size", "dim_ff"), 96),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 4),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_encoder_layers", "num_decoder_layers"), 3),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_encoder_attention_heads", "num_decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "d_head", "dim_head", "attention_head_size"), 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "model_max_length"), 512),
    "context_length": 512,
    "max_target_positions": 512,
    "sliding_window": WINDOW,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # experts
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), EXPERTS),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 32),
    **dict.fromkeys(("expert_ffn_hidden_size", "dense_intermediate_size", "intermediate_size_mlp"), 32),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    # compressed keys and values, and selections of keys
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "index_topk": 7,
    "index_n_heads": 16,  # so many that no score is 0 in all of them: of equal scores, any may be chosen
    "index_head_dim": 16,
    # recurrent modules
    **dict.fromkeys(("linear_num_value_heads", "linear_num_heads"), 4),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 16),
    "linear_num_key_heads": 2,
    **dict.fromkeys(("state_size", "ssm_state_size", "mamba_d_state"), 8),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "n_mamba_heads"), 4),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_headdim"), 32),
    **dict.fromkeys(("time_step_rank", "mamba_dt_rank"), 4),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size"), 16),
    "mamba_d_ssm": 128,
    "n_groups": 1,
}
_MLA = {"head_dim": None, "num_key_value_heads": 4}
_DENSE_FIRST = {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]}
_SLIDING = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]}
_SLIDES_LAST = {"layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]}
_SOME_SLIDE = {"use_sliding_window": True, "max_window_layers": 2}
_RECURS = {"layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"]}
_RECURS_LAST = {"layer_types": ["linear_attention", "full_attention", "full_attention", "linear_attention"]}
_DECODER = {"is_decoder": True}
_SMALL_EYES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}

#: What a family needs besides the general sizes. A family whose text model belongs to another one has that one's.
CHANGES: dict[str, dict[str, Any]] = {
    "afmoe": _SLIDING,
    "apertus": {"max_position_embeddings": 16384},
    "axk1": {**_MLA, "first_k_dense_replace": 1},
    "axk2": {**_MLA, **_DENSE_FIRST, "gated_norm_rank": 8},
    "bamba": {"attn_layer_indices": [1, 3]},
    "blt": {
        "vocab_size": 260,
        "encoder_hash_byte_group_vocab": 50,
        "patcher_config": _SIZES | {"vocab_size": 260, "num_hidden_layers": 1},
        "encoder_config": {**_SIZES, "vocab_size": 260, "num_hidden_layers": 1, "hidden_size_global": 64},
        "decoder_config": {**_SIZES, "vocab_size": 260, "num_hidden_layers": 2, "hidden_size_global": 64},
        "global_config": {**_SIZES, "num_hidden_layers": 2},
    },
    "codegen": {"rotary_dim": 8},
    "cohere": {"logit_scale": 1.0},
    "cohere2": {**_SLIDING, "logit_scale": 1.0},
    "cohere2_moe": {**_SLIDES_LAST, "logit_scale": 1.0, "num_shared_experts": 1},
    "cohere_compass_text": {
        **_SLIDING,
        "logit_scale": 1.0,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
            "full_attention": None,
        },
    },
    "cwm": _SLIDING,
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": EXPERTS, "moe_top_k": 2},
    },
    "deepseek_v2": {**_MLA, "first_k_dense_replace": 1, "n_shared_experts": 1},
    "deepseek_v3": {**_MLA, "first_k_dense_replace": 1},
    "deepseek_v32": {**_MLA, **_DENSE_FIRST},
    "deepseek_v4": {
        "num_key_value_heads": 1,
        "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"] * 2,
        "num_hidden_layers": 6,
        "compress_rates": {"compressed_sparse_attention": 3, "heavily_compressed_attention": 8},
        "partial_rotary_factor": 0.5,
        "o_groups": 2,
        "o_lora_rank": 16,
        "index_topk": 4,
        "hc_mult": 2,
    },
    "doge": {"keep_window_size": 64},  # beyond it, keys are dropped, and of equal ones any may be
    "dots1": {**_SLIDING, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "ernie4_5_moe": {"moe_num_experts": EXPERTS, "moe_k": 2, "moe_num_shared_experts": 1},
    "exaone4": _SLIDING,
    "exaone_moe": _SLIDES_LAST,
    "falcon_h1": {"mamba_rms_norm": True},
    "gemma2": {**_SLIDING, "query_pre_attn_scalar": 16},
    "gemma3_text": {**_SLIDING, "query_pre_attn_scalar": 16},
    "gemma3n_text": {
        "num_hidden_layers": 6,
        "layer_types": [*_SLIDING["layer_types"], "sliding_attention", "full_attention"],
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 16,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0, 0.0, 0.0],
    },
    "gemma4_text": {
        "num_hidden_layers": 6,
        "layer_types": [*_SLIDING["layer_types"], "sliding_attention", "full_attention"],
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 16,
        "global_head_dim": 32,
    },
    "gemma4_unified_text": {**_SLIDING, "global_head_dim": 32},
    "git": {"vision_config": {**_SMALL_EYES, "image_size": 32}},
    "glm4_moe_lite": {**_MLA, **_DENSE_FIRST},
    "glm_moe_dsa": {**_MLA, **_DENSE_FIRST, "indexer_types": ["full", "shared", "full", "shared"]},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": WINDOW},
    "gpt_oss": _SLIDING,
    "gptj": {"rotary_dim": 8},
    "granite": {"attention_multiplier": 0.25, "residual_multiplier": 0.5, "logits_scaling": 0.5},
    "granite_swa": _SLIDING,
    "granitemoe": {"attention_multiplier": 0.25},
    "granitemoe_swa": _SLIDES_LAST,
    "granitemoehybrid": {**_RECURS, "attention_multiplier": 0.25},
    "granitemoeshared": {"attention_multiplier": 0.25},
    "hrm_text": {"num_hidden_layers": 1, "L_cycles": 1},
    "hy_v4": {**_DENSE_FIRST, "indexer_types": ["full", "shared", "full", "shared"], "hc_mult": 2},
    "inkling_text": {
        "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding", "hybrid"],
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "sliding_window_size": WINDOW,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 1,
        "swa_head_dim": 16,
        "rel_extent": 23,
        "d_rel": 8,
        "logits_mup_width_multiplier": 1.0,
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "jetmoe": {"kv_channels": 16},
    "kimi_linear": {**_RECURS_LAST, **_MLA, **_DENSE_FIRST},
    "laguna": {**_SLIDES_LAST, "num_attention_heads_per_layer": [4, 2, 4, 2]},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "full_attention", "conv"], "num_dense_layers": 1},
    "llama4_text": {
        "attention_chunk_size": 13,
        "floor_scale": 8,
        "interleave_moe_layer_step": 2,
        "no_rope_layer_interval": 3,
    },
    "longcat_flash": {"num_layers": 2, "head_dim": 8, "num_key_value_heads": 4, "zero_expert_num": 2},
    "mamba2": {"num_heads": 4, "head_dim": 32},
    "mellum": _SLIDES_LAST,
    "mimo_v2_flash": {
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        **_DENSE_FIRST,
    },
    "minicpm3": _MLA,
    "minimax": {**_RECURS, "block_size": 16},
    "minimax_m2": {"rotary_dim": 8},
    "minimax_m3_vl_text": {
        **_DENSE_FIRST,
        "layer_types": ["full_attention", "minimax_m3_sparse", "full_attention", "minimax_m3_sparse"],
        "index_n_heads": 4,
        "index_block_size": 4,
        "index_topk_blocks": 3,
        "rotary_dim": 8,
    },
    "ministral": _SLIDING,
    "mllama_text_model": {"cross_attention_layers": [1]},
    "modernbert-decoder": {**_SLIDING, "local_attention": 2 * WINDOW, "cls_token_id": 1, "sep_token_id": 2},
    "moshi": {"audio_vocab_size": 20, "sliding_window": None},  # which only its cache knows
    "nemotron_h": {
        "layers_block_type": ["mamba", "moe", "attention", "mlp", "mamba", "attention"],
        "moe_shared_expert_intermediate_size": 32,
    },
    "olmo3": _SLIDING,
    "olmo_hybrid": {**_RECURS, "linear_num_key_heads": 4},
    "phimoe": {"sliding_window": None},
    "phi4_multimodal": {
        "vision_config": _SMALL_EYES,
        "audio_config": {
            **dict.fromkeys(("hidden_size", "intermediate_size", "ext_pw_out_channel", "nemo_conv_channels"), 16),
            **dict.fromkeys(("num_blocks", "num_attention_heads"), 2),
            "depthwise_separable_out_channel": 16,
        },
    },
    "qwen2": _SOME_SLIDE,
    "qwen3": _SOME_SLIDE,
    "qwen3_5_moe_text": _RECURS_LAST,
    "qwen3_5_text": _RECURS,
    "qwen3_moe": _SOME_SLIDE,
    "qwen3_next": _RECURS,
    "qwen4_exp_text": {
        "layer_types": ["linear_attention", "indexed_attention", "linear_attention", "indexed_attention"],
        "hc_count": 2,
        "hc_lowrank": 8,
        "ple_layer_ids": [1],
        "ple_embed_dim": 32,
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 100,
        "make_ngram_vocab_size_divisible_by": 8,
        "split_ngram_parts": 1,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "recurrent_gemma": {"num_hidden_layers": 5, "attention_window_size": WINDOW, "lru_width": 64},
    "reformer": {
        **_DECODER,
        "attn_layers": ["local", "lsh", "local", "lsh"],
        "axial_pos_shape": [16, 32],
        "axial_pos_embds_dim": [16, 48],
        "num_buckets": 8,
        "hash_seed": 5,
    },
    "roc_bert": {**_DECODER, "pronunciation_vocab_size": 20, "shape_vocab_size": 20},
    "smollm3": {**_SOME_SLIDE, "no_rope_layers": [1, 0, 1, 0]},
    "solar_open": {"n_shared_experts": 1},
    "vaultgemma": {**_SLIDING, "query_pre_attn_scalar": 16},
    "xlm": {"causal": True},
    "xlnet": {"attn_type": "uni"},
    "xmod": {**_DECODER, "default_language": "en_XX"},
    "youtu": _MLA,
    "zamba": {
        "num_hidden_layers": 5,
        "layers_block_type": ["mamba", "mamba", "hybrid", "mamba", "hybrid"],
        "num_key_value_heads": 4,
    },
    "zamba2": {
        "num_hidden_layers": 6,
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid", "mamba", "hybrid"],
        "num_key_value_heads": 4,
        "num_mem_blocks": 2,
        "use_shared_attention_adapter": True,
        "adapter_rank": 8,
        "use_mem_rope": True,
    },
    "zaya": {
        "layer_types": ["hybrid", "hybrid_sliding", "hybrid", "hybrid_sliding"],
        "num_experts_per_tok": 1,
        "router_hidden_size": 16,
    },
    # Encoders that are decoders too where they are told so.
    **dict.fromkeys(("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra"), _DECODER),
    **dict.fromkeys(("ernie", "megatron-bert", "rembert", "roberta", "roberta-prelayernorm", "roformer"), _DECODER),
    **dict.fromkeys(("xlm-roberta", "xlm-roberta-xl"), _DECODER),
}


#: Further settings of a family that change how it computes: title, and what it is to be built with besides.
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "bamba": {"a recurrent layer last": {"attn_layer_indices": [0, 2]}},
    "doge": {"experts": {"is_moe": True, "num_experts": 16}},
    "falcon": {
        "its new decoder": {"new_decoder_architecture": True},
        "ALiBi": {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True, "num_kv_heads": 4},
    },
    "gemma4_text": {
        "experts, and keys that are values": {
            "enable_moe_block": True,
            "top_k_experts": 2,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "num_kv_shared_layers": 0,
        }
    },
    "granitemoehybrid": {"a recurrent layer last": {**_RECURS_LAST, "position_embedding_type": "rope"}},
    "jamba": {"a recurrent layer last": {"attn_layer_offset": 0}},
    "kimi_linear": {"attention last": _RECURS},
    "lfm2": {"a convolution last": {"layer_types": ["full_attention", "conv", "full_attention", "conv"]}},
    "minimax": {"a recurrent layer last": _RECURS_LAST},
    "nemotron_h": {
        "a recurrent layer last": {"layers_block_type": ["attention", "mlp", "mamba", "moe", "attention", "mamba"]},
        "experts last": {"layers_block_type": ["mamba", "attention", "mamba", "moe"]},
    },
    "olmo_hybrid": {"a recurrent layer last": _RECURS_LAST},
    "phimoe": {"sliding windows": {"sliding_window": WINDOW}},
    "qwen2_moe": {"sliding windows": _SOME_SLIDE},
    "qwen3_5_text": {"a recurrent layer last": _RECURS_LAST},
    "qwen3_next": {"a recurrent layer last": _RECURS_LAST},
    "recurrent_gemma": {"attention last": {"num_hidden_layers": 6}},
    "zamba2": {
        "a recurrent layer last": {"layers_block_type": ["mamba", "hybrid", "mamba", "mamba", "hybrid", "mamba"]},
    },
}

_HALF = "the decoder of an encoder-decoder, which reads what the encoder saw"
_DRAFTER = "a drafter, which reads the states of the model that it drafts for"
_CODES = "makes codes of audio, not text"
_HALVES = ("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "mvp", "pegasus")
_HALVES += ("plbart", "prophetnet", "trocr", "whisper")

#: Classes of the registry that are no language models by themselves, and why.
NOT_DECODERS = {
    **dict.fromkeys(_HALVES, _HALF),
    **dict.fromkeys(("gemma4_assistant", "gemma4_unified_assistant"), _DRAFTER),
    **dict.fromkeys(("musicgen", "musicgen_melody"), _CODES),
}


def class_names() -> dict[str, str]:
    """The names of all causal language models that transformers knows, with those of their classes, by family."""
    return dict(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()))


def model_class(family: str) -> type[PreTrainedModel]:
    """The class of a name in the registry."""
    return getattr(transformers, class_names()[family])


def sized(kind: type[PreTrainedConfig], changes: dict[str, Any]) -> PreTrainedConfig:
    """A configuration with the general sizes that its kind knows, and these changes."""
    known = kind().to_dict()
    sizes = {name: size for name, size in _SIZES.items() if name in known}
    return kind(**{name: value for name, value in {**sizes, **changes}.items() if value is not None})


def make_tiny_config(family: str, **changes: object) -> PreTrainedConfig:
    """The configuration of a family's text model at test size."""
    text = model_class(family).config_class().get_text_config(decoder=True)
    return sized(type(text), {**CHANGES.get(text.model_type, {}), **changes})


def redraw(model: PreTrainedModel, seed: int = 7) -> PreTrainedModel:
    """The model with weights that make its logits spread over a few units, so that a wrong key shows.

    Decays and steps of recurrent modules, which have one number a channel, stay as they are.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(0, weight.shape[-1] ** -0.5, generator=generator)
            elif name.endswith(("sinks", ".A")) or (name.endswith("bias") and "dt" not in name):
                weight.normal_(0, 0.5, generator=generator)
    return model.requires_grad_(False)


def make_tiny_model(family: str, **changes: object) -> PreTrainedModel:
    """A model of a family of the registry, in float32 and eval mode."""
    config = make_tiny_config(family, **changes)
    own = model_class(family)
    make = own._from_config if isinstance(config, own.config_class) else AutoModelForCausalLM.from_config
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = make(config, attn_implementation="eager")
    return redraw(model.eval())
