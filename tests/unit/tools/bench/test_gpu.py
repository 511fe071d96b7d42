"""The benchmark for GPUs runs as a whole on the CPU, and guesses nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import typer

from benchmarks.gpu import SCALES, main


@pytest.mark.nightly
def test_the_whole_program_runs_without_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(device="cpu", scale="tiny", rounds=1, output=tmp_path / "gpu.json")
    printed = capsys.readouterr().out
    report = json.loads(printed.splitlines()[-1])
    assert report == json.loads((tmp_path / "gpu.json").read_text())
    assert [line["mode"] for line in report["speeds"]] == ["full", "hybrid"] * (len(SCALES["tiny"].lengths) + 2)
    assert all(line["tokens_per_second"] > 0 and line["of_peak"] is None for line in report["speeds"])
    small, missing = report["longest"]
    assert small["hybrid"] > 0
    assert (missing["law"], missing["hybrid"]) == (None, None)
    assert "| 40 GB | no such card |" in printed


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as ended:
        main(device="cuda", scale="8b", rounds=1, output=tmp_path / "gpu.json")
    assert ended.value.exit_code == 5
    said = capsys.readouterr()
    assert "finds 0 CUDA devices" in said.err
    assert (said.out, len(said.err.splitlines())) == ("", 1)
