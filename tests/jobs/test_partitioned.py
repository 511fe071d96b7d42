"""`--partition`: scores in folders like those of a Hive-partitioned input."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import quote

import pyarrow.dataset as ds
import pytest

from prefillcli.rows.input.source import Source
from prefillcli.tools.verify import verify_job
from tests.jobs.jobs import score
from tests.unit.rows.test_partitions import write


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_scores_in_folders_like_those_of_the_input(model: Path, tmp_path: Path, kind: str) -> None:
    folders = [("month=01", f"x={quote('a b/c', safe='')}"), ("month=01", "x=1"), ("month=02", "x=1"), ("month=02",)]
    write(tmp_path / "in", kind, folders)
    write(tmp_path / "in" / "more", kind, folders[:1])  # a folder with the same keys, but not beside the first
    read = Source.open([f"{tmp_path}/in"])
    read.select(columns=["prompt", "month", "x"], carried=[])
    wanted = [row for batch in read.batches() for row in zip(*batch.columns.values(), strict=True)]
    options: dict[str, Any] = {
        "model": model,
        "report": f"{tmp_path}/run.json",
        "keep_columns": ("prompt",),
        "partition": True,
    }
    assert score(f"{tmp_path}/in", f"{tmp_path}/out/", **options)["exit_code"] == 0
    oracle = ds.dataset(f"{tmp_path}/out", format="parquet", partitioning="hive").to_table().sort_by("row")
    assert [tuple(row[name] for name in ("prompt", "month", "x")) for row in oracle.to_pylist()] == wanted
    assert {str(path.parent.relative_to(tmp_path / "out")) for path in tmp_path.glob("out/**/*.parquet")} == {
        "/".join(names) for names in folders
    }
    assert (tmp_path / "out" / "_SUCCESS").exists()
    verified = verify_job(f"{tmp_path}/out", [f"{tmp_path}/in"])
    assert verified["problems"] == []
    assert score(f"{tmp_path}/in", f"{tmp_path}/out/", resume=True, **options)["exit_code"] == 0
    del options["partition"]
    assert score(f"{tmp_path}/in", f"{tmp_path}/out/", resume=True, **options)["exit_code"] == 4


def test_an_output_that_cannot_be_partitioned_is_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "plain", "jsonl", [("a",)])
    write(tmp_path / "in", "jsonl", [("day=1",)])
    for source, output, id_column, why in (
        ("plain", "o/", None, "no folder of the input is named like day=2026-01-01"),
        ("in", "o.parquet", None, "is one file"),
        ("in", "o/", "day", "--id-column day: with --partition it names folders"),
    ):
        options = {"model": model, "partition": True, "id_column": id_column}
        assert score(f"{tmp_path}/{source}", f"{tmp_path}/{output}", **options)["exit_code"] == 2
        assert why in capsys.readouterr().err
