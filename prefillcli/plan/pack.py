"""Packs: the forest cut into pieces that the engine walks one after the other.

A pack is a forest in depth-first order, flat: its nodes' tokens stand one after the other, children behind their
parent. A tree that is larger than one pack goes on in the next one, which takes the K,V of the path they share
(`held` tokens, positions 0 to `held`) from the pack before or computes that path once more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from prefillcli.plan.trie import TokenArray, TrieNode

HELD_PACKS = 16
"""Packs after which a shared path is computed again instead of held: what a resumed run may have to repeat."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What fits one pack.

    `tokens` is the size aimed at; `max_tokens` what the memory budget allows at all, where a held token costs
    `held_cost` computed ones (it keeps every layer's K,V). `held_tokens` is the longest path whose K,V may be kept
    between packs; 0 means the path is computed again. `read_tokens` bounds the tokens that a pack's prompts see, each
    prompt counted whole; a prompt that has more gets a pack of its own.
    """

    tokens: int
    max_tokens: int
    held_tokens: int = 0
    held_cost: float = 0.0
    read_tokens: int | None = None


@dataclass(slots=True)
class Pack:
    """One pass over the model. Nodes are in depth-first order; all arrays have one entry a node.

    `tokens` int32 [n] are the tokens to compute, node after node: node i is `tokens[offsets[i]:offsets[i + 1]]`, with
    `starts[i]` tokens before it on its path; `positions` int32 [n] are their positions in the whole prompt.
    `parents[i]` is a node's number, or -1 for a root, which sees the first `attach[i]` held tokens.
    `reads[k] = (node, prompts)`: at the end of this node these prompts are answered.
    """

    index: int
    tokens: TokenArray
    positions: TokenArray
    offsets: list[int]
    starts: list[int]
    parents: list[int]
    attach: list[int]
    reads: list[tuple[int, tuple[int, ...]]]
    held: int = 0  # tokens whose K,V come from an earlier pack
    needs: tuple[int, ...] = ()  # the packs that computed them
    hold_attach: int = 0  # of the held tokens, how many the next pack goes on using ...
    hold_nodes: tuple[int, ...] = ()  # ... and the nodes below them, root first

    @property
    def prompts(self) -> list[int]:
        """The prompts answered here."""
        return [prompt for _, prompts in self.reads for prompt in prompts]


@dataclass(slots=True)
class _Draft:
    """A pack being filled."""

    nodes: dict[int, int] = field(default_factory=dict)  # id(TrieNode) -> number in the pack
    order: list[TrieNode] = field(default_factory=list)
    reads: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    tokens: int = 0
    read_tokens: int = 0
    held: list[TrieNode] = field(default_factory=list)  # path whose K,V come from earlier packs

    @property
    def held_length(self) -> int:
        return self.held[-1].end if self.held else 0


def cut_packs(
    roots: Sequence[TrieNode],
    prompts: Sequence[TokenArray],
    limits: Limits,
    positions: Sequence[TokenArray | None],
) -> list[Pack]:
    """Fill packs with the forest in depth-first order. `positions` as in `make_plan`.

    Every prompt of the forest is answered in exactly one pack. A prompt longer than `limits.tokens` gets a pack of
    its own; the caller keeps out prompts longer than `limits.max_tokens`.
    """
    packs: list[Pack] = []
    draft = _Draft()
    computed_in: dict[int, int] = {}  # id(TrieNode) -> pack that computed it last
    for node in _read_nodes(roots):
        path = _path(node)
        if draft.order and not _fits(draft, path, limits):
            held = [n for n in _common_path(draft, path) if n.end <= limits.held_tokens]
            if held and (node.end - held[-1].end) + held[-1].end * limits.held_cost > limits.max_tokens:
                held = []
            if len(packs) % HELD_PACKS == HELD_PACKS - 1:
                held = []
            packs.append(_close(draft, held, len(packs), prompts, positions, computed_in))
            draft = _Draft(held=held)
        held_ids = {id(n) for n in draft.held}
        for step in path:
            if id(step) not in draft.nodes and id(step) not in held_ids:
                draft.nodes[id(step)] = len(draft.order)
                draft.order.append(step)
                draft.tokens += step.length
        draft.reads.append((draft.nodes[id(node)], tuple(node.reads)))
        draft.read_tokens += node.end
    if draft.order:
        packs.append(_close(draft, [], len(packs), prompts, positions, computed_in))
    return packs


def _read_nodes(roots: Sequence[TrieNode]) -> Iterator[TrieNode]:
    """Nodes at which prompts end, in depth-first order."""
    stack = list(reversed(roots))
    while stack:
        node = stack.pop()
        if node.reads:
            yield node
        stack.extend(reversed(node.children))


def _path(node: TrieNode) -> list[TrieNode]:
    """The node and its ancestors, root first."""
    path = [node]
    while path[-1].parent is not None:
        path.append(path[-1].parent)
    return path[::-1]


def _fits(draft: _Draft, path: Sequence[TrieNode], limits: Limits) -> bool:
    if limits.read_tokens is not None and draft.read_tokens + path[-1].end > limits.read_tokens:
        return False
    held = {id(n) for n in draft.held}
    more = sum(n.length for n in path if id(n) not in draft.nodes and id(n) not in held)
    tokens = draft.tokens + more
    # What the next pack may want held is at most the longer of this path and the one held now.
    kept = min(max(draft.held_length, path[-1].start), limits.held_tokens)
    return tokens <= limits.tokens and tokens + kept * limits.held_cost <= limits.max_tokens


def _common_path(draft: _Draft, path: Sequence[TrieNode]) -> list[TrieNode]:
    """The part of `path` that is at hand after the draft: held by it or computed in it."""
    held = {id(n) for n in draft.held}
    common: list[TrieNode] = []
    for node in path:
        if id(node) not in draft.nodes and id(node) not in held:
            break
        common.append(node)
    return common


def _close(
    draft: _Draft,
    keep: Sequence[TrieNode],
    index: int,
    prompts: Sequence[TokenArray],
    positions: Sequence[TokenArray | None],
    computed_in: dict[int, int],
) -> Pack:
    held = {id(n) for n in draft.held}
    offsets = [0]
    for node in draft.order:
        offsets.append(offsets[-1] + node.length)
    needs = tuple(sorted({computed_in[id(n)] for n in draft.held}))
    for node in draft.order:
        computed_in[id(node)] = index
    parents, attach = [], []
    for node in draft.order:
        inside = node.parent is not None and id(node.parent) in draft.nodes
        parents.append(draft.nodes[id(node.parent)] if inside else -1)
        attach.append(node.start if not inside and node.parent is not None else 0)
    kept_held = [n for n in keep if id(n) in held]
    return Pack(
        index=index,
        tokens=np.concatenate([prompts[n.prompt][n.start : n.end] for n in draft.order]),
        positions=np.concatenate([_positions(n, positions[n.prompt]) for n in draft.order]),
        offsets=offsets,
        starts=[n.start for n in draft.order],
        parents=parents,
        attach=attach,
        reads=draft.reads,
        held=draft.held_length,
        needs=needs,
        hold_attach=kept_held[-1].end if kept_held else 0,
        hold_nodes=tuple(draft.nodes[id(n)] for n in keep if id(n) not in held),
    )


def _positions(node: TrieNode, positions: TokenArray | None) -> TokenArray:
    if positions is None:
        return np.arange(node.start, node.end, dtype=np.int32)
    return positions[node.start : node.end]
