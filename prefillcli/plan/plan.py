"""The prompts that wait to be computed, and the choice of the next ones by a schedule."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from prefillcli.images.image import FIRST_FEATURE, PlacedImage
from prefillcli.plan import SCHEDULES, WaitingPrompts
from prefillcli.plan.behind import LabelSet, with_labels
from prefillcli.plan.blocks import (
    NO_COVER,
    Block,
    CarriedBlock,
    Cover,
    WindowBlocks,
    align_nodes,
    cover_nodes,
    find_blocks,
    order_siblings,
    shared_ends,
)
from prefillcli.plan.pack import NO_INDEX, Held, Key, Limits, Pack
from prefillcli.plan.trie import (
    KeyArray,
    TokenArray,
    TrieNode,
    build_forest,
    dissolve_small_nodes,
    every_node,
    forest_tokens,
    keys_with_positions,
    split_ends,
    token_order,
)


class Queue:
    """Ends of prompts in a forest, in the order of a schedule.

    Prompts that end at the same node are one job, in the place of the first of them. All have arrived before the first
    is taken, so they have waited equally long, and the lambda of PrefillOnly's algorithm 1 changes nothing here. Its
    completion times are the tokens that are not at hand, as in the paper. With `groups`, which have the group of each
    prompt, a group's prompts are taken before those of the next. Raises ValueError for an unknown schedule.
    """

    def __init__(self, roots: Sequence[TrieNode], schedule: str, groups: Sequence[int] = ()) -> None:
        if schedule not in SCHEDULES:
            raise ValueError(f"{schedule!r} is not a schedule: there are {', '.join(SCHEDULES)}")
        by = SCHEDULES[schedule]
        self._calibrated = by.calibrated
        self._places: dict[int, tuple[int, int, int]] = {}  # id(node) -> number, first and last end below, depth first
        ends: list[TrieNode] = []
        stack = [(root, False) for root in reversed(roots)]
        while stack:
            node, below_done = stack.pop()
            if below_done:
                number, first, _ = self._places[id(node)]
                self._places[id(node)] = number, first, len(ends)
                continue
            self._places[id(node)] = len(self._places), len(ends), len(ends)
            if node.ending:
                ends.append(node)
            stack.append((node, True))
            stack.extend((child, False) for child in reversed(node.children))
        order = list(range(len(ends)))
        if (key := by.key) is not None:
            order.sort(key=lambda at: key(WaitingPrompts(min(ends[at].ending), ends[at].end)))
        if groups and (by.key is not None or by.calibrated):
            order.sort(key=lambda at: groups[ends[at].prompt])
        self._jobs: list[TrieNode] = [ends[at] for at in order]
        self._job_of = np.argsort(np.asarray(order, dtype=np.int64))  # of each end, depth first
        self._input = np.asarray([node.end for node in self._jobs], dtype=np.float64)
        self._cached = np.zeros(len(ends))
        self._waiting = np.ones(len(ends), dtype=bool)  # ends, depth first
        self._left = len(ends)
        self._next = 0
        self._ends = [len(ends)]  # of the groups among the jobs
        if groups and by.calibrated:
            numbers = [groups[job.prompt] for job in self._jobs]
            self._ends = [at for at in range(1, len(ends)) if numbers[at] != numbers[at - 1]] + [len(ends)]

    def __bool__(self) -> bool:
        return self._left > 0

    def number(self, node: TrieNode) -> int:
        """The node's number in depth-first order."""
        return self._places[id(node)][0]

    def awaits(self, node: TrieNode) -> bool:
        """Return whether a waiting prompt begins with this node."""
        _, first, last = self._places[id(node)]
        return bool(self._waiting[first:last].any())

    def next(self) -> TrieNode:
        """The end of the prompts to compute next."""
        if self._calibrated:
            taken, first = len(self._jobs) - self._left, 0
            for end in self._ends:
                if taken < end:
                    break
                first = end
            self._next = first + int(np.argmin(self._input[first:end] - self._cached[first:end]))
        return self._jobs[self._next]

    def take(self) -> None:
        """The next prompts no longer wait."""
        self._waiting[self._places[id(self._jobs[self._next])][1]] = False
        self._left -= 1
        if self._calibrated:
            self._input[self._next] = np.inf
        else:
            self._next += 1

    def computed(self, nodes: Iterable[TrieNode]) -> None:
        """The pack that is being filled computes these nodes, parents first."""
        if self._calibrated:
            for node in nodes:
                _, first, last = self._places[id(node)]
                self._cached[self._job_of[first:last]] = node.end

    def held(self, nodes: Iterable[TrieNode]) -> None:
        """A new pack begins, with the K,V of these nodes at hand. A prompt that ends at one computes it again."""
        if self._calibrated:
            self._cached[:] = 0
            for node in sorted(nodes, key=lambda node: node.start):
                _, first, last = self._places[id(node)]
                self._cached[self._job_of[first + bool(node.ending) : last]] = node.end


