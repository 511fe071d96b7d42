"""Models whose layers are called with a cache of their own kind, against their own eager forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.memory import peak_in_child
from prefillcli.models.find import read_model_files
from prefillcli.models.law import memory_law, pack_limits
from prefillcli.models.load import load_model
from prefillcli.models.rehearsal import rehearsal_of, rehearse
from prefillcli.plan.pack import LayersDone, Limits
from prefillcli.plan.plan import make_plan
from prefillcli.walk import own_cache
from prefillcli.walk.forest import UnsupportedModelError
from prefillcli.walk.model_ends import decoder_layers
from prefillcli.walk.own_cache import set_own_attention
from prefillcli.walk.walk import LayerWalk
from tests.unit.walk.families import VOCABULARY, WINDOW
from tests.unit.walk.test_sparse import eager_sparse, kept_of
from tests.unit.walk.test_walk import ONE_PACK, Prompt, assert_equal, eager, mixed, single, three_levels, tokens

_LATENT = {"kv_lora_rank": 16, "q_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12}
_EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
}
_COMMON = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
_GPT = {"n_embd": 64, "n_layer": 3, "n_head": 4}

#: What each family's configuration takes; with eight heads or fewer, an indexer finds keys that score the same.
CONFIGS: dict[str, dict[str, Any]] = {
    "gptj": {**_GPT, "rotary_dim": 8},
    "codegen": {**_GPT, "rotary_dim": 8},
    "bloom": {"hidden_size": 64, "n_layer": 3, "n_head": 4},
    "falcon": {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4},
    "falcon with ALiBi": {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "alibi": True},
    "mpt": {"d_model": 64, "n_heads": 4, "n_layers": 3, "max_seq_len": 512},
    "gpt_neo": {
        "hidden_size": 64,
        "num_layers": 3,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 1], [["global"], 1]],
        "window_size": WINDOW,
    },
    "xglm": {"d_model": 64, "num_layers": 3, "attention_heads": 4, "ffn_dim": 96},
    "diffllama": _SIZES,
    "doge": _SIZES,
    "deepseek_v32": {
        **_SIZES,
        **_LATENT,
        **_EXPERTS,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "first_k_dense_replace": 1,
        "index_topk": 24,
        "index_head_dim": 16,
        "index_n_heads": 16,
    },
    "deepseek_v4": {**_SIZES, **_EXPERTS, "num_key_value_heads": 1, "sliding_window": WINDOW},
    "longcat_flash": {
        **_SIZES,
        **_LATENT,
        "num_layers": 3,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "ffn_hidden_size": 96,
        "expert_ffn_hidden_size": 32,
        "moe_topk": 2,
        "zero_expert_num": 1,
        "n_routed_experts": 4,
    },
    "minimax": {
        **_SIZES,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "block_size": 16,
    },
}
#: Families whose forward takes no positions: kept tokens stand side by side.
WITHOUT_POSITIONS = {"bloom", "falcon with ALiBi", "mpt"}
every_family = pytest.mark.parametrize("family", CONFIGS)


@cache
def model_of(family: str) -> nn.Module:
    generator = torch.Generator().manual_seed(7)
    config = AutoConfig.for_model(family.split()[0], **_COMMON, **CONFIGS[family])
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for _, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(0, weight.shape[-1] ** -0.5, generator=generator)
    return model.requires_grad_(False)


@cache
def wanted(family: str, make: Callable[[], list[Prompt]]) -> Tensor:
    return eager(model_of(family), make())


def walked(
    model: Any, prompts: list[Prompt], *, chunk: int, limits: Limits = ONE_PACK, offload_held: bool = False,
    kept: Sequence[Prompt | None] | None = None,
) -> Tensor:  # fmt: skip
    """Float32 logits [prompts, vocabulary] of the walk with the model's own cache."""
    set_own_attention(model)
    walk = LayerWalk(model, chunk_tokens=chunk, offload_held=offload_held)
    logits = torch.zeros(len(prompts), VOCABULARY)
    try:
        for pack in make_plan(prompts, limits, positions=kept).packs:
            ticks: list[float] = []
            done = LayersDone.none(pack)
            rows = torch.cat(list(walk.read_logits(pack, ticks.append, done=done)))
            assert sum(ticks) == pytest.approx(len(pack.tokens))
            assert (done.full == len(walk.layers)).all()
            for row, (_, numbers) in zip(rows, pack.reads, strict=True):
                logits[list(numbers)] = row
    finally:
        walk.close()
    return logits


