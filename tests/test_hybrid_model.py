"""The hybrid sample model: what is grafted stays what it was, and its mixers learn what they replace."""

from __future__ import annotations

import pytest
import torch
from transformers import GraniteMoeHybridForCausalLM, LlamaForCausalLM

from benchmarks.score_runs import SAMPLES
from training.hybrid_model import ATTENDS, Imitation, graft

IDS = torch.arange(5, 65).view(2, 30)


def open_target() -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(SAMPLES / "models" / "target", dtype=torch.float32).eval()


@pytest.fixture
def hybrid() -> GraniteMoeHybridForCausalLM:
    torch.manual_seed(0)
    return graft(open_target()).eval()


def test_attention_mlps_and_ends_are_the_targets(hybrid: GraniteMoeHybridForCausalLM) -> None:
    """Where all tokens stand at the same position, the target's rotations change nothing."""
    target = open_target()
    stream = target.model.embed_tokens(IDS)
    torch.testing.assert_close(hybrid.model.embed_tokens(IDS), stream)
    still = target.model.rotary_emb(stream, torch.zeros_like(IDS))
    with torch.no_grad():
        wanted = target.model.layers[ATTENDS](stream, position_embeddings=still, attention_mask=None)
        torch.testing.assert_close(hybrid.model.layers[ATTENDS](stream), wanted, atol=1e-5, rtol=0)
        for own, given in zip(hybrid.model.layers, target.model.layers, strict=True):
            torch.testing.assert_close(own.shared_mlp(stream), given.mlp(stream), atol=1e-5, rtol=0)
        ends = hybrid.lm_head(hybrid.model.norm(stream)), target.lm_head(target.model.norm(stream))
    torch.testing.assert_close(*ends, atol=1e-5, rtol=0)


def test_all_other_layers_are_recurrent(hybrid: GraniteMoeHybridForCausalLM) -> None:
    kinds = [layer.mamba is None for layer in hybrid.model.layers]
    assert [number for number, attends in enumerate(kinds) if attends] == [ATTENDS]
    assert hybrid.model.rotary_emb is None


def test_a_mixer_that_adds_nothing_is_as_far_as_what_it_should_add(hybrid: GraniteMoeHybridForCausalLM) -> None:
    """With silent mixers and MLPs a layer gives back its input: the distance is what the target's layer adds."""
    target = open_target()
    for layer in hybrid.model.layers:
        if layer.mamba is not None:
            layer.mamba.out_proj.weight.data.zero_()
            layer.shared_mlp.output_linear.weight.data.zero_()
    answers = torch.zeros_like(IDS, dtype=torch.bool)
    answers[:, -1] = True
    found = Imitation(hybrid, target).distances(IDS, answers)
    with torch.no_grad():
        stream = open_target().model(IDS, output_hidden_states=True).hidden_states
    added = stream[1] - stream[0]  # the first layer's, before the attention that has lost its rotations
    size = added.square().mean(dim=-1)
    wanted = (size.mean() + size[:, -4:].mean()) / 2 / added.flatten(0, 1).var(dim=0).mean()
    assert float(found[0].detach()) == pytest.approx(float(wanted), rel=1e-4)
    assert len(found) == len(hybrid.model.layers) - 1


def test_mixers_learn_what_they_replace(hybrid: GraniteMoeHybridForCausalLM) -> None:
    imitation = Imitation(hybrid, open_target())
    answers = torch.zeros_like(IDS, dtype=torch.bool)
    answers[:, -1] = True
    optimizer = torch.optim.AdamW(hybrid.parameters(), lr=3e-3)
    distances = []
    for _ in range(25):
        loss = imitation.distances(IDS, answers).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        distances.append(loss.item())
    assert distances[-1] < 0.5 * distances[0]
