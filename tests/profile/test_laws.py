"""The laws against numbers worked out by hand, for Llama-3.1-8B."""

from __future__ import annotations

import pytest
import torch
from transformers import GemmaConfig, LlamaConfig, MistralConfig

from prefillcli.profile.children import attention_windows, layer_bytes, mode_law

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
    return mode_law(mode, LLAMA_8B, torch.bfloat16, chunk).token


def test_a_layer_of_llama_8b_peaks_in_its_mlp() -> None:
    assert layer_bytes(LLAMA_8B, torch.bfloat16) == MLP == 102_400


def test_bytes_for_each_token_of_llama_8b() -> None:
    assert token("hybrid") == 12 * KIB + POSITIONS
    assert token("full") == 128 * KIB + 2 * 8 * KIB + POSITIONS + MLP
    assert token("chunked") == 128 * KIB + 4 * 4 * KIB + 1024 * 3


def test_only_chunked_modes_have_a_constant_that_grows_with_the_chunk() -> None:
    for mode in ("full", "chunked", "hybrid"):
        small, large = (mode_law(mode, LLAMA_8B, torch.bfloat16, chunk).base for chunk in (512, 1024))
        assert (large > small) == (mode != "full"), mode


def test_the_longest_prompt_fits_and_the_next_does_not() -> None:
    law = mode_law("hybrid", LLAMA_8B, torch.bfloat16, 512)
    longest = law.longest(8 << 30)
    assert law.bytes(longest) <= 8 << 30 < law.bytes(longest + 1)
    assert law.longest(1000) == 0


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="no mode"):
        mode_law("paged", LLAMA_8B, torch.bfloat16, 512)


def test_layers_that_attend_for_all_tokens_are_all_but_the_last() -> None:
    assert attention_windows(LLAMA_8B) == [(None, 31)]
    sliding = MistralConfig(num_hidden_layers=5, sliding_window=64)
    assert attention_windows(sliding) == [(64, 4)]
    assert attention_windows(GemmaConfig(num_hidden_layers=1)) == []
