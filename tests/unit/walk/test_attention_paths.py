"""Each path of attention is checked against explicit scores, and one that differs on a device is not taken there."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from prefillcli.errors import ResourceError
from prefillcli.models import rehearsal
from prefillcli.runtime import device_key as devices
from prefillcli.walk import attention, attention_checks
from prefillcli.walk.attention import PATHS, may_take, rule_out, ruled_out
from prefillcli.walk.attention_checks import CHECKED, check_path, check_paths
from tests.unit.walk.test_walk import assert_equal, eager, make_model, mixed, register, walked

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
#: What is remembered of a machine on which every path agrees in float32.
AGREED = {
    f"{path}/float32": None for path in ("blocks", "flash-cpu", *(["kernel"] if attention.compiled_kernel() else []))
}
Operator = Callable[..., tuple[Tensor, Tensor]]
FLASH = "_scaled_dot_product_flash_attention_for_cpu"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Nothing is known of this machine, and nothing stays ruled out."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    attention.allow_all()
    yield tmp_path / "cache" / "prefillcli" / rehearsal.FILE
    attention.allow_all()


def break_flash(patch: pytest.MonkeyPatch, change: Callable[[Operator], Operator]) -> None:
    """Put another operator in the place of PyTorch's flash attention for CPUs."""
    patch.setattr(torch.ops.aten, FLASH, change(getattr(torch.ops.aten, FLASH)))


def in_base_2(own: Operator) -> Operator:
    def changed(*tensors: Any, **how: Any) -> tuple[Tensor, Tensor]:
        out, lse = own(*tensors, **how)
        return out, lse * math.log2(math.e)

    return changed


def without_mask(own: Operator) -> Operator:
    return lambda *tensors, attn_mask=None, **how: own(*tensors, attn_mask=None, **how)


def not_causal(own: Operator) -> Operator:
    return lambda q, k, v, dropout, causal, **how: own(q, k, v, dropout, False, **how)


def unscaled(own: Operator) -> Operator:
    return lambda *tensors, scale, **how: own(*tensors, scale=1.01 * scale, **how)


def not_a_number(own: Operator) -> Operator:
    def changed(*tensors: Any, **how: Any) -> tuple[Tensor, Tensor]:
        out, lse = own(*tensors, **how)
        return torch.where(lse[..., None] > 100, math.nan, out), lse

    return changed


def refused(own: Operator) -> Operator:
    def changed(*tensors: Any, **how: Any) -> tuple[Tensor, Tensor]:
        raise RuntimeError("no kernel image is available for execution on the device")

    return changed


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("path", CHECKED)
def test_every_path_of_this_machine_agrees_with_explicit_scores(path: str, dtype: torch.dtype) -> None:
    check = check_path(path, CPU, dtype)
    assert check.status in ("agrees", "not here"), check
    assert (check.error is None) is (check.status == "not here") is (check.why is not None)
    if path in ("blocks", "flash-cpu"):
        assert check.status == "agrees"


@pytest.mark.parametrize(
    ("change", "dtypes"),
    [(in_base_2, DTYPES), (without_mask, DTYPES), (not_causal, DTYPES), (not_a_number, DTYPES), (refused, DTYPES),
     (unscaled, DTYPES[:1])],
)  # fmt: skip
def test_what_is_wrong_with_a_kernel_is_found(
    change: Callable[[Operator], Operator], dtypes: list[torch.dtype], monkeypatch: pytest.MonkeyPatch
) -> None:
    break_flash(monkeypatch, change)
    for dtype in dtypes:
        check = check_path("flash-cpu", CPU, dtype)
        assert check.status == ("fails" if change is refused else "differs")
        if change is refused:
            assert "no kernel image" in str(check.why)


def test_products_that_differ_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    if check_path("products", CPU, torch.bfloat16).status == "not here":
        pytest.skip("needs bfloat16 products")
    own = attention_checks.attend_by_products
    monkeypatch.setattr(attention_checks, "attend_by_products", in_base_2(own))
    assert check_path("products", CPU, torch.bfloat16).status == "differs"


def test_a_path_for_another_device_is_not_here() -> None:
    check = check_path("flash-cuda", CPU, torch.bfloat16)
    assert (check.status, check.why, check.error) == ("not here", "for half precision on CUDA devices", None)
    with pytest.raises(KeyError):
        check_path("magic", CPU, torch.float32)


def test_checks_leave_no_tensors_behind() -> None:
    check_paths(CHECKED, CPU, torch.float32)
    assert attention_checks.make_trial.cache_info().currsize == 0


