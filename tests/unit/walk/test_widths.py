"""Models of any width: what `--deterministic` lays out in whole vectors is left over in most of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from prefillcli.walk.determinism import by_row
from prefillcli.walk.forest import ATTENTION, register
from tests.unit.walk.families import make_model
from tests.unit.walk.shuffling import LABELS, as_they_come, label_bits, random_shuffle
from tests.unit.walk.test_walk import three_levels

ONE_HEAD = {"num_attention_heads": 1, "num_key_value_heads": 1}
WIDTHS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"hidden_size": 96, "intermediate_size": 100, "head_dim": 24}),
    ("llama", {"hidden_size": 100, "head_dim": 100, "vocab_size": 1001, **ONE_HEAD}),
    ("gemma2", {"hidden_size": 36, "intermediate_size": 90, "head_dim": 10, "vocab_size": 301}),
    ("gpt2", {"n_embd": 36, "n_head": 1, "vocab_size": 333}),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("family", "sizes"), WIDTHS, ids=lambda value: value if isinstance(value, str) else "")
def test_a_prompt_has_the_same_bits_and_the_eager_logits_at_any_width(family: str, sizes: dict[str, Any]) -> None:
    register()
    model, prompts, rng = make_model(family, torch.float32, **sizes), three_levels(), np.random.default_rng(3)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        logits = model(torch.as_tensor(prompts[4][None].astype(np.int64))).logits[0, -1].double().log_softmax(-1)
    expected = [logits[list(label)].logsumexp(0).item() for label in LABELS.first]
    model.set_attn_implementation(ATTENTION)
    wanted = label_bits(model, prompts, as_they_come(len(prompts)), arithmetic=by_row())
    assert wanted.view(np.float64)[4] == pytest.approx(expected, abs=1e-5)
    found = label_bits(model, prompts, random_shuffle(rng, len(prompts)), arithmetic=by_row())
    there = found.any(axis=1)
    assert there.any()
    assert (found == wanted)[there].all()
