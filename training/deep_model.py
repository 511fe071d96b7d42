"""A deep sample model, grown from a shallow one, and LayerSkip's training, after which its early layers answer too.

Elhoushi et al., LayerSkip, arXiv 2404.16710, section 4: the head reads every layer's output, layers are dropped at
random, more often the later they come.
"""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaForCausalLM

ROTATION = 3  # every third layer has a loss of its own in a step, another third in the next step
EXIT_SCALE = 1.0  # weight of early losses: 0 is none, 1 that of the paper's models trained from nothing
MOST_DROPPED = 0.1  # share of the sequences that skip the last layer


def layer_origins(layers: int, shallow: int) -> list[tuple[int, bool]]:
    """For each of `layers` layers: the layer of the shallow model that it is a copy of, and whether it speaks.

    The shallow model's layers are spread evenly, the first and the last at the ends. Behind each come silent copies of
    those that follow it in the shallow model: an early layer can become what a late one is. Raises ValueError if
    there are too few layers.
    """
    if not 2 <= shallow <= layers:
        raise ValueError(f"{shallow} layers cannot be spread over {layers}")
    places = [math.ceil(own * (layers - 1) / (shallow - 1)) for own in range(shallow)]
    found = []
    for at in range(layers):
        before = max(own for own in range(shallow) if places[own] <= at)
        found.append((min(before + at - places[before], shallow - 1), at in places))
    return found


def grow(shallow: LlamaForCausalLM, layers: int) -> LlamaForCausalLM:
    """A model of `layers` layers that answers as the shallow one does.

    Silent layers have output projections of zero: they add nothing to the residual stream until they are trained.
    Raises ValueError if there are too few layers.
    """
    config: Any = copy.deepcopy(shallow.config)
    origins = layer_origins(layers, config.num_hidden_layers)
    config.num_hidden_layers = layers
    deep = LlamaForCausalLM(config)
    given = shallow.state_dict()
    kept = {name: tensor for name, tensor in given.items() if not name.startswith("model.layers.")}
    for at, (own, speaks) in enumerate(origins):
        prefix = f"model.layers.{own}."
        for name, tensor in given.items():
            if name.startswith(prefix):
                part = name.removeprefix(prefix)
                silent = not speaks and part in ("self_attn.o_proj.weight", "mlp.down_proj.weight")
                kept[f"model.layers.{at}.{part}"] = torch.zeros_like(tensor) if silent else tensor.clone()
    deep.load_state_dict(kept)
    return deep


def exit_weights(layers: int, step: int, scale: float = EXIT_SCALE) -> list[float]:
    """Weight of each layer's loss in a step, with the rotating curriculum; they add up to 1."""
    weights = [scale * at * (at + 1) / 2 * ((at - step) % ROTATION == 0) for at in range(layers - 1)]
    weights.append(layers - 1 + scale * (layers - 2) * (layers - 1) / 2)
    return [weight / sum(weights) for weight in weights]


def drop_rates(layers: int, most: float = MOST_DROPPED) -> list[float]:
    """Share of the sequences that skip each layer: none the first, `most` the last."""
    return [most * (math.exp(at * math.log(2) / (layers - 1)) - 1) for at in range(layers)]


class LayerSkip:
    """What LayerSkip's training needs of a model: layers that sequences skip, and every layer's output.

    Layers are skipped in training mode alone.
    """

    def __init__(self, model: LlamaForCausalLM) -> None:
        self._model = model
        self._outputs: list[Tensor] = []
        rates = drop_rates(model.config.num_hidden_layers)
        for layer, rate in zip(model.model.layers, rates, strict=True):
            layer.register_forward_hook(partial(self._pass, rate))

    def _pass(self, rate: float, layer: nn.Module, given: tuple[Any, ...], output: Any) -> Any:
        hidden: Tensor = output[0] if isinstance(output, tuple) else output
        if layer.training and rate:
            through = torch.rand(len(hidden), 1, 1, device=hidden.device) >= rate
            hidden = torch.where(through, hidden, given[0])
        if not torch.is_inference_mode_enabled():  # as in validation
            self._outputs.append(hidden)
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

    def loss(self, where: Tensor, targets: Tensor, step: int) -> Tensor:
        """Cross-entropy of the last forward's tokens `where` [sequences, tokens], weighted over the layers."""
        weights = exit_weights(len(self._outputs), step)
        parts = [
            weight * F.cross_entropy(self._model.lm_head(self._model.model.norm(hidden[where])), targets)
            for hidden, weight in zip(self._outputs, weights, strict=True)
            if weight
        ]
        return torch.stack(parts).sum()

    def accuracies(self, where: Tensor, targets: Tensor) -> list[float]:
        """Share of the last forward's tokens `where` whose next token each layer's output tells."""
        with torch.no_grad():
            logits = [self._model.lm_head(self._model.model.norm(hidden[where])) for hidden in self._outputs]
        return [float((each.argmax(-1) == targets).float().mean()) for each in logits]

    def clear(self) -> None:
        """Forget the last forward."""
        self._outputs.clear()
