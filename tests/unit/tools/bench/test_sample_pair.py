"""The sample pair: a fifth of the tokens is enough for what it can do, if they are the right ones."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from benchmarks.needles import make_needles
from benchmarks.score_runs import SAMPLES
from prefillcli.options.commands import BenchSettings
from prefillcli.options.load import load_settings
from prefillcli.tools.bench.bench_job import bench_job


def write_needles(path: Path) -> Path:
    tokenizer = AutoTokenizer.from_pretrained(SAMPLES / "models" / "target")
    prompts, _ = make_needles(rows=60, tokens=4000, seed=0, count=lambda text: len(tokenizer(text)["input_ids"]))
    pq.write_table(pa.table({"prompt": prompts}), path)
    return path


@pytest.mark.nightly
def test_a_fifth_of_the_tokens_keeps_the_answers_and_random_ones_do_not(tmp_path: Path) -> None:
    output = tmp_path / "bench.json"
    flags = {
        "method": ["specprefill", "random"],
        "inputs": [str(write_needles(tmp_path / "needles.parquet"))],
        "rounds": 1,
        "keep": ["0.2"],
        "output": str(output),
        "quiet": True,
    }
    settings = load_settings(BenchSettings, flags, environment={})
    assert bench_job(settings)["exit_code"] == 0
    (result,) = json.loads(output.read_text())["workloads"]
    flips = {method["method"]: method["answers"]["audit"]["flips"] for method in result["methods"] if method["keep"]}
    kept = {method["method"]: method["kept"] for method in result["methods"]}
    assert kept["specprefill@0.2"] <= kept["random@0.2"] < 0.25
    assert flips["specprefill@0.2"] <= 0.03 * 60
    assert flips["random@0.2"] >= 5 * max(1, flips["specprefill@0.2"])
