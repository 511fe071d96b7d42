"""`--rejects`: the error rows of a job in a file of their own, with all columns of the input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.jobs.jobs import read_output, read_report, score, texts, write_jsonl, write_parquet
from tests.jobs.processes import cut_small_windows
from tests.jobs.test_shards import merge

ROWS = 50
BAD = {3: "null_prompt", 21: "empty_prompt", 44: "prompt_too_long"}


@pytest.fixture(autouse=True)
def _small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    cut_small_windows(monkeypatch)


def flags(model: Path, **more: Any) -> dict[str, Any]:
    given = {"model": model, "id_column": "id", "max_length": 200, "max_error_rate": 0.5, "empty_text": "error"}
    return given | {"memory": "64MiB"} | more


def rows() -> list[dict[str, Any]]:
    """Rows of which three are errors; `seen` is no column that the job needs."""
    prompts: list[str | None] = list(texts(ROWS))
    prompts[3], prompts[21], prompts[44] = None, " ", "fox " * 400
    return [{"id": f"r{i}", "prompt": prompt, "seen": i / 2} for i, prompt in enumerate(prompts)]


def write_input(kind: str) -> str:
    if kind == "jsonl":
        return str(write_jsonl("in.jsonl", rows()))
    return str(write_parquet("in.parquet", **{name: [row[name] for row in rows()] for name in rows()[0]}))


def expected() -> list[dict[str, Any]]:
    return [{"row": at, **rows()[at], "error": code} for at, code in BAD.items()]


def without_details(path: str) -> list[dict[str, Any]]:
    found = read_output(path)
    assert all(row.pop("error_detail") for row in found)
    return found


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
@pytest.mark.parametrize(("output", "rejects"), [("out.parquet", "bad.jsonl"), ("out/", "bad.parquet")])
def test_error_rows_are_written_with_all_their_columns(model: Path, kind: str, output: str, rejects: str) -> None:
    summary = score(write_input(kind), output, rejects=rejects, **flags(model))
    assert summary["exit_code"] == 0
    assert without_details(rejects) == expected()
    assert read_report("out.run.json")["rejects"] == rejects


def test_rejects_can_be_mended_and_scored(model: Path) -> None:
    assert score(write_input("parquet"), rejects="bad.parquet", **flags(model))["exit_code"] == 0
    table = pq.read_table("bad.parquet")
    mended = table.set_column(table.column_names.index("prompt"), "prompt", pa.array(texts(3)))
    pq.write_table(mended, "mended.parquet")
    given = flags(model, rejects="still.parquet", keep_columns=("seen",))
    assert score("mended.parquet", "more.parquet", **given)["rows"]["scored"] == 3
    assert pq.read_table("still.parquet").num_rows == 0
    assert pq.read_schema("still.parquet").names == ["row", "id", "prompt", "seen", "error", "error_detail"]


def test_of_a_sample_the_rows_go_by_their_numbers_in_the_input(model: Path) -> None:
    given = flags(model, sample=45, seed=2, id_column=None)
    assert score(write_input("parquet"), rejects="bad.jsonl", **given)["exit_code"] == 0
    failed = [row["row"] for row in read_output("out.parquet") if row["error"]]
    assert [row["row"] for row in read_output("bad.jsonl")] == failed != []
    assert all(row["id"] == f"r{row['row']}" for row in read_output("bad.jsonl"))


def test_a_job_that_is_complete_writes_its_rejects_when_it_is_asked_again(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ends while the rejects are written leaves none, and is run again."""

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    path = write_input("parquet")
    with monkeypatch.context() as patch:
        patch.setattr("prefillcli.rows.output.destination.JsonlFormat.write", full)
        assert score(path, "out.parquet", rejects="bad.jsonl", **flags(model))["exit_code"] == 5
    assert Path("out.parquet").exists()
    assert not list(Path().glob("*bad.jsonl*"))
    assert score(path, "out.parquet", resume=True, rejects="bad.jsonl", **flags(model))["exit_code"] == 0
    assert without_details("bad.jsonl") == expected()


def test_merged_shards_have_their_rejects_too(model: Path) -> None:
    path = write_input("parquet")
    for shard in ("1/2", "2/2"):
        assert score(path, shard=shard, **flags(model))["exit_code"] == 0
    assert merge()["exit_code"] == 0
    assert score(path, resume=True, rejects="bad.jsonl", **flags(model))["exit_code"] == 0
    assert without_details("bad.jsonl") == expected()


def test_where_rejects_cannot_go_is_told_before_anything_is_scored(
    model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert score(write_input("parquet"), rejects="bad.xlsx", **flags(model))["exit_code"] == 2
    assert "unknown ending of --rejects bad.xlsx" in capfd.readouterr().err
    assert not Path("out.parquet").exists()
