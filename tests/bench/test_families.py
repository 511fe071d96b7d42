"""The benchmark of families measures what it says, at tiny size."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.families import Votes, measure_answers, measure_speed
from benchmarks.family_models import FAMILIES, Family

TINY = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 1}


def shrunk(name: str) -> Family:
    """A family with the layers that it has, of tiny width."""
    found = FAMILIES[name]
    few = {key: 64 for key in found.target if key.startswith("moe_")}
    return replace(found, target=found.target | TINY | few, draft=found.draft | TINY)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("name", "votes"), [("qwen3_next", (4,)), ("nemotron_h", (6,)), ("gpt_oss", (2, 4))], ids=str)
def test_attention_votes_and_the_papers_prediction_stands_beside_the_speedup(
    name: str, votes: tuple[int, ...]
) -> None:
    found = measure_speed(shrunk(name), 500, 0.2, 1)
    assert found["votes"].layers == votes
    assert found["predicted"] == pytest.approx(1 / (found["r"] + 0.2))
    assert found["gap"] == pytest.approx(found["predicted"] / found["measured"].median)
    window = 128 if name == "gpt_oss" else 64  # its last window is always kept
    assert found["kept"] * 500 == pytest.approx(0.2 * 500 + window + 4, abs=40)
    assert found["paper"].predicted == pytest.approx(1 / (found["paper"].r + 0.2), abs=0.06)


@pytest.mark.nightly
def test_flips_and_drift_of_the_hybrid_sample_are_those_of_two_drafts() -> None:
    small, itself = measure_answers(0.2, 3)
    assert (small["rows"], small["votes"]) == (6, Votes((1, 2, 3), 3))
    assert itself["votes"] == Votes((2,), 4)
    for each in (small, itself):
        assert each["kept"] < 0.4
        assert each["flips"] <= 2
        assert [layer.layer for layer in each["drift"].layers] == [1, 3, 4]
        assert 0 < each["drift"].median < 2