# Packs after which nothing is held and shared prefixes are computed again: the most that a resumed run may have to
# repeat.
HELD_PACKS = 16


def cut_packs(
    queue: Queue,
    prompts: Sequence[TokenArray],
    limits: Limits,
    positions: Sequence[TokenArray | None],
    cover: Cover = NO_COVER,
    variants: Sequence[str | None] | None = None,
    labels: Sequence[LabelSet] = (),
) -> list[Pack]:
    """Fill packs with the prompts of the queue as they come. `positions`, `variants` and `labels` as in `make_plan`.

    Every prompt is answered in exactly one pack. A prompt longer than `limits.tokens` gets its own pack; the
    caller keeps out prompts longer than `limits.max_tokens`. Between packs the prefix cache keeps nodes that waiting
    prompts begin with, the most recently used ones first. Nodes that lie in blocks by `cover` are read from these; a
    block is computed in its own pack before the first pack that reads it, unless it is given.
    """
    return _Cutter(queue, prompts, limits, positions, cover, variants or [None] * len(prompts), labels).cut()


def given_packs(
    blocks: Sequence[Block],
    prompts: Sequence[TokenArray],
    positions: Sequence[TokenArray | None],
    variants: Sequence[str | None],
) -> list[Pack]:
    """The packs of given blocks, the first of a plan, for a run that no longer has their K,V."""
    keep = frozenset(block.key for block in blocks)
    numbers = {block.key: number for number, block in enumerate(blocks)}
    return [_block_pack(block, numbers, keep, prompts, positions, variants) for block in blocks]


class _OpenPack:
    """A pack being filled. It holds the nodes in blocks with which its prompts begin."""

    def __init__(
        self, cover: Cover, limits: Limits, labels: Sequence[LabelSet], held: Sequence[TrieNode] = ()
    ) -> None:
        self._cover = cover
        self._labels = labels
        self.held = {id(node): node for node in held}
        self.held_tokens = limits.held_size(node.length for node in held)  # outside of blocks
        self.added: dict[int, TrieNode] = {}
        self.ends: list[TrieNode] = []
        self.blocks: dict[str, Block] = {}
        self.tokens = 0
        self.read_tokens = 0

    def missing(self, path: Sequence[TrieNode]) -> list[TrieNode]:
        # The nodes of a path to compute: its end in any case, since K,V alone give no answer.
        *above, end = path
        at_hand = (self.added, self.held, self._cover.nodes)
        nodes = [node for node in above if not any(id(node) in each for each in at_hand)]
        return nodes if id(end) in self.added else [*nodes, end]

    def tokens_with(self, path: Sequence[TrieNode]) -> int:
        # Tokens that the pack computes with this prompt.
        return (
            self.tokens
            + sum(node.length for node in self.missing(path))
            + behind_tokens(path[-1].ending, self._labels)
        )

    def kept_with(self, path: Sequence[TrieNode]) -> tuple[int, int]:
        # Tokens of the pack with this prompt, held ones included, and the number of nodes where its prompts end.
        covered = [node for node in path[:-1] if id(node) in self._cover.nodes and id(node) not in self.held]
        new = [*self.missing(path), *covered]
        held = sum(node.length for node in self.held.values())
        own = sum(node.length for node in new) + behind_tokens(path[-1].ending, self._labels)
        return self.tokens + held + own, len(self.ends) + 1

    def add(self, path: Sequence[TrieNode]) -> list[TrieNode]:
        # Take a prompt in; returns the nodes that are computed for it.
        self.tokens = self.tokens_with(path)
        new = self.missing(path)
        self.added.update((id(node), node) for node in new)
        self.held.update((id(node), node) for node in path[:-1] if id(node) in self._cover.nodes)
        self.blocks |= self._cover.blocks_above(path)
        self.ends.append(path[-1])
        self.read_tokens += path[-1].end
        return new