@every_family
def test_logits_equal_the_eager_forward(family: str) -> None:
    assert_equal(walked(model_of(family), single(), chunk=97), wanted(family, single))
    assert_equal(walked(model_of(family), three_levels(), chunk=97), wanted(family, three_levels))


@every_family
def test_a_tree_over_several_packs_keeps_or_recomputes_its_prefix(family: str) -> None:
    model, prompts = model_of(family), three_levels()
    kept = Limits(110, 10**6, held_tokens=10**6, whole_nodes=True)
    assert make_plan(prompts, kept).computed_tokens < make_plan(prompts, Limits(110, 10**6)).computed_tokens
    assert_equal(walked(model, prompts, chunk=41, limits=kept), wanted(family, three_levels))


@every_family
def test_kept_tokens_are_read_at_their_own_positions(family: str) -> None:
    model, prompts = model_of(family), three_levels()
    kept = kept_of(prompts)
    short = [prompt if own is None else prompt[own] for prompt, own in zip(prompts, kept, strict=True)]
    reference = eager(model, short) if family in WITHOUT_POSITIONS else eager_sparse(model, prompts, kept)
    assert_equal(walked(model, short, chunk=41, kept=kept), reference)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("family", ["bloom", "minimax"])
def test_chunks_and_offloading_change_no_score(family: str) -> None:
    held = Limits(90, 10**6, held_tokens=200, whole_nodes=True)
    for found in (
        walked(model_of(family), mixed(), chunk=4096),
        walked(model_of(family), mixed(), chunk=31, limits=held, offload_held=True),
        walked(model_of(family), mixed(), chunk=53, limits=Limits(110, 10**6)),
    ):
        assert_equal(found, wanted(family, mixed))
    assert_equal(walked(model_of(family), three_levels(), chunk=7), wanted(family, three_levels))


@pytest.mark.parametrize("family", ["bloom", "diffllama", "minimax"])
def test_runs_whose_scores_take_much_memory_are_computed_in_pieces(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_cache, "SCORE_BYTES", 1 << 15)
    monkeypatch.setattr(own_cache, "MIN_PIECE", 5)
    assert_equal(walked(model_of(family), three_levels(), chunk=97), wanted(family, three_levels))


@pytest.mark.parametrize("family", ["falcon", "minimax", "longcat_flash"])
def test_shared_prefixes_go_through_each_layer_once(family: str) -> None:
    model, prompts = model_of(family), three_levels()
    rows = [0] * len(decoder_layers(model).layers)

    def count(index: int) -> Callable[..., None]:
        def counted(layer: nn.Module, inputs: tuple[Any, ...], given: dict[str, Any]) -> None:
            rows[index] += (inputs[0] if inputs else given["hidden_states"]).shape[1]

        return counted

    layers = decoder_layers(model).layers
    hooks = [layer.register_forward_pre_hook(count(i), with_kwargs=True) for i, layer in enumerate(layers)]
    walked(model, prompts, chunk=50)
    for hook in hooks:
        hook.remove()
    unique = len({tuple(prompt[: end + 1].tolist()) for prompt in prompts for end in range(len(prompt))})
    assert unique < 0.7 * sum(len(prompt) for prompt in prompts)
    assert rows == [unique] * len(rows)


class _LeaveEvenReads:
    """Every second read leaves after the first layer."""

    layers = (0,)
    regroup_cost = 0.0

    def __init__(self) -> None:
        self.seen: dict[int, Tensor] = {}

    def peeks(self, layer: int) -> bool:
        return True

    def __call__(self, layer: int, reads: Sequence[int], before: Tensor, after: Tensor) -> list[int]:
        self.seen = dict(zip(reads, after.clone(), strict=True))
        return [read for read in reads if read % 2]


