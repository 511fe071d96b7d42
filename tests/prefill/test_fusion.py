"""Fused parts of a layer compute what its modules do, and leave them as they were."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from prefillcli.models.law import memory_law
from prefillcli.plan.pack import Limits
from prefillcli.prefill import fusion
from tests.prefill.families import make_config
from tests.prefill.test_walk import assert_equal, mixed, model_of, walked, wanted

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(not fusion._operators_work(), reason="this torch has no oneDNN")


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of any size are worth it."""
    monkeypatch.setattr(fusion, "LEAST_TOKENS", 1)
    monkeypatch.setattr(fusion, "COPY_SHARE", 10**9)


class OwnMlp(nn.Module):
    """Like the MLP of many families; `swapped` computes something else with the same parts."""

    def __init__(self, act: str = "silu", *, bias: bool = False, swapped: bool = False) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(64, 96, bias=bias) for _ in range(2))
        self.down_proj = nn.Linear(96, 64, bias=bias)
        self.act_fn = ACT2FN[act]
        self.swapped = swapped

    def forward(self, rows: Tensor) -> Tensor:
        gate, up = self.gate_proj(rows), self.up_proj(rows)
        return self.down_proj(gate * self.act_fn(up) if self.swapped else self.act_fn(gate) * up)


class OtherMlp(OwnMlp):
    """The same parts under another class, which computes something else."""

    def forward(self, rows: Tensor) -> Tensor:
        return super().forward(rows) + 1


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "phi3", "mixtral", "gpt_oss"])
def test_scores_are_those_of_the_eager_forward(family: str) -> None:
    limits = Limits(110, 10**6, held_tokens=10**6)
    model = model_of(family)
    assert_equal(walked(model, mixed(), chunk=97, limits=limits), wanted(family, mixed))
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_pytorch_tanh", "relu"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_mlp_computes_the_same(act: str, bias: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    mlp = OwnMlp(act, bias=bias)
    rows = torch.randn(1, 40, 64)
    with torch.inference_mode():
        exact = mlp.to(dtype).float()(rows.to(dtype).float())
        mlp = mlp.to(dtype)
        own = mlp(rows.to(dtype)).float()
        with fusion.fused(mlp, 40):
            assert ("forward" in vars(mlp)) is (act != "relu")  # no product applies it
            found = mlp(rows.to(dtype)).float()
    tolerance = 1e-5 if dtype == torch.float32 else 1.2 * float((own - exact).abs().max())
    torch.testing.assert_close(found, exact, atol=tolerance, rtol=0)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("mlp", [OwnMlp(swapped=True), OtherMlp()], ids=["swapped", "another class"])
def test_an_mlp_that_computes_something_else_is_left_alone(mlp: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusion, "_known", {})
    rows = torch.randn(1, 40, 64)
    with torch.inference_mode():
        own = mlp(rows)
        with fusion.fused(mlp, 40):
            assert "forward" not in vars(mlp)
            torch.testing.assert_close(mlp(rows), own, atol=1e-5, rtol=0)


@pytest.mark.usefixtures("always")
def test_a_module_that_is_called_through_something_else_stays_so() -> None:
    mlp = OwnMlp()
    mlp.gate_proj.forward = lambda rows: torch.zeros(*rows.shape[:-1], 96)
    mlp.forward = lambda rows: mlp.gate_proj(rows)
    with torch.inference_mode(), fusion.fused(mlp, 40):
        assert not mlp(torch.randn(1, 40, 64)).any()
    assert {"forward"} <= vars(mlp).keys()


def test_a_copy_is_made_for_chunks_that_are_worth_it_and_the_law_counts_it() -> None:
    assert not fusion.copy_pays(1000, 1000, fusion.LEAST_TOKENS - 1)
    assert fusion.copy_pays(1000, 1000, fusion.LEAST_TOKENS)
    assert not fusion.copy_pays(10**9, 1000, fusion.LEAST_TOKENS)
    law = memory_law(make_config("llama"), torch.bfloat16)
    layer = model_of("llama").model.layers[0]
    linear = [module for module in layer.modules() if type(module) is nn.Linear]
    assert law.weights == sum(each.weight.numel() for each in linear)
    assert law.outputs == sum(each.out_features for each in linear)
    extra = law.constant(fusion.LEAST_TOKENS, CPU) - law.constant(fusion.LEAST_TOKENS, torch.device("meta"))
    assert extra == 2 * law.weights
    assert law.constant(64, CPU) == law.constant(64, torch.device("meta"))
