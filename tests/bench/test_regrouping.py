"""What leaving between two layers takes: times that are made up are found again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
from torch import Tensor, nn

from benchmarks.regrouping import measure_leaving
from benchmarks.workloads import prompts_with_histories
from prefillcli.plan.plan import make_plan
from prefillcli.prefill.forest import ATTENTION, register
from prefillcli.prefill.walk import LayerWalk
from tests.prefill.families import VOCABULARY, make_model
from tests.prefill.test_walk import ONE_PACK

TOKEN, KEYS, REGROUP = 1e-3, 0.2, 0.05  # seconds of a layer, the others in layers


class Clock:
    """Time passes only while a layer computes, or the rest is laid out anew."""

    def __init__(self, model: nn.Module) -> None:
        self.seconds = 0.0
        self.disturbed: dict[int, float] = {}  # seconds that other programs take, by layer call
        self._calls = 0
        for layer in model.get_decoder().layers:
            layer.register_forward_pre_hook(self._begun)
            layer.register_forward_hook(self._ended)

    def __call__(self) -> float:
        return self.seconds

    def _begun(self, layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self.seconds += TOKEN * KEYS * inputs[0].shape[1] + self.disturbed.get(self._calls, 0.0)
        self._calls += 1

    def _ended(self, layer: nn.Module, inputs: tuple[Tensor, ...], output: object) -> None:
        self.seconds += TOKEN * (1 - KEYS) * inputs[0].shape[1]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[LayerWalk, Clock]]:
    register()
    model = make_model("llama")
    model.set_attn_implementation(ATTENTION)
    clock = Clock(model)
    regroup: Callable[..., None] = LayerWalk.regroup

    def slow(self: LayerWalk, state: Any, left: Any, attention: Any) -> None:
        regroup(self, state, left, attention)
        clock.seconds += TOKEN * REGROUP * len(left.tokens)

    monkeypatch.setattr(LayerWalk, "regroup", slow)
    with closing(LayerWalk(model, chunk_tokens=64)) as walk:
        yield walk, clock


def test_costs_are_found_in_layers_of_a_token(measured: tuple[LayerWalk, Clock]) -> None:
    (pack,) = make_plan(prompts_with_histories(1, 6, 80, 20, VOCABULARY), ONE_PACK).packs
    assert measure_leaving(measured[0], pack, measured[1]) == pytest.approx((REGROUP, KEYS))


def test_rounds_that_others_disturbed_change_no_cost(measured: tuple[LayerWalk, Clock]) -> None:
    (pack,) = make_plan(prompts_with_histories(1, 6, 80, 20, VOCABULARY), ONE_PACK).packs
    chunks = 4
    measured[1].disturbed = {chunks: 3.0, chunks * 5: 1.0, chunks * 9: 2.0}  # one step of each of the three rounds
    assert measure_leaving(measured[0], pack, measured[1]) == pytest.approx((REGROUP, KEYS))


def test_a_model_of_one_layer_has_no_exits() -> None:
    register()
    model = make_model("llama", num_hidden_layers=1)
    model.set_attn_implementation(ATTENTION)
    (pack,) = make_plan(prompts_with_histories(1, 2, 20, 5, VOCABULARY), ONE_PACK).packs
    with closing(LayerWalk(model, chunk_tokens=64)) as walk:
        assert measure_leaving(walk, pack, lambda: 0.0) is None
