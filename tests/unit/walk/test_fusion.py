"""Fused parts of a layer compute what its modules do, and leave them as they were."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.models.cohere import modeling_cohere
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from prefillcli.models.law import memory_law
from prefillcli.plan.pack import Limits
from prefillcli.walk import fusion
from tests.unit.walk.families import make_config, make_model
from tests.unit.walk.test_walk import assert_equal, eager, mixed, model_of, walked, wanted

CPU = torch.device("cpu")
PASSES = fusion.compiled_passes()
needs_passes = pytest.mark.skipif(PASSES is None, reason="needs a C++ compiler and GNU's OpenMP")
pytestmark = pytest.mark.skipif(not fusion.operators_work(torch.float32), reason="this torch has no oneDNN")
#: The dtypes in which oneDNN multiplies here: on AVX2 alone it has no layout for bfloat16.
DTYPES = [dtype for dtype in (torch.float32, torch.bfloat16) if fusion.operators_work(dtype)]


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


@pytest.fixture(params=[pytest.param(True, marks=needs_passes), False], ids=["passes", "no compiler"])
def compiler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether there is one."""
    if not request.param:
        monkeypatch.setattr(fusion, "compiled_passes", lambda: None)
    monkeypatch.setattr(fusion, "_known", {})
    return bool(request.param)


@pytest.mark.sampled(4)
@pytest.mark.usefixtures("always", "compiler")
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "phi3", "gpt_oss"])
def test_scores_are_those_of_the_eager_forward(family: str) -> None:
    limits = Limits(110, 10**6, held_tokens=10**6)
    model = model_of(family)
    assert_equal(walked(model, mixed(), chunk=97, limits=limits), wanted(family, mixed))
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.usefixtures("always", "compiler")
@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_pytorch_tanh", "relu"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
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


@needs_passes
@pytest.mark.usefixtures("always")
def test_a_wide_mlp_is_computed_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    assert PASSES is not None
    gates: list[int] = []
    own = fusion.CompiledPasses.gate
    monkeypatch.setattr(
        fusion.CompiledPasses, "gate", lambda self, *given: gates.append(given[1].shape[-2]) or own(self, *given)
    )
    monkeypatch.setattr(fusion, "PIECE_BYTES", 1)
    mlp, rows = OwnMlp(), torch.randn(1, 40, 64)
    with torch.inference_mode():
        wanted = mlp(rows)
        with fusion.fused(mlp, 40):
            torch.testing.assert_close(mlp(rows), wanted, atol=1e-5, rtol=0)
    assert gates[-3:] == [16, 16, 8]


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("mlp", [OwnMlp(swapped=True), OtherMlp()], ids=["swapped", "another class"])
def test_an_mlp_that_computes_something_else_is_left_alone(mlp: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusion, "_known", {})
    rows = torch.randn(1, 40, 64)
    with torch.inference_mode():
        own = mlp(rows)
        with fusion.fused(mlp, 40):
            assert "forward" not in vars(mlp)
            assert "forward" in vars(mlp.down_proj)
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


# The compiled passes, and the modules that they take the place of.


@needs_passes
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_keeps_its_bits_beside_others_and_with_other_threads(dtype: torch.dtype) -> None:
    assert PASSES is not None
    form = fusion.NormForm(1e-6)
    weight, given = torch.randn(96).to(dtype), [torch.randn(1, 900, 96).to(dtype) for _ in range(2)]
    tables = [torch.randn(1, 900, 96).to(dtype) for _ in range(2)]

    def computed(at: slice) -> list[Tensor]:
        one, other = (each[:, at] for each in given)
        heads = [each.view(1, -1, 3, 32).transpose(1, 2) for each in (one, other)]
        turned = PASSES.rotary(*heads, *(each[:, at, :32].contiguous() for each in tables))
        sums = one.clone()
        passed = [PASSES.gate(0, one, other), PASSES.gate(1, one, other), PASSES.add(one.clone(), other)]
        passed += [PASSES.add_and_norm(sums, other, weight, form), sums]
        return [*passed, *(each.transpose(1, 2).flatten(2) for each in turned)]

    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        together = computed(slice(None))
    finally:
        torch.set_num_threads(threads)
    for row in (0, 1, 449, 450, 899):
        for whole, alone in zip(together, computed(slice(row, row + 1)), strict=True):
            assert torch.equal(whole[:, row : row + 1], alone)


