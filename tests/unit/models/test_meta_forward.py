"""What a forward without numbers shows of a model, against what its forward with numbers takes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from benchmarks.flops import table5
from prefillcli.models.law import SCAN_OPERATIONS, TOKENS, NoSizesError, memory_law, model_sizes, pack_limits
from prefillcli.models.shape import NoCostModel
from tests.unit.walk.tiny_models import make_tiny_model

ATTENTION = ["gpt2", "falcon", "deepseek_v3", "llama4_text", "cohere2", "mpt"]
EXPERTS = ["qwen2_moe", "glm4_moe", "granitemoeshared"]
RECURRENT = ["qwen3_next", "olmo_hybrid", "nemotron_h", "falcon_h1", "jamba", "lfm2_moe"]


def text_model(family: str, **changes: object) -> PreTrainedModel:
    model = make_tiny_model(family, **changes)
    model.set_experts_implementation("eager")  # torch counts nothing of a grouped product
    return model


def counted(model: PreTrainedModel, tokens: int) -> int:
    ids = torch.arange(3, 3 + tokens)[None] % 200
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=ids, use_cache=False)
    return int(counter.get_total_flops())


@pytest.mark.parametrize("family", [*ATTENTION, *EXPERTS])
def test_operations_are_those_that_torch_counts(family: str) -> None:
    model = text_model(family)
    assert table5(model.config, 90).total == pytest.approx(counted(model, 90), rel=1e-9)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", RECURRENT)
def test_operations_of_recurrent_layers_are_those_that_torch_counts(family: str) -> None:
    """Of prompts of whole parts, as scans pad others; a scan that is no product is counted by its formula."""
    model = text_model(family, max_position_embeddings=2 * TOKENS)
    sizes = model_sizes(model.config, torch.float32)
    scans = TOKENS * sum(layer.scan for layer in sizes.layers)
    assert table5(model.config, TOKENS).total - scans == pytest.approx(counted(model, TOKENS), rel=2e-3)


def test_the_scan_of_mamba_is_counted_by_its_formula() -> None:
    config = make_tiny_model("mamba").config
    states = config.intermediate_size * config.state_size
    assert {layer.scan for layer in model_sizes(config, torch.float32).layers} == {SCAN_OPERATIONS * states}


@pytest.mark.parametrize("family", ["qwen3_next", "nemotron_h", "jamba", "zamba2", "lfm2"])
def test_states_and_keys_are_as_large_as_in_a_cache(family: str) -> None:
    model = make_tiny_model(family)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=torch.arange(3, 23)[None], past_key_values=cache, use_cache=True)
    keys, states = [], []
    for layer in cache.layers:
        both = [each for name in ("keys", "values") if (each := getattr(layer, name, None)) is not None]
        keys.append(sum(each.nbytes for each in both) // 20)
        own = [getattr(layer, name, {}).values() for name in ("conv_states", "recurrent_states")]
        states.append(sum(each.nbytes for part in own for each in part if each is not None))
    sizes = model_sizes(model.config, torch.float32)
    assert [layer.key_value for layer in sizes.layers] == keys
    assert [layer.states for layer in sizes.layers] == states
    law = memory_law(model.config, torch.float32)
    assert (law.all_key_values, law.states, law.layer_states) == (sum(keys), sum(states), max(states))
    assert law.residual == 4 * model.config.hidden_size


def test_mla_keeps_the_heads_that_attention_sees() -> None:
    """Not the latents that are cached for decoding: the walk stores what it attends to."""
    config = make_tiny_model("deepseek_v3").config
    key = config.qk_nope_head_dim + config.qk_rope_head_dim
    numbers = config.num_attention_heads * (key + config.v_head_dim)
    assert memory_law(config, torch.bfloat16).key_value == 2 * numbers


def test_a_held_node_keeps_the_states_of_all_layers() -> None:
    config = make_tiny_model("qwen3_next").config
    law = memory_law(config, torch.float32)
    limits = pack_limits(law, budget=1 << 30, device=torch.device("cpu"), chunk_tokens=64)
    assert limits.whole_nodes
    assert limits.held_size([10]) * law.all_key_values >= 10 * law.all_key_values + law.states
    attention = memory_law(make_tiny_model("gpt2").config, torch.float32)
    plain = pack_limits(attention, budget=1 << 30, device=torch.device("cpu"), chunk_tokens=64)
    assert (plain.whole_nodes, plain.node_tokens) == (False, 0)


def test_what_cannot_be_run_without_numbers_is_scored_all_the_same() -> None:
    config = SimpleNamespace(model_type="new", hidden_size=64, vocab_size=211, to_json_string=lambda **_: "{}")
    with pytest.raises(NoSizesError):
        model_sizes(config, torch.float32)
    assert memory_law(config, torch.float32).residual == 256
    with pytest.raises(NoCostModel, match="the operations of new are not known"):
        table5(config, 10)
