"""`prefill bench --rationale`: ways to write texts behind the same prompts, against each other."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from prefillcli.features.rationale.contenders import TextMethod, TextRun
from prefillcli.features.rationale.contest import TextResult, TextTask, compare, quick_text_table
from typer.testing import CliRunner, Result

from prefillcli.bench.material import Material
from prefillcli.bench.report import BenchReport, bench_html
from prefillcli.cli import app
from prefillcli.decode.continuations import Beginning, Continuation, DecodingReport, DrafterCounts, Writing
from prefillcli.plan.behind import LabelSet
from prefillcli.plan.pack import Limits

SMALL = ("--rows", "3", "--tokens", "150", "--rounds", "1", "--dtype", "float32")
DRAFTED = {"draft", "hierarchy"}
ALL = {"plain", "lookup", "suffix", "retrieval", "generate", "generate-padded"} | DRAFTED


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def bench(*words: object) -> Result:
    return CliRunner().invoke(app, ["bench", "--rationale", "6", *SMALL, *map(str, words)])


def saved() -> BenchReport:
    found = BenchReport.model_validate_json(Path("bench.json").read_text(), strict=False)
    found.texts = [TextResult.model_validate(each) for each in found.texts]
    return found


@pytest.mark.nightly
def test_all_ways_write_what_transformers_writes_in_float32() -> None:
    result = bench()
    assert result.exit_code == 0, result.output
    (texts,) = saved().texts
    assert {each.method for each in texts.methods} == ALL
    assert texts.methods[0].method == "plain"
    for each in texts.methods:
        assert each.same_texts + each.near_ties == texts.rows, each.method
        assert each.decode_seconds.median < each.seconds.median
        assert each.tokens_per_second > 0
    assert 3 <= texts.text_tokens <= 18
    passes = {each.method: each.passes_per_token for each in texts.methods}
    assert passes["plain"] == passes["generate"] == passes["generate-padded"]
    assert set(json.loads(result.stdout.splitlines()[-1])["workloads"]["needle"]) == ALL
    page = Path("bench.html").read_text()
    assert all(f"<td>{name}</td>" in page for name in ALL)
    assert bench_html(saved()) == page


def test_named_ways_are_compared_with_plain() -> None:
    assert bench("--method", "lookup,generate-padded").exit_code == 0
    assert [each.method for each in saved().texts[0].methods] == ["plain", "lookup", "generate-padded"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--method", "hybrid"), "there are plain, lookup"),
        (("--method", "draft", "-m", "somewhere"), "--method draft needs --draft"),
    ],
)
def test_other_ways_are_refused_before_the_model_is_opened(words: tuple[str, ...], message: str) -> None:
    result = bench(*words)
    assert result.exit_code == 2
    assert message in result.output


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
    result = compare(
        Material("made", False, [], []),
        task,
        [
            Scripted("plain", plain, DecodingReport(tokens=6, row_passes=6, seconds=2.0)),
            Scripted("lookup", other, report),
        ],
        device=torch.device("cpu"),
        rounds=2,
    )
    first, second = result.methods
    assert (first.same_texts, first.near_ties, first.passes_per_token) == (3, 0, 1.0)
    assert (second.same_texts, second.near_ties, second.passes_per_token) == (1, 1, 0.5)
    assert second.decode_speedup.median == 4.0
    assert second.tokens_per_second == 12
    row = quick_text_table(result)[2]
    assert {"lookup", "75%", "1 + 1", "0.50"} <= set(row)
