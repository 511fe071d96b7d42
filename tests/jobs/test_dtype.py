"""`--dtype auto`: float32 where this processor is slow at what the model is saved in, and has the memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import prefillcli
from prefillcli.core.scorer import Granularity
from prefillcli.models import dtype as dtypes
from prefillcli.models.open import open_models
from prefillcli.options.commands import ScoreSettings
from prefillcli.options.load import load_settings
from prefillcli.rows.output.sink import Sink
from prefillcli.runtime import user_cache
from prefillcli.walk import attention
from prefillcli.walk.attention import compiled_kernel
from tests.jobs import jobs
from tests.jobs.jobs import TOLERANCE, Reference, read_output, read_report, score, texts, write_parquet
from tests.jobs.models import save_model

ROOT = Path(__file__).parents[2]
PROMPTS = texts(9)
LABELS = "Yes= Yes,No= No"
CPU = torch.device("cpu")
Ratio = Callable[[float], None]


def save_half(path: Path, **sizes: Any) -> Path:
    """A model that is saved in bfloat16."""
    save_model(path, **sizes)
    AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_half(tmp_path_factory.mktemp("half") / "model")


@pytest.fixture(scope="module")
def half_draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_half(tmp_path_factory.mktemp("half") / "draft", seed=3, layers=1)


@pytest.fixture
def ratio(monkeypatch: pytest.MonkeyPatch) -> Ratio:
    """Make products in bfloat16 take so many times as long as in float32."""
    return lambda times: monkeypatch.setattr(dtypes, "times_as_long", lambda *_: times)


def job(model: Path, output: str = "out.parquet", **flags: Any) -> dict[str, Any]:
    return score(write_parquet("in.parquet", prompt=PROMPTS), output, model=model, labels=LABELS, **flags)


def assert_eager(model: Path, dtype: torch.dtype, tolerance: float) -> None:
    reference = Reference(model, dtype=dtype)
    for row, text in zip(read_output("out.parquet"), PROMPTS, strict=True):
        assert row["score"] == pytest.approx(reference.answer(reference.ids(text)).score, abs=tolerance)


@pytest.mark.nightly
def test_a_processor_whose_instructions_are_hidden_computes_in_float32(half: Path, tmp_path: Path) -> None:
    write_parquet("in.parquet", prompt=PROMPTS)
    hidden = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    words = [sys.executable, "-m", "prefillcli", "score", "in.parquet", "-m", str(half), "--labels", LABELS]
    done = subprocess.run(
        [*words, "-o", "out.parquet"],
        env={**os.environ, **hidden, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "computed in float32: products take" in done.stderr
    said = read_report()["dtype"]
    assert said["name"] == "float32"
    assert "times as long in bfloat16" in said["why"]
    assert_eager(half, torch.float32, TOLERANCE)
    (kept,) = json.loads((tmp_path / "cache" / "prefillcli" / "devices.json").read_text())["entries"].values()
    assert kept["speeds"]["bfloat16/float32"] > dtypes.MARGIN
    told = "from prefillcli.walk.attention import compiled_kernel as kernel; print(kernel() and kernel().form)"
    found = subprocess.check_output([sys.executable, "-c", told], env={**os.environ, **hidden}, cwd=ROOT, text=True)
    assert found.strip() == ("None" if compiled_kernel() is None else "AVX2")  # the program's own kernels, too


def test_with_instructions_it_computes_as_the_model_is_saved(half: Path, ratio: Ratio) -> None:
    ratio(1.4)  # no clear margin
    assert job(half)["status"] == "complete"
    assert read_report()["dtype"] == {"name": "bfloat16", "why": "as the model is saved"}
    assert_eager(half, torch.bfloat16, 0.05)


def test_where_float32_does_not_fit_it_stays_as_saved(
    half: Path, ratio: Ratio, monkeypatch: pytest.MonkeyPatch
) -> None:
    ratio(6.0)
    bytes_ = sum(weight.numel() for weight in AutoModelForCausalLM.from_pretrained(half).parameters()) * 4
    monkeypatch.setattr(dtypes, "loadable_memory", lambda device: int(bytes_ / dtypes.FITS) - 100)
    assert job(half)["status"] == "complete"
    said = read_report()["dtype"]
    assert said["name"] == "bfloat16"
    assert "float32 is 6.0 times as fast" in said["why"]
    monkeypatch.setattr(dtypes, "loadable_memory", lambda device: int(bytes_ / dtypes.FITS) + 100)
    assert job(half, "other.parquet")["status"] == "complete"
    assert read_report("other.run.json")["dtype"]["name"] == "float32"
    # Each of two workers has weights of its own
    assert job(half, "two.parquet", workers=2, threads=1)["status"] == "complete"
    assert read_report("two.run.json")["dtype"]["name"] == "bfloat16"


def test_a_dtype_that_is_named_is_taken(half: Path, ratio: Ratio) -> None:
    ratio(6.0)
    assert job(half, dtype="bfloat16")["status"] == "complete"
    assert read_report()["dtype"] == {"name": "bfloat16", "why": "set by --dtype"}


@pytest.mark.parametrize(("began", "goes_on"), [(6.0, 0.5), (0.5, 6.0)])
def test_a_resumed_job_keeps_its_dtype(
    half: Path, ratio: Ratio, monkeypatch: pytest.MonkeyPatch, began: float, goes_on: float
) -> None:
    monkeypatch.setattr(jobs, "granularity", Granularity(batch_rows=4, window_rows=4))
    ratio(began)
    write = Sink.write

    def once(sink: Sink, window: Any, *args: Any, **kwargs: Any) -> None:
        if window.index:
            raise KeyboardInterrupt
        write(sink, window, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Sink, "write", once)
        assert job(half)["status"] != "complete"
    first = read_report()["dtype"]["name"]
    ratio(goes_on)
    assert job(half, resume=True)["status"] == "complete"
    assert read_report()["dtype"] == {"name": first, "why": "as the job began"}
    assert_eager(half, getattr(torch, first), TOLERANCE if first == "float32" else 0.05)
    assert job(half, resume=True)["status"] == "complete"  # nothing to do
    assert job(half, resume=True, dtype=first)["status"] == "complete"
    assert job(half, overwrite=True)["status"] == "complete"
    assert read_report()["dtype"]["name"] != first


def test_small_models_and_python_choose_alike(half: Path, half_draft: Path, ratio: Ratio) -> None:
    ratio(6.0)
    given = {"inputs": ["in.parquet"], "model": str(half), "draft": str(half_draft), "keep": 0.5}
    assert open_models(load_settings(ScoreSettings, given, environment={})).dtypes == ["float32", "float32"]
    table = prefillcli.score(PROMPTS, str(half), labels=LABELS)
    assert job(half)["status"] == "complete"
    assert table["score"].to_pylist() == pytest.approx([row["score"] for row in read_output("out.parquet")], abs=1e-6)
    ratio(1.0)
    assert open_models(load_settings(ScoreSettings, given, environment={})).dtypes == ["bfloat16", "bfloat16"]


def test_a_ratio_is_measured_once_for_a_device_and_its_instructions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    measured = []
    monkeypatch.setattr(dtypes, "_measured", lambda *given: measured.append(given) or 6.5)
    assert [dtypes.times_as_long("bfloat16", "float32", CPU) for _ in range(3)] == [6.5] * 3
    assert len(measured) == 1
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "SSE41")
    dtypes.times_as_long("bfloat16", "float32", CPU)
    assert len(measured) == 2


def test_the_doctor_advises_what_auto_takes(half: Path, ratio: Ratio) -> None:
    from prefillcli.tools import doctor

    for times, wanted in ((6.0, "float32"), (0.5, "bfloat16")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(doctor, "times_as_long", lambda *_, own=times: own)
            assert doctor._dtype_advice(CPU)["advice"] == wanted
        ratio(times)
        given = {"inputs": ["in.parquet"], "model": str(half)}
        assert open_models(load_settings(ScoreSettings, given, environment={})).dtypes == [wanted]


def test_smaller_numbers_that_are_slower_are_refused(half: Path, ratio: Ratio) -> None:
    ratio(6.0)
    error = job(half, compute="int8", max_flips=0.1)["error"]
    assert "--compute int8: products take 6.0 times as long in int8 as in float32 on this processor" in error


@pytest.mark.parametrize(
    ("compiler", "reason", "cure"),
    [
        (None, "there is no C++ compiler", "install g++"),
        ("", "CXX is empty, and then nothing is compiled", "unset it"),
        ("no-such-compiler", "CXX names no-such-compiler, which is not there", "install g++, and unset CXX"),
        ("sh bad.sh", "the C++ compiler failed: bad.cpp: no such header", "name another one in CXX"),
    ],
)
def test_smaller_numbers_that_are_slow_for_want_of_a_compiler_say_so(
    half: Path, ratio: Ratio, compiler: str | None, reason: str, cure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("bad.sh").write_text('[ "$1" = --version ] && exit 0\necho "bad.cpp: no such header" >&2; exit 1\n')
    monkeypatch.setattr(user_cache, "COMPILERS", ())
    monkeypatch.delenv("CXX", raising=False)
    if compiler is not None:
        monkeypatch.setenv("CXX", compiler.replace("bad.sh", str(Path("bad.sh").resolve())))
    monkeypatch.setattr(attention, "has_kernel_instructions", lambda: True)
    monkeypatch.setattr(attention, "compiled_library", attention.compiled_library.__wrapped__)
    ratio(6.0)
    error = job(half, compute="int8", max_flips=0.1)["error"]
    assert error == (
        "--compute int8: products take 6.0 times as long in int8 as in float32 on this processor without the compiled "
        f"kernel: {reason}\n{cure}, or leave --compute out"
    )
