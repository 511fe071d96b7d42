"""The laws against numbers worked out by hand, for Llama-3.1-8B."""

from __future__ import annotations

import torch
from transformers import LlamaConfig

from prefillcli.tools.profile.measuring import layer_bytes, mode_law

LLAMA_8B = LlamaConfig(
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=128_256,
)
KIB = 1024
POSITIONS = 2 * 128 * 2 + 16  # cos and sin of 128 in bfloat16, two int64
MLP = 2 * (2 * 4096 + 3 * 14336)  # residual, normed input; gate, up, product


def token(mode: str, chunk: int = 1024) -> float:
    return mode_law(mode, LLAMA_8B, torch.bfloat16, chunk)[1]


def test_a_layer_of_llama_8b_peaks_in_its_mlp() -> None:
    assert layer_bytes(LLAMA_8B, torch.bfloat16) == MLP == 102_400


def test_bytes_for_each_token_of_llama_8b() -> None:
    assert token("hybrid") == 12 * KIB + POSITIONS
    assert token("full") == 128 * KIB + 2 * 8 * KIB + POSITIONS + MLP
    assert token("chunked") == 128 * KIB + 4 * 4 * KIB + 1024 * 3


def test_only_chunked_modes_have_a_constant_that_grows_with_the_chunk() -> None:
    for mode in ("full", "chunked", "hybrid"):
        small, large = (mode_law(mode, LLAMA_8B, torch.bfloat16, chunk)[0] for chunk in (512, 1024))
        assert (large > small) == (mode != "full"), mode
