"""Models whose layers are called with a cache of their own kind, against their own eager forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
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
from prefillcli.runtime.memory import keep_blocks
from prefillcli.walk import own_cache
from prefillcli.walk.forest import UnsupportedModelError
from prefillcli.walk.model_ends import decoder_layers
from prefillcli.walk.own_cache import set_own_attention
from prefillcli.walk.walk import LayerWalk
from tests.unit.walk.families import VOCABULARY
from tests.unit.walk.test_leaving import LeaveAfter
from tests.unit.walk.test_sparse import eager_sparse, kept_of
from tests.unit.walk.test_walk import ONE_PACK, Prompt, assert_equal, eager, mixed, single, three_levels, tokens
from tests.unit.walk.tiny_models import VARIANTS, make_tiny_model

ALIBI = VARIANTS["falcon"]["ALiBi"]
#: The matrix has the others: without positions, with windows, with chosen keys, and with states.
FAMILIES = ["bloom", "gpt_neo", "deepseek_v32", "minimax"]
every_family = pytest.mark.parametrize("family", FAMILIES)


@cache
def model_of(family: str) -> nn.Module:
    name, _, alibi = family.partition(" with ")
    return make_tiny_model(name, **(ALIBI if alibi else {}))


@cache
def wanted(family: str, make: Callable[[], list[Prompt]]) -> Tensor:
    return eager(model_of(family), make())


def walked(
    model: Any, prompts: list[Prompt], *, chunk: int, limits: Limits = ONE_PACK, offload_held: bool = False,
    kept: Sequence[Prompt | None] | None = None,
) -> Tensor:  # fmt: skip
    """Float32 logits [prompts, vocabulary] of the walk with the model's own cache."""
    set_own_attention(model)
    logits = torch.zeros(len(prompts), VOCABULARY)
    with closing(LayerWalk(model, chunk_tokens=chunk, offload_held=offload_held)) as walk:
        for pack in make_plan(prompts, limits, positions=kept).packs:
            ticks: list[float] = []
            done = LayersDone.none(pack)
            rows = torch.cat(list(walk.read_logits(pack, ticks.append, done=done)))
            assert sum(ticks) == pytest.approx(len(pack.tokens))
            assert (done.full == len(walk.layers)).all()
            for row, (_, numbers) in zip(rows, pack.reads, strict=True):
                logits[list(numbers)] = row
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
    # The forward of bloom takes no positions: kept tokens stand side by side.
    reference = eager(model, short) if family == "bloom" else eager_sparse(model, prompts, kept)
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


@pytest.mark.parametrize("family", ["bloom", "minimax"])
def test_runs_whose_scores_take_much_memory_are_computed_in_pieces(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_cache, "SCORE_BYTES", 1 << 15)
    monkeypatch.setattr(own_cache, "MIN_PIECE", 5)
    assert_equal(walked(model_of(family), three_levels(), chunk=97), wanted(family, three_levels))


@pytest.mark.parametrize("family", ["minimax", "longcat_flash"])
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


@pytest.mark.parametrize("family", ["bloom", "minimax"])
def test_reads_leave_after_a_layer_and_change_no_other(family: str) -> None:
    model, prompts = model_of(family), three_levels()
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        states = [model(input_ids=torch.as_tensor(p).long()[None], output_hidden_states=True) for p in prompts]
    after_first = [each.hidden_states[1][0, -1] for each in states]
    set_own_attention(model)
    (pack,) = make_plan(prompts, ONE_PACK).packs
    numbers = [own[0] for _, own in pack.reads]
    rule, done = LeaveAfter(dict.fromkeys(numbers[::2], 0), peek=True), LayersDone.none(pack)
    rule.pack = pack
    with closing(LayerWalk(model, chunk_tokens=37)) as walk:
        rows = torch.cat(list(walk.read_logits(pack, exits=rule, done=done)))
    assert done.regroupings == 1
    assert done.full.min() == 1
    assert done.full.max() == len(walk.layers)
    assert_equal(rows, wanted(family, three_levels)[numbers[1::2]])
    for number in numbers:
        torch.testing.assert_close(rule.shown[0][number][1], after_first[number], atol=1e-4, rtol=0)


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
    keep_blocks(budget)
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
    with closing(LayerWalk(model, chunk_tokens=64)) as walk:
        (pack,) = make_plan([tokens(np.random.default_rng(1), 9)], ONE_PACK).packs
        with pytest.raises(UnsupportedModelError, match="own cache"):
            next(walk.watch(pack, [8]))


def test_a_model_without_a_cache_is_refused() -> None:
    model = make_tiny_model("openai-gpt")
    set_own_attention(model)
    with pytest.raises(UnsupportedModelError, match="cache"):
        LayerWalk(model, chunk_tokens=64)


@pytest.mark.parametrize("family", ["gptj", "falcon with ALiBi"])
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