class _Cutter:
    def __init__(
        self,
        queue: Queue,
        prompts: Sequence[TokenArray],
        limits: Limits,
        positions: Sequence[TokenArray | None],
        cover: Cover,
        variants: Sequence[str | None],
        labels: Sequence[LabelSet] = (),
    ) -> None:
        self._queue = queue
        self._labels = labels
        self._prompts = prompts
        self._limits = limits
        self._positions = positions
        self._cover = cover
        self._variants = variants
        self._carried = {block.key for block in cover.blocks.carried}
        self._at_hand = {block.key: block for block in cover.blocks.given}  # as the pack being filled begins
        self._block_packs = {key: number for number, key in enumerate(self._at_hand)}  # the pack that computes each
        self._first_index = len(self._at_hand)
        self._packs: list[Pack] = []
        self._answering = 0  # of these packs
        self._open = _OpenPack(cover, limits, labels)
        self._used: dict[int, int] = {}  # id(node) -> when a prompt used it last, counted in prompts
        self._keys: dict[int, tuple[int, int]] = {}  # id(node) -> the pack that computed it last, and its number there
        self._charged = {id(node) for node in cover.within(self._at_hand)}  # nodes in blocks

    def cut(self) -> list[Pack]:
        taken = 0
        self._queue.held(self._cover.within(self._at_hand))
        while self._queue:
            path = _path(self._queue.next())
            if self._open.added and not self._fits(path):
                path = self._begin_pack()
            self._queue.take()
            self._queue.computed(self._open.add(path))
            taken += 1
            self._used.update((id(node), taken) for node in path)
        if self._open.added:
            self._add_pack([], self._blocks_left())
        return self._packs

    def _fits(self, path: Sequence[TrieNode]) -> bool:
        filled, limits = self._open, self._limits
        if self._variants[path[-1].prompt] != self._variants[filled.ends[0].prompt]:
            return False
        if limits.read_tokens is not None and filled.read_tokens + path[-1].end > limits.read_tokens:
            return False
        tokens = filled.tokens_with(path)
        blocks = self._at_hand | filled.blocks | self._cover.blocks_above(path)
        blocks_held = self._held_size(blocks)
        room = limits.held_tokens - blocks_held
        # Room for the nodes that are held now, and for this path below them.
        above = limits.held_size(node.length for node in path[:-1] if id(node) not in self._cover.nodes)
        held = max(filled.held_tokens, min(above, room)) + blocks_held
        return (
            tokens <= limits.tokens
            and filled.held_tokens <= room
            and self._most(tokens, blocks) + held * limits.held_cost <= limits.max_tokens
            and (not limits.kept_packs or limits.kept_size(*filled.kept_with(path)) <= limits.kept_tokens)
        )

    def _begin_pack(self) -> list[TrieNode]:
        # Close the pack; return the path that the new one begins with.
        blocks = self._blocks_left()
        covered = self._cover.within(blocks)
        keep = self._cache(self._held_size(blocks))
        self._queue.held([*covered, *keep])
        path = _path(self._queue.next())  # with other nodes at hand it may be another one
        while keep and not self._fits_alone(path, keep, blocks):
            keep.remove(next((node for node in reversed(keep) if node not in path), keep[-1]))
        self._queue.held([*covered, *keep])
        self._add_pack(keep, blocks)
        self._at_hand = blocks
        self._open = _OpenPack(self._cover, self._limits, self._labels, keep)
        return path

    def _cache(self, blocks_held: int) -> list[TrieNode]:
        # The nodes whose K,V stay: the most recently used ones first, parents before their children.
        limits, filled = self._limits, self._open
        if self._answering % HELD_PACKS == HELD_PACKS - 1:
            return []
        room = float(limits.held_tokens)
        if limits.held_cost:
            room = min(room, (limits.max_tokens - filled.tokens) / limits.held_cost)
        room -= blocks_held
        useful = [
            node
            for node in (filled.held | filled.added).values()
            if id(node) not in self._cover.nodes and self._queue.awaits(node)
        ]
        useful.sort(key=lambda node: (-self._used[id(node)], node.start))
        keep: list[TrieNode] = []
        kept = set(self._cover.nodes)
        for node in useful:
            size = limits.held_size([node.length])
            if size <= room and (node.parent is None or id(node.parent) in kept):
                keep.append(node)
                kept.add(id(node))
                room -= size
        return keep

    def _fits_alone(self, path: Sequence[TrieNode], held: Sequence[TrieNode], blocks: dict[str, Block]) -> bool:
        filled, limits = _OpenPack(self._cover, self._limits, self._labels, held), self._limits
        tokens = filled.tokens_with(path)
        blocks = blocks | self._cover.blocks_above(path)
        stays = filled.held_tokens + self._held_size(blocks)
        alone, with_held = limits.kept_size(path[-1].end, 1), limits.kept_size(*filled.kept_with(path))
        if limits.kept_packs and alone <= limits.kept_tokens < with_held:
            return False
        most = self._most(tokens, blocks)
        return stays <= limits.held_tokens and most + stays * limits.held_cost <= limits.max_tokens

    def _most(self, tokens: int, blocks: Mapping[str, Block]) -> int:
        # Tokens of the largest pack, if one of `tokens` needs these blocks.
        return max([tokens, *(block.length for key, block in blocks.items() if key not in self._block_packs)])

    def _held_size(self, blocks: Mapping[str, Block]) -> int:
        return self._limits.held_size(block.length for block in blocks.values())

    def _blocks_left(self) -> dict[str, Block]:
        # The blocks that stay at hand after the open pack: later prompts or the next window begin with them.
        awaited = {block.key for node, block in self._cover.nodes.values() if self._queue.awaits(node)}
        return {
            key: block
            for key, block in (self._at_hand | self._open.blocks).items()
            if key in awaited or key in self._carried
        }

    def _add_pack(self, keep: Sequence[TrieNode], blocks: Mapping[str, Block]) -> None:
        # Close the pack, after the packs of the blocks that are computed for it.
        filled = self._open
        held = {self._keys[name] for name in filled.held if name not in self._cover.nodes}
        at_hand = held | self._at_hand.keys()
        for key, block in filled.blocks.items():
            if key not in self._block_packs:
                self._block_packs[key] = self._first_index + len(self._packs)
                at_hand |= {key}
                keep_now, numbers = frozenset(at_hand), self._block_packs
                of_prompts = self._prompts, self._positions, self._variants
                self._packs.append(_block_pack(block, numbers, keep_now, *of_prompts))
        self._packs.append(self._pack(keep, blocks))
        self._answering += 1

    def _pack(self, keep: Sequence[TrieNode], blocks: Mapping[str, Block]) -> Pack:
        filled, index = self._open, self._first_index + len(self._packs)
        nodes = sorted(filled.added.values(), key=self._queue.number)
        numbers = {id(node): number for number, node in enumerate(nodes)}
        at_hand = sorted(filled.held.values(), key=lambda node: id(node) not in self._cover.nodes)  # blocks first
        held_numbers = {id(node): number for number, node in enumerate(at_hand)}
        held = tuple(self._held(node) for node in at_hand)
        self._keys.update((id(node), (index, number)) for number, node in enumerate(nodes))
        parents, attach = [], []
        for node in nodes:
            # A held node may be computed again for a prompt that ends there. The nodes below read the held one: those
            # in the pack that do so already need not follow the new one.
            inside = node.parent is not None and id(node.parent) in numbers and id(node.parent) not in filled.held
            parents.append(numbers[id(node.parent)] if inside else -1)
            above = [] if inside or node.parent is None else _path(node.parent)
            attach.append(tuple(held_numbers[id(each)] for each in above))
        offsets = [0]
        for node in nodes:
            offsets.append(offsets[-1] + node.length)
        return Pack(
            index=index,
            tokens=np.concatenate([self._prompts[node.prompt][node.start : node.end] for node in nodes]),
            positions=np.concatenate([_positions(node, self._positions[node.prompt]) for node in nodes]),
            offsets=offsets,
            starts=[node.start for node in nodes],
            parents=parents,
            attach=attach,
            reads=[(numbers[id(end)], tuple(end.ending)) for end in filled.ends],
            held=held,
            keep=frozenset(self._keys[id(node)] for node in keep) | blocks.keys(),
            variant=self._variants[filled.ends[0].prompt],
        )

    def _held(self, node: TrieNode) -> Held:
        # A held node of the open pack; the first node of a block that was computed for this pack is charged.
        if id(node) not in self._cover.nodes:
            key = self._keys[id(node)]
            return Held(key, key[0], node.start, node.length)
        _, block = self._cover.nodes[id(node)]
        charged = id(node) not in self._charged
        self._charged.add(id(node))
        return Held(
            block.key, self._block_packs[block.key], node.start, node.length, node.start - block.start, charged
        )


