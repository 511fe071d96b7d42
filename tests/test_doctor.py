"""`prefill doctor` says what a machine has and finds what it computes wrongly; runs go around that."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from prefillcli.errors import UsageError
from prefillcli.models import law
from prefillcli.models.find import read_model_files
from prefillcli.models.open import Opened
from prefillcli.options.commands import DoctorSettings
from prefillcli.options.groups import LayerOptions
from prefillcli.options.load import load_settings
from prefillcli.runtime import memory
from prefillcli.runtime.device_key import KINDS, choose_device, other_devices
from prefillcli.runtime.memory import available_memory, device_capacity, loadable_memory
from prefillcli.scoring.loading import plan_weights
from prefillcli.tools import doctor
from prefillcli.tools.doctor import DTYPES, Diagnosis, doctor_job
from prefillcli.walk import attention, fusion
from prefillcli.walk.attention import PATHS
from prefillcli.walk.attention_checks import CHECKED
from tests.jobs.jobs import Reference, assert_scored, read_output, read_report, score, texts, write_parquet
from tests.jobs.models import save_model
from tests.unit.walk.test_attention_paths import break_flash, in_base_2

ROOT = Path(__file__).parent.parent
KERNEL = ["kernel"] if attention.compiled_kernel() else []
needs_kernel = pytest.mark.skipif(not KERNEL, reason="needs AVX2, GNU's OpenMP and a C++ compiler")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder and a cache of its own, and nothing stays ruled out."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    attention.allow_all()
    yield tmp_path / "cache" / "prefillcli"
    attention.allow_all()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("doctor") / "model")


def examine(**flags: Any) -> dict[str, Any]:
    return doctor_job(load_settings(DoctorSettings, flags, environment={}))


def test_a_healthy_machine_is_described(capsys: pytest.CaptureFixture[str], cache: Path) -> None:
    (kept := cache / "gguf" / "kept").mkdir(parents=True)
    (kept / "model.safetensors").write_bytes(bytes(2996))
    (kept / "prefillcli.digest").write_text("none")
    found = examine()
    assert (found["status"], found["exit_code"], found["error"]) == ("complete", 0, None)
    assert found["device"]["name"] == "cpu"
    assert found["device"]["memory_bytes"] > found["device"]["free_bytes"] > 0
    assert found["attention"]["float32"] == [*KERNEL, "flash-cpu", "blocks"]
    assert found["attention"]["bfloat16"][-2:] == ["flash-cpu", "blocks"]
    form = found["cpu"]["kernel"]
    assert bool(form) == bool(KERNEL)
    assert not form or {"AMX": "AMX-BF16"}.get(form, form) in found["cpu"]["instructions"]
    assert found["versions"]["torch"] == torch.__version__
    assert {(each["path"], each["dtype"]) for each in found["checks"]} == {(p, d) for p in CHECKED for d in DTYPES}
    assert {each["status"] for each in found["checks"]} <= {"agrees", "not here"}
    assert found["cache"] == {
        "folder": str(cache),
        "remembered": True,
        "gguf_folder": str(cache / "gguf"),
        "gguf_bytes": 3000,
    }
    assert found["model"] is None
    told = capsys.readouterr()
    assert told.out == ""
    for name in ("processor", "--device", "--dtype", "in bfloat16", "--threads", "--memory", "attention path"):
        assert f"\n{name}" in f"\n{told.err}", name
    assert "\x1b" not in told.err


def test_quietly_it_says_what_is_wrong_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    examine(quiet=True)
    assert capsys.readouterr().err == ""
    break_flash(monkeypatch, in_base_2)
    examine(quiet=True)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert all(line.startswith("prefill: flash-cpu is wrong in ") for line in lines)


@pytest.mark.nightly
def test_the_command_prints_one_line_of_json_and_tables_on_stderr() -> None:
    done = subprocess.run([sys.executable, "-m", "prefillcli", "doctor"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert json.loads(line)["exit_code"] == 0
    assert "attention path" in done.stderr


def test_flash_attention_that_tells_its_log_sum_exp_in_base_2_is_found_and_gone_around(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As ROCm's did: outputs of one node are right, and where nodes are merged they are not."""
    break_flash(monkeypatch, in_base_2)
    found = examine()
    assert (found["status"], found["exit_code"]) == ("failed", 1)
    assert "flash-cpu is wrong in float32" in found["error"]
    assert "flash-cpu" not in found["attention"]["float32"]
    assert found["attention"]["float32"] == [*KERNEL, "blocks"]
    told = capsys.readouterr().err
    assert "WRONG" in told
    assert "runs on this machine go without it" in told
    attention.allow_all()  # as in a new process, which finds it in the cache
    prompts, reference = texts(9), Reference(model)
    summary = score(write_parquet("in.parquet", prompt=prompts), model=model)
    assert summary["exit_code"] == 0
    assert "goes without flash-cpu" in capsys.readouterr().err
    assert read_report()["weights"]["avoided_paths"] == ["flash-cpu"]
    assert_scored(read_output("out.parquet"), [reference.answer(text) for text in prompts])


