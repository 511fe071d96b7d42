"""`python -m benchmarks.made_workloads`."""

from __future__ import annotations

import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import typer
from typer.testing import CliRunner

from benchmarks.made_workloads import WORKLOADS, main


@pytest.mark.nightly
def test_every_workload_is_a_file_with_its_answers(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(main)
    done = CliRunner().invoke(app, ["--rows", "40", "--tokens", "800", "-o", str(tmp_path)])
    assert done.exit_code == 0, done.output
    rows = {name: pq.read_table(tmp_path / f"{name}.parquet").to_pylist() for name in WORKLOADS}
    for name, own in rows.items():
        assert [row["answer"] for row in own].count("Yes") == 20, name
        assert all(re.search(r"about \w+\? Answer:\Z", row["prompt"]) for row in own), name
    histories = {row["prompt"].rpartition("New post: ")[0] for row in rows["post-recommendation"]}
    assert len(histories) == 2  # each of 20 rows
    for row in rows["qa"]:  # the creditor is in the file of the applicant asked about, or it is not
        text, _, question = row["prompt"].rpartition("Question: ")
        owner, word = re.search(r"file of (\w+ \w+) say anything about (\w+)", question).groups()
        files = dict(re.findall(r"Applicant: (\w+ \w+),(.*?)(?=Applicant: |\Z)", text, re.DOTALL))
        assert row["answer"] == ("Yes" if re.search(rf"\b{word}\b", files[owner]) else "No")
