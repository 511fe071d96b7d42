"""Label logits after any layer, against the eager forward of the model cut off behind that layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager

import pytest
import torch
from torch import Tensor, nn

from prefillcli.plan.pack import Pack
from prefillcli.plan.plan import make_plan
from prefillcli.walk.forest import ATTENTION, register
from prefillcli.walk.walk import LayerWalk
from tests.unit.walk.families import VOCABULARY, each_family, make_model
from tests.unit.walk.test_walk import ONE_PACK, Prompt, eager, model_of, two_levels

LABELS = (9, 5, 200, 9)


@contextmanager
def cut_off(model: nn.Module, layers: int) -> Iterator[nn.Module]:
    """The model with its first layers only."""
    decoder, whole, count = model.get_decoder(), model.get_decoder().layers, model.config.num_hidden_layers
    decoder.layers, model.config.num_hidden_layers = whole[:layers], layers
    try:
        yield model
    finally:
        decoder.layers, model.config.num_hidden_layers = whole, count


class Look:
    """An exit rule that lets everybody go on, and reads the labels before and after each layer."""

    regroup_cost = 0.0

    def __init__(self, walk: LayerWalk, pack: Pack, *, peek: bool) -> None:
        self.layers = range(len(walk.layers))
        self._walk, self._pack, self._peek = walk, pack, peek
        self.seen: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # by layer and prompt

    def peeks(self, layer: int) -> bool:
        return self._peek

    def __call__(self, layer: int, reads: Sequence[int], before: Tensor, after: Tensor) -> Sequence[int]:
        both = [self._walk.label_logits(hidden, LABELS) for hidden in (before, after)]
        for read, *rows in zip(reads, *both, strict=True):
            for prompt in self._pack.reads[read][1]:
                self.seen[layer, prompt] = (rows[0], rows[1])
        return reads


def look(model: nn.Module, prompts: list[Prompt], *, peek: bool) -> tuple[Look, Tensor]:
    """What such a rule sees, and the logits of the walk."""
    model.set_attn_implementation(ATTENTION)
    with closing(LayerWalk(model, chunk_tokens=61)) as walk:
        (pack,) = make_plan(prompts, ONE_PACK).packs
        rule = Look(walk, pack, peek=peek)
        return rule, torch.cat(list(walk.read_logits(pack, exits=rule)))


@each_family
@pytest.mark.parametrize("peek", [False, True])
def test_labels_after_a_layer_are_those_of_the_model_cut_off_there(family: str, peek: bool) -> None:
    model, prompts = model_of(family), two_levels()
    rule, _ = look(model, prompts, peek=peek)
    layers = model.config.num_hidden_layers
    assert rule.seen.keys() == {(layer, prompt) for layer in range(layers) for prompt in range(len(prompts))}
    for layer in range(layers):
        with cut_off(model, layer + 1):
            wanted = eager(model, prompts)[:, list(LABELS)]
        assert wanted.std() > 0.3, "logits must differ enough to tell a wrong answer"
        found = torch.stack([rule.seen[layer, prompt][1] for prompt in range(len(prompts))])
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)
        if layer + 1 < layers:
            before = torch.stack([rule.seen[layer + 1, prompt][0] for prompt in range(len(prompts))])
            torch.testing.assert_close(before, wanted, atol=1e-4, rtol=0)


@each_family
def test_whoever_only_looks_changes_no_bit(family: str) -> None:
    model, prompts = model_of(family), two_levels()
    model.set_attn_implementation(ATTENTION)
    with closing(LayerWalk(model, chunk_tokens=61)) as walk:
        (pack,) = make_plan(prompts, ONE_PACK).packs
        plain = torch.cat(list(walk.read_logits(pack)))
    for peek in (False, True):
        assert torch.equal(look(model, prompts, peek=peek)[1], plain)


@pytest.mark.parametrize("bias", [False, True])
def test_only_the_labels_rows_of_the_head_are_multiplied(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    register()
    model = make_model("llama")
    if bias:
        model.lm_head.bias = nn.Parameter(torch.randn(VOCABULARY), requires_grad=False)
    whole = model.lm_head
    walk = LayerWalk(model, chunk_tokens=61)
    hidden = torch.randn(7, 64)
    shapes = []
    linear = nn.functional.linear
    try:
        wanted = torch.cat(list(walk.logits(hidden[None])))[:, list(LABELS)]
        monkeypatch.setattr(nn.functional, "linear", lambda x, *a: shapes.append(a[0].shape) or linear(x, *a))
        found = walk.label_logits(hidden, LABELS)
    finally:
        walk.close()
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)
    assert shapes == [(len(LABELS), 64)]
    assert model.lm_head is whole


class DoublingHead(nn.Linear):
    def forward(self, hidden: Tensor) -> Tensor:
        return 2 * super().forward(hidden)


def test_a_head_of_another_kind_is_called_as_it_is() -> None:
    register()
    model = make_model("llama")
    hidden = torch.randn(7, 64)
    head = DoublingHead(64, VOCABULARY, bias=False)
    head.weight = model.lm_head.weight
    with closing(LayerWalk(model, chunk_tokens=61)) as walk:
        plain = walk.label_logits(hidden, LABELS)
        model.set_output_embeddings(head)
        torch.testing.assert_close(walk.label_logits(hidden, LABELS), 2 * plain, atol=1e-5, rtol=0)
