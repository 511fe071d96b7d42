"""On a device that the tests do not know, every model is compared with its own forward before it is walked."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from prefillcli.models import rehearsal
from prefillcli.models.find import read_model_files
from prefillcli.models.load import load_model
from prefillcli.models.rehearsal import Rehearsal, in_float32, rehearse
from prefillcli.models.streamed_layers import load_streamed
from prefillcli.runtime import device_key as devices
from prefillcli.walk import attention, forest
from prefillcli.walk.attention import may_take
from prefillcli.walk.forest import UnsupportedModelError, register
from tests.unit.walk.families import each_family, make_model
from tests.unit.walk.test_attention_paths import break_flash
from tests.unit.walk.test_walk import assert_equal, eager, mixed, walked

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    attention.allow_all()
    yield
    attention.allow_all()


@pytest.fixture
def unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine's CPU goes for an accelerator that no test ever saw."""
    key = devices.device_key
    monkeypatch.setattr(devices, "device_key", lambda device: replace(key(device), kind="abacus"))


@pytest.fixture
def rehearsed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The families that were rehearsed since."""
    families: list[str] = []
    own = rehearsal.rehearse

    def noted(model: Any, config: Any, *others: Any, **how: Any) -> Any:
        families.append(config.model_type)
        return own(model, config, *others, **how)

    monkeypatch.setattr(rehearsal, "rehearse", noted)
    return families


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    make_model("llama").save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def in_base_2_for_queries_of(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flash attention that is wrong for so many queries at a time: the checks of paths have no such case."""

    def change(own: Any) -> Any:
        def changed(query: Tensor, *others: Any, **how: Any) -> tuple[Tensor, Tensor]:
            out, lse = own(query, *others, **how)
            return out, lse * math.log2(math.e) if query.shape[2] == count else lse

        return changed

    break_flash(monkeypatch, change)


def test_a_known_device_rehearses_no_verified_family(saved: Path, rehearsed: list[str]) -> None:
    load_model(read_model_files(saved), CPU)
    assert rehearsed == []


@pytest.mark.usefixtures("unknown")
def test_an_unknown_device_rehearses_a_family_once(saved: Path, rehearsed: list[str]) -> None:
    files = read_model_files(saved)
    model = load_model(files, CPU)
    assert rehearsed == ["llama"]
    assert_equal(walked(model, mixed(), chunk=97), eager(model, mixed()))
    load_model(files, CPU)
    assert rehearsed == ["llama"], "that is remembered"
    load_model(replace(files, dtype=torch.bfloat16), CPU)
    assert rehearsed == ["llama", "llama"], "but not of another dtype"


@pytest.mark.usefixtures("unknown")
@pytest.mark.parametrize("found", [Rehearsal(own_cache=True), Rehearsal(own_cache=False, gaps=False)])
def test_a_family_that_is_not_walked_as_elsewhere_is_rehearsed_each_time(
    found: Rehearsal, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    families: list[str] = []

    def rehearsed(model: Any, config: Any, *others: Any, **how: Any) -> Rehearsal:
        families.append(config.model_type)
        return found

    monkeypatch.setattr(rehearsal, "rehearse", rehearsed)
    load_model(read_model_files(saved), CPU)
    first = len(families)
    attention.allow_all()
    load_model(read_model_files(saved), CPU)
    assert len(families) == 2 * first > 0


@pytest.mark.usefixtures("unknown")
def test_weights_that_are_streamed_are_rehearsed_there_too(saved: Path, rehearsed: list[str]) -> None:
    model, layers = load_streamed(read_model_files(saved), CPU, memory=1 << 28)
    layers.close()
    assert rehearsed == ["llama"]
    assert model.config.model_type == "llama"


@pytest.mark.usefixtures("unknown")
def test_where_a_family_does_not_agree_attention_goes_by_blocks(
    saved: Path, rehearsed: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    in_base_2_for_queries_of(3, monkeypatch)
    files = read_model_files(saved)
    model = load_model(files, CPU)
    told = capsys.readouterr().err
    assert "on cpu a llama model agrees with its own forward only where attention uses explicit scores" in told
    assert not may_take("flash-cpu", CPU)
    assert_equal(walked(model, mixed(), chunk=3), eager(model, mixed()))
    attention.allow_all()  # as in a new process
    rehearsed.clear()
    model = load_model(files, CPU)
    assert rehearsed == []
    assert not may_take("flash-cpu", CPU)
    assert "explicit scores" in capsys.readouterr().err
    assert_equal(walked(model, mixed(), chunk=3), eager(model, mixed()))


@pytest.mark.usefixtures("unknown")
def test_what_agrees_in_no_way_is_refused(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forest, "merge_into", lambda *parts: None)
    monkeypatch.setattr(rehearsal, "set_own_attention", lambda model: model.set_attn_implementation("sdpa"))
    monkeypatch.setattr(attention, "attend_blockwise", lambda query, *others, **how: (query, query[..., 0].float()))
    monkeypatch.setattr("prefillcli.walk.own_cache.fork_past", lambda past: None)
    with pytest.raises(UnsupportedModelError, match="llama cannot be walked"):
        load_model(read_model_files(saved), CPU)
    assert rehearsal.DeviceRecord(CPU).families == {}, "and is not remembered as good"


@pytest.mark.sampled(4)
@each_family
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_held_against_the_own_forward_in_float32(
    family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A walk has about the errors of the model's own forward. One whose parts are merged in base 2 has many times
    that, also where that stays below a fixed bound."""
    register()
    attention.only_blocks(CPU, "for the test")  # what the compiled kernel computes is not merged outside of it
    model = make_model(family, dtype)
    assert not rehearse(model, model.config, strictly=True).own_cache
    own = forest.merge_into
    monkeypatch.setattr(
        forest, "merge_into", lambda out, lse, part, part_lse: own(out, lse, part, part_lse * math.log2(math.e))
    )
    found = rehearse(model, model.config, strictly=True)
    assert found.own_cache
    assert "off by" in str(found.reason) or "differ by" in str(found.reason)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "lfm2"])
def test_a_forward_in_float32_is_that_of_a_model_in_float32(family: str) -> None:
    half, prompts = make_model(family, torch.bfloat16), mixed()[:4]
    weights = {name: tensor.clone() for name, tensor in half.state_dict().items()}
    places = [tensor.data_ptr() for tensor in half.parameters()]
    with in_float32(half):
        found = eager(half, prompts)
    assert [tensor.data_ptr() for tensor in half.parameters()] == places
    for name, tensor in half.state_dict().items():
        assert tensor.dtype == weights[name].dtype
        assert torch.equal(tensor, weights[name])
    assert_equal(found, eager(half.float(), prompts))


def test_weights_are_restored_after_a_forward_that_fails() -> None:
    model = make_model("llama", torch.bfloat16)
    with pytest.raises(IndexError), in_float32(model):
        model(input_ids=torch.tensor([[10**6]]))
    assert {tensor.dtype for tensor in model.parameters()} == {torch.bfloat16}