def test_without_the_doctor_a_run_finds_it_too(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    break_flash(monkeypatch, in_base_2)
    prompts, reference = texts(9), Reference(model)
    score(write_parquet("in.parquet", prompt=prompts), model=model)
    assert_scored(read_output("out.parquet"), [reference.answer(text) for text in prompts])


@pytest.mark.skipif(fusion.compiled_passes() is None, reason="needs a C++ compiler and GNU's OpenMP")
@pytest.mark.parametrize("raises", [False, True])
def test_a_compiled_pass_with_wrong_numbers_is_found_and_gone_around(
    raises: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert examine()["passes"] == {"bfloat16": "agrees", "float32": "agrees"}
    assert "compiled passes" in capsys.readouterr().err
    own = fusion.CompiledPasses.gate

    def wrong(self: fusion.CompiledPasses, number: int, *rows: torch.Tensor) -> torch.Tensor:
        if raises:
            raise RuntimeError("it is not compiled")
        return own(self, 0, *rows)

    monkeypatch.setattr(fusion.CompiledPasses, "gate", wrong)
    found, told = examine(), capsys.readouterr().err
    assert set(found["passes"].values()) == {"fails" if raises else "differs"}
    if raises:
        assert "without compiled passes: they do not run" in " ".join(told.split())
    else:
        assert (found["exit_code"], found["error"]) == (1, "compiled passes are wrong in bfloat16")
        assert "go without them" in told
    assert fusion.compiled_passes.__wrapped__() is None


def test_the_flash_attention_that_is_taken_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert examine(quiet=True)["flash"] == {}, "not for CPUs"
    found = {"FA4": "No module named 'flash_attn'", "FA3": None}
    monkeypatch.setattr(doctor, "settle_flash", lambda *_, **__: found)
    assert examine()["flash"] == found
    assert "FA3 (torch.nn.attention); FA4: No module named 'flash_attn'" in " ".join(capsys.readouterr().err.split())


@needs_kernel
def test_a_compiled_kernel_with_wrong_numbers_is_found_and_gone_around(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = attention.ForestKernel.attend

    def wrong(self: attention.ForestKernel, *tensors: Any, **how: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = own(self, *tensors, **how)
        return out.mul_(1.5), lse

    monkeypatch.setattr(attention.ForestKernel, "attend", wrong)
    found = examine(quiet=True)
    assert found["exit_code"] == 1
    assert "kernel is wrong in float32" in found["error"]
    assert all("kernel" not in paths for paths in found["attention"].values())
    attention.allow_all()
    capsys.readouterr()
    prompts, reference = texts(9), Reference(model)
    score(write_parquet("in.parquet", prompt=prompts), model=model, dtype="bfloat16")
    assert "goes without kernel" in capsys.readouterr().err
    for row, text in zip(read_output("out.parquet"), prompts, strict=True):
        assert row["score"] == pytest.approx(reference.answer(text).score, abs=0.02)  # of bfloat16 weights
    monkeypatch.setattr(attention.ForestKernel, "attend", own)
    assert examine(quiet=True)["exit_code"] == 0, "the doctor looks again, whatever is remembered"
    attention.allow_all()
    score("in.parquet", "again.parquet", model=model, dtype="bfloat16")
    assert "goes without" not in capsys.readouterr().err


def test_a_cache_that_cannot_be_written_is_told(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache.parent.write_text("a file where the folder should be")
    found = examine()
    assert found["exit_code"] == 0
    assert not found["cache"]["remembered"]
    assert "every run checks anew" in " ".join(capsys.readouterr().err.split())


def test_what_a_run_would_do_with_a_model(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = examine(model=str(model), memory="1GiB")["model"]
    assert found["family"] == "llama"
    assert (found["dtype"], found["weights"]) == ("float32", "all in memory")
    assert found["longest_prompt"] == 2048
    assert found["limited_by"] == "what the model reads"
    assert "layer by layer" in found["walk"]
    assert f"{found['token_bytes']:,} bytes" in capsys.readouterr().err
    config = json.loads((model / "config.json").read_text())
    width = config["hidden_size"] // config["num_attention_heads"]
    kv = 2 * config["num_key_value_heads"] * width
    assert found["token_bytes"] >= 4 * (config["hidden_size"] + kv), "a row of the residual stream and one layer's K,V"


def test_the_shortest_memory_limits_the_longest_prompt(tmp_path: Path) -> None:
    long = save_model(tmp_path / "long")
    config = json.loads((long / "config.json").read_text()) | {"max_position_embeddings": 1 << 24}
    (long / "config.json").write_text(json.dumps(config))
    small, large = (examine(model=str(long), memory=size)["model"] for size in ("200MiB", "800MiB"))
    assert small["limited_by"] == large["limited_by"] == "what fits the memory"
    assert small["longest_prompt"] < large["longest_prompt"]
    assert large["longest_prompt"] * large["token_bytes"] < 800 << 20


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        ({"model": "nowhere/at/all"}, 2, "no such directory"),
        ({"device": "cuda:7"}, 5, "CUDA devices found"),
        ({"device": "mps"}, 5, "no Apple GPU found"),
    ],
)
def test_what_is_not_there_is_an_error(flags: dict[str, str], code: int, message: str) -> None:
    found = examine(**flags)
    assert (found["status"], found["exit_code"]) == ("failed", code)
    assert message in found["error"]


def test_a_device_that_does_not_exist_is_refused_before_anything_is_examined() -> None:
    with pytest.raises(UsageError, match="--device 'abacus': no such device; use auto, cpu, cuda, cuda:N or mps"):
        examine(device="abacus")


def test_a_torch_without_cuda_beside_a_driver_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.version.cuda is not None:
        pytest.skip("this torch has CUDA")
    monkeypatch.setattr("prefillcli.runtime.device_key.driver_version", lambda: "570.86.15")
    assert any("built for CPUs" in note for note in examine(quiet=True)["notes"])


@pytest.mark.parametrize("kept", [True, False])
def test_packages_that_python_compiles_at_every_start_are_noted(
    kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bytecode = tmp_path / "torch.pyc"
    if kept:
        bytecode.touch()
    monkeypatch.setattr(torch.__spec__, "cached", str(bytecode))
    notes = [note for note in doctor._notes(torch.device("cpu")) if "at every start" in note]
    site = str(Path(torch.__file__).parents[1])
    assert len(notes) == (not kept)
    assert all(f"python -m compileall -q {site} once" in note for note in notes)


@pytest.mark.parametrize(("capability", "noted"), [((8, 0), True), ((9, 0), False), ((12, 0), True)])
def test_devices_that_wait_for_each_expert_are_noted(
    capability: tuple[int, int], noted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "compute_capability", lambda device: capability)
    notes = doctor._notes(torch.device("cuda"))
    assert any("models with experts" in note for note in notes) is noted


def test_every_kind_of_device_has_sizes() -> None:
    for sizes in (law.PACK_TOKENS, law.CHUNK_TOKENS, law.HELD_COPIES):
        assert set(sizes) == set(KINDS)


def test_the_memory_of_an_apple_gpu_is_what_its_system_recommends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 12 << 30)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 2 << 30)
    device = torch.device("mps")
    assert available_memory(device) == loadable_memory(device) == 10 << 30
    assert device_capacity(device) == 12 << 30


def test_no_weights_are_streamed_to_an_apple_gpu(model: Path) -> None:
    files = read_model_files(model)
    opened = Opened(files, torch.device("mps"), None, (), 2048)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "loadable_memory", lambda device: 1 << 30)
        assert plan_weights(LayerOptions(weights="auto"), opened).mode == "resident"
        with pytest.raises(UsageError, match="not to mps"):
            plan_weights(LayerOptions(weights="stream"), opened)


def test_auto_never_takes_an_apple_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == torch.device("cpu")
    assert choose_device("mps") == torch.device("mps")
    assert "mps" in other_devices(torch.device("cpu"))


def test_threads_and_their_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    try:
        found = examine(quiet=True, threads="1")
        assert (found["threads"], found["why_threads"]) == (1, "as asked for")
    finally:
        torch.set_num_threads(before)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert examine(quiet=True)["why_threads"] == "OMP_NUM_THREADS=1 in the environment"


def shown_by_doctor(page: Path) -> list[str]:
    """The lines of the page's block that shows the command."""
    (block,) = re.findall(r"```console\n\$ prefill doctor\n(.*?)```", page.read_text(), re.DOTALL)
    return block.splitlines()


def first_words(lines: list[str]) -> list[str]:
    """What each line of a table begins with, as far as its first column."""
    return [re.split(r"  +", line)[0] for line in lines if line and not line.startswith(" ")]


def test_the_page_shows_the_table_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    page = shown_by_doctor(ROOT / "docs" / "doctor.md")
    examine()
    now = capsys.readouterr().err.splitlines()
    of_machines = {"note", *PATHS}  # some have these lines, others not
    shown, printed = ([word for word in first_words(each) if word not in of_machines] for each in (page, now))
    assert shown == printed
    numbers = [line for line in page if line.startswith(("blocks", "eager"))]
    for line in numbers:
        assert len(re.findall(r"\de-\d\d, \de-\d\d", line)) == len(DTYPES), line


def test_the_page_of_the_command_has_every_key_path_and_status() -> None:
    text = (ROOT / "docs" / "doctor.md").read_text()
    for each in fields(Diagnosis):
        assert f"`{each.name}`" in text, each.name
    for path, meaning in PATHS.items():
        assert f"| `{path}` | {meaning} |" in text, path
    for status in ("agrees", "differs", "fails", "not here"):
        assert f"`{status}`" in text


def test_errors_are_numbers_that_json_can_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    def infinite(own: Any) -> Any:
        def changed(*tensors: Any, **how: Any) -> Any:
            out, lse = own(*tensors, **how)
            return out * math.nan, lse

        return changed

    break_flash(monkeypatch, infinite)
    found = examine(quiet=True)
    assert found["exit_code"] == 1
    json.dumps(found, allow_nan=False)