def _block_pack(
    block: Block,
    packs: Mapping[str, int],
    keep: frozenset[Key],
    prompts: Sequence[TokenArray],
    positions: Sequence[TokenArray | None],
    variants: Sequence[str | None],
) -> Pack:
    # The pack that computes a block after those before it. `packs` are the numbers of all these blocks' packs.
    *before, _ = block.chain
    return Pack(
        index=packs[block.key],
        tokens=prompts[block.prompt][block.start : block.end],
        positions=_positions(block, positions[block.prompt]),
        offsets=[0, block.length],
        starts=[block.start],
        parents=[-1],
        attach=[tuple(range(len(before)))],
        reads=[],
        held=tuple(Held(each.key, packs[each.key], each.start, each.length) for each in before),
        keep=keep,
        block=block.key,
        variant=variants[block.prompt],
    )


def _path(node: TrieNode) -> list[TrieNode]:
    # The node and its ancestors, root first.
    path = [node]
    while path[-1].parent is not None:
        path.append(path[-1].parent)
    return path[::-1]


def _positions(node: TrieNode | Block, positions: TokenArray | None) -> TokenArray:
    if positions is None:
        return np.arange(node.start, node.end, dtype=np.int32)
    return positions[node.start : node.end]


@dataclass(frozen=True, slots=True)
class Plan:
    """Packs of a window, in the order of the run, and the tokens that they share.

    `unique_tokens` is the size of the trie of all prompts without given blocks: the least that must be computed.
    `behind_tokens`, which it counts too, are those of labels after their prompts; packs do not have them yet.
    `given` are the packs of the blocks that the window before has handed on, which run only if their K,V are lost.
    `carried` are the blocks for the next window.
    """

    packs: list[Pack]
    unique_tokens: int
    given: list[Pack] = field(default_factory=list)
    carried: tuple[CarriedBlock, ...] = ()
    behind_tokens: int = 0

    @property
    def computed_tokens(self) -> int:
        return sum(len(pack.tokens) for pack in self.packs) + self.behind_tokens

    def with_labels(self, labels: Callable[[int], LabelSet]) -> Plan:
        """The same with the tokens of each prompt's labels in the packs, as the layer walk computes them."""
        return replace(self, packs=[with_labels(pack, labels)[0] for pack in self.packs], behind_tokens=0)


