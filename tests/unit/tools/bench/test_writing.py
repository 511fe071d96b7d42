"""`python -m benchmarks.writing`: ways to write texts behind the same prompts, against each other."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from benchmarks import writing
from benchmarks.writing import TextMethod, TextRun, TextTask, compare
from prefillcli.plan.behind import LabelSet
from prefillcli.plan.pack import Limits
from prefillcli.walk.continuations import Beginning, Continuation, DecodingReport, DrafterCounts, Writing


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


class Scripted(TextMethod):
    """Writes what it is told, in no time."""

    def __init__(self, name: str, texts: list[Continuation], report: DecodingReport) -> None:
        super().__init__(name)
        self._run = TextRun(dict(enumerate(texts)), report)

    def run(self, task: TextTask) -> TextRun:
        return self._run


def test_texts_guesses_and_near_ties_are_counted() -> None:
    prompts = [np.arange(5, dtype=np.int32) for _ in range(3)]
    task = TextTask(
        prompts,
        lambda _: LabelSet.of([[1], [2]]),
        lambda n, _: Beginning(prompts[n], (1,), ""),
        Writing(2),
        Limits(9, 9),
        99,
    )
    plain = [Continuation((1, 2), "length", gap) for gap in (1.0, 0.5e-4, 0.5)]
    other = [plain[0], Continuation((1, 3), "length", 0.0), Continuation((2,), "stop", 1.0)]
    report = DecodingReport(tokens=6, row_passes=3, seconds=0.5, drafters={"lookup": DrafterCounts(2, 4, 3)})
    reference = Scripted("plain", plain, DecodingReport(tokens=6, row_passes=6, seconds=2.0))
    first, second = compare(task, [reference, Scripted("lookup", other, report)], 2, torch.device("cpu"))
    assert (first["same_texts"], first["near_ties"], first["passes_per_token"]) == (3, 0, 1.0)
    assert (second["same_texts"], second["near_ties"], second["passes_per_token"]) == (1, 1, 0.5)
    assert second["decode_speedup"]["median"] == 4.0
    assert second["guesses"] == {"lookup": {"proposed": 4, "accepted": 3}}
