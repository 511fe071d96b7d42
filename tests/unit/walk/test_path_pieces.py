"""Recurrent models give a prompt the same bits in every pack, order and chunk, beside any others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from prefillcli.plan.pack import Limits
from prefillcli.plan.plan import make_plan
from prefillcli.walk import determinism as paths
from prefillcli.walk.determinism import PIECE, by_row, cut_between_pieces
from prefillcli.walk.forest import register
from prefillcli.walk.layout import Tree
from prefillcli.walk.recurrent import ModuleCall
from tests.unit.walk.families import make_model
from tests.unit.walk.test_path_attention import threads
from tests.unit.walk.test_recurrent import RECURRENT, model_of, prompts, wanted
from tests.unit.walk.test_walk import walked

WHOLE = Limits(10**6, 10**6, whole_nodes=True, state_step=PIECE)
HOLDING = Limits(400, 10**6, held_tokens=10**6, whole_nodes=True, state_step=PIECE)
SOME = [1, 2, 4, 6, 9, 17, 29]  # two users with branches and ends in the middle of pieces, and short prompts
every_family = pytest.mark.parametrize(
    "family",
    [each if each in ("mamba2", "lfm2") else pytest.param(each, marks=pytest.mark.nightly) for each in RECURRENT],
)


def bits(model: nn.Module, limits: Limits, chunk: int, order: Sequence[int]) -> torch.Tensor:
    """Float32 logits [prompts, vocabulary] of the walk over these prompts, in their order."""
    given = prompts()
    return walked(model, [given[number] for number in order], chunk=chunk, limits=limits, arithmetic=by_row())


@pytest.mark.sampled(1)
@every_family
def test_logits_equal_the_eager_forward(family: str) -> None:
    found = bits(model_of(family), HOLDING, 41, range(len(prompts())))
    torch.testing.assert_close(found, wanted(family), atol=1e-4, rtol=0)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        (family, dtype)
        if (family, dtype) in (("qwen3_next", torch.float32), ("lfm2", torch.bfloat16))
        else pytest.param(family, dtype, marks=pytest.mark.nightly)
        for family in RECURRENT
        for dtype in (torch.float32, torch.bfloat16)
    ],
    ids=str,
)
def test_bits_do_not_depend_on_pack_chunk_order_or_threads(family: str, dtype: torch.dtype) -> None:
    register()
    model = make_model(family, dtype, **RECURRENT[family])
    first = bits(model, WHOLE, 4096, SOME)
    assert torch.equal(bits(model, HOLDING, 90, SOME[::-1]).flip(0), first)
    with threads(2):
        assert torch.equal(bits(model, WHOLE, 130, SOME[2:4]), first[2:4])


def test_what_differs_beside_others_is_computed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that gives a row other bits where there are several."""
    model, own = model_of("lfm2"), ModuleCall.compute_at
    alone = bits(model, WHOLE, 4096, SOME)

    def crowded(self: ModuleCall, index: torch.Tensor, state: Any) -> Any:
        return own(self, index, state) * (1 + 1e-6 * (len(index) > 1))

    monkeypatch.setattr(paths, "_agreed", {})
    monkeypatch.setattr(ModuleCall, "compute_at", crowded)
    assert torch.equal(bits(model, WHOLE, 4096, SOME), alone)
    assert False in paths._agreed.values()


def test_chunks_end_between_pieces() -> None:
    packs = make_plan(prompts(), HOLDING).packs
    for pack in packs:
        tree, tokens = Tree(pack), len(pack.tokens)
        for most in (1, 64, 100, 10**6):
            chunks = cut_between_pieces(tree, tokens, most)
            assert [start for start, _ in chunks] == [0, *(end for _, end in chunks[:-1])]
            assert chunks[-1][1] == tokens
            starts = set(pack.offsets)
            assert all(tree.depths[end] % PIECE == 0 or end in starts for _, end in chunks[:-1])
            assert max(end - start for start, end in chunks) <= max(most, PIECE)
        assert np.all(np.asarray(pack.starts) % PIECE == 0)
