"""Jobs with models whose layers are recurrent, or recurrent beside attention."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.jobs import (
    TOLERANCE,
    Reference,
    assert_scored,
    read_output,
    read_report,
    score,
    texts,
    write_parquet,
)
from tests.jobs.models import save_model

ROWS = 60
HYBRIDS: dict[str, dict[str, Any]] = {
    # All experts work: with two of four, rounding to float32 grows in the layers behind, and transformers' own forward
    # is up to 5.7e-5 from the one in float64 (1.9e-6 with all).
    "qwen3_next": {
        "layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2, "linear_num_value_heads": 4,
        "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "num_experts": 4,
        "num_experts_per_tok": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    },
    "nemotron_h": {
        "layers": 4, "layers_block_type": ["mamba", "attention", "mamba", "moe"], "mamba_num_heads": 8,
        "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 2, "chunk_size": 32, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32,
    },
    "falcon_h1": {
        "layers": 3, "mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8,
        "mamba_n_groups": 2, "mamba_chunk_size": 32,
    },
}  # fmt: skip


@pytest.fixture(scope="module", params=HYBRIDS)
def hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(
        tmp_path_factory.mktemp("models") / request.param, family=request.param, **HYBRIDS[request.param]
    )


@pytest.fixture(autouse=True)
def _rows() -> None:
    write_parquet("in.parquet", prompt=texts(ROWS))


def scores(output: str) -> list[float]:
    return [row["score"] for row in read_output(output)]


@pytest.mark.sampled(1)
def test_rows_have_transformers_scores_and_shared_prefixes_are_computed_once(hybrid: Path) -> None:
    """Over several packs, in which later ones begin behind the states of earlier ones."""
    assert score("in.parquet", model=hybrid, pack_tokens=128, chunk_tokens=64)["exit_code"] == 0
    reference = Reference(hybrid)
    assert_scored(read_output("out.parquet"), [reference.answer(text) for text in texts(ROWS)])
    report = read_report()
    assert report["packs"] > 3
    tokens = report["tokens"]
    assert tokens["computed"] <= 1.01 * tokens["unique"], "as for any model: the smallest shared nodes are no nodes"
    assert tokens["unique"] < tokens["prompt"] / 1.5


@pytest.mark.nightly
def test_nobody_is_told_to_install_kernels_that_are_not_for_cpus(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", family="nemotron_h", **HYBRIDS["nemotron_h"])
    command = [sys.executable, "-m", "prefillcli", "score", "in.parquet", "--model", str(model), "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0
    assert "falling back" not in done.stderr


@pytest.mark.sampled(1)
def test_scores_do_not_depend_on_packs_memory_or_workers(hybrid: Path) -> None:
    assert score("in.parquet", "a.parquet", model=hybrid)["exit_code"] == 0
    others: list[dict[str, Any]] = [
        {"pack_tokens": 200, "prefix_kv": "discard"},
        {"pack_tokens": 200, "prefix_kv": "offload"},
        {"pack_tokens": 200},
        {"pack_tokens": 200, "workers": 2},
        {"pack_tokens": 200, "weights": "stream"},
    ]
    for flags in others:
        assert score("in.parquet", "b.parquet", model=hybrid, overwrite=True, **flags)["exit_code"] == 0
        assert scores("b.parquet") == pytest.approx(scores("a.parquet"), abs=TOLERANCE)
