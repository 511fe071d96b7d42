"""A hybrid sample model: Mamba-2 layers around one attention layer without rotations, grafted from the target.

The target's second layer finds the asked word in the history; its other layers move what stands a few tokens before.
So that layer keeps its attention, and the others get Mamba-2 mixers instead of theirs. The attention loses its
rotations: as in Granite 4 and Nemotron-H, order is told by the recurrent layers alone. First each new mixer learns to
do what the attention in its place did, then the whole model learns the task (as in MOHAWK, arXiv 2408.10189).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM, LlamaForCausalLM

ATTENDS = 1  # the layer that keeps its attention
HEADS, STATE, EXPAND, CHUNK = 8, 32, 2, 32  # of the Mamba-2 mixers
FASTEST = 0.1  # state decay a token of the mixers' last head at the start, as A; the first has a hundredth
ASKED_BEFORE = 3  # tokens from the asked word to the ":" before the answer
IMITATES = 0.5  # share of the time in which the layers imitate the target's, each by itself


def hybrid_config(shallow: Any) -> GraniteMoeHybridConfig:
    """The hybrid's configuration, from that of the target, a `LlamaConfig`."""
    mixers = ["linear_attention"] * shallow.num_hidden_layers
    mixers[ATTENDS] = "full_attention"
    return GraniteMoeHybridConfig(
        vocab_size=shallow.vocab_size,
        hidden_size=shallow.hidden_size,
        intermediate_size=shallow.intermediate_size,
        shared_intermediate_size=shallow.intermediate_size,
        num_hidden_layers=shallow.num_hidden_layers,
        num_attention_heads=shallow.num_attention_heads,
        num_key_value_heads=shallow.num_key_value_heads,
        attention_multiplier=(shallow.hidden_size // shallow.num_attention_heads) ** -0.5,
        max_position_embeddings=shallow.max_position_embeddings,
        initializer_range=shallow.initializer_range,
        rms_norm_eps=shallow.rms_norm_eps,
        bos_token_id=shallow.bos_token_id,
        eos_token_id=shallow.eos_token_id,
        pad_token_id=shallow.pad_token_id,
        num_local_experts=0,
        num_experts_per_tok=0,
        layer_types=mixers,
        mamba_n_heads=HEADS,
        mamba_d_state=STATE,
        mamba_expand=EXPAND,
        mamba_chunk_size=CHUNK,
    )


def graft(shallow: LlamaForCausalLM) -> GraniteMoeHybridForCausalLM:
    """The hybrid with the target's weights and new Mamba-2 mixers, drawn by torch's generator."""
    model = GraniteMoeHybridForCausalLM(hybrid_config(shallow.config))
    own = model.state_dict()
    for name, tensor in shallow.state_dict().items():
        if name in own:  # embeddings, norms, head, one attention
            own[name].copy_(tensor)
    with torch.no_grad():
        for layer, given in zip(model.model.layers, shallow.model.layers, strict=True):
            gated = torch.cat((given.mlp.gate_proj.weight, given.mlp.up_proj.weight))
            layer.shared_mlp.input_linear.weight.copy_(gated)
            layer.shared_mlp.output_linear.weight.copy_(given.mlp.down_proj.weight)
            if layer.mamba is not None:
                slowest, fastest = torch.tensor([FASTEST / 100, FASTEST]).log()
                layer.mamba.A_log.copy_(torch.linspace(slowest, fastest, HEADS))
    return model


class Imitation:
    """The first stage: each layer of the hybrid learns by itself to do to the target's residual stream what the
    target's layer does, without the rotations that it has lost."""

    def __init__(self, model: GraniteMoeHybridForCausalLM, target: LlamaForCausalLM) -> None:
        self._layers = model.model.layers
        self._target = target.eval().requires_grad_(False)
        self._streams: list[tuple[Tensor, Tensor]] = []  # before and after each of the target's layers
        for layer in target.model.layers:
            layer.register_forward_hook(self._record)
        unrotated = target.model.layers[ATTENDS].self_attn
        unrotated.forward = partial(_without_rotations, unrotated.forward)

    def _record(self, layer: nn.Module, given: tuple[Any, ...], output: Any) -> None:
        self._streams.append((given[0], output[0] if isinstance(output, tuple) else output))

    def distances(self, ids: Tensor, answers: Tensor) -> Tensor:
        """Mean squared distance of each recurrent layer's output from that of the target's layer, [layers].

        A share of the variance of what the target's layer adds to the stream. Half of the mean is over all tokens of
        `ids` [sequences, tokens], half over those that predict an answer (bool, the same shape) and the few before.
        """
        self._streams.clear()
        with torch.no_grad():
            self._target.model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
        near = answers.clone()
        for step in range(1, ASKED_BEFORE + 1):
            near[:, :-step] |= answers[:, step:]
        found = []
        for layer, (before, after) in zip(self._layers, self._streams, strict=True):
            if layer.mamba is None:
                continue  # nothing of it is new
            apart = (layer(before) - after).square().mean(dim=-1)
            added = (after - before).var(dim=(0, 1)).mean()
            found.append((apart.mean() + apart[near].mean()) / 2 / added)
        return torch.stack(found)


def _without_rotations(forward: Callable[..., Any], *given: Any, position_embeddings: Any, **named: Any) -> Any:
    """An attention's forward, of all tokens as if they stood at the same place."""
    cosines, sines = position_embeddings
    still = torch.ones_like(cosines), torch.zeros_like(sines)
    return forward(*given, position_embeddings=still, **named)
