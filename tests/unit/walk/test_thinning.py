"""Prompts that lose tokens after a layer, against the model's own modules called by hand."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from prefillcli.plan.pack import Limits, Pack
from prefillcli.plan.plan import make_plan
from prefillcli.walk.forest import ATTENTION, UnsupportedModelError, WatchedLayer, register
from prefillcli.walk.layout import Tree
from prefillcli.walk.walk import LayerWalk, Thinned, thin_pack
from tests.unit.walk.families import VOCABULARY, each_family, make_model
from tests.unit.walk.test_walk import ONE_PACK, Prompt, assert_equal, mixed, model_of, three_levels, walked


class KeepTheSame:
    """A thinning rule: each prompt goes on with its tokens at `kept`. Takes down what it is shown."""

    def __init__(self, layer: int, kept: Sequence[Sequence[int]]) -> None:
        self.layer = layer
        self._kept = kept
        self.keys: dict[int, Tensor] = {}  # by prompt, [kv heads, tokens, width]
        self.queries: dict[int, Tensor] = {}  # of its last token, [heads, width]

    def of(self, prompts: Collection[int]) -> KeepTheSame:
        return self

    def watched(self, pack: Pack, tree: Tree) -> list[int]:
        return sorted({pack.offsets[node + 1] - 1 for node, _ in pack.reads})

    def __call__(self, pack: Pack, tree: Tree, layer: WatchedLayer) -> list[Thinned]:
        found, watched = [], self.watched(pack, tree)
        for node, prompts in pack.reads:
            whole = np.concatenate([np.arange(*run) for run in tree.path(node)])
            found.append(Thinned(whole[np.unique(np.concatenate([self._kept[prompt] for prompt in prompts]))]))
            for prompt in prompts:
                self.keys[prompt] = layer.keys[:, whole].clone()
                self.queries[prompt] = layer.queries[:, watched.index(whole[-1])].clone()
        return found


def kept_of(prompts: Sequence[Prompt], seed: int = 3) -> list[np.ndarray]:
    """Random runs of each prompt, of its own: what prompts share, they keep differently."""
    rng = np.random.default_rng(seed)
    kept = []
    for prompt in prompts:
        mask = np.repeat(rng.random(len(prompt)) < 0.4, 5)[: len(prompt)]
        mask[-1] = True
        kept.append(np.flatnonzero(mask))
    return kept


def kept_alike(prompts: Sequence[Prompt]) -> list[np.ndarray]:
    """Random runs, the same of what prompts share."""
    mask = np.repeat(np.random.default_rng(4).random(200) < 0.4, 5)
    return [np.flatnonzero(mask[: len(prompt)] | (np.arange(len(prompt)) == len(prompt) - 1)) for prompt in prompts]


@torch.inference_mode()
def kept_by_hand(model: nn.Module, prompt: Prompt, kept: np.ndarray, layer: int) -> Tensor:
    """Logits of the kept tokens: the first layers over all tokens, the others over the kept ones.

    The others are a forward of the model in which the first layers give the kept hidden states, with their position
    ids and a causal mask.
    """
    model.set_attn_implementation("eager")
    ids, at = torch.as_tensor(prompt).long()[None], torch.as_tensor(kept)
    hidden: list[Tensor] = []
    decoder = model.get_decoder()
    every = decoder.layers
    catch = every[layer].register_forward_hook(
        lambda m, i, out: hidden.append(out[0] if isinstance(out, tuple) else out)
    )
    model(input_ids=ids, use_cache=False)
    catch.remove()

    class GoOn(nn.Module):
        def __init__(self, whole: nn.Module) -> None:
            super().__init__()
            self.whole = whole

        def __getattr__(self, name: str) -> object:
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(super().__getattr__("whole"), name)

        def forward(self, *args: object, **kwargs: object) -> Tensor:
            return hidden[0][:, at]

    decoder.layers = nn.ModuleList([GoOn(each) if number <= layer else each for number, each in enumerate(every)])
    try:
        return model(
            input_ids=ids[:, at], position_ids=at[None], attention_mask=torch.ones(1, len(at)).long(), use_cache=False
        ).logits[0]
    finally:
        decoder.layers = every


def thinned(
    model: nn.Module, prompts: Sequence[Prompt], rule: KeepTheSame, *, chunk: int = 41, limits: Limits = ONE_PACK
) -> Tensor:
    model.set_attn_implementation(ATTENTION)
    logits = torch.zeros(len(prompts), VOCABULARY)
    with closing(LayerWalk(model, chunk_tokens=chunk)) as walk:
        for pack in make_plan(prompts, limits).packs:
            ticks: list[float] = []
            rows = torch.cat(list(walk.read_logits(pack, ticks.append, thinning=rule)))
            assert sum(ticks) == pytest.approx(len(pack.tokens))
            for row, (_, numbers) in zip(rows, pack.reads, strict=True):
                logits[list(numbers)] = row
    return logits


@pytest.mark.sampled(4)
@each_family
@pytest.mark.parametrize("kept", [kept_of, kept_alike])
def test_kept_tokens_go_on_as_by_hand(family: str, kept: Callable[[Sequence[Prompt]], list[np.ndarray]]) -> None:
    model, prompts = model_of(family), mixed()
    own, layer = kept(prompts), len(model.get_decoder().layers) - 2
    # The first of two equal prompts is read for both.
    same = [min(n for n, other in enumerate(prompts) if np.array_equal(other, prompt)) for prompt in prompts]
    own = [own[number] for number in same]
    wanted = torch.stack(
        [kept_by_hand(model, prompt, each, layer)[-1] for prompt, each in zip(prompts, own, strict=True)]
    )
    assert_equal(thinned(model, prompts, KeepTheSame(layer, own)), wanted)


HYBRID: dict[str, Any] = {
    "layers_block_type": ["mamba", "mamba", "attention", "moe", "mamba"], "num_hidden_layers": 5, "mamba_num_heads": 8,
    "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 2, "chunk_size": 32, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32,
}  # fmt: skip


def test_the_next_layer_that_attends_chooses_where_one_does_not() -> None:
    register()
    model, prompts = make_model("nemotron_h", **HYBRID), three_levels()
    own = kept_of(prompts)
    wanted = torch.stack([kept_by_hand(model, prompt, each, 2)[-1] for prompt, each in zip(prompts, own, strict=True)])
    assert_equal(thinned(model, prompts, KeepTheSame(1, own)), wanted)
    with pytest.raises(UnsupportedModelError, match="no layer attends"):
        thinned(model, prompts, KeepTheSame(3, own))


@pytest.mark.parametrize(("chunk", "limits"), [(7, ONE_PACK), (4096, Limits(60, 10**6))])
def test_neither_packs_nor_chunks_matter(limits: Limits, chunk: int) -> None:
    model, prompts = model_of("gemma2"), three_levels()
    own = kept_of(prompts)
    wanted = torch.stack([kept_by_hand(model, prompt, each, 0)[-1] for prompt, each in zip(prompts, own, strict=True)])
    assert_equal(thinned(model, prompts, KeepTheSame(0, own), chunk=chunk, limits=limits), wanted)


@each_family
def test_keeping_all_is_the_full_pass(family: str) -> None:
    model, prompts = model_of(family), mixed()
    rule = KeepTheSame(1, [np.arange(len(prompt)) for prompt in prompts])
    assert torch.equal(thinned(model, prompts, rule, chunk=97), walked(model, prompts, chunk=97))


@torch.inference_mode()
@pytest.mark.parametrize("layer", [0, 1])
def test_a_rule_sees_the_keys_and_queries_of_its_layer(layer: int) -> None:
    model, prompts = model_of("llama"), three_levels()
    rule = KeepTheSame(layer, [np.arange(len(prompt)) for prompt in prompts])
    thinned(model, prompts, rule)
    model.set_attn_implementation("eager")
    for number, prompt in enumerate(prompts):
        out = model(torch.as_tensor(prompt).long()[None], output_attentions=True, use_cache=False)
        keys = rule.keys[number].repeat_interleave(2, dim=0)  # two heads share those of one
        scores = torch.einsum("hd,hkd->hk", rule.queries[number], keys) * 16**-0.5
        torch.testing.assert_close(scores.softmax(-1), out.attentions[layer][0, :, -1], atol=1e-5, rtol=1e-4)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_each_read_keeps_its_own_tokens_at_their_positions_and_shares_what_it_can(data: st.DataObject) -> None:
    prompts = [
        np.asarray(data.draw(st.lists(st.integers(1, 2), min_size=1, max_size=12)), dtype=np.int32)
        for _ in range(data.draw(st.integers(1, 6)))
    ]
    for pack in make_plan(prompts, Limits(20, 10**6)).packs:
        tree = Tree(pack)
        whole = [np.concatenate([np.arange(*run) for run in tree.path(node)]) for node, _ in pack.reads]
        kept = [
            own[sorted({*data.draw(st.sets(st.integers(0, len(own) - 1))), len(own) - 1})].astype(np.int64)
            for own in whole
        ]
        thin = thin_pack(pack, kept)
        after = Tree(thin.pack)
        assert [prompts for _, prompts in thin.pack.reads] == [prompts for _, prompts in pack.reads]
        for (node, _), own in zip(thin.pack.reads, kept, strict=True):
            path = np.concatenate([np.arange(*run) for run in after.path(node)])
            assert thin.tokens[path].tolist() == own.tolist()
            assert thin.pack.positions[path].tolist() == pack.positions[own].tolist()
            assert thin.pack.tokens[path].tolist() == pack.tokens[own].tolist()
            assert after.depths[path].tolist() == list(range(len(own)))
        beginnings = {tuple(own[: end + 1].tolist()) for own in kept for end in range(len(own))}
        assert len(thin.tokens) == len(beginnings)


def test_what_cannot_be_thinned_is_refused() -> None:
    prompts = [np.arange(1, 9, dtype=np.int32)]
    (pack,) = make_plan(prompts, ONE_PACK).packs
    with pytest.raises(ValueError, match="last token"):
        thin_pack(pack, [np.array([0, 3])])
    pack.keep = frozenset({(0, 0)})
    with pytest.raises(ValueError, match="holds nothing"):
        thin_pack(pack, [np.array([0, 7])])