def make_plan(
    prompts: Sequence[TokenArray],
    limits: Limits,
    schedule: str = "prefix-tree",
    positions: Sequence[TokenArray | None] | None = None,
    *,
    variants: Sequence[str | None] | None = None,
    labels: Sequence[LabelSet] = (),
    images: Sequence[Sequence[PlacedImage]] = (),
    carried: Sequence[CarriedBlock] = (),
    block_tokens: int = 0,
) -> Plan:
    """Plan `prompts` (token ids each) under `limits`, in the order of one of the `SCHEDULES`.

    `prefix-tree` goes through the trie of the prompts depth first, so that every shared prefix is computed once.
    `fifo` keeps the order given, `srjf` takes short prompts first, `srjf-calibrated` those with the fewest tokens that
    are not at hand: computed in the same pack, or held in the prefix cache. `positions` are ascending, one for each
    token of a prompt; None where they count from 0. Tokens are shared only at the same positions. `variants` name the
    variant that reads each prompt; None: no prompt has one. A pack has prompts of one variant, and the packs of a
    variant come one after the other. `labels` are what is read after each prompt; none: nothing longer than a token.
    A prompt that is longer than `limits.switch` with its longest label is planned as a long one; if it is not with
    its shortest, its pack has another one for the shorter labels (`Pack.shorter`). `images` are those of each prompt;
    none: no prompt has one.

    `carried` are the blocks that the plan of the window before carries. A prefix of at least `block_tokens` at this
    window's end is cut into blocks; with 0 there are none.
    """
    switch = limits.switch
    variants = variants or [None] * len(prompts)
    labels = labels if any(own.tokens for own in labels) else ()
    depths = [own.depth for own in labels] or [0] * len(prompts)
    plain = positions or [None] * len(prompts)
    positions = [
        marked_positions(own, len(tokens), switch, depth)
        for own, tokens, depth in zip(plain, prompts, depths, strict=True)
    ]
    shorter = _shorter_readings(prompts, plain, variants, labels, switch)
    window = _Prompts(prompts, positions, variants, labels)
    blocks = window.blocks(limits, carried, block_tokens)
    roots, cover = window.forest(blocks, limits)
    given = given_packs(blocks.given, prompts, positions, variants)
    packs = cut_packs(Queue(roots, schedule, window.groups), prompts, limits, positions, cover, variants, labels)
    if shorter:
        packs = [replace(pack, shorter=_of(shorter, pack.prompts)) for pack in packs]
    unique = window.unique_tokens - sum(len(pack.tokens) for pack in given)
    following = tuple((block.end, block.key) for block in blocks.carried)
    given, packs = (_with_images(each, images) for each in (given, packs))
    return Plan(packs, unique, given, following, window.behind_tokens)


