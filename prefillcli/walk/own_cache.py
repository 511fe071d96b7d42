"""Layers called after a path's past, with a cache of transformers of the model's own kind.

This walks the models that the forest attention does not cover: attention biases that depend on the distance of tokens,
indexers that choose keys, layers that attend twice, caches of a family's own. A layer is called for the tokens of one
node at a time. Its cache holds this layer's past on the path before them; of all other layers it only gives the length
of the path. Masks and biases are made by the model's own forward over these tokens, once more for each call, so that
none of them outlives it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionCacheLayerMixin

from prefillcli.stats.arrays import Int64Array
from prefillcli.walk.forest import ATTENTION, UnsupportedModelError
from prefillcli.walk.layout import Tree, split_evenly
from prefillcli.walk.model_ends import ModelEnds
from prefillcli.walk.recurrent import NodeRun, PathStates, node_runs

# The part of a transformers cache that belongs to one decoder layer at a path's end: K,V, window tails, indexer keys,
# states.
#
# Tensors that grow token by token are kept once, in parts, one for each call. A path is the parts of its calls, root
# first, and paths share those of their common beginning. For a call they are joined.


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
    """The part that the last `tokens` tokens have added, with everything else that the cache holds at their end."""

    def part(name: str, tensor: Tensor) -> Tensor:
        if not _grows(name, tensor):
            return tensor
        own = tensor[..., max(0, tensor.shape[-2] - tokens) :, :]
        return own.clone() if own.untyped_storage().nbytes() > own.nbytes else own

    return _changed(past, part)


def lengthened(path: Path, part: LayerPast) -> Path:
    """A path with one more part. Of the parts before, it needs only the tensors that grow token by token."""
    if not path:
        return (part,)
    bare = _changed(path[-1], lambda name, tensor: tensor if _grows(name, tensor) else None)
    return (*path[:-1], LayerPast(bare.entries), part)


def moved(past: LayerPast, place: torch.device) -> LayerPast:
    return _changed(past, lambda name, tensor: tensor.to(place, copy=True))


def joined(path: Path, device: torch.device) -> LayerPast:
    """A layer's past at the end of a path, on `device`; not to be changed."""
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
    # A copy with `change(name, tensor)` for each tensor; `name` is that of the attribute it is in.
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


SCORE_BYTES = 64 << 20  # of the scores of one call, in float32, and the tensors computed from them
MIN_PIECE = 16  # tokens of a call, whatever its scores take
NO_QUERIES = "the model is walked with its own cache, so the queries that would choose tokens are not seen"
NO_DECODING = "the model is walked with its own cache, after which no text is written; --engine hf writes texts"
JOINED_PATHS = 2  # that are kept as a whole: the one that a run has read, and its parent's for the next child


