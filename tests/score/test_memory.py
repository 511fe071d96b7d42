"""Memory does not grow with the number of rows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.score.models import save_model


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "small", layers=1, hidden=16)


def peak_bytes(model: Path, rows: int) -> int:
    with Path("in.jsonl").open("w") as file:
        file.writelines(json.dumps({"id": f"r{i}", "prompt": f"fox {i % 9973}: yes?"}) + "\n" for i in range(rows))
    command = [sys.executable, "-m", "prefillcli", "score", "in.jsonl", "-m", str(model), "-o", "out.jsonl", "-q"]
    done = subprocess.run([*command, "--id-column", "id", "--overwrite"], capture_output=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rows"]["scored"] == rows
    peak: int = json.loads(Path("out.run.json").read_text())["peak_memory_bytes"]["host"]
    return peak


@pytest.mark.nightly
def test_ten_times_the_rows_take_hardly_more_memory(small_model: Path) -> None:
    few, many = peak_bytes(small_model, 20_000), peak_bytes(small_model, 200_000)
    assert many <= 1.2 * few, f"{few / 2**20:.0f} MiB for 20,000 rows, {many / 2**20:.0f} MiB for 200,000"
