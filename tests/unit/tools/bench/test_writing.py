"""`python -m benchmarks.writing`: ways to write texts behind the same prompts, against each other."""

from __future__ import annotations

import json

import pytest

from benchmarks import writing


@pytest.mark.nightly
def test_all_ways_write_what_transformers_writes_in_float32(capsys: pytest.CaptureFixture[str]) -> None:
    writing.main(None, None, None, None, "Yes,No", "float32", tokens=6, limit=3, length=150, rounds=1)
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["methods"]
    assert [each["method"] for each in found] == list(writing.WAYS)
    for each in found:
        assert each["same_texts"] + each["near_ties"] == 3, each["method"]
        assert each["decode_seconds"]["median"] < each["seconds"]["median"]
    assert 3 <= found[0]["tokens"] <= 18
    passes = {each["method"]: each["passes_per_token"] for each in found}
    assert passes["plain"] == passes["generate"] == passes["generate-padded"]
