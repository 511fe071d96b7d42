"""Where a causal language model keeps its decoder layers.

Families call that list `layers`, `h`, `blocks` or `layer`, and transformers' own look-up finds the module around it
only in some of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from prefillcli.prefill.forest import UnsupportedModelError


@dataclass(frozen=True, slots=True)
class DecoderLayers:
    """The list of a model's decoder layers, and its place: attribute `name` of the module `owner`.

    The names of the layers' tensors begin with `prefix` in the model.
    """

    owner: nn.Module
    name: str
    prefix: str

    @property
    def layers(self) -> nn.ModuleList:
        """What is in that place now."""
        found: nn.ModuleList = getattr(self.owner, self.name)
        return found

    def replace(self, layers: Sequence[nn.Module]) -> None:
        """Put others in that place."""
        setattr(self.owner, self.name, nn.ModuleList(layers))


def decoder_layers(model: PreTrainedModel) -> DecoderLayers:
    """Where `model` keeps its decoder layers; its weights may be on the meta device.

    Of all lists of modules that is the one with as many members as the configuration has layers; of several, the one
    with the most weights. Raises UnsupportedModelError if there is none.
    """
    counts = _layer_counts(model.config)
    names = {module: name for name, module in model.named_modules()}
    found: list[tuple[bool, int, DecoderLayers]] = []
    for part in (model.get_decoder(), model):
        if not isinstance(part, nn.Module) or part not in names:
            continue
        for owner, name in _lists_of_layers(part):
            members: nn.ModuleList = getattr(owner, name)
            place = DecoderLayers(owner, name, f"{names[members]}.")
            found.append((len(members) in counts, sum(each.numel() for each in members.parameters()), place))
        if any(as_configured for as_configured, _, _ in found):
            break  # the decoder's own come first: an image's encoder may be as deep, and larger
    if not found:
        raise UnsupportedModelError(
            f"{model.config.model_type} keeps its decoder layers where the walk does not find them"
        )
    return max(found, key=lambda each: each[:2])[2]


def embedding_device(model: PreTrainedModel) -> torch.device:
    """The device of a model's tokens: that of its embedding."""
    embedding = model.get_input_embeddings()
    weights = [] if embedding is None else list(embedding.parameters())
    device: torch.device = (weights or list(model.parameters()))[0].device
    return device


def _layer_counts(config: Any) -> set[int]:
    """The numbers of layers that a configuration gives."""
    text = config.get_text_config(decoder=True)
    given = {key: value for key, value in text.to_dict().items() if key.endswith(("layer", "layers"))}
    given["num_hidden_layers"] = getattr(text, "num_hidden_layers", None)
    return {value for value in given.values() if isinstance(value, int) and value > 0}


def _lists_of_layers(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """The lists in a module whose members have parts of their own, but for those inside such members."""
    for name, part in module.named_children():
        if isinstance(part, nn.ModuleList) and len(part) and all(any(each.children()) for each in part):
            yield module, name
        else:
            yield from _lists_of_layers(part)
