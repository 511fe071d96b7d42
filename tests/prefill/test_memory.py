"""The memory law, and that a budget is kept."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from benchmarks.memory import peak_in_child
from benchmarks.models import random_llama
from prefillcli.errors import ResourceError
from prefillcli.models.law import choose_chunk, memory_law, pack_limits
from prefillcli.plan.plan import make_plan
from prefillcli.prefill.forest import ATTENTION
from prefillcli.prefill.walk import LayerWalk
from prefillcli.profile.prompts import prompts_with_histories, random_prompt
from prefillcli.runtime.memory import available_memory

CPU = torch.device("cpu")
CHUNK = 512
LLAMA_8B = LlamaConfig(
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=128_256,
)


def test_the_law_of_an_8b_llama_is_12_kib_a_token() -> None:
    law = memory_law(LLAMA_8B, torch.bfloat16)
    assert law.residual + law.key_value == 12 * 1024
    assert law.key_value * law.layers == 128 * 1024, "what keeping all layers' K,V would take"


def test_limits_follow_from_the_budget() -> None:
    law = memory_law(LLAMA_8B, torch.bfloat16)
    gib = 1 << 30
    small, large = (
        pack_limits(law, budget=n * gib, device=CPU, chunk_tokens=CHUNK, pack_tokens=1 << 30) for n in (2, 4)
    )
    assert small.max_tokens * law.token + law.constant(CHUNK) <= 2 * gib
    assert large.max_tokens - small.max_tokens == pytest.approx(2 * gib / law.token, abs=1)
    assert small.held_tokens * 128 * 1024 <= gib
    discard = pack_limits(law, budget=2 * gib, device=CPU, chunk_tokens=CHUNK, prefix_kv="discard")
    assert dataclasses.replace(discard, held_cost=0.0).held_tokens == 0


def test_chunks_shrink_with_the_budget() -> None:
    law = memory_law(LLAMA_8B, torch.bfloat16)
    chunks = [choose_chunk(law, n << 20, CPU) for n in (16_000, 1_000, 200, 1)]
    assert chunks == sorted(chunks, reverse=True)
    assert (chunks[0], chunks[-1]) == (2048, 64)
    assert law.transient * chunks[1] <= (1_000 << 20) / 8 < 2 * law.transient * chunks[1]


def test_a_budget_too_small_for_anything_is_refused() -> None:
    with pytest.raises(ResourceError, match="too small: this model needs"):
        pack_limits(memory_law(LLAMA_8B, torch.bfloat16), budget=1 << 20, device=CPU, chunk_tokens=CHUNK)


def test_free_memory_is_some_but_not_all() -> None:
    assert 1 << 20 < available_memory(CPU) < 1 << 50


def ready_to_walk(budget: int, kind: str):
    model = random_llama("25M", torch.float32)
    model.set_attn_implementation(ATTENTION)
    limits = pack_limits(
        memory_law(model.config, torch.float32), budget=budget, device=CPU, chunk_tokens=CHUNK, pack_tokens=1 << 30
    )
    prompts = (
        [random_prompt(limits.max_tokens, 8000)]
        if kind == "longest"
        else prompts_with_histories(2, 60, 3000, 150, 8000)
    )
    walk = LayerWalk(model, chunk_tokens=CHUNK)

    def run(prompts: list[np.ndarray]) -> None:
        for pack in make_plan(prompts, limits).packs:
            list(walk.read_logits(pack))

    run([random_prompt(64, 8_000)])  # what is set up once is not the packs'
    return lambda: run(prompts)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["longest", "trees"])
def test_peak_memory_stays_within_the_budget(kind: str) -> None:
    budget = 130 << 20
    peak = peak_in_child(ready_to_walk, budget, kind)
    assert budget / 4 < peak <= budget
