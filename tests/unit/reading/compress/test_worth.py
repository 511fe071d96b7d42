"""Where compression pays, by the papers' cost model and by transformers' own count of parameters."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, T5Config

from prefillcli.reading.compress.compressor import OVERHEAD, UNKNOWN_ABOVE, WorthCompressing
from prefillcli.reading.compress.settings import Compression


def config_of(layers: int, width: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=1000,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=1 << 20,
    )


TARGET, DRAFT = config_of(16, 512), config_of(2, 256)


def operations(config: LlamaConfig, tokens: int, heads: int) -> float:
    """Two for each parameter and token, and the causal pairs of queries and keys, twice two for each number."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    weights = sum(weight.numel() for weight in model.model.layers.parameters() if weight.dim() == 2)
    pairs = tokens * (tokens + 1) / 2 * config.num_hidden_layers
    return 2 * weights * tokens + 4 * config.hidden_size * pairs + 2 * heads * config.hidden_size * config.vocab_size


@pytest.mark.parametrize("tokens", [500, 3_000, 40_000])
@pytest.mark.parametrize("keep", [0.1, 0.5])
def test_the_speedup_is_that_of_the_papers_cost_model(tokens: int, keep: float) -> None:
    how = Compression(lookahead=8, keep_first=4, keep_last=64)
    full = operations(TARGET, tokens, 1)
    r = operations(DRAFT, tokens + 7, 7) / full
    k = operations(TARGET, round(keep * tokens) + 68, 1) / full
    assert WorthCompressing(how, TARGET, DRAFT).speedup(tokens, keep) == pytest.approx(
        1 / (r + k + OVERHEAD), rel=1e-6
    )


def test_auto_compresses_where_it_is_faster_and_a_number_stands_whatever_it_costs() -> None:
    auto = WorthCompressing(Compression(compress_above="auto"), TARGET, DRAFT)
    assert auto(2_700, 0.2)
    assert not auto(72, 0.2), "the ends that are kept anyway are nearly all of it"
    assert not auto(2_700, 0.99), "the draft costs more than is saved"
    itself = WorthCompressing(Compression(compress_above="auto"), TARGET, TARGET)
    assert not itself(2_700, 0.2)
    assert not itself(200_000, 0.2)
    assert "would be read at 0." in itself.why_not(2_700, 0.2)
    number = WorthCompressing(Compression(compress_above=2_000), TARGET, TARGET)
    assert [number(tokens, 0.2) for tokens in (1_999, 2_000, 2_001)] == [False, False, True]
    assert number.why_not(2_000, 0.2) == "are not more than compress_above 2,000"


def test_an_architecture_without_a_cost_model_is_compressed_where_prompts_are_long() -> None:
    unknown = WorthCompressing(Compression(compress_above="auto"), T5Config(), DRAFT)
    assert unknown.speedup(10_000, 0.2) is None
    assert [unknown(tokens, 0.2) for tokens in (UNKNOWN_ABOVE, UNKNOWN_ABOVE + 1)] == [False, True]