@pytest.mark.parametrize("family", ["mpt", "deepseek_v32", "minimax"])
def test_reads_leave_after_a_layer_and_change_no_other(family: str) -> None:
    model, prompts = model_of(family), three_levels()
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        states = [model(input_ids=torch.as_tensor(p).long()[None], output_hidden_states=True) for p in prompts]
    after_first = [each.hidden_states[1][0, -1] for each in states]
    set_own_attention(model)
    walk, rule = LayerWalk(model, chunk_tokens=37), _LeaveEvenReads()
    try:
        (pack,) = make_plan(prompts, ONE_PACK).packs
        done = LayersDone.none(pack)
        rows = torch.cat(list(walk.read_logits(pack, exits=rule, done=done)))
    finally:
        walk.close()
    numbers = [own[0] for _, own in pack.reads]
    assert done.regroupings == 1
    assert done.full.min() == 1
    assert done.full.max() == len(walk.layers)
    assert_equal(rows, wanted(family, three_levels)[numbers[1::2]])
    for read, number in enumerate(numbers):
        torch.testing.assert_close(rule.seen[read], after_first[number], atol=1e-4, rtol=0)


def ready_to_walk(budget: int, kind: str) -> Callable[[], None]:
    config = AutoConfig.for_model("bloom", vocab_size=2000, hidden_size=256, n_layer=3, n_head=8)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    law = memory_law(config, torch.float32).with_own_cache()
    cpu = torch.device("cpu")
    limits = pack_limits(law, budget=budget, device=cpu, chunk_tokens=1024, pack_tokens=1 << 30)
    rng = np.random.default_rng(1)
    history = tokens(rng, limits.max_tokens // 2)
    tails = 12 if kind == "tree" else 1
    each = (limits.max_tokens - len(history)) // tails
    prompts = [np.concatenate([history, tokens(rng, each)]) for _ in range(tails)]
    walk = LayerWalk(model, chunk_tokens=1024)

    def run(prompts: list[Prompt]) -> None:
        for pack in make_plan(prompts, limits).packs:
            list(walk.read_logits(pack))

    run([tokens(rng, 64)])  # what is set up once is not the packs'
    return lambda: run(prompts)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["longest", "tree"])
def test_peak_memory_stays_within_the_budget(kind: str) -> None:
    budget = 420 << 20
    peak = peak_in_child(ready_to_walk, budget, kind)
    assert budget / 5 < peak <= budget, f"{peak / 2**20:.0f} MiB"


def test_what_needs_queries_is_refused() -> None:
    model = model_of("bloom")
    set_own_attention(model)
    walk = LayerWalk(model, chunk_tokens=64)
    try:
        (pack,) = make_plan([tokens(np.random.default_rng(1), 9)], ONE_PACK).packs
        with pytest.raises(UnsupportedModelError, match="own cache"):
            next(walk.watch(pack, [8]))
    finally:
        walk.close()


def test_a_model_without_a_cache_is_refused() -> None:
    config = AutoConfig.for_model("openai-gpt", **_COMMON, **_GPT)
    model = AutoModelForCausalLM.from_config(config).eval()
    set_own_attention(model)
    with pytest.raises(UnsupportedModelError, match="cache"):
        LayerWalk(model, chunk_tokens=64)


@pytest.mark.parametrize("family", ["gptj", "bloom", "falcon with ALiBi"])
def test_a_saved_model_is_walked_with_its_own_cache(family: str, tmp_path: Path) -> None:
    model_of(family).save_pretrained(tmp_path)
    loaded = load_model(read_model_files(tmp_path), torch.device("cpu"))
    found = rehearsal_of(loaded)
    assert found.own_cache
    assert found.gaps
    assert_equal(walked(loaded, three_levels(), chunk=97), wanted(family, three_levels))


def test_a_model_that_its_gaps_confuse_is_walked_whole() -> None:
    """In deepseek_v4, a token sees as many compressed keys as its position says."""
    found = rehearse(model_of("deepseek_v4"), model_of("deepseek_v4").config)
    assert found.own_cache
    assert not found.gaps