def _with_images(packs: list[Pack], images: Sequence[Sequence[PlacedImage]]) -> list[Pack]:
    # The packs, each with the images that its tokens have features of.
    placed = {image.first: image for own in images for image in own}
    if not placed:
        return packs
    firsts = np.array(sorted(placed), dtype=np.int64)

    def found(tokens: TokenArray) -> tuple[PlacedImage, ...]:
        features = tokens[tokens >= FIRST_FEATURE]
        numbers = np.unique(np.searchsorted(firsts, features, side="right") - 1)
        return tuple(placed[first] for first in firsts[numbers].tolist())

    def whole(pack: Pack) -> Pack:
        shorter = {prompt: whole(each) for prompt, each in pack.shorter.items()}
        return replace(pack, images=found(pack.tokens), shorter=shorter)

    return [whole(pack) for pack in packs]


def behind_tokens(prompts: Sequence[int], labels: Sequence[LabelSet]) -> int:
    """The tokens after prompts that end alike; a label set that several of them have counts once."""
    return sum(own.tokens for own in {labels[prompt] for prompt in prompts}) if labels else 0


def packs_to_run(plan: Plan, done: Iterable[int], at_hand: Container[Key | None] = ()) -> list[Pack]:
    """The packs that a run still needs: those with a prompt not in `done`, and those whose K,V they hold.

    Given blocks whose keys are `at_hand` are not computed again.
    """
    finished = set(done)
    wanted: set[int] = set()
    packs = [*(pack for pack in plan.given if pack.block not in at_hand), *plan.packs]
    for pack in reversed(packs):
        if pack.index in wanted or not finished.issuperset(pack.prompts):
            wanted.add(pack.index)
            wanted.update(pack.needs)
    return [pack for pack in packs if pack.index in wanted]


class _Prompts:
    """The prompts of a window and their shared prefixes, found once for each set of blocks."""

    def __init__(
        self,
        prompts: Sequence[TokenArray],
        positions: Sequence[TokenArray | None],
        variants: Sequence[str | None],
        labels: Sequence[LabelSet] = (),
    ) -> None:
        self._prompts = prompts
        self._positions = positions
        self._variants = variants
        self._labels = labels
        # The group of each prompt: the prompts of one variant. Empty if there is only one variant.
        self.groups = _groups_of(variants)
        self._keys: Sequence[KeyArray] = prompts
        if any(own is not None for own in positions) or self.groups:
            groups = self.groups or [0] * len(prompts)
            self._keys = [
                keys_with_positions(tokens, own, group)
                for tokens, own, group in zip(prompts, positions, groups, strict=True)
            ]
        self._order = token_order(self._keys)
        if self.groups:
            self._order.sort(key=self.groups.__getitem__)
        roots = build_forest(self._keys, self._order)
        self.behind_tokens = sum(behind_tokens(node.ending, labels) for node in every_node(roots)) if labels else 0
        self.unique_tokens = forest_tokens(roots) + self.behind_tokens
        last = len(prompts) - 1
        self._shared = {
            whole: shared_ends(roots, self._keys, last, whole=whole) if prompts else [] for whole in (False, True)
        }
        alone = dissolve_small_nodes(roots), NO_COVER
        self._forests = {(NO_COVER.blocks.ends, whole, 0, 0): alone for whole in (False, True)} if not labels else {}

    def blocks(self, limits: Limits, carried: Sequence[CarriedBlock], block_tokens: int) -> WindowBlocks:
        # The blocks that fit within the limits beside any single prompt.
        if not block_tokens or not limits.held_tokens or not self._prompts:
            return WindowBlocks()
        if limits.whole_images and any((self._prompts[at] >= FIRST_FEATURE).any() for at in (0, -1)):
            return WindowBlocks()  # it costs a shared prefix once more in each window
        room = float(limits.held_tokens)
        if limits.held_cost:
            room = min(room, (limits.max_tokens - max(map(len, self._prompts))) / limits.held_cost)
        shared = self._shared[limits.whole_nodes]
        ends = self._variants[0], self._variants[-1]
        return find_blocks(self._prompts, self._positions, shared, int(room), carried, block_tokens, limits, ends)

    def forest(self, blocks: WindowBlocks, limits: Limits) -> tuple[list[TrieNode], Cover]:
        # The forest with small nodes dissolved, split at the ends of blocks; with `whole_nodes` each block is one
        # node, and with a `state_step` nodes are aligned to it.
        whole, step, room = limits.whole_nodes, limits.state_step, limits.tokens // 2 if self._labels else 0
        name = blocks.ends, whole, step, room
        if name not in self._forests:
            roots = build_forest(self._keys, self._order)
            cover = cover_nodes(roots, self._keys, blocks, whole=whole)
            if step:
                align_nodes(roots, step)
            roots = dissolve_small_nodes(roots, fixed=cover.nodes)
            order_siblings(roots, cover)
            if room:
                split_ends(roots, self._tokens_behind, room, fixed=cover.nodes, whole=step > 0)
            self._forests[name] = roots, cover
        return self._forests[name]

    def _tokens_behind(self, prompts: Sequence[int]) -> int:
        return behind_tokens(prompts, self._labels)


