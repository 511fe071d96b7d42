"""Drafts with recurrent layers: only their attention votes, also while tokens are decoded behind their states."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from prefillcli.errors import UsageError
from prefillcli.plan.pack import Limits
from prefillcli.reading.compress.draft import Draft
from prefillcli.reading.compress.settings import Compression
from prefillcli.walk.forest import ATTENTION, register
from prefillcli.walk.walk import LayerWalk
from tests.unit.reading.compress.test_importance import CHUNK, decoded_behind, estimated, prompts, reference
from tests.unit.walk.families import make_model
from tests.unit.walk.test_recurrent import RECURRENT

#: A gated attention with a delta net and experts; a Mamba-2 hybrid and one more, neither with rotations.
HYBRIDS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "qwen3_next": (RECURRENT["qwen3_next"], (1, 3)),
    "nemotron_h": (RECURRENT["nemotron_h"], (1,)),
    "granitemoehybrid": (
        {
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "shared_intermediate_size": 96, "num_local_experts": 0, "num_experts_per_tok": 0, "mamba_n_heads": 8,
            "mamba_d_state": 8, "mamba_chunk_size": 32, "attention_multiplier": 0.25,
        },
        (1,),
    ),
}  # fmt: skip


def attention_shares(model: Any, tokens: list[int], context: int, first: int) -> list[torch.Tensor]:
    """Of each layer with attention, eager weights [heads, queries, context] of the queries from `first` on."""
    with torch.inference_mode():
        given = model(input_ids=torch.tensor([tokens]), output_attentions=True, use_cache=False).attentions
    own = [weights[0, :, first:, :context].double() for weights in given if weights is not None]
    return [(each / each.sum(-1, keepdim=True)).float() for each in own]


@pytest.mark.parametrize("family", HYBRIDS)
@pytest.mark.parametrize(("lookahead", "window", "reduce"), [(1, 5, "max"), (1, 8, "rank"), (8, 4, "mean")])
def test_attention_layers_vote_and_no_others(family: str, lookahead: int, window: int, reduce: Any) -> None:
    changes, voters = HYBRIDS[family]
    model = make_model(family, **changes)
    settings = Compression(lookahead=lookahead, query_window=window, query_reduce=reduce, select_chunk=CHUNK)
    found = estimated(model, settings)
    decoded = 0
    for tokens, own in zip(prompts(), found, strict=True):
        grown = decoded_behind(model, tokens.tolist(), settings.decoded)
        decoded = max(decoded, len(grown) - len(tokens))
        layers = attention_shares(model, grown, len(tokens), max(len(tokens) - window, 0))
        assert len(layers) == len(voters)
        assert own.voters == voters
        np.testing.assert_allclose(own.importance, reference(layers, settings.pool, reduce), atol=1e-5)
    assert decoded == settings.decoded


def test_a_draft_without_attention_is_refused() -> None:
    register()
    model: Any = make_model("mamba2", **RECURRENT["mamba2"])
    model.set_attn_implementation(ATTENTION)
    with pytest.raises(UsageError, match="none of its 3 layers attends"):
        Draft(LayerWalk(model, chunk_tokens=64), Compression(), limits=Limits(10**6, 10**6), max_length=4096)
