"""The walk takes its layers from a source, one at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from prefillcli.plan.plan import make_plan
from prefillcli.walk.decoding import look_ahead
from prefillcli.walk.forest import ATTENTION
from prefillcli.walk.walk import LayerSource, LayerWalk
from tests.unit.walk.test_walk import ONE_PACK, assert_equal, mixed, model_of, wanted


class LentLayers(LayerSource):
    """Layers whose weights are there only while they are used; keeps a record of what was asked for."""

    def __init__(self, layers: nn.ModuleList) -> None:
        self._layers = list(layers)
        self._weights = [
            {name: weight.detach().clone() for name, weight in layer.named_parameters()} for layer in layers
        ]
        self.asked: list[int] = []
        self.in_use = 0
        self.ended = 0
        for layer in self._layers:
            self._clear(layer)

    def __len__(self) -> int:
        return len(self._layers)

    @contextmanager
    def use(self, index: int) -> Iterator[nn.Module]:
        assert self.in_use == 0, "one layer at a time"
        self.asked.append(index)
        self.in_use += 1
        layer = self._layers[index]
        self._fill(layer, index)
        try:
            yield layer
        finally:
            self._clear(layer)
            self.in_use -= 1

    def end_pass(self) -> None:
        self.ended += 1

    def give_back(self) -> None:
        for index, layer in enumerate(self._layers):
            self._fill(layer, index)

    def _fill(self, layer: nn.Module, index: int) -> None:
        with torch.no_grad():
            for name, weight in layer.named_parameters():
                weight.copy_(self._weights[index][name])

    def _clear(self, layer: nn.Module) -> None:
        with torch.no_grad():
            for weight in layer.parameters():
                weight.fill_(float("nan"))


@pytest.fixture
def lent() -> Iterator[tuple[nn.Module, LentLayers]]:
    model = model_of("gemma2")
    layers = LentLayers(model.get_decoder().layers)
    yield model, layers
    layers.give_back()


def test_layers_are_used_one_at_a_time_and_once_a_pack(lent: tuple[nn.Module, LentLayers]) -> None:
    model, layers = lent
    prompts = mixed()
    model.set_attn_implementation(ATTENTION)
    walk = LayerWalk(model, chunk_tokens=97, layers=layers)
    try:
        (pack,) = make_plan(prompts, ONE_PACK).packs
        rows = torch.cat(list(walk.read_logits(pack)))
        assert layers.asked == list(range(len(layers)))
    finally:
        walk.close()
    assert layers.in_use == 0
    found = torch.stack([rows[read] for _, read in sorted(
        (prompt, read) for read, (_, numbers) in enumerate(pack.reads) for prompt in numbers
    )])  # fmt: skip
    layers.give_back()
    assert_equal(found, wanted("gemma2", mixed))


def test_decoding_uses_the_layers_once_more_for_each_token(lent: tuple[nn.Module, LentLayers]) -> None:
    model, layers = lent
    model.set_attn_implementation(ATTENTION)
    walk = LayerWalk(model, chunk_tokens=97, layers=layers)
    try:
        (pack,) = make_plan(mixed(), ONE_PACK).packs
        ahead = look_ahead(walk, pack, [5], 3, frozenset())
    finally:
        walk.close()
    assert ahead.counts == [3] * len(pack.reads)
    assert layers.asked == list(range(len(layers))) * 4
    assert all(layer.queries.isfinite().all() for layer in ahead.layers)


def test_a_walk_that_is_stopped_lets_go_of_its_layer(lent: tuple[nn.Module, LentLayers]) -> None:
    model, layers = lent
    model.set_attn_implementation(ATTENTION)
    walk = LayerWalk(model, chunk_tokens=97, layers=layers)

    def stop(tokens: float) -> None:
        raise KeyboardInterrupt

    try:
        (pack,) = make_plan(mixed(), ONE_PACK).packs
        with pytest.raises(KeyboardInterrupt):
            list(walk.read_logits(pack, stop))
    finally:
        walk.close()
    assert (layers.asked, layers.in_use) == ([0], 0)
