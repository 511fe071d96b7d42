"""What a model's forward hands to its layers, recorded chunk by chunk.

The same tensors (rotary tables, position ids) go to every layer, and live as long as the pack. Left where each chunk's
forward put them, they lie scattered between its temporaries, and the allocator cannot use the gaps again: with small
chunks that costs as much as the residual stream. So they are copied into one buffer each.

Some models have later layers attend over the keys and values of an earlier one. Those are handed on in a mapping that
every layer is called with. They are kept for the whole pack too.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from prefillcli.prefill.forest import UnsupportedModelError

LayerCall = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(slots=True)
class Recording:
    """One forward over some tokens: what its layers were called with."""

    first: Tensor | None = None
    calls: list[LayerCall] = field(default_factory=list)
    """The arguments of each layer, but for the residual stream."""

    @property
    def hidden(self) -> Tensor:
        """The residual stream before the first layer, [1, tokens, hidden]. Raises UnsupportedModelError."""
        if self.first is None:
            raise UnsupportedModelError("the model's forward does not reach its layers")
        return self.first


class SharedKeysValues(MutableMapping[Any, tuple[Tensor, Tensor]]):
    """K,V [1, kv heads, tokens, width] that layers leave for later ones, for some tokens of a pack.

    `whole` are those of all its tokens, by the layer's name for them; `start` is the first token of these.
    """

    def __init__(self, whole: dict[Any, tuple[Tensor, Tensor]], start: int, tokens: int, pack_tokens: int) -> None:
        self.whole = whole
        self._part = slice(start, start + tokens)
        self._tokens = (tokens, pack_tokens)

    def __getitem__(self, name: Any) -> tuple[Tensor, Tensor]:
        keys, values = self.whole[name]
        return keys[:, :, self._part], values[:, :, self._part]

    def __setitem__(self, name: Any, both: tuple[Tensor, Tensor]) -> None:
        own, tokens = self._tokens
        if not all(isinstance(each, Tensor) and each.dim() == 4 and each.shape[2] == own for each in both):
            raise UnsupportedModelError("a layer hands more than its keys and values on to later layers")
        if name not in self.whole:
            keys, values = (each.new_empty(1, each.shape[1], tokens, each.shape[3]) for each in both)
            self.whole[name] = keys, values
        for place, each in zip(self.whole[name], both, strict=True):
            place[:, :, self._part] = each

    def __delitem__(self, name: Any) -> None:
        raise UnsupportedModelError("a layer takes back what it has handed on to later layers")

    def __iter__(self) -> Iterator[Any]:
        return iter(self.whole)

    def __len__(self) -> int:
        return len(self.whole)


def lend_shared(calls: list[LayerCall], of_chunk: list[LayerCall], tokens: int) -> None:
    """Let layers that attend over K,V of earlier ones be called by themselves with `calls`, for so many tokens whose
    K,V are not used. `of_chunk` are the calls of any chunk of the pack."""
    for mapping, shared in zip(_mappings(calls), _mappings(of_chunk), strict=True):
        if not mapping and isinstance(shared, SharedKeysValues):
            for name, (keys, values) in shared.whole.items():
                mapping[name] = tuple(
                    each.new_zeros(()).expand(1, each.shape[1], tokens, each.shape[3]) for each in (keys, values)
                )


def _mappings(calls: list[LayerCall]) -> list[MutableMapping[Any, Any]]:
    """The mappings that layers are called with, each once."""
    given = [value for args, kwargs in calls for value in (*args, *kwargs.values())]
    return list({id(each): each for each in given if isinstance(each, MutableMapping)}.values())


class CallBuffers:
    """Buffers for the tensors of all chunks of a pack of `tokens` tokens."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._buffers: dict[tuple[int, torch.dtype, int], Tensor] = {}
        self._filled: dict[tuple[int, torch.dtype, int], int] = {}
        self._shared: list[dict[Any, tuple[Tensor, Tensor]]] = []  # of each mapping that layers share
        self._begun = 0  # tokens of the chunks so far

    def take_over(self, calls: list[list[LayerCall]], at: Tensor) -> None:
        """Keep what layers have left for later ones of the tokens `at` of the pack, whose chunks had these calls."""
        for mapping in _mappings([call for chunk in calls[:1] for call in chunk]):
            if isinstance(mapping, SharedKeysValues):
                kept: dict[Any, tuple[Tensor, Tensor]] = {}
                self._shared.append(kept)
                for name in list(mapping.whole):  # one at a time: the old ones go
                    keys, values = mapping.whole.pop(name)
                    rows = at.to(keys.device)
                    kept[name] = keys[:, :, rows], values[:, :, rows]

    def keep(self, calls: list[LayerCall], chunk_tokens: int) -> list[LayerCall]:
        """The same calls with their tensors moved to the buffers. What several layers share stays one."""
        moved: dict[int, Tensor] = {}
        mappings: dict[int, SharedKeysValues] = {}
        start, self._begun = self._begun, self._begun + chunk_tokens

        def move(value: Any) -> Any:
            if isinstance(value, Tensor):
                if id(value) not in moved:
                    moved[id(value)] = self._move(value, len(moved), chunk_tokens)
                return moved[id(value)]
            if isinstance(value, tuple | list):
                return type(value)(move(part) for part in value)
            if isinstance(value, MutableMapping) and not value:  # for what layers will leave there
                if id(value) not in mappings:
                    whole = self._shared_by(len(mappings))
                    mappings[id(value)] = SharedKeysValues(whole, start, chunk_tokens, self._tokens)
                return mappings[id(value)]
            if isinstance(value, dict):
                return {key: move(part) for key, part in value.items()}
            return value

        return [(move(args), {name: move(value) for name, value in kwargs.items()}) for args, kwargs in calls]

    def _shared_by(self, mapping: int) -> dict[Any, tuple[Tensor, Tensor]]:
        if mapping == len(self._shared):
            self._shared.append({})
        return self._shared[mapping]

    def _move(self, tensor: Tensor, number: int, chunk_tokens: int) -> Tensor:
        per_token, rest = divmod(tensor.numel(), chunk_tokens)
        if rest or not per_token:
            return tensor  # not made of one piece for each token
        key = (number, tensor.dtype, per_token)
        if key not in self._buffers:
            self._buffers[key] = torch.empty(per_token * self._tokens, dtype=tensor.dtype, device=tensor.device)
            self._filled[key] = 0
        start = self._filled[key]
        self._filled[key] = start + tensor.numel()
        return self._buffers[key][start : start + tensor.numel()].view(tensor.shape).copy_(tensor)


# Where a causal language model keeps its decoder layers.
#
# Families call that list `layers`, `h`, `blocks` or `layer`, and transformers' own look-up finds the module around
# it only in some of them.


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
