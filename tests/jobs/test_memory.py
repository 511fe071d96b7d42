"""Memory does not grow with the number of rows."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.jobs.models import save_model


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "small", layers=1, hidden=16)


def peak_bytes(model: Path, rows: int) -> int:
    with Path("in.jsonl").open("w") as file:
        for i in range(rows):  # the note goes to the output: 2 KB that a row takes as long as it is held
            print(json.dumps({"id": f"r{i}", "prompt": f"fox {i % 9973}: yes?", "note": f"{i} " * 300}), file=file)
    command = [sys.executable, "-m", "prefillcli", "score", "in.jsonl", "-m", str(model), "-o", "out.jsonl", "-q"]
    command += ["--id-column", "id", "--keep-columns", "note", "--overwrite"]
    done = subprocess.run(command, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rows"]["scored"] == rows
    peak: int = json.loads(Path("out.run.json").read_text())["peak_memory_bytes"]["host"]
    return peak


@pytest.mark.nightly
def test_four_times_the_rows_take_hardly_more_memory(small_model: Path) -> None:
    few, many = peak_bytes(small_model, 50_000), peak_bytes(small_model, 200_000)
    assert many <= 1.2 * few, f"{few / 2**20:.0f} MiB for 50,000 rows, {many / 2**20:.0f} MiB for 200,000"


def _score_in(folder: str, words: list[str], extra: int) -> None:
    """Run the command where no more than `extra` bytes can be mapped beside what torch and the libraries take."""
    from prefillcli.cli import main

    os.chdir(folder)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + extra, used + extra))
    sys.argv = ["prefill", "score", *words]
    with Path("stdout").open("w") as out, Path("stderr").open("w") as error:
        sys.stdout, sys.stderr = out, error
        main()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["in.parquet", "in.jsonl.zst"])
def test_one_row_of_300_megabytes_is_an_error_row_and_the_others_are_scored(small_model: Path, name: str) -> None:
    huge = "x" * (300 << 20)
    if name == "in.parquet":
        prompts = ["fox", huge, *["dog"] * 3]
        pq.write_table(pa.table({"prompt": prompts}), name, compression="zstd", row_group_size=2)
    else:
        with pa.output_stream(name, compression="zstd") as file:
            file.write(b'{"prompt":"fox"}\n{"prompt":"' + huge.encode() + b'"}\n' + b'{"prompt":"dog"}\n' * 3)
    del huge
    words = [name, "-m", str(small_model), "-o", "out.jsonl", "--labels", "yes,no", "--max-error-rate", "0.5", "-q"]
    extra = (3 if name == "in.parquet" else 1) << 30  # a page of a Parquet file is read as a whole, some times over
    child = multiprocessing.get_context("forkserver").Process(target=_score_in, args=(os.getcwd(), words, extra))
    child.start()
    child.join()
    assert child.exitcode == 0, Path("stderr").read_text()
    rows = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    errors = [row["error"] for row in rows]
    assert errors == [None, "row_too_large", *[None] * 3]
    assert all(row["score"] is not None for row in rows if not row["error"])
