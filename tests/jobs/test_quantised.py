"""Whole jobs with quantised checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.jobs.jobs import read_output, read_report, score, texts, write_parquet
from tests.jobs.models import save_model
from tests.quantised_checkpoints import make_quantised

pytestmark = pytest.mark.filterwarnings("ignore")  # what other packages say of themselves


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "dense", hidden=64)


@pytest.fixture(scope="module")
def fp8(dense: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_quantised("fp8", dense, tmp_path_factory.mktemp("fp8"))


@pytest.fixture(autouse=True)
def _rows() -> None:
    write_parquet("in.parquet", prompt=texts(12))


@pytest.mark.parametrize("kind", ["fp8", "torchao-w8", "w4a16"])
def test_scores_are_those_of_the_plain_loop(
    kind: str, dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_quantised(kind, dense, tmp_path / kind)
    assert score("in.parquet", "a.parquet", model=model, dtype="float32")["exit_code"] == 0
    assert score("in.parquet", "b.parquet", model=model, dtype="float32", engine="hf")["exit_code"] == 0
    pairs = zip(read_output("a.parquet"), read_output("b.parquet"), strict=True)
    assert all(one["score"] == pytest.approx(other["score"], abs=1e-4) for one, other in pairs)
    said = read_report("a.run.json")["weights"]["quantisation"]
    assert said == {"fp8": "fine-grained FP8, unpacked to float32", "torchao-w8": "torchao, packed"}.get(
        kind, "compressed-tensors, unpacked to float32"
    )
    assert ("unpacked to float32" in capsys.readouterr().err) == (kind != "torchao-w8")


def test_a_quantised_model_may_be_the_draft(fp8: Path, dense: Path) -> None:
    flags = {"keep": 0.5, "compress_above": 8, "select_chunk": 4}
    assert score("in.parquet", model=dense, draft=str(fp8), **flags)["exit_code"] == 0
    assert any(row["kept_tokens"] < row["prompt_tokens"] for row in read_output("out.parquet"))


@pytest.mark.parametrize("flags", [{}, {"engine": "hf"}, {"dry_run": True}])
def test_what_runs_nowhere_here_is_refused_before_weights_are_read(
    flags: dict[str, object], dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_quantised("fp8", dense, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "eetq"}
    (model / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr("prefillcli.models.load.load_weights", lambda *a, **k: pytest.fail("weights are read"))
    summary = score("in.parquet", model=model, **flags)
    assert summary["exit_code"] == 2
    assert "quantised with EETQ run on CUDA devices only, not on cpu" in summary["error"]


def test_layers_are_unpacked_in_their_turn_or_all_at_the_start(fp8: Path) -> None:
    for where in ("auto", "resident"):
        assert score("in.parquet", f"{where}.parquet", model=fp8, dtype="float32", weights=where)["exit_code"] == 0
    modes = [read_report(f"{where}.run.json")["weights"]["mode"] for where in ("auto", "resident")]
    assert modes == ["stream", "resident"]
    rows, wanted = ([row["score"] for row in read_output(f"{where}.parquet")] for where in ("auto", "resident"))
    assert rows == wanted
    assert read_report("auto.run.json")["weights"]["quantisation"] == "fine-grained FP8, unpacked to float32"


def test_the_dtype_is_chosen_with_two_unpacked_layers(fp8: Path, dense: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from prefillcli.models import dtype

    monkeypatch.setattr(dtype, "layer_bytes", lambda *_: {None: 10, 0: 5, 1: 7, 2: 7})
    packed, plain = dtype.read_model_files(fp8), dtype.read_model_files(dense)
    cpu = torch.device("cpu")
    assert dtype.held_bytes(packed, cpu, streams=True) == 24
    assert dtype.held_bytes(packed, cpu) == dtype.held_bytes(plain, cpu, streams=True) == 29


def test_weights_that_stay_packed_are_not_streamed(dense: Path, tmp_path: Path) -> None:
    model = make_quantised("torchao-w8", dense, tmp_path / "model")
    assert score("in.parquet", "own.parquet", model=model)["exit_code"] == 0
    summary = score("in.parquet", model=model, weights="stream")
    assert summary["exit_code"] == 2
    assert "stay packed, and cannot be read layer by layer" in summary["error"]


def test_weights_have_to_fit_as_they_are_loaded(fp8: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers are unpacked to four times what they take in the file. The rest stays a mapped file."""
    size = (fp8 / "model.safetensors").stat().st_size
    monkeypatch.setattr("prefillcli.runtime.memory.loadable_memory", lambda device: int(0.9 * size))
    summary = score("in.parquet", model=fp8, dtype="float32")
    assert summary["exit_code"] == 5
    assert "the weights take" in summary["error"]
