"""Layers that are called through torch.compile: the same logits, and one compilation for all of a class.

They are traced as always; the backend is the one that generates no code, which takes a minute.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from transformers import AttentionInterface

from prefillcli.errors import UsageError
from prefillcli.plan.pack import Limits
from prefillcli.plan.plan import make_plan, packs_to_run
from prefillcli.walk import forest, fusion
from prefillcli.walk.forest import ATTENTION
from prefillcli.walk.fusion import check_compiler, compiled
from prefillcli.walk.walk import Arithmetic, LayerWalk
from tests.unit.walk.families import FAMILIES, VOCABULARY
from tests.unit.walk.test_walk import assert_equal, mixed, model_of, wanted

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch", "ignore::UserWarning:torch")

OTHERS = [name for name in FAMILIES if name != "gemma2"]


@pytest.fixture
def without_code(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No code is generated, and the attention is traced again afterwards."""
    compile_with = torch.compile

    def traced(function: object, *, dynamic: bool) -> object:
        return compile_with(function, dynamic=dynamic, backend="aot_eager")

    monkeypatch.setattr(torch, "compile", traced)
    fusion._compile.cache_clear()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    check_compiler(torch.device("cpu"))
    yield
    AttentionInterface.register(ATTENTION, forest._attention)
    fusion._compile.cache_clear()


@pytest.mark.nightly
@pytest.mark.usefixtures("without_code")
@pytest.mark.parametrize("family", ["gemma2", *(pytest.param(name, marks=pytest.mark.matrix) for name in OTHERS)])
def test_compiled_layers_give_the_logits_of_the_eager_forward(family: str) -> None:
    model, limits = model_of(family), Limits(110, 10**6, held_tokens=10**6)
    expected = wanted(family, mixed)
    model.set_attn_implementation(ATTENTION)
    walk = LayerWalk(model, chunk_tokens=61, arithmetic=Arithmetic(prepare=compiled))
    graphs = []
    try:
        for _ in range(2):
            logits = torch.zeros(len(mixed()), VOCABULARY)
            for pack in packs_to_run(make_plan(mixed(), limits), ()):
                rows = torch.cat(list(walk.read_logits(pack)))
                for row, (_, numbers) in zip(rows, pack.reads, strict=True):
                    logits[list(numbers)] = row
            assert_equal(logits, expected)
            graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    finally:
        walk.close()
    assert graphs[0] > 1, "nothing was compiled"
    assert graphs[0] == graphs[1], "what has been seen once is compiled"
    assert all("forward" not in vars(layer) for layer in model.model.layers)


def test_a_machine_without_a_compiler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_compiler(function: object, **how: object) -> None:
        raise RuntimeError("g++ was not found")

    monkeypatch.setattr(torch, "compile", no_compiler)
    with pytest.raises(
        UsageError, match=r"--compile: torch.compile does not work for cpu: g\+\+ was not found\nleave"
    ):
        check_compiler(torch.device("cpu"))
    AttentionInterface.register(ATTENTION, forest._attention)
