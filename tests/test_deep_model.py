"""The deep sample model: grown without a change of what it says, trained by the formulas of LayerSkip."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.score_runs import SAMPLES
from training.deep_model import LayerSkip, drop_rates, exit_weights, grow, layer_origins

IDS = torch.arange(5, 45).view(2, 20)


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(SAMPLES / "models" / "target", dtype=torch.float32).eval()


@pytest.mark.parametrize("layers", [4, 7, 12])
def test_a_grown_model_says_what_the_shallow_one_says(target: LlamaForCausalLM, layers: int) -> None:
    deep = grow(target, layers).eval()
    assert deep.config.num_hidden_layers == len(deep.model.layers) == layers
    with torch.no_grad():
        torch.testing.assert_close(deep(IDS).logits, target(IDS).logits, atol=1e-5, rtol=0)


def test_layers_are_spread_with_silent_copies_of_what_follows() -> None:
    assert layer_origins(4, 4) == [(own, True) for own in range(4)]
    found = layer_origins(12, 4)
    assert [at for at, (_, speaks) in enumerate(found) if speaks] == [0, 4, 8, 11]
    assert [own for own, _ in found] == [0, 1, 2, 3, 1, 2, 3, 3, 2, 3, 3, 3]
    with pytest.raises(ValueError, match="cannot be spread"):
        layer_origins(3, 4)


def test_losses_weigh_more_the_deeper_and_rotate() -> None:
    layers = 12
    seen = set()
    for step in range(3):
        weights = exit_weights(layers, step)
        assert sum(weights) == pytest.approx(1)
        early = {at for at, weight in enumerate(weights[:-1]) if weight}
        assert not early & seen
        seen |= early
        # section 4.2 of the paper: e(l) = scale * (0 + ... + l), and L - 1 + scale * (0 + ... + L - 2) for the last
        last = layers - 1 + sum(range(layers - 1))
        for at in early:
            assert weights[at] / weights[-1] == pytest.approx(sum(range(at + 1)) / last)
    assert seen == set(range(1, layers - 1))
    assert exit_weights(layers, 0, scale=0) == [0.0] * (layers - 1) + [1.0]


def test_layers_are_dropped_the_more_the_later_they_come() -> None:
    rates = drop_rates(12, 0.2)
    assert rates[0] == 0
    assert rates[-1] == pytest.approx(0.2)
    assert rates == sorted(rates)
    assert rates[5] == pytest.approx(0.2 * (math.exp(5 * math.log(2) / 11) - 1))


def test_the_loss_is_that_of_every_layers_output_under_norm_and_head() -> None:
    config = LlamaConfig(
        vocab_size=60, hidden_size=16, intermediate_size=32, num_hidden_layers=5, num_attention_heads=2
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    skip = LayerSkip(model)
    where = torch.zeros(IDS.shape, dtype=torch.bool)
    where[0, 7] = where[1, 12] = True
    targets = torch.tensor([3, 9])
    with torch.no_grad():
        states = model(IDS, output_hidden_states=True).hidden_states
        logits = [model.lm_head(model.model.norm(state[where])) for state in states[1:-1]]
        logits.append(model.lm_head(states[-1][where]))  # transformers has put the norm on the last one already
        for step in range(3):
            wanted = sum(
                weight * F.cross_entropy(each, targets)
                for weight, each in zip(exit_weights(5, step), logits, strict=True)
            )
            torch.testing.assert_close(skip.loss(where, targets, step), wanted)
    assert skip.accuracies(where, logits[2].argmax(-1))[2] == 1


def test_sequences_skip_layers_in_training_alone(target: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    model = grow(target, 6)
    LayerSkip(model)
    with torch.no_grad():
        whole = target(IDS).logits
        torch.testing.assert_close(model.eval()(IDS).logits, whole, atol=1e-5, rtol=0)
        monkeypatch.setattr(torch, "rand", lambda *shape, device=None: torch.tensor([0.0, 1.0]).view(shape))
        mixed = model.train()(IDS).logits
    torch.testing.assert_close(mixed[1], whole[1], atol=1e-5, rtol=0)
    assert (mixed[0] - whole[0]).abs().max() > 0.1
