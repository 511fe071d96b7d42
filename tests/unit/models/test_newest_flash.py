"""The newest flash attention that torch can take in the place of its own, with stand-ins that torch registers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import attention as torch_attention

from prefillcli.models import newest_flash
from prefillcli.models.newest_flash import current_flash, settle_attention, settle_flash
from prefillcli.report.run import versions
from prefillcli.walk import attention, attention_checks, cuda_kernels
from tests.unit.walk.test_attention_paths import in_base_2
from tests.unit.walk.varlen_reference import flash_by_definition

pytestmark = pytest.mark.skipif(
    not hasattr(torch_attention, "register_flash_attention_impl"), reason="this torch takes no other flash attention"
)
CPU = torch.device("cpu")
Operator = Callable[..., Any]


class Packages:
    """Implementations that torch knows, with how often each was checked in a case."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls: dict[str, int] = {}
        self._patch = patch

    def add(self, name: str, operator: Operator | None) -> None:
        """Register one whose kernels compute `operator`; None: its package is missing."""

        def called(*given: Any) -> Any:
            self.calls[name] = self.calls.get(name, 0) + 1
            return operator(*given)

        def register() -> SimpleNamespace:
            if operator is None:
                raise ModuleNotFoundError(f"No module named '{name.lower()}'")
            own = cuda_kernels.flash_sequences
            self._patch.setattr(cuda_kernels, "flash_sequences", called)
            return SimpleNamespace(remove=lambda: self._patch.setattr(cuda_kernels, "flash_sequences", own))

        torch_attention.register_flash_attention_impl(name, register_fn=register)


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Packages]:
    """On the CPU, as if it had flash attention for many sequences."""
    from torch.nn.attention import _registry

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(_registry, "_FLASH_ATTENTION_IMPLS", {})
    way = replace(attention_checks._WAYS["varlen-flash"], lacks=lambda device, dtype: None)
    monkeypatch.setitem(attention_checks._WAYS, "varlen-flash", way)
    monkeypatch.setattr(cuda_kernels, "flash_sequences", flash_by_definition)
    new_process(monkeypatch)
    attention.allow_all()
    yield Packages(monkeypatch)
    if current_flash() is not None:
        torch_attention.restore_flash_attention_impl()
    attention.allow_all()


def new_process(patch: pytest.MonkeyPatch) -> None:
    if current_flash() is not None:
        torch_attention.restore_flash_attention_impl()
    for name, empty in {"_needed": {}, "_not_taken": {}, "_taken": []}.items():
        patch.setattr(newest_flash, name, empty)


def refuses(query: torch.Tensor, *others: Any) -> Any:
    if query.shape[-1] > 128:
        raise AssertionError("heads of 256 are not supported")
    return flash_by_definition(query, *others)


def test_the_newest_that_agrees_is_taken(packages: Packages) -> None:
    packages.add("FA3", flash_by_definition)
    packages.add("FA4", flash_by_definition)
    assert settle_flash(CPU, torch.bfloat16, [64]) == {"FA4": None}
    assert current_flash() == versions()["flash attention"] == "FA4"
    assert packages.calls.keys() == {"FA4"}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("newest", "why"),
    [
        (in_base_2(flash_by_definition), "outputs differ by"),
        (refuses, "AssertionError: heads of 256 are not supported"),
        (None, "No module named 'fa4'"),
    ],
    ids=["base 2", "raises", "missing"],
)
def test_one_that_differs_raises_or_is_missing_is_not_taken(
    newest: Operator | None, why: str, packages: Packages, capsys: pytest.CaptureFixture[str]
) -> None:
    packages.add("FA4", newest)
    found = settle_flash(CPU, torch.bfloat16, [256])
    assert why in str(found["FA4"])
    assert current_flash() is None
    assert cuda_kernels.flash_sequences is flash_by_definition, "torch's own is back"
    assert settle_flash(CPU, torch.bfloat16, [256]) == found
    assert capsys.readouterr().err.count("goes without FA4") == (newest is not None), "told once"
    packages.add("FA3", flash_by_definition)
    assert settle_flash(CPU, torch.bfloat16, [256]) == found | {"FA3": None}


def test_it_is_for_all_models_of_a_process(packages: Packages) -> None:
    packages.add("FA4", refuses)
    sizes = {"hidden_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
    settle_attention(CPU, torch.float16, SimpleNamespace(**sizes))
    assert current_flash() == "FA4"
    wide = SimpleNamespace(**sizes, head_dim=256)
    layers = [SimpleNamespace(**sizes), SimpleNamespace(head_dim=512)]
    wider = SimpleNamespace(is_heterogeneous=True, per_layer_config=layers)
    settle_attention(CPU, torch.float16, wider)
    assert current_flash() == "FA4", "heads of 512 never take flash attention"
    settle_attention(CPU, torch.float16, wide)
    assert current_flash() is None
    settle_attention(CPU, torch.float16, SimpleNamespace(**sizes))
    assert current_flash() is None, "the model with wide heads is still there"


def test_outcomes_are_remembered(packages: Packages, monkeypatch: pytest.MonkeyPatch) -> None:
    packages.add("FA3", flash_by_definition)
    packages.add("FA4", refuses)
    found = settle_flash(CPU, torch.bfloat16, [256])
    checked = dict(packages.calls)
    new_process(monkeypatch)
    assert settle_flash(CPU, torch.bfloat16, [256]) == found
    assert current_flash() == "FA3"
    assert packages.calls == checked
    new_process(monkeypatch)
    assert settle_flash(CPU, torch.bfloat16, [256], anew=True) == found
    assert packages.calls == {name: 2 * count for name, count in checked.items()}


def test_what_somebody_else_has_chosen_stays(packages: Packages) -> None:
    packages.add("FA3", flash_by_definition)
    packages.add("FA4", flash_by_definition)
    torch_attention.activate_flash_attention_impl("FA3")
    assert settle_flash(CPU, torch.bfloat16, [64]) == {}
    assert current_flash() == "FA3"
    torch_attention.restore_flash_attention_impl()
    assert settle_flash(CPU, torch.bfloat16, [64]) == {"FA4": None}


def test_a_device_without_flash_attention_has_no_other() -> None:
    assert settle_flash(CPU, torch.bfloat16, [64]) == {}
