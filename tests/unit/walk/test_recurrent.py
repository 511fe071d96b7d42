"""Recurrent modules in the walk, against the model's own eager forward over each prompt alone."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from prefillcli.plan.pack import Limits, Pack
from prefillcli.plan.plan import make_plan
from prefillcli.walk import recurrent
from prefillcli.walk.forest import register
from prefillcli.walk.layout import Group, group_runs
from prefillcli.walk.recurrent import PathStates, recurrent_modules
from tests.unit.walk import test_leaving, test_walk
from tests.unit.walk.families import VOCABULARY, make_model
from tests.unit.walk.test_leaving import LeaveAfter

HELD = Limits(110, 10**6, held_tokens=10**6)
ONE_PACK = Limits(10**6, 10**6)

#: State-space models of both versions, a gated delta net beside attention and experts, layers of one kind each, and a
#: short convolution. The last layers of the first, second and fifth recur.
RECURRENT: dict[str, dict[str, Any]] = {
    "mamba": {"state_size": 8},
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 8, "n_groups": 2, "chunk_size": 32},
    "qwen3_next": {
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
        "num_hidden_layers": 4, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16,
        "linear_value_head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    },
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "mamba", "moe"], "num_hidden_layers": 4, "mamba_num_heads": 8,
        "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 2, "chunk_size": 32, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32,
    },
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
}  # fmt: skip
every_family = pytest.mark.parametrize("family", RECURRENT)


@cache
def model_of(family: str) -> nn.Module:
    register()
    return make_model(family, **RECURRENT[family])


def prompts() -> list[np.typing.NDArray[np.int32]]:
    """Two levels of shared prefixes, prompts that others begin with, a long one and many of about the same length."""
    rng = np.random.default_rng(4)
    draw = lambda n: rng.integers(3, VOCABULARY, int(n)).astype(np.int32)  # noqa: E731
    task, found = draw(29), [draw(350)]
    for user in range(3):
        history = np.concatenate([task, draw(60 + 31 * user)])
        found += [history, *(np.concatenate([history, draw(n)]) for n in rng.integers(1, 80, 4))]
    return [*found, *(np.concatenate([task, draw(n)]) for n in rng.integers(1, 12, 12)), draw(1), draw(2)]


def own_logits(model: nn.Module) -> torch.Tensor:
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        ids = [torch.as_tensor(each, dtype=torch.long)[None] for each in prompts()]
        return torch.stack([model(input_ids=each, use_cache=False).logits[0, -1].float() for each in ids])


@cache
def wanted(family: str) -> torch.Tensor:
    return own_logits(model_of(family))


def walked(model: nn.Module, limits: Limits, chunk: int) -> torch.Tensor:
    return test_walk.walked(model, prompts(), chunk=chunk, limits=limits)


@pytest.mark.sampled(4)
@every_family
@pytest.mark.parametrize(("limits", "chunk"), [(ONE_PACK, 4096), (HELD, 41)])
def test_logits_equal_the_eager_forward(family: str, limits: Limits, chunk: int) -> None:
    assert wanted(family).std() > 0.1, "logits must differ enough to tell a wrong answer"
    torch.testing.assert_close(walked(model_of(family), limits, chunk), wanted(family), atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["mamba", "qwen3_next", "lfm2"])
def test_long_runs_and_large_batches_are_computed_in_parts(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrent, "RUN_TOKENS", 16)
    monkeypatch.setattr(recurrent, "STATE_BYTES", 3 * 4096)
    torch.testing.assert_close(walked(model_of(family), ONE_PACK, 97), wanted(family), atol=1e-4, rtol=0)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("family", ["mamba", "nemotron_h", "lfm2"])
def test_bfloat16_is_as_near_to_float32_as_the_models_own(family: str) -> None:
    register()
    half, rounded = make_model(family, torch.bfloat16, **RECURRENT[family]), make_model(family, **RECURRENT[family])
    rounded.load_state_dict({name: weight.float() for name, weight in half.state_dict().items()})
    exact = own_logits(rounded)
    own = (own_logits(half) - exact).abs().mean()
    assert (walked(half, ONE_PACK, 64) - exact).abs().mean() < 1.5 * own


@pytest.mark.parametrize(("family", "limits"), [("mamba2", ONE_PACK), ("qwen3_next", HELD), ("lfm2", ONE_PACK)])
def test_a_recurrent_module_reads_every_token_of_the_plan_once(
    family: str, limits: Limits, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens: Counter[int] = Counter()
    forward = recurrent.ModuleCall._forward_rows

    def counted(call: Any, pick: Any, shape: Any, state: Any) -> Any:
        tokens[id(call._module)] += shape[0] * shape[1]
        return forward(call, pick, shape, state)

    def one_by_one(runs: list[tuple[int, int]], device: torch.device) -> list[Group]:
        return [group for run in runs for group in group_runs([run], device)]  # without padding

    monkeypatch.setattr(recurrent.ModuleCall, "_forward_rows", counted)
    monkeypatch.setattr(recurrent, "group_runs", one_by_one)
    walked(model_of(family), limits, 53)
    plan = make_plan(prompts(), limits)
    modules = [each for layer in model_of(family).get_decoder().layers for each in recurrent_modules(layer)]
    assert modules
    assert plan.computed_tokens < sum(map(len, prompts()))
    assert tokens == {id(module): plan.computed_tokens for module in modules}


def test_as_many_states_are_kept_as_branches_are_open(monkeypatch: pytest.MonkeyPatch) -> None:
    states: list[int] = []  # how many were put aside, each time one was
    after = PathStates.after

    def counted(own: Any, run: Any, state: Any) -> None:
        after(own, run, state)
        states.append(len(own._states))

    monkeypatch.setattr(PathStates, "after", counted)
    walked(model_of("mamba"), ONE_PACK, 64)
    pack: Pack = make_plan(prompts(), ONE_PACK).packs[0]
    depth = [0] * len(pack.parents)
    for node, parent in enumerate(pack.parents):
        depth[node] = depth[parent] + 1 if parent >= 0 else 1
    assert 1 < max(states) <= max(depth)


def test_reads_leave_a_hybrid_between_its_layers() -> None:
    """Reads that have left get no logits; the others' are what they were."""
    numbers = [own[0] for _, own in make_plan(prompts(), ONE_PACK).packs[0].reads]
    rule = LeaveAfter(dict.fromkeys(numbers[::2], 1), peek=True, regroup_cost=0.01)
    found = test_leaving.walked(model_of("nemotron_h"), prompts(), rule, chunk=64).logits
    assert sorted(found) == sorted(numbers[1::2])
    for number, row in found.items():
        torch.testing.assert_close(row, wanted("nemotron_h")[number], atol=1e-4, rtol=0)


def test_tokens_that_were_left_out_are_not_in_the_state() -> None:
    """Kept tokens stand side by side for a recurrent module; attention knows their positions."""
    model, rng = model_of("qwen3_next"), np.random.default_rng(8)
    whole = rng.integers(3, VOCABULARY, 90).astype(np.int32)
    kept = np.sort(rng.choice(90, 50, replace=False)).astype(np.int32)
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        own = model(
            input_ids=torch.as_tensor(whole[kept], dtype=torch.long)[None],
            position_ids=torch.as_tensor(kept, dtype=torch.long)[None],
            attention_mask=torch.ones(1, 50, dtype=torch.long),
            use_cache=False,
        ).logits[0, -1]
    (found,) = test_walk.walked(model, [whole[kept]], chunk=16, positions=[kept])
    torch.testing.assert_close(found, own, atol=1e-4, rtol=0)
