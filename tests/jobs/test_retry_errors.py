"""`--retry-errors`: error rows are scored again, and no other row changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from prefillcli.engines.torch import TorchEngine
from prefillcli.rows.records import ErrorCode, RowError
from prefillcli.scoring import loop
from prefillcli.tools.verify import verify_job
from tests.jobs.jobs import Reference, assert_scored, read_output, read_report, score, texts, write_parquet
from tests.jobs.processes import cut_small_windows
from tests.jobs.test_shards import merge
from tests.jobs.test_since import stop_at_pack

ROWS = 50
FAILED = (2, 3, 30, 49)
NULL = 10


@pytest.fixture(autouse=True)
def _small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    cut_small_windows(monkeypatch)


def flags(model: Path, **more: Any) -> dict[str, Any]:
    given = {"model": model, "id_column": "id", "pack_tokens": 64, "max_error_rate": 0.5}
    given["empty_text"] = "error"
    return given | {"memory": "64MiB"} | more


def prompts() -> list[str | None]:
    found: list[str | None] = list(texts(ROWS))
    found[NULL] = None
    return found


def write_input() -> str:
    return str(write_parquet("in.parquet", prompt=prompts(), id=[f"r{i}" for i in range(ROWS)]))


def with_failures(patch: pytest.MonkeyPatch) -> None:
    """Some rows do not fit the memory, for as long as this holds."""
    fitting = loop._fitting

    def fit(requests: Any, most: int) -> Any:
        kept, errors, failed = fitting([each for each in requests if each.prompt.row not in FAILED], most)
        lost = {each.prompt.row for each in requests} & set(FAILED)
        return kept, errors | {row: RowError(ErrorCode.EXCEEDS_MEMORY, "for now") for row in lost}, failed

    patch.setattr(loop, "_fitting", fit)


def assert_mended(before: list[dict[str, Any]], reference: Reference, output: str = "out.parquet") -> None:
    """The rows that had failed have their scores, the one without a prompt its error, and the others their bits."""
    after = read_output(output)
    assert [row["id"] for row in after] == [f"r{i}" for i in range(ROWS)]
    assert [after[row] for row in range(ROWS) if row not in FAILED] == [
        before[row] for row in range(ROWS) if row not in FAILED
    ]
    assert after[NULL]["error"] == "null_prompt"
    assert_scored([after[row] for row in FAILED], [reference.answer(prompts()[row] or "") for row in FAILED])


@pytest.mark.parametrize("output", ["out.parquet", "out.jsonl"])
def test_of_a_complete_job_error_rows_alone_are_scored_again(
    model: Path, reference: Reference, output: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_input()
    with monkeypatch.context() as patch:
        with_failures(patch)
        assert score(path, output, **flags(model))["rows"]["errors"] == 5
        before = read_output(output)
        assert [before[row]["error"] for row in FAILED] == ["exceeds_memory"] * 4
    with monkeypatch.context() as patch:  # before anything new is written: the output stays until it is replaced
        stop_at_pack(patch, 1)
        assert score(path, output, retry_errors=True, **flags(model))["exit_code"] == 143
        assert read_output(output) == before
    with monkeypatch.context() as patch:
        stop_at_pack(patch, 2)
        assert score(path, output, resume=True, **flags(model))["exit_code"] == 143
    read: list[int] = []
    answer = TorchEngine.answer

    def noting(self: TorchEngine, pack: Any, *rest: Any) -> Any:
        read.extend(pack.prompts)
        return answer(self, pack, *rest)

    monkeypatch.setattr(TorchEngine, "answer", noting)
    summary = score(path, output, resume=True, **flags(model))
    assert (summary["exit_code"], summary["rows"]["errors"]) == (0, 1)
    assert 0 < len(read) <= len(FAILED)
    assert_mended(before, reference, output)
    assert verify_job(output, [path], quiet=True)["exit_code"] == 0
    read.clear()
    assert score(path, output, retry_errors=True, **flags(model))["exit_code"] == 0  # the null prompt stays one
    assert read == []
    assert_mended(before, reference, output)


def test_of_a_stopped_job_too(model: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_input()
    with monkeypatch.context() as patch:
        with_failures(patch)
        assert score(path, "failed.parquet", threads=1, **flags(model))["exit_code"] == 0
        stop_at_pack(patch, 8)
        assert score(path, threads=1, **flags(model))["exit_code"] == 143
    assert score(path, threads=1, retry_errors=True, **flags(model))["exit_code"] == 0
    after = read_output("out.parquet")
    assert_scored([after[row] for row in FAILED], [reference.answer(prompts()[row] or "") for row in FAILED])
    for row, wanted in zip(after, read_output("failed.parquet"), strict=True):
        if wanted["error"] is None:
            assert row["score"] == pytest.approx(wanted["score"], abs=1e-6)
        assert row["id"] == wanted["id"]


def test_what_earlier_runs_scored_counts_where_a_run_scores_nothing(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_input()
    with monkeypatch.context() as patch:
        stop_at_pack(patch, 8)
        assert score(path, threads=1, **flags(model))["exit_code"] == 143
    before = read_report()["rows"]["scored"]
    assert 0 < before < ROWS - 1
    lost = RowError(ErrorCode.EXCEEDS_MEMORY, "for now")
    monkeypatch.setattr(loop, "_fitting", lambda asked, most: ([], {each.prompt.row: lost for each in asked}, {}))
    for again in ("resume", "retry_errors"):
        summary = score(path, threads=1, **flags(model, max_error_rate=1), **{again: True})
        assert (summary["status"], summary["exit_code"]) == ("complete", 0)
        assert (summary["rows"]["scored"], summary["rows"]["errors"]) == (before, ROWS - before)
    assert score(path, "new.parquet", threads=1, **flags(model, max_error_rate=1))["status"] == "failed"


def test_of_shards_that_are_not_merged_too(
    model: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write_input()
    with monkeypatch.context() as patch:
        with_failures(patch)
        for shard in ("1/2", "2/2"):
            assert score(path, shard=shard, **flags(model))["exit_code"] == 0
    assert score(path, shard="1/2", retry_errors=True, **flags(model))["exit_code"] == 0
    assert merge()["exit_code"] == 0
    before = read_output("out.parquet")
    assert score(path, shard="2/2", retry_errors=True, **flags(model))["exit_code"] == 2
    assert "the shards of out.parquet were merged" in capfd.readouterr().err
    assert score(path, retry_errors=True, **flags(model))["exit_code"] == 0
    assert_mended(before, reference)


def test_a_job_without_errors_stays_as_it_is(model: Path) -> None:
    path = str(write_parquet("in.parquet", prompt=texts(5), id=list("abcde")))
    assert score(path, retry_errors=True, **flags(model))["exit_code"] == 0  # there is none yet
    written = Path("out.parquet").stat()
    assert score(path, retry_errors=True, **flags(model))["exit_code"] == 0
    now = Path("out.parquet").stat()
    assert (now.st_ino, now.st_mtime_ns) == (written.st_ino, written.st_mtime_ns)