@needs_passes
@pytest.mark.parametrize(("kind", "form"), [
    (LlamaRMSNorm, fusion.NormForm(1e-3, 0.0, early=True)),
    (GemmaRMSNorm, fusion.NormForm(1e-3, 1.0, early=False)),
])  # fmt: skip
def test_a_norm_computes_what_its_class_does_in_each_form(kind: type[nn.Module], form: fusion.NormForm) -> None:
    norm = kind(64, eps=1e-3).bfloat16()
    with torch.inference_mode():
        norm.weight.copy_(torch.randn(64))
        found = fusion._norm_of(norm, PASSES)
        assert found is not None
        assert found.form == form
        for rows in (torch.randn(1, 40, 64), torch.randn(1, 7, 200)[..., :192].view(1, 7, 3, 64) / 30):
            differ = found.forward(rows.bfloat16()) != norm(rows.bfloat16())
            assert differ.float().mean() < 0.01  # a sum in another order may round otherwise


class OtherNorm(LlamaRMSNorm):
    """The same parts under another class, which computes something else."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states - hidden_states.mean(-1, keepdim=True))


@needs_passes
def test_norms_and_encodings_that_compute_something_else_are_left_alone() -> None:
    assert PASSES is not None
    assert fusion._norm_of(OtherNorm(64), PASSES) is None
    assert fusion._norm_of(nn.LayerNorm(64), PASSES) is None
    assert fusion._turns(modeling_llama.apply_rotary_pos_emb)
    assert not fusion._turns(modeling_cohere.apply_rotary_pos_emb)  # turns neighbours, not halves


@needs_passes
@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_scores_are_those_of_the_eager_forward_where_heads_are_turned(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their heads are wide enough for the compiled pass, and each pass computes something."""
    assert PASSES is not None
    model = make_model(family, head_dim=32)
    used: set[str] = set()
    own = dict(PASSES._calls)
    for (name, dtype), call in own.items():
        monkeypatch.setitem(PASSES._calls, (name, dtype), lambda *args, n=name, c=call: used.add(n) or c(*args))
    assert_equal(walked(model, mixed(), chunk=97), eager(make_model(family, head_dim=32), mixed()))
    assert used == {"gate", "norm", "add", "rotary"}


@needs_passes
@pytest.mark.usefixtures("always")
def test_a_layer_is_called_as_a_whole_where_it_adds_what_its_parts_give() -> None:
    # Models of their own: transformers leaves hooks on those that other tests have asked for hidden states
    for family, whole in (("llama", True), ("qwen3", True), ("granite", False), ("gemma2", False)):
        layer = make_model(family).model.layers[0]
        layer.residual_multiplier = 0.5  # granite's looks at it
        names = frozenset({"attention_mask", "position_embeddings"})
        with fusion.fused(layer, 40):
            assert all("forward" in vars(each) for each in (layer.mlp, layer.self_attn, layer.input_layernorm))
            taken = "forward" in vars(layer) and fusion._handed_on(layer, names) is not None
        assert taken is whole


@needs_passes
@pytest.mark.usefixtures("always")
def test_modules_with_hooks_are_called() -> None:
    layer = copy.deepcopy(model_of("llama").model.layers[0])
    seen: list[nn.Module] = []
    for part in (layer.post_attention_layernorm, layer.mlp.gate_proj, layer.self_attn.q_proj):
        part.register_forward_hook(lambda module, args, out: seen.append(module))
    with torch.inference_mode(), fusion.fused(layer, 40):
        layer.mlp(layer.post_attention_layernorm(torch.randn(1, 5, 64)))
        assert "forward" not in vars(layer)
        assert "forward" not in vars(layer.self_attn.q_proj)
    assert seen == [layer.post_attention_layernorm, layer.mlp.gate_proj]


def test_other_products_take_the_place_of_those_in_the_dtype() -> None:
    """Whatever pays: a chunk of 5 tokens is not worth a layout."""
    layer = model_of("llama").model.layers[0]
    asked: list[int] = []

    def products(linear: Sequence[nn.Linear], chunk_tokens: int) -> fusion.Product | None:
        asked.append(len(linear))
        if layer.self_attn.o_proj in linear:
            return None
        return lambda rows: [2 * nn.functional.linear(rows, one.weight) for one in linear]

    rows = torch.randn(1, 5, 64)
    with torch.inference_mode():
        values = layer.self_attn.v_proj(rows)
        wanted = 2 * layer.mlp.down_proj(layer.mlp.act_fn(2 * layer.mlp.gate_proj(rows)) * 2 * layer.mlp.up_proj(rows))
        with fusion.fused(layer, 5, products=products):
            torch.testing.assert_close(layer.self_attn.v_proj(rows), 2 * values)
            torch.testing.assert_close(layer.mlp(rows), wanted)
            assert "forward" not in vars(layer.self_attn.o_proj)
    assert sorted(asked) == ([1, 1, 2, 3] if PASSES else [1, 1, 1, 1, 3])
