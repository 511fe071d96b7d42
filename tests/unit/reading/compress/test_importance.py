"""Importance against attention weights of transformers' own eager forward."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from prefillcli.plan.pack import Limits
from prefillcli.reading.compress.draft import Draft
from prefillcli.reading.compress.settings import Compression
from prefillcli.walk.forest import ATTENTION, register
from prefillcli.walk.walk import LayerWalk
from tests.unit.walk.families import VOCABULARY, WINDOW, make_model
from tests.unit.walk.variants import make_variant

PLENTY = Limits(10**6, 10**6)
CHUNK = 5
FAMILIES = ("llama", "qwen3", "gemma2", "gpt_oss")

Prompt = np.typing.NDArray[np.int32]


def prompts() -> list[Prompt]:
    """A tree of two levels, a prompt that another begins with, a duplicate, a short one, and one by itself."""
    rng = np.random.default_rng(5)

    def tokens(count: int) -> Prompt:
        return rng.integers(3, VOCABULARY, count).astype(np.int32)

    root = tokens(61)
    branch = np.concatenate([root, tokens(23)])
    found = [np.concatenate([branch, tokens(n)]) for n in (3, 40, 19)] + [np.concatenate([root, tokens(30)])]
    return [*found, branch, found[0].copy(), tokens(5), tokens(130)]


def draft_of(model: Any, settings: Compression, *, chunk: int = 37, limits: Limits = PLENTY) -> Draft:
    register()
    model.set_attn_implementation(ATTENTION)
    return Draft(LayerWalk(model, chunk_tokens=chunk), settings, limits=limits, max_length=4096)


def estimated(model: Any, settings: Compression, *, chunk: int = 37, limits: Limits = PLENTY) -> list[Any]:
    draft = draft_of(model, settings, chunk=chunk, limits=limits)
    try:
        return draft.estimate(prompts())
    finally:
        draft.close()


def decoded_behind(model: Any, tokens: list[int], steps: int) -> list[int]:
    """The tokens with those that the model decodes greedily behind them, up to an end of text."""
    model.set_attn_implementation("eager")
    grown = list(tokens)
    for _ in range(steps):
        with torch.inference_mode():
            following = int(model(input_ids=torch.tensor([grown]), use_cache=False).logits[0, -1].argmax())
        if following == model.config.eos_token_id:
            break
        grown.append(following)
    return grown


def context_shares(model: Any, tokens: list[int], context: int, queries: range) -> list[Tensor]:
    """Per voting layer, eager attention weights [heads, queries, context] as shares of what goes to the context."""
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        given = model(input_ids=torch.tensor([tokens]), output_attentions=True, use_cache=False).attentions
    kinds = getattr(model.config, "layer_types", None) or ["full_attention"] * len(given)
    reaches = max(queries) < getattr(model.config, "attention_chunk_size", WINDOW)
    layers = []
    for weights, kind in zip(given, kinds, strict=True):
        if kind == "full_attention" or reaches:
            own = weights[0, :, list(queries), :context].double()
            layers.append((own / own.sum(-1, keepdim=True)).float())
    return layers


def reference(layers: list[Tensor], pool: int, reduce: str) -> np.ndarray:
    """softmax -> pooling -> largest over layers and heads -> mean, largest or best rank over the queries."""
    pooled = [F.avg_pool1d(shares, pool, 1, pool // 2) for shares in layers]
    votes = torch.cat(pooled).amax(0)
    if reduce == "rank":
        found = np.zeros(votes.shape[1], np.float32)
        for query in votes.numpy():
            means = [query[at : at + CHUNK].mean() for at in range(0, len(query), CHUNK)]
            for place, best in enumerate(sorted(range(len(means)), key=lambda number: -means[number]), 1):
                part = slice(best * CHUNK, (best + 1) * CHUNK)
                found[part] = np.maximum(found[part], 1 / place)
        return found
    return (votes.mean(0) if reduce == "mean" else votes.amax(0)).numpy()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("window", "pool", "reduce"), [(1, 13, "mean"), (16, 13, "mean"), (5, 1, "max"), (9, 7, "max"), (5, 13, "rank")]
)
def test_the_last_tokens_ask(family: str, window: int, pool: int, reduce: Any) -> None:
    model = make_model(family)
    settings = Compression(lookahead=1, query_window=window, pool=pool, query_reduce=reduce, select_chunk=CHUNK)
    for tokens, found in zip(prompts(), estimated(model, settings), strict=True):
        count = min(window, len(tokens))
        layers = context_shares(model, tokens.tolist(), len(tokens), range(len(tokens) - count, len(tokens)))
        np.testing.assert_allclose(found.importance, reference(layers, pool, reduce), atol=1e-5)


@pytest.mark.parametrize("settings", [Compression(lookahead=1, select_chunk=CHUNK), Compression(select_chunk=CHUNK)])
def test_keys_that_are_wider_than_values_vote(settings: Compression) -> None:
    model = make_variant("deepseek_v3")
    model.config.eos_token_id = VOCABULARY + 1
    for tokens, found in zip(prompts(), estimated(model, settings), strict=True):
        grown = decoded_behind(model, tokens.tolist(), settings.lookahead - 1)
        first = max(len(tokens) - settings.query_window, 0)
        layers = context_shares(model, grown, len(tokens), range(first, len(grown)))
        np.testing.assert_allclose(found.importance, reference(layers, settings.pool, "rank"), atol=1e-5)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("window", "reduce"), [(0, "mean"), (8, "max"), (8, "rank")])
def test_decoded_tokens_ask_and_the_last_tokens_with_them(family: str, window: int, reduce: Any) -> None:
    model = make_model(family)
    settings = Compression(lookahead=8, query_window=window, query_reduce=reduce, select_chunk=CHUNK)
    decoded_some = False
    for tokens, found in zip(prompts(), estimated(model, settings), strict=True):
        grown = decoded_behind(model, tokens.tolist(), 7)
        decoded_some |= len(grown) == len(tokens) + 7
        first = len(tokens) - min(max(window, 1), len(tokens))
        layers = context_shares(model, grown, len(tokens), range(first, len(grown)))
        np.testing.assert_allclose(found.importance, reference(layers, 13, reduce), atol=1e-5)
    assert decoded_some


def test_what_follows_an_end_of_text_does_not_ask() -> None:
    model = make_model("llama")
    *_, following = decoded_behind(model, prompts()[-1].tolist(), 1)
    model.config.eos_token_id = [following, 2]
    found = estimated(model, Compression(lookahead=8))[-1].importance
    np.testing.assert_array_equal(found, estimated(model, Compression(lookahead=1))[-1].importance)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "settings",
    [
        Compression(lookahead=1, query_reduce="mean"),
        Compression(query_window=0, query_reduce="mean"),
        Compression(query_reduce="max"),
    ],
    ids=["last tokens", "decoded", "both"],
)
@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_chunks_and_packs_make_no_difference(family: str, settings: Compression) -> None:
    model = make_model(family)
    whole = estimated(model, settings, chunk=10**6)
    for limits in (Limits(140, 10**6), Limits(10**6, 10**6, read_tokens=150)):
        for a, b in zip(whole, estimated(model, settings, chunk=11, limits=limits), strict=True):
            np.testing.assert_allclose(b.importance, a.importance, atol=1e-6)


def test_without_a_layer_that_sees_the_whole_prompt_there_is_no_importance() -> None:
    found = estimated(make_model("mistral"), Compression(lookahead=1, query_window=4))
    for tokens, one in zip(prompts(), found, strict=True):
        assert (one.reason, one.importance is None) == (
            (None, False) if len(tokens) <= WINDOW else ("draft_window", True)
        )


def test_steps_beyond_a_sliding_window_leave_it() -> None:
    """Decoding further than a window is wide: the window passes the prompt's own last tokens."""
    model = make_model("gpt_oss", sliding_window=4)
    model.config.eos_token_id = VOCABULARY + 1
    draft = draft_of(model, Compression(lookahead=12, query_window=0, query_reduce="mean"))
    tokens = prompts()[0]
    found = draft.estimate([tokens])[0].importance
    draft.close()
    grown = decoded_behind(model, tokens.tolist(), 11)
    layers = context_shares(model, grown, len(tokens), range(len(tokens) - 1, len(grown)))
    np.testing.assert_allclose(found, reference(layers, 13, "mean"), atol=1e-5)


def test_decoded_tokens_that_begin_a_part_of_local_attention_see_nothing_before_it() -> None:
    """Each read of a pack is in a part of its own when the tokens decoded behind it pass a border."""
    model = make_variant("llama4_text", attention_chunk_size=4)
    model.config.eos_token_id = VOCABULARY + 1
    for tokens, one in zip(
        prompts(), estimated(model, Compression(lookahead=8, query_window=0, query_reduce="mean")), strict=True
    ):
        grown = decoded_behind(model, tokens.tolist(), 7)
        layers = context_shares(model, grown, len(tokens), range(len(tokens) - 1, len(grown)))
        np.testing.assert_allclose(one.importance, reference(layers, 13, "mean"), atol=1e-5)
