"""What a model's own layer votes for, and after which layer it does."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import MambaConfig

from prefillcli.core.request import Request, plan_requests
from prefillcli.errors import UsageError
from prefillcli.plan.behind import LabelSet
from prefillcli.plan.pack import Limits, Pack
from prefillcli.plan.plan import make_plan
from prefillcli.reading.compress.compressor import OVERHEAD, WorthCompressing
from prefillcli.reading.compress.draft import SelfDraftRule, SelfThinning
from prefillcli.reading.compress.load import choosing_layers
from prefillcli.reading.compress.selection import NO_VOTE
from prefillcli.reading.compress.settings import Compression
from prefillcli.rows.records import Prompt
from prefillcli.walk.forest import ATTENTION, WatchedLayer
from prefillcli.walk.layout import Tree
from prefillcli.walk.walk import LayerWalk, Thinned
from tests.unit.reading.compress.test_worth import TARGET, operations
from tests.unit.walk.families import WINDOW, make_config
from tests.unit.walk.test_walk import Prompt as Tokens
from tests.unit.walk.test_walk import model_of

CHUNK, FIRST, LAST, QUERIES, POOL = 8, 4, 12, 6, 5
HOW = Compression(
    lookahead=1,
    query_window=QUERIES,
    query_reduce="mean",
    pool=POOL,
    select_chunk=CHUNK,
    keep_first=FIRST,
    keep_last=LAST,
    keep_private=False,
)
ALL = Limits(10**6, 10**6)


def lone(*lengths: int) -> list[Tokens]:
    """Prompts that share nothing."""
    rng = np.random.default_rng(1)
    return [
        np.concatenate([[number + 3], rng.integers(3, 200, length - 1)]).astype(np.int32)
        for number, length in enumerate(lengths)
    ]


def sharing(rows: int = 4, prefix: int = 90, own: int = 25) -> list[Tokens]:
    """Prompts that share a prefix."""
    rng = np.random.default_rng(2)
    first = rng.integers(3, 200, prefix)
    return [
        np.concatenate([first, [number + 3], rng.integers(3, 200, own)]).astype(np.int32) for number in range(rows)
    ]


class _Heard:
    """A rule that keeps what it has found, by prompt."""

    def __init__(self, rule: SelfDraftRule) -> None:
        self.rule, self.layer = rule, rule.layer
        self.found: dict[int, tuple[list[int], str | None]] = {}

    def of(self, prompts: object) -> _Heard:
        return self

    def watched(self, pack: Pack, tree: Tree) -> list[int]:
        return self.rule.watched(pack, tree)

    def __call__(self, pack: Pack, tree: Tree, layer: WatchedLayer) -> list[Thinned]:
        found = self.rule(pack, tree, layer)
        for (_, prompts), own in zip(pack.reads, found, strict=True):
            self.found |= dict.fromkeys(prompts, (tree.depths[own.tokens].tolist(), own.reason))
        return found


def chosen(
    family: str, prompts: list[Tokens], rates: dict[int, tuple[float, int]], layer: int, how: Compression = HOW
) -> dict[int, tuple[list[int], str | None]]:
    """What goes on of each prompt after `layer`, and why all of it."""
    model = model_of(family)
    model.set_attn_implementation(ATTENTION)
    walk, rule = LayerWalk(model, chunk_tokens=37), _Heard(SelfDraftRule(layer, how, rates))
    try:
        for pack in make_plan(prompts, ALL).packs:
            list(walk.read_logits(pack, thinning=rule))
    finally:
        walk.close()
    return rule.found


@torch.inference_mode()
def votes(family: str, prompt: Tokens, layer: int) -> np.ndarray:
    """Eager attention of the prompt's last tokens in that layer: pooled, largest over heads, mean over queries."""
    model = model_of(family)
    model.set_attn_implementation("eager")
    out = model(torch.as_tensor(prompt).long()[None], output_attentions=True, use_cache=False)
    return F.avg_pool1d(out.attentions[layer][0, :, -QUERIES:], POOL, 1, POOL // 2).amax(0).mean(0).numpy()


def best(importance: np.ndarray, rate: float, *, last: int = LAST) -> list[int]:
    """The best chunks, and both ends."""
    tokens = len(importance)
    means = [importance[at : at + CHUNK].astype(float).mean() for at in range(0, tokens, CHUNK)]
    take = sorted(range(len(means)), key=lambda chunk: -means[chunk])[: math.ceil(round(rate * len(means), 9))]
    at = np.arange(tokens)
    return at[np.isin(at // CHUNK, take) | (at < FIRST) | (at >= tokens - last)].tolist()


@pytest.mark.parametrize(("family", "layer"), [("llama", 0), ("llama", 1), ("gemma2", 1), ("qwen3_moe", 1)])
def test_what_the_last_tokens_attend_to_goes_on(family: str, layer: int) -> None:
    prompts = lone(130, 97, 64)
    rates = {0: (0.3, LAST), 1: (0.5, LAST), 2: (0.2, 20)}
    found = chosen(family, prompts, rates, layer)
    for number, prompt in enumerate(prompts):
        rate, last = rates[number]
        assert found[number] == (best(votes(family, prompt, layer), rate, last=last), None)


def test_a_shared_prefix_keeps_the_same_tokens_for_all_and_each_row_its_own_where_that_is_asked() -> None:
    prompts = sharing()
    rates = dict.fromkeys(range(4), (0.3, LAST))
    found = chosen("llama", prompts, rates, 1)
    prefix = {tuple(at for at in kept if at < 88) for kept, _ in found.values()}  # up to the chunk at its end
    assert len(prefix) == 1
    largest = np.max([votes("llama", prompt, 1)[:88] for prompt in prompts], axis=0).astype(float)
    means = [largest[at : at + CHUNK].mean() for at in range(0, 88, CHUNK)]
    take = sorted(range(11), key=lambda chunk: -means[chunk])[:4]
    assert [at for at in next(iter(prefix)) if at >= 4] == [at for at in range(4, 88) if at // CHUNK in take]
    alone = chosen("llama", prompts, rates, 1, Compression(**{**_values(HOW), "per_row": True}))
    for number, prompt in enumerate(prompts):
        assert alone[number][0] == best(votes("llama", prompt, 1), 0.3)
    assert len({tuple(at for at in kept if at < 90) for kept, _ in alone.values()}) > 1


def _values(how: Compression) -> dict[str, object]:
    return {name: getattr(how, name) for name in Compression.__slots__}


def test_what_a_prompt_in_full_shares_goes_on_whole() -> None:
    prompts = sharing()
    found = chosen("llama", prompts, {0: (0.2, LAST), 1: (0.2, LAST)}, 1)
    assert [len(found[number][0]) == len(prompts[number]) for number in range(4)] == [False, False, True, True]
    assert found[0][0][:90] == list(range(90))


def test_equal_prompts_go_on_alike_and_in_full_if_one_is_to_be() -> None:
    prompts = [*lone(100), *lone(100), *lone(100)]
    assert (
        len({tuple(kept) for kept, _ in chosen("llama", prompts, dict.fromkeys(range(3), (0.3, LAST)), 1).values()})
        == 1
    )
    assert chosen("llama", prompts, {0: (0.3, LAST)}, 1) == {}, "nothing of that pack is left behind"


def test_a_layer_with_a_sliding_window_has_no_vote_on_longer_prompts() -> None:
    prompts = lone(130, WINDOW - 2)
    found = chosen("gemma2", prompts, {0: (0.2, LAST), 1: (0.2, LAST)}, 0)
    assert found[0] == (list(range(130)), NO_VOTE)
    assert found[1][1] is None
    assert len(found[1][0]) < WINDOW - 2


FULL_ONLY = {"llama": (10, 5), "llama of 30": (30, 14), "llama of 2": (2, 1), "llama of 12": (12, 5)}


@pytest.mark.parametrize(("layers", "by_depth"), FULL_ONLY.values(), ids=FULL_ONLY)
def test_the_layer_lies_at_a_share_of_the_depth(layers: int, by_depth: int) -> None:
    config = make_config("llama", num_hidden_layers=layers)
    assert choosing_layers(config, None, 4096) == by_depth
    assert choosing_layers(config, layers - 1, 4096) == layers - 1
    with pytest.raises(UsageError, match=f"the model has {layers}"):
        choosing_layers(config, layers, 4096)


def test_a_layer_that_does_not_see_the_whole_prompt_is_not_taken() -> None:
    gemma = make_config("gemma3_text", num_hidden_layers=12)  # each sixth layer sees all
    assert choosing_layers(gemma, None, 4096) == 6
    assert choosing_layers(gemma, None, WINDOW) == 5, "the window spans such prompts"
    with pytest.raises(UsageError, match=r"--set self_layer=4: .*sliding window.*\n.* is 6"):
        choosing_layers(gemma, 4, 4096)
    for config in (make_config("mistral"), MambaConfig()):
        with pytest.raises(UsageError, match="no layer but the last"):
            choosing_layers(config, None, 4096)
    with pytest.raises(UsageError, match="not known"):
        choosing_layers(make_config("llama", layer_types=["compressed_sparse_attention"] * 3), None, 64)


def questions_of(prompts: list[Tokens], keeps: list[float | None], how: Compression) -> list[Request]:
    own = [None if keep is None else SelfThinning(1, keep, LAST, how) for keep in keeps]
    return [
        Request(Prompt(number, tokens, LabelSet(())), thinning=each)
        for number, (tokens, each) in enumerate(zip(prompts, own, strict=True))
    ]


def test_a_prompt_that_is_read_both_ways_is_in_two_packs() -> None:
    questions = questions_of(sharing(), [0.2] * 4, HOW)
    plan = plan_requests([*questions, Request(questions[1].prompt)], Limits(10**6, 10**6, held_tokens=10**6))
    assert [sorted(pack.prompts) for pack in plan.packs] == [[0, 1, 2, 3], [4]]
    assert [pack.index for pack in plan.packs] == [0, 1]
    assert plan.unique_tokens == 90 + 4 * 26 + 116


def test_nothing_is_held_from_pack_to_pack() -> None:
    questions = questions_of(sharing(12), [0.2] * 12, HOW)
    plan = plan_requests(questions, Limits(200, 400, held_tokens=400, held_cost=1.0))
    assert len(plan.packs) > 1
    assert not any(pack.held or pack.keep for pack in plan.packs)
    assert sorted(prompt for pack in plan.packs for prompt in pack.prompts) == list(range(12))


def test_rows_that_choose_for_themselves_fit_the_memory_after_it_too() -> None:
    how = Compression(**{**_values(HOW), "per_row": True})
    keeps = [0.5, 0.5, None, 0.3] * 5
    prompts = [*sharing(20), *lone(500)]
    questions = questions_of(prompts, [*keeps, 0.5], how)
    plan = plan_requests(questions, Limits(600, 600))
    assert sorted(prompt for pack in plan.packs for prompt in pack.prompts) == list(range(21))
    for pack in plan.packs:
        assert len({questions[prompt].thinning and questions[prompt].thinning.keep for prompt in pack.prompts}) == 1
        kept = sum(questions[prompt].most_kept for prompt in pack.prompts)
        whole = questions[pack.prompts[0]].thinning is None
        assert whole or len(pack.prompts) == 1 or (kept <= 300 and len(pack.tokens) <= 300)


@pytest.mark.parametrize("tokens", [500, 3_000, 40_000])
@pytest.mark.parametrize("layers", [1, 7])
def test_the_predicted_speedup_is_that_of_the_layers(tokens: int, layers: int) -> None:
    how = Compression(keep_first=4, keep_last=64)
    kept, depth = round(0.2 * tokens) + 68, TARGET.num_hidden_layers
    head = 2 * TARGET.hidden_size * TARGET.vocab_size
    whole, part = operations(TARGET, tokens, 1), operations(TARGET, kept, 1)
    cost = layers / depth * (whole - head) + (1 - layers / depth) * (part - head) + head
    found = WorthCompressing(how, TARGET, own_layers=layers).speedup(tokens, 0.2)
    assert found == pytest.approx(1 / (cost / whole + OVERHEAD), rel=1e-6)