def test_a_path_is_ruled_out_on_its_device_alone() -> None:
    assert set(CHECKED) == set(PATHS), "each path is checked"
    rule_out("flash-cuda", torch.device("cuda"), "why")
    assert not may_take("flash-cuda", torch.device("cuda:0"))
    assert may_take("flash-cuda", torch.device("cuda:1"))
    assert may_take("flash-cpu", CPU)
    assert ruled_out(torch.device("cuda:0")) == {"flash-cuda": "why"}
    with pytest.raises(KeyError):
        rule_out("magic", CPU, "why")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_ruled_out_is_not_called(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither of a walk's ways on this machine: blocks compute it, and as the eager forward does."""
    register()
    model = make_model("llama", dtype)
    wanted = eager(model, mixed())
    for path in CHECKED:
        if path != "blocks":
            rule_out(path, CPU, "for the test")
    break_flash(monkeypatch, refused)
    monkeypatch.setattr(attention, "attend_by_products", refused(attention.attend_by_products))
    monkeypatch.setattr(attention.ForestKernel, "attend", refused(attention.ForestKernel.attend))
    found = walked(model, mixed(), chunk=97)
    if dtype == torch.float32:
        assert_equal(found, wanted)
    else:
        assert float((found - wanted).abs().max()) < 0.15 * float(wanted.abs().max())


def settle(dtype: torch.dtype = torch.float32) -> dict[str, str | None]:
    """What is known of the CPU when a model is about to be loaded."""
    rehearsal.settle_paths(CPU, dtype)
    return rehearsal.DeviceRecord(CPU).paths


def test_a_machine_is_checked_once(monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> None:
    assert settle() == AGREED
    assert own_cache.stat().st_mode & 0o077 == 0
    monkeypatch.setattr(attention_checks, "difference_of", lambda *_: pytest.fail("checked again"))
    assert settle() == AGREED


def test_a_path_that_differs_is_avoided_by_later_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        break_flash(patch, in_base_2)
        settle()
    assert not may_take("flash-cpu", CPU)
    told = capsys.readouterr().err
    assert told.startswith(
        "prefill: warning: attention on cpu goes without flash-cpu, which is wrong there in float32"
    )
    assert told.count("\n") == 1
    settle()
    assert capsys.readouterr().err == "", "told once by a process"
    attention.allow_all()  # as in a new process
    settle()
    assert not may_take("flash-cpu", CPU)
    assert "flash-cpu" in capsys.readouterr().err


@pytest.mark.parametrize("change", [{"driver": "560.35.05"}, {"torch": "9.9"}, {"prefill": "9"}])
def test_a_machine_that_changed_is_checked_anew(change: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        break_flash(patch, in_base_2)
        assert settle()["flash-cpu/float32"]
    attention.allow_all()
    key = devices.device_key
    monkeypatch.setattr(devices, "device_key", lambda device: replace(key(device), **change))
    assert settle() == AGREED
    assert may_take("flash-cpu", CPU)


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"entries": {"x": 1}, "check": "0"}', b"\xff" * 99])
def test_a_damaged_cache_counts_as_empty(content: bytes, own_cache: Path) -> None:
    own_cache.parent.mkdir(parents=True)
    own_cache.write_bytes(content)
    assert settle() == AGREED
    assert json.loads(own_cache.read_text())["entries"]


def test_a_cache_that_says_another_thing_than_was_written_is_not_believed(own_cache: Path) -> None:
    settle()
    own_cache.write_text(own_cache.read_text().replace('"blocks/float32": null', '"blocks/float32": "bad"'))
    assert settle()["blocks/float32"] is None


def test_without_a_cache_each_run_checks(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_cache.parent.parent.write_text("a file where the folder should be")
    assert settle() == {}
    break_flash(monkeypatch, in_base_2)
    settle()
    assert not may_take("flash-cpu", CPU)


def test_two_that_write_at_once_keep_what_both_found() -> None:
    one, other = rehearsal.DeviceRecord(CPU), rehearsal.DeviceRecord(CPU)
    one.note([attention_checks.PathCheck("blocks", "float16", "agrees")])
    other.note([attention_checks.PathCheck("flash-cpu", "float16", "differs", "why")])
    assert one.save()
    assert other.save()
    assert rehearsal.DeviceRecord(CPU).paths == {"blocks/float16": None, "flash-cpu/float16": "why"}


def test_a_device_whose_explicit_scores_are_wrong_computes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_checks, "attend_blockwise", in_base_2(attention_checks.attend_blockwise))
    with pytest.raises(ResourceError, match=r"cpu computes attention wrongly in float32: .*\n.*--device"):
        settle()