class OwnCache:
    """Calls the layers of a model with its own kind of cache. Raises UnsupportedModelError if it has none."""

    def __init__(self, model: PreTrainedModel, ends: ModelEnds) -> None:
        self._ends = ends
        self._blank = _blank_cache(ends)
        self._numbers = [_entry_numbers(layer, index) for index, layer in enumerate(ends.layers)]
        self._length = 1 + max(max(numbers) for numbers in self._numbers)
        self._others: tuple[int, list[Any]] = (0, [])
        self.device = ends.device
        self._carried: dict[int, list[Any]] = {}  # by the first token of each call
        self._heads = score_heads(model)

    def pieces(self, seen: int, tokens: int) -> list[tuple[int, int]]:
        """Cuts this many tokens after `seen` others into pieces whose scores and masks stay small."""
        return split_evenly(tokens, max(MIN_PIECE, SCORE_BYTES // (8 * self._heads * (seen + tokens))))

    @property
    def carries(self) -> bool:
        """Return whether layers pass on more than the residual stream. Then the layout of a pack does not change."""
        return bool(self._ends.carried)

    def embed(self, tokens: Tensor, positions: Int64Array) -> Tensor:
        """The residual stream before the first layer, [1, tokens, hidden]."""
        return self._ends.record(tokens, positions, use_cache=True).hidden

    def call(
        self, index: int, layer: nn.Module, rows: Tensor, tokens: Tensor, tree: Tree, start: int, past: LayerPast
    ) -> tuple[Tensor, LayerPast]:
        """A layer's output for `rows` [1, n, hidden] of a pack's tokens from `start` on, all of one path, and its past
        after them.

        `tokens` int64 are all of the pack's; `past` is the layer's past of those before `start` on the path. It may be
        changed.
        """
        at, seen = slice(start, start + rows.shape[1]), int(tree.depths[start])
        cache = self._cache(past, seen)
        mask = torch.ones(1, seen + rows.shape[1], dtype=torch.long, device=rows.device)
        recording = self._ends.record(tokens[at], tree.positions[at], cache=cache, attention_mask=mask)
        args, kwargs = recording.calls[index]
        if index == 0 and start == 0:
            self._carried.clear()  # of another pack
        elif index:
            args, kwargs = self._with_carried(args, kwargs, self._carried.get(start, []))
        out = layer(self._ends.lanes.unfold(rows), *args, **kwargs)
        if isinstance(out, tuple | list):
            self._carried[start] = [out[1 + number] for number in self._ends.carried]
            out = out[0]
        out = self._ends.lanes.fold(out) if isinstance(out, Tensor) else out
        if not isinstance(out, Tensor) or out.shape != rows.shape:
            raise UnsupportedModelError(f"a layer of type {type(layer).__name__} does not give a row for each token")
        return out, self._taken(cache, self._numbers[index])

    def _with_carried(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], carried: list[Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        # A layer's arguments with the values that the layer before has passed on.
        positional = list(args)
        for place, value in zip(self._ends.carried.values(), carried, strict=True):
            if isinstance(place, int):
                positional[place] = value
            else:
                kwargs = kwargs | {place: value}
        return tuple(positional), kwargs

    def _cache(self, past: LayerPast, seen: int) -> Cache:
        # A cache with one layer's past. Its other entries report `seen` tokens.
        cache = copy.copy(self._blank)
        lists = {name: value for name, value in vars(self._blank).items() if isinstance(value, list)}
        for name, value in lists.items():
            setattr(cache, name, copy.deepcopy(value))
        if not seen:
            return cache
        cache.layers = list(self._other_entries(seen))
        for number, entry in past.entries.items():
            cache.layers[number] = entry
        for name, given in past.lists.items():
            setattr(cache, name, [given.get(number) for number in range(self._length)])
        return cache

    def _other_entries(self, seen: int) -> list[Any]:
        # Entries that report `seen` tokens and hold nothing.
        if self._others[0] != seen:
            kinds: dict[Any, Any] = {}
            entries = []
            replicated: Callable[[], Any] | None = self._blank.layer_class_to_replicate
            for number in range(self._length):
                if number < len(self._blank.layers):
                    blank = self._blank.layers[number]
                elif replicated is not None:
                    blank = replicated()
                else:
                    raise UnsupportedModelError("the model's cache has fewer entries than the model has layers")
                kind = (type(blank), getattr(blank, "sliding_window", None))
                if kind not in kinds:
                    kinds[kind] = _read_before(blank, seen)
                entries.append(kinds[kind])
            self._others = (seen, entries)
        return self._others[1]

    def _taken(self, cache: Cache, numbers: list[int]) -> LayerPast:
        entries = {number: cache.layers[number] for number in numbers if number < len(cache.layers)}
        lists = {
            name: {number: value[number] for number in numbers if number < len(value)}
            for name, value in vars(cache).items()
            if isinstance(value, list) and name != "layers"
        }
        return LayerPast(entries, {name: own for name, own in lists.items() if own})


class OwnCacheLayer:
    """One layer during its turn in the walk over a pack, with its past on the pack's paths.

    `kept` are nodes that later packs hold; `given` are the paths that roots begin after.
    """

    def __init__(
        self,
        own: OwnCache,
        index: int,
        layer: nn.Module,
        tree: Tree,
        *,
        kept: Collection[int] = (),
        given: Mapping[int, Path] | None = None,
    ) -> None:
        self._own, self._index, self._layer, self._tree = own, index, layer, tree
        self._paths: PathStates[Path] = PathStates(tree, lambda path: path, kept=kept, given=given)
        self._joined: list[tuple[Path, LayerPast]] = []  # of the paths used last
        self._runs: list[NodeRun] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._joined.clear()

    def chunk(self, start: int, end: int) -> None:
        """The next output is that of the pack's tokens `start:end`."""
        self._runs = node_runs(self._tree, start, end)

    def output(self, rows: Tensor, tokens: Tensor) -> Tensor:
        """The layer's output for a chunk's rows [1, n, hidden]; `tokens` int64 are all of the pack's."""
        start = self._runs[0].start
        parts = [self._run(run, rows[:, run.start - start : run.end - start], tokens) for run in self._runs]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def end_of(self, node: int) -> tuple[LayerPast]:
        """The part that a kept node's tokens have added."""
        path = self._paths.end_of(node)
        length = self._tree.offsets[node + 1] - self._tree.offsets[node]
        return (own_part(joined(path, self._own.device), length),)

    def _run(self, run: NodeRun, rows: Tensor, tokens: Tensor) -> Tensor:
        path = self._paths.before(run) or ()
        past = fork_past(self._join(path)) if path else LayerPast()
        parts = []
        for start, end in self._own.pieces(int(self._tree.depths[run.start]), run.tokens):
            piece = rows[:, start:end]
            out, past = self._own.call(self._index, self._layer, piece, tokens, self._tree, run.start + start, past)
            parts.append(out)
        if self._paths.needed(run):
            longer = lengthened(path, own_part(past, run.tokens))
            self._remember(longer, past)
            self._paths.after(run, longer)
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _join(self, path: Path) -> LayerPast:
        for known, past in self._joined:
            if known is path:
                return past
        past = joined(path, self._own.device)
        self._remember(path, past)
        return past

    def _remember(self, path: Path, past: LayerPast) -> None:
        self._joined = [(path, past), *self._joined[: JOINED_PATHS - 1]]


def has_forest_attention(model: PreTrainedModel) -> bool:
    """Return whether a model's layers call the forest attention."""
    found: bool = model.config.get_text_config()._attn_implementation == ATTENTION
    return found


def set_own_attention(model: PreTrainedModel) -> None:
    """Give a model the fastest attention of transformers that it has."""
    with suppress(ValueError):
        model.set_attn_implementation("sdpa")
    if has_forest_attention(model):
        set_eager_attention(model)


def set_eager_attention(model: PreTrainedModel) -> None:
    model.set_attn_implementation("eager")
    if has_forest_attention(model):  # some have no other, and only their masks go by this name
        model.config.get_text_config()._attn_implementation = "eager"


def _blank_cache(ends: ModelEnds) -> Cache:
    # The cache that the model makes where none is given.
    token = torch.zeros(1, dtype=torch.long)
    calls = ends.record(token, token.numpy(), use_cache=True).calls
    found = next((value for args, kwargs in calls for value in _caches([args, kwargs])), None)
    if found is None:
        raise UnsupportedModelError("its layers keep nothing of earlier tokens in a cache of transformers")
    return found


def score_heads(model: PreTrainedModel) -> int:
    """The number of heads whose scores a layer's attention has in memory; 1 where there is only one mask for all."""
    config = model.config.get_text_config()
    if config._attn_implementation == "sdpa":
        return 1
    return int(getattr(config, "num_attention_heads", None) or 1)


def _caches(value: Any) -> Iterator[Cache]:
    if isinstance(value, Cache):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _caches(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _caches(each)


def _entry_numbers(layer: nn.Module, index: int) -> list[int]:
    # The numbers of a decoder layer's entries in a cache: a layer that attends twice has two.
    numbers = {getattr(module, "layer_idx", None) for module in layer.modules()}
    return sorted(number for number in numbers if isinstance(number, int)) or [index]


def _read_before(blank: Any, tokens: int) -> Any:
    # An entry like `blank` that reports this many tokens.
    entry = copy.deepcopy(blank)
    if isinstance(entry, CacheLayerMixin):
        nothing = torch.zeros(1, 1, 1, 1).expand(1, 1, tokens, 1)
        entry.update(nothing, nothing)
    if isinstance(entry, LinearAttentionCacheLayerMixin):
        entry.has_previous_state = dict.fromkeys(entry.has_previous_state, True)
    return entry
