"""Jobs with several questions, or choices of each row, that are killed: going on gives what one run gives."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.score.jobs import read_output, read_report, score, write_jsonl
from tests.score.processes import Command, Hold, cut_small_windows, words_of

ROWS = 70
ANSWER = "prefillcli.engines.torch:TorchEngine.answer"
REPLACE = "prefillcli.runtime.file_calls:replace_file"
FILE = """
document: "{{ prompt }}"
questions:
  - {name: fox, text: " Is it a fox? Answer:", labels: [Yes, No]}
  - {name: tone, text: " The dog was", labels: [very quick, not quick at all, brown], when: "fox.score > 0.5"}
  - {name: kind, template: "{{ one }} or {{ other }}:", labels: [brown, quick], swap: [one, other]}
"""
CHOICES = [["Yes", "No"], ["was helped by it", "was harmed by it", "No"], ["a fox"]]


def questions() -> dict[str, Any]:
    Path("q.yaml").write_text(FILE)
    return {"questions": "q.yaml", "rationale": 6}


def choices() -> dict[str, Any]:
    return {"choices_column": "choices", "label_norm": "bytes", "evidence": True, "rationale": 6}


@pytest.fixture(params=[questions, choices], ids=lambda each: each.__name__)
def job(request: pytest.FixtureRequest, model: Path, draft: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A job whose rows are read in full and compressed, some of them both, and some of which are errors."""
    cut_small_windows(monkeypatch)
    rows: list[dict[str, Any]] = [
        {
            "id": f"r{at}",
            "prompt": None if at == 33 else f"{'The brown fox. ' * (at % 8)}\n\nFox {at} saw {'a ' * (at % 5)}dog",
            "choices": ["Yes", "Yes"] if at == 41 else CHOICES[at % 3],
            "one": f"fox {at}",
            "other": "dog",
        }
        for at in range(ROWS)
    ]
    write_jsonl("in.jsonl", rows)
    made: Callable[[], dict[str, Any]] = request.param
    how = {"draft": draft, "keep": 0.5, "compress_above": 24, "keep_last": 8, "keep_first": 2, "audit": 30}
    return {"model": model, "id_column": "id", "pack_tokens": 256, "max_error_rate": 0.5} | how | made()


def command(job: dict[str, Any], *more: str, **how: Any) -> Command:
    return Command("score", "in.jsonl", "-o", "out.parquet", *words_of(job), *more, **how)


def rows_of(path: str) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key != "seconds"} for row in read_output(path)]


def parts() -> list[Path]:
    return list(Path("out.parquet.prefill").glob("part-*.parquet"))


def assert_whole(job: dict[str, Any]) -> None:
    """The job goes on to the rows and the report of one run."""
    assert score("in.jsonl", "whole.parquet", **job)["exit_code"] == 0
    assert score("in.jsonl", resume=True, **job)["exit_code"] == 0
    found, wanted = rows_of("out.parquet"), rows_of("whole.parquet")
    assert [row["id"] for row in found] == [f"r{at}" for at in range(ROWS)]
    assert sum(row["error"] is not None for row in found) in (1, 2)
    assert {row["method"] for row in found} == {"full", "specprefill", None}
    for row, other in zip(found, wanted, strict=True):
        for name in [name for name in row if name.endswith("rationale_gap")]:  # texts may be written in other company
            assert row.pop(name) == pytest.approx(other.pop(name), abs=1e-5)
        assert row == other
    report, other = read_report(), read_report("whole.run.json")
    for key in ("rows", "audit", "audits", "orders"):
        assert report[key] == other[key]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "hold",
    [
        Hold(ANSWER, 2),
        Hold(ANSWER, 9),
        Hold(ANSWER, 17),
        Hold(REPLACE, 3, ".parquet"),
        Hold("prefillcli.data.output.sink:Sink.finish"),
    ],
    ids=[
        "in the first window",
        "in a later window",
        "in the last windows",
        "a part half written",
        "before the output",
    ],
)
def test_a_job_goes_on_after_a_kill(job: dict[str, Any], hold: Hold) -> None:
    running = command(job, hold=hold)
    running.wait_until_held()
    running.kill()
    assert not Path("out.parquet").exists()
    assert_whole(job)


@pytest.mark.nightly
def test_a_job_goes_on_after_many_kills_at_any_moment(job: dict[str, Any]) -> None:
    rng = random.Random(3)
    for _ in range(4):
        running = command(job, "--resume", seconds_per_pack=0.03)
        before = len(parts())
        running.wait_until(lambda n=before: len(parts()) > n)
        time.sleep(0.05 * rng.random())
        running.kill()
    assert not Path("out.parquet").exists()
    assert_whole(job)
