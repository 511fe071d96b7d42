"""The race of texts behind scored prompts, at a tiny size."""

from __future__ import annotations

import json

import pytest

from benchmarks import rationales

pytestmark = pytest.mark.nightly


@pytest.fixture
def result(capsys: pytest.CaptureFixture[str]) -> dict:
    rationales.main("25M", ["float32"], rows=2, lengths="150-200", tokens=6, rounds=1, budget=64, chunk_tokens=64)
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_every_way_writes_the_same_texts_and_is_measured(result: dict) -> None:
    (found,) = result["results"]
    assert set(found["drafters"]) == {"off", "lookup", "retrieval"}
    assert set(found["same_texts"].values()) == {2}, "greedy, in float32"
    assert found["drafters"]["off"]["passes"] == 1
    assert found["drafters"]["retrieval"]["proposed"] > 0
    for each in found["drafters"].values():
        assert each["seconds"]["median"] > 0
    plain = found["drafters"]["off"]
    parts = found["scoring"]["median"] + found["generating"]["median"]
    ours = found["keeping"]["median"] + plain["seconds"]["median"]
    assert plain["end_to_end"]["median"] == pytest.approx(parts / ours)
