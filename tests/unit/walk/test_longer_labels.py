"""Labels of several tokens in the arithmetic of `--deterministic`: the same bits beside labels of any other length."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest
import torch

from prefillcli.core.request import Request, answer_requests
from prefillcli.engines.torch import TorchEngine
from prefillcli.plan.behind import LabelSet
from prefillcli.plan.pack import Limits
from prefillcli.rows.records import Prompt
from prefillcli.walk.determinism import by_row
from prefillcli.walk.forest import ATTENTION
from prefillcli.walk.walk import LONGEST_BEHIND, LayerWalk
from tests.unit.walk.shuffling import model_of
from tests.unit.walk.test_walk import tokens


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("labels", [[[8], [9]], [[[5, 6, 7]], [[5, 6, 8, 9, 10]], [9]]])
def test_a_row_has_the_same_bits_whether_others_make_the_last_layer_read_whole_chunks(
    family: str, labels: list[list[int | list[int]]]
) -> None:
    rng = np.random.default_rng(1)
    row = Prompt(0, tokens(rng, 300), LabelSet.of(labels))
    long = LabelSet.of([[tokens(rng, LONGEST_BEHIND + 16)], [5]])
    model = model_of(family, torch.float32)
    model.set_attn_implementation(ATTENTION)
    found = set()
    for others in ([], [Prompt(1, tokens(rng, 50), long)], [Prompt(1, row.tokens, long)]):
        walk = LayerWalk(model, chunk_tokens=64, arithmetic=by_row())
        with closing(TorchEngine(walk, limits=Limits(10**6, 10**6))) as engine:
            answers = answer_requests(engine, [Request(each) for each in (row, *others)])
        found.add(answers[0].logprobs.tobytes())
    assert len(found) == 1
