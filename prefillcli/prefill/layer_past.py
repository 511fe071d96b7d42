"""What a cache of transformers keeps of one decoder layer at a path's end: K,V, window tails, indexer keys, states.

What grows token by token is kept once, in parts: each holds what the tokens of one call have added. A path is the
parts of its calls, root first, and paths share those of their common beginning. For a call they are joined to what the
layer knows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

#: Attributes of a cache's entries that grow by one piece for each token, along their dimension -2. Transformers
#: lengthens them by concatenation, and changes nothing in place.
_PER_TOKEN = ("keys", "values", "indexer_keys", "idx_keys")


@dataclass(slots=True)
class LayerPast:
    """The entries of one decoder layer in a cache: by their numbers there, and in further lists that the cache has."""

    entries: dict[int, Any] = field(default_factory=dict)
    lists: dict[str, dict[int, Any]] = field(default_factory=dict)


Path = tuple[LayerPast, ...]


def fork_past(past: LayerPast) -> LayerPast:
    """A copy that can be lengthened and changed."""
    return _changed(past, lambda name, tensor: tensor if name in _PER_TOKEN else tensor.clone())


def own_part(past: LayerPast, tokens: int) -> LayerPast:
    """The part that the last `tokens` tokens have added, with all else that is known at their end."""

    def part(name: str, tensor: Tensor) -> Tensor:
        if not _grows(name, tensor):
            return tensor
        own = tensor[..., max(0, tensor.shape[-2] - tokens) :, :]
        return own.clone() if own.untyped_storage().nbytes() > own.nbytes else own

    return _changed(past, part)


def lengthened(path: Path, part: LayerPast) -> Path:
    """A path with one more part. Of those before, it needs only what grows token by token."""
    if not path:
        return (part,)
    bare = _changed(path[-1], lambda name, tensor: tensor if _grows(name, tensor) else None)
    return (*path[:-1], LayerPast(bare.entries), part)


def moved(past: LayerPast, place: torch.device) -> LayerPast:
    """A copy in `place`."""
    return _changed(past, lambda name, tensor: tensor.to(place, copy=True))


def joined(path: Path, device: torch.device) -> LayerPast:
    """What a layer knows at the end of a path, on `device`; not to be changed."""
    last = _changed(path[-1], lambda name, tensor: tensor.to(device))
    for number, entry in last.entries.items():
        window = getattr(entry, "sliding_window", None)
        for name in _PER_TOKEN:
            pieces: list[Tensor] = []
            for part in reversed(path):
                own = vars(part.entries[number]).get(name) if number in part.entries else None
                if isinstance(own, Tensor) and _grows(name, own):
                    pieces.insert(0, own.to(device))
                if window is not None and sum(piece.shape[-2] for piece in pieces) >= window:
                    break
            if len(pieces) > 1:
                whole = torch.cat(pieces, dim=-2)
                setattr(entry, name, whole if window is None else whole[..., -window + 1 :, :])
    return last


def _grows(name: str, tensor: Tensor) -> bool:
    return name in _PER_TOKEN and tensor.dim() > 2  # an entry without a token has an empty vector


def _changed(past: LayerPast, change: Callable[[str, Tensor], Tensor | None]) -> LayerPast:
    """A copy with `change(name, tensor)` for each tensor; `name` is that of the attribute it is in."""

    def each(name: str, value: Any) -> Any:
        if isinstance(value, Tensor):
            return change(name, value)
        if isinstance(value, dict):
            return {key: each(name, one) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(each(name, one) for one in value)
        return value

    entries = {}
    for number, entry in past.entries.items():
        entries[number] = copy.copy(entry)
        for name, value in vars(entry).items():
            setattr(entries[number], name, each(name, value))
    return LayerPast(entries, {name: each(name, own) for name, own in past.lists.items()})