def _groups_of(variants: Sequence[str | None]) -> list[int]:
    # Numbers of the variants, one for each prompt, in the order in which they read; empty if there is one. The first
    # prompt's comes first and the last prompt's last: so the prefixes that these share with other windows are held
    # only for a short time.
    names = list(dict.fromkeys(variants))
    if len(names) < 2:
        return []
    if variants[-1] != names[0]:
        names.remove(variants[-1])
        names.append(variants[-1])
    numbers = {name: number for number, name in enumerate(names)}
    return [numbers[name] for name in variants]


# Prompts that a model reads with other position encodings than shorter ones.
#
# Some rotary encodings (longrope) encode all positions of a prompt in another way if it is longer than a limit. The
# positions of such a prompt's tokens are marked. So these prompts share prefixes with one another but not with shorter
# ones, and any piece of a pack shows which kind it is. The answer that is read after a prompt counts too. A prompt
# whose answers lie on both sides of the limit is read in both ways.


LONG = 1 << 30  # is added to the positions of such prompts


def marked_positions(positions: TokenArray | None, tokens: int, switch: int, behind: int = 0) -> TokenArray | None:
    """The positions of a prompt of this many tokens (None: 0, 1, 2, ...), marked if it is longer than `switch`.

    A prompt that has lost tokens is as long as its last position says; this many tokens `behind` it count too. With
    `switch` 0 no prompt is marked.
    """
    last = (tokens - 1 if positions is None else int(positions[-1])) + behind
    if not switch or last < switch:
        return positions
    own = np.arange(tokens, dtype=np.int32) if positions is None else positions.astype(np.int32)
    return own + np.int32(LONG)


def _shorter_readings(
    prompts: Sequence[TokenArray],
    positions: Sequence[TokenArray | None],
    variants: Sequence[str | None],
    labels: Sequence[LabelSet],
    switch: int,
) -> dict[int, Pack]:
    # For each prompt that is longer than `switch` only with its longer labels, the pack that reads it without a mark.
    found = {}
    for number, (tokens, own, labelled) in enumerate(zip(prompts, positions, labels, strict=False)):
        last = len(tokens) - 1 if own is None else int(own[-1])
        if last + labelled.least_depth < switch <= last + labelled.depth:
            found[number] = Pack(
                index=NO_INDEX,
                tokens=tokens,
                positions=np.arange(len(tokens), dtype=np.int32) if own is None else own.astype(np.int32),
                offsets=[0, len(tokens)],
                starts=[0],
                parents=[-1],
                attach=[()],
                reads=[(0, (number,))],
                variant=variants[number],
            )
    return found


def _of(shorter: Mapping[int, Pack], prompts: Iterable[int]) -> dict[int, Pack]:
    return {prompt: shorter[prompt] for prompt in prompts if prompt in shorter}
