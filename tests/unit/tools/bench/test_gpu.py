"""The benchmark for GPUs runs as a whole on the CPU, and guesses nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import typer

from benchmarks.gpu import FULL, HYBRID, SCALES, main, peak_of, search, speed, tables


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


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40", None),
        ("Tesla V100-SXM2-16GB", None),
    ],
)
def test_an_unknown_card_has_no_peak(name: str, peak: float | None) -> None:
    assert peak_of(name) == peak


def test_the_longest_length_is_found_near_a_guess() -> None:
    assert 950 <= search(lambda tokens: tokens <= 1000, 1000) <= 1000
    assert 900 <= search(lambda tokens: tokens <= 1000, 1100) <= 1000
    assert search(lambda tokens: False, 1000) == 0


def test_a_run_is_set_beside_what_others_reach_and_shared_prefixes_do_not_count() -> None:
    def line(mode: str, tokens: int, *, shared: bool = False) -> dict[str, object]:
        return speed("rows", mode, 1.0, rows=1, tokens=tokens, flops=1e12, peak=None, shared=shared)

    lines = [line(HYBRID, 21_000), line(HYBRID, 20_000), line(HYBRID, 90_000, shared=True), line(FULL, 50_000)]
    printed = tables({"speeds": lines, "longest": []})
    assert "| goal in bfloat16 | 42,000 | 21,000, 0.50 of it |" in printed
    assert "| goal in FP8 | 60,000 | 21,000, 0.35 of it |" in printed
    assert "pull request 2134), 62 % of the peak if that was an H100 | 43,925 |" in printed
    assert "740 TFLOP/s" in printed
    nothing = speed("rows", HYBRID, None, rows=1, tokens=1, flops=1.0, peak=None)
    assert "| goal in FP8 | 60,000 |  |" in tables({"speeds": [nothing], "longest": []})
