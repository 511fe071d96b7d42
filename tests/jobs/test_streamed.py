"""A job whose weights are read while it runs is the same job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.jobs import read_report, score, texts, without_seconds, write_parquet
from tests.jobs.models import save_model
from tests.jobs.processes import Command, Hold, cut_small_windows

ROWS = 40
ANSWER = "prefillcli.engines.torch:TorchEngine.answer"


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of some megabytes, with more layers than have room in 3 MiB."""
    return save_model(tmp_path_factory.mktemp("models") / "deep", layers=6, hidden=128)


@pytest.fixture(autouse=True)
def _rows() -> None:
    write_parquet("in.parquet", prompt=texts(ROWS))


def test_a_streamed_job_gives_the_same_rows_under_the_same_fingerprint(deep: Path) -> None:
    assert score("in.parquet", "a.parquet", model=deep, pack_tokens=128)["exit_code"] == 0
    assert score("in.parquet", "b.parquet", model=deep, pack_tokens=128, weights_memory="2MiB")["exit_code"] == 0
    assert without_seconds("a.parquet") == without_seconds("b.parquet")
    resident, streamed = read_report("a.run.json"), read_report("b.run.json")
    assert resident["fingerprint"] == streamed["fingerprint"]
    assert resident["weights"]["mode"] == "resident"
    assert resident["weights"]["bytes"] == resident["weights"]["memory_bytes"] == streamed["weights"]["bytes"]
    assert resident["weights"]["bytes_read"] == resident["weights"]["seconds_waited"] == 0
    weights = streamed["weights"]
    assert weights["mode"] == "stream"
    assert 0 < weights["memory_bytes"] <= 2 << 20 < weights["bytes"]
    assert weights["weights_over_memory"] == resident["weights"]["weights_over_memory"] > 0
    assert weights["bytes_read"] > streamed["packs"] * weights["bytes"] / 3, "again for each pack"
    assert weights["seconds_waited"] >= 0


def test_weights_are_streamed_if_they_do_not_fit(deep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = (deep / "model.safetensors").stat().st_size
    for free, mode in ((2 * size, "resident"), (size // 2, "stream")):
        monkeypatch.setattr("prefillcli.runtime.memory.loadable_memory", lambda device, free=free: free)
        assert score("in.parquet", model=deep, overwrite=True)["exit_code"] == 0
        report = read_report()
        assert report["weights"]["mode"] == mode
        assert report["weights"]["memory_bytes"] < size


@pytest.mark.parametrize("free", [1000, 300_000])
def test_what_does_not_even_fit_as_a_stream_is_refused(deep: Path, free: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefillcli.runtime.memory.loadable_memory", lambda device: free)
    monkeypatch.setattr(
        "prefillcli.models.streamed_layers.load_streamed",
        lambda *a, **k: pytest.fail("weights were loaded"),
    )
    summary = score("in.parquet", model=deep)
    assert summary["exit_code"] == 5
    assert "even streamed" in summary["error"]


def test_too_little_memory_for_weights_says_how_much_is_needed(deep: Path) -> None:
    summary = score("in.parquet", model=deep, weights_memory="100KB")
    assert summary["exit_code"] == 5
    needed = summary["error"].partition("give ")[2].partition(" ")[0]
    assert score("in.parquet", model=deep, weights_memory=needed, overwrite=True)["exit_code"] == 0
    assert read_report()["weights"]["mode"] == "stream"


def test_a_streamed_job_that_was_killed_goes_on_in_either_way(deep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cut_small_windows(monkeypatch)
    flags: dict[str, Any] = {"model": deep, "pack_tokens": 64}
    assert score("in.parquet", "whole.parquet", **flags)["exit_code"] == 0
    words = ["score", "in.parquet", "-m", deep, "--pack-tokens", 64, "-o", "out.parquet", "--weights-memory", "2MiB"]
    for weights in ("stream", "resident"):
        command = Command(*words, "--overwrite", hold=Hold(ANSWER, 5))
        command.wait_until_held()
        command.kill()
        assert list(Path("out.parquet.prefill").glob("part-*.parquet"))
        assert score("in.parquet", resume=True, weights=weights, **flags)["exit_code"] == 0
        assert read_report()["resumed"]
        assert without_seconds("out.parquet") == without_seconds("whole.parquet")


def test_the_residual_stream_on_the_host_gives_the_same_rows(deep: Path) -> None:
    assert score("in.parquet", "a.parquet", model=deep, pack_tokens=128)["exit_code"] == 0
    assert score("in.parquet", "b.parquet", model=deep, pack_tokens=128, hidden="host")["exit_code"] == 0
    assert without_seconds("a.parquet") == without_seconds("b.parquet")
    assert json.loads(Path("b.run.json").read_text())["settings"]["hidden"] == "host"


def test_workers_stream_each_for_themselves(deep: Path) -> None:
    flags = {"model": deep, "pack_tokens": 128, "weights": "stream"}
    assert score("in.parquet", "one.parquet", weights_memory="2MiB", **flags)["exit_code"] == 0
    little = score("in.parquet", "two.parquet", weights_memory="3MiB", workers=2, **flags)
    assert little["exit_code"] == 5
    assert "1.5 MiB for each worker is too little" in little["error"]
    assert "give 4MiB or more" in little["error"]
    assert score("in.parquet", "two.parquet", weights_memory="4MiB", workers=2, **flags)["exit_code"] == 0
    for own, other in zip(without_seconds("two.parquet"), without_seconds("one.parquet"), strict=True):
        assert own["error"] is None
        assert abs(own["score"] - other["score"]) < 1e-6
    weights = read_report("two.run.json")["weights"]
    assert weights["mode"] == "stream"
    assert weights["memory_bytes"] <= 4 << 20
    assert weights["bytes_read"] > 0
