"""The benchmark for GPUs runs as a whole on the CPU, and guesses nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

from benchmarks.gpu import SCALES, main, speed
from benchmarks.gpu_kit import goals
from benchmarks.gpu_steps import ran_its_own


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


def test_goals_stand_beside_what_a_cut_run_has_reached() -> None:
    def line(mode: str, rows: int, tokens: int, seconds: float | None, case: str = "", shared: bool = False) -> Any:
        return speed(case, mode, seconds, rows=rows, tokens=tokens, flops=1.0, peak=None, shared=shared)

    speeds = [
        line("full", 50, 25_000, 1.0, "rows"),
        line("hybrid", 200, 100_000, 2.0, "rows"),
        line("full", 12, 90_000, 3.0, "shared"),
        line("hybrid", 1000, 7_000_000, 20.0, "shared", shared=True),
        line("hybrid", 1, 32_768, 0.9),
        line("hybrid", 1, 131_072, None),
    ]
    errors = {
        "llama": {"bfloat16": 0.004, "times_eager": 0.8},
        "phi3": {"bfloat16": 0.009, "times_eager": 2.1},
        "olmo2": {"bfloat16": 0.0001, "times_eager": 7.0},
    }
    found = goals({"speed": {"speeds": speeds}, "parity": {"errors": errors}, "smaller": {"status": "cut"}})
    assert [goal["reached"] for goal in found] == [50_000.0, None, 12.5, 32_768, 2.1]
    assert [goal["met"] for goal in found] == [True, None, True, False, False]
    assert {goal["met"] for goal in goals({})} == {None}


def test_a_path_whose_kernel_is_another_one_is_told() -> None:
    assert ran_its_own("flash-cuda", ["void pytorch_flash::flash_fwd_kernel<...>", "memcpy"])
    assert not ran_its_own("flash-cuda", ["fmha_cutlassF_bf16_aligned_64x64_rf_sm80", "ampere_bf16_gemm"])
    assert ran_its_own("flex", ["triton_tem_fused_0"])
    assert ran_its_own("blocks", ["whatever"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as ended:
        main(device="cuda", scale="8b", rounds=1, output=tmp_path / "gpu.json")
    assert ended.value.exit_code == 5
    said = capsys.readouterr()
    assert "finds 0 CUDA devices" in said.err
    assert (said.out, len(said.err.splitlines())) == ("", 1)
