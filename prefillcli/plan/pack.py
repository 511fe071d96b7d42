"""Packs: the forest cut into pieces that the engine walks one after the other.

A pack is a forest in depth-first order, flat: its nodes' tokens stand one after the other, children behind their
parent. Prompts of later packs that begin with the same nodes take their K,V from a cache of bounded size, or compute
them once more.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from prefillcli.plan.trie import TokenArray


@dataclass(frozen=True, slots=True)
class Limits:
    """What fits one pack.

    `tokens` is the size aimed at; `max_tokens` what the memory budget allows at all, where a held token costs
    `held_cost` computed ones (it keeps every layer's K,V). `held_tokens` is the size of the prefix cache: tokens whose
    K,V may be kept between packs; 0 means that prefixes are computed again. `read_tokens` bounds the tokens that a
    pack's prompts see, each prompt counted whole; a prompt that has more gets a pack of its own.

    With `whole_nodes` a held node is used whole or not at all, because what is kept of it is behind all of its tokens,
    like the state of a recurrent layer. `node_tokens` is what the states at a node's end count as, in held tokens.
    With `state_step`, nodes with something behind them end at multiples of it (`state_steps`).

    Prompts longer than `switch` tokens, if it is not 0, share nothing with shorter ones (`long_positions`).

    Behind prompts of packs whose K,V of all layers are kept, texts can be written. `kept_tokens` is the size of such a
    pack, as `kept_size` counts it; 0: nothing is kept. With `kept_packs` packs are made no larger than that where a
    prompt fits. `kept_held_tokens` is the prefix cache beside them, and `kept_end` what the states behind a prompt
    count as, in kept tokens. While texts are written, the K,V of `written_tokens` tokens are there at most: those of
    the prompts that they are written behind, and their own.
    """

    tokens: int
    max_tokens: int
    held_tokens: int = 0
    held_cost: float = 0.0
    read_tokens: int | None = None
    whole_nodes: bool = False
    node_tokens: int = 0
    state_step: int = 0
    switch: int = 0
    kept_tokens: int = 0
    kept_packs: bool = False
    kept_held_tokens: int = 0
    kept_end: float = 0.0
    written_tokens: int = 0

    def held_size(self, lengths: Iterable[int]) -> int:
        """What nodes of these lengths take of `held_tokens`."""
        return sum(length + self.node_tokens for length in lengths)

    def kept_size(self, tokens: int, ends: int) -> float:
        """What a pack takes of `kept_tokens`: so many tokens, held ones included, if prompts end at `ends` nodes."""
        return tokens + ends * self.kept_end

    @property
    def row_tokens(self) -> float:
        """What a row that is written on counts as, beside its tokens: its states behind the prompt, those that it goes
        on from, and those that they are made of."""
        return 3 * self.kept_end

    @property
    def reads_again(self) -> bool:
        """Whether packs are as large as if no text was written, and prompts that are wanted are read once more."""
        return self.kept_tokens > 0 and not self.kept_packs

    def can_keep(self, pack: Pack) -> bool:
        """Whether the K,V of all layers of this pack can be kept, if it was made for packs that are."""
        return 0 < self.kept_size(pack.held_tokens + len(pack.tokens), len(pack.reads)) <= self.kept_tokens

    def for_texts(self) -> Limits:
        """The limits of packs that can be kept, all but those of prompts that are too long."""
        if not self.kept_tokens:
            return self
        return replace(
            self,
            tokens=min(self.tokens, self.kept_tokens),
            held_tokens=min(self.held_tokens, self.kept_held_tokens),
            kept_packs=True,
        )


Key = tuple[int, int] | str
"""What K,V are held by: the pack that computed a node and its number there, or the key of a block."""


@dataclass(frozen=True, slots=True)
class Held:
    """A node whose K,V come from an earlier pack: `length` tokens, with `start` tokens before them on their path.

    They are those from `offset` on of what is kept under `key`; the pack of number `pack` computes that. Tokens that
    are `charged` were computed for the first prompt here that reads them.
    """

    key: Key
    pack: int
    start: int
    length: int
    offset: int = 0
    charged: bool = False


@dataclass(slots=True)
class Pack:
    """One pass over the model. Nodes are in depth-first order; all arrays have one entry a node.

    `tokens` int32 [n] are the tokens to compute, node after node: node i is `tokens[offsets[i]:offsets[i + 1]]`, with
    `starts[i]` tokens before it on its path; `positions` int32 [n] are their positions in the whole prompt.
    `parents[i]` is a node's number, or -1 for a root, which sees the held nodes `attach[i]`, root first.
    `reads[k] = (node, prompts)`: at the end of this node these prompts are answered; in the order of the schedule.
    """

    index: int
    tokens: TokenArray
    positions: TokenArray
    offsets: list[int]
    starts: list[int]
    parents: list[int]
    attach: list[tuple[int, ...]]
    reads: list[tuple[int, tuple[int, ...]]]
    held: tuple[Held, ...] = ()
    keep: frozenset[Key] = frozenset()
    """Keys of the nodes, held or its own, whose K,V later packs hold."""
    block: Key | None = None
    """What the only node is held by, where nothing is read: a block, or a node that another worker needs too."""
    adapter: str | None = None
    """The adapter that the model computes it with; None: the model itself."""

    @property
    def prompts(self) -> list[int]:
        """The prompts answered here."""
        return [prompt for _, prompts in self.reads for prompt in prompts]

    @property
    def held_tokens(self) -> int:
        """Tokens whose K,V come from earlier packs."""
        return sum(node.length for node in self.held)

    @property
    def charged_tokens(self) -> int:
        """Tokens of earlier packs that are charged to prompts of this one."""
        return sum(node.length for node in self.held if node.charged)

    @property
    def needs(self) -> set[int]:
        """The packs that compute what is held."""
        return {node.pack for node in self.held}

    @property
    def kept_nodes(self) -> dict[int, Key]:
        """The pack's own nodes whose K,V later packs hold, with their keys."""
        if self.block is not None:
            return {0: self.block}
        own = (key for key in self.keep if not isinstance(key, str))
        return {key[1]: key for key in own if key[0] == self.index}

    def shifted(self, by: int) -> Pack:
        """The same pack with its number and those of the packs that it needs raised."""
        held = tuple(replace(node, key=_shifted(node.key, by), pack=node.pack + by) for node in self.held)
        keep = frozenset(_shifted(key, by) for key in self.keep)
        return replace(self, index=self.index + by, held=held, keep=keep)


def _shifted(key: Key, by: int) -> Key:
    return key if isinstance(key, str) else (key[0] + by, key[1])
