"""Packs: the forest cut into pieces that the engine walks one after the other.

A pack is a flat forest in depth-first order: its nodes' tokens stand one after the other, children after their parent.
Prompts of later packs that begin with the same nodes take their K,V from a cache of bounded size, or compute them
again.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from prefillcli.images.image import PlacedImage
from prefillcli.plan.trie import TokenArray


@dataclass(frozen=True, slots=True)
class Limits:
    """The bounds of a pack.

    `tokens` is the intended size; `max_tokens` the most that the memory budget allows, where a held token costs
    `held_cost` computed ones (it keeps every layer's K,V). `held_tokens` is the size of the prefix cache: tokens whose
    K,V may be kept between packs; 0 means that prefixes are computed again. `read_tokens` bounds the tokens that a
    pack's prompts see, each prompt counted whole; a longer prompt gets its own pack.

    With `whole_nodes` a held node is used whole or not at all, because the kept data are valid only after all of its
    tokens, like the state of a recurrent layer. `node_tokens` is the size of the states at a node's end, in held
    tokens. With `state_step`, nodes with children end at multiples of it.

    With `whole_images` no held block ends among the features of an image: these see one another.

    Prompts longer than `switch` tokens, if it is not 0, share nothing with shorter ones (`plan.marked_positions`).

    Texts can be written after prompts of packs that keep the K,V of all layers. `kept_tokens` is the size of such a
    pack, as `kept_size` counts it; 0: nothing is kept. With `kept_packs` packs are no larger than that, unless a
    single prompt is. `kept_held_tokens` is the prefix cache beside them, and `kept_end` the size of the states after a
    prompt, in kept tokens. While texts are written, memory holds the K,V of at most `written_tokens` tokens: those of
    the prompts before the texts, and of the texts.
    """

    tokens: int
    max_tokens: int
    held_tokens: int = 0
    held_cost: float = 0.0
    read_tokens: int | None = None
    whole_nodes: bool = False
    node_tokens: int = 0
    state_step: int = 0
    whole_images: bool = False
    switch: int = 0
    kept_tokens: int = 0
    kept_packs: bool = False
    kept_held_tokens: int = 0
    kept_end: float = 0.0
    written_tokens: int = 0

    def held_size(self, lengths: Iterable[int]) -> int:
        """The part of `held_tokens` that nodes of these lengths take."""
        return sum(length + self.node_tokens for length in lengths)

    def kept_size(self, tokens: int, ends: int) -> float:
        """The part of `kept_tokens` that a pack takes: this many tokens, held ones included, if prompts end at `ends`
        nodes."""
        return tokens + ends * self.kept_end

    @property
    def row_tokens(self) -> float:
        """The size of a row that a text continues, beside its tokens: its states after the prompt, those that it
        continues from, and those that they are made from."""
        return 3 * self.kept_end

    @property
    def reads_again(self) -> bool:
        """Return whether packs are as large as without texts, and wanted prompts are read again."""
        return self.kept_tokens > 0 and not self.kept_packs

    def can_keep(self, pack: Pack) -> bool:
        """Return whether the K,V of all layers of this pack can be kept, if it was made for that."""
        return 0 < self.kept_size(pack.held_tokens + len(pack.tokens), len(pack.reads)) <= self.kept_tokens

    def for_texts(self) -> Limits:
        """The limits of packs that can be kept, unless a prompt is too long."""
        if not self.kept_tokens:
            return self
        return replace(
            self,
            tokens=min(self.tokens, self.kept_tokens),
            held_tokens=min(self.held_tokens, self.kept_held_tokens),
            kept_packs=True,
        )


# The name of held K,V: the pack that computed a node and its number there, or the key of a block.
Key = tuple[int, int] | str


@dataclass(frozen=True, slots=True)
class Held:
    """A node whose K,V come from an earlier pack: `length` tokens, with `start` tokens before them on their path.

    They begin at token `offset` of the K,V kept under `key`; the pack of number `pack` computes these. Tokens that
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
    """One pass over the model. Nodes are in depth-first order; all arrays have one entry per node.

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
    keep: frozenset[Key] = frozenset()  # its own keys and held nodes whose K,V later packs hold
    # The key of the only node of a pack without reads: a block, or a node that another worker needs too.
    block: Key | None = None
    variant: str | None = None  # the variant of the model that computes it; None: the model itself
    # For each read the nodes after it, in order, whose tokens are read for the same prompts; empty: there are none.
    behind: tuple[tuple[int, ...], ...] = ()
    # The numbers of its own nodes before others were put after them, by which `keep` has them; empty: unchanged.
    moved: Mapping[int, int] = field(default_factory=dict)
    # Prompts that are longer than `Limits.switch` only with their longer labels: the pack reads them as long ones, and
    # these packs, of one prompt each, as short ones for the other labels.
    shorter: Mapping[int, Pack] = field(default_factory=dict)
    # The images that its tokens have features of, and maybe others.
    images: tuple[PlacedImage, ...] = ()

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
        """The packs that compute the held nodes."""
        return {node.pack for node in self.held}

    @property
    def kept_nodes(self) -> dict[int, Key]:
        """The pack's own nodes whose K,V later packs hold, with their keys."""
        if self.block is not None:
            return {0: self.block}
        own = (key for key in self.keep if not isinstance(key, str))
        return {self.moved.get(key[1], key[1]): key for key in own if key[0] == self.index}

    def behind_read(self, read: int) -> tuple[int, ...]:
        """The nodes after a read, of this number, whose tokens are read too."""
        return self.behind[read] if self.behind else ()

    def renumbered(self, numbers: Sequence[int]) -> Pack:
        """The same pack with these numbers of its prompts, by the ones they have."""
        reads = [(node, tuple(numbers[prompt] for prompt in prompts)) for node, prompts in self.reads]
        shorter = {numbers[prompt]: pack.renumbered(numbers) for prompt, pack in self.shorter.items()}
        return replace(self, reads=reads, shorter=shorter)

    def shifted(self, by: int) -> Pack:
        """The same pack with its number and those of the packs that it needs raised."""
        held = tuple(replace(node, key=_shifted(node.key, by), pack=node.pack + by) for node in self.held)
        keep = frozenset(_shifted(key, by) for key in self.keep)
        return replace(self, index=self.index + by, held=held, keep=keep)


def _shifted(key: Key, by: int) -> Key:
    return key if isinstance(key, str) else (key[0] + by, key[1])


# Packs that stand alone: they bring packs that compute their held K,V, for a worker without these.


@dataclass(frozen=True, slots=True)
class FreePack:
    """A pack that any worker can compute.

    Each of the `refills` computes one node that the pack holds, after the nodes before it. It runs if the worker does
    not have the node's K,V.
    """

    pack: Pack
    refills: tuple[Pack, ...] = ()


def free_packs(packs: Sequence[Pack]) -> Iterator[FreePack]:
    """The packs of a plan, given ones first, that answer prompts, each as one that stands alone."""
    by_index = {pack.index: pack for pack in packs}
    for pack in packs:
        if pack.reads:
            pack = without_idle(pack)
            keys = pack.keep | {node.key for node in pack.held}
            refills = refills_of(pack, lambda key: alone(key, by_index))
            yield FreePack(pack, tuple(replace(refill, keep=keys) for refill in refills))


def refills_of(pack: Pack, source: Callable[[Key], Pack | None]) -> list[Pack]:
    """Packs that compute the nodes that `pack` holds for its own prompts, those nearer to the root first.

    `source` gives the pack that has computed a node, or None if that is not needed. The node is computed after the
    nodes of its path that this pack holds: another key may hold the same tokens by now, if they were computed again
    for a prompt.
    """
    paths: dict[Key, tuple[Held, ...]] = {}
    for above in pack.attach:
        nodes = [pack.held[number] for number in above]
        for at, node in enumerate(nodes):
            paths.setdefault(node.key, tuple(replace(each, charged=False) for each in nodes[:at]))
    found = []
    for node in sorted({node.key: node for node in pack.held}.values(), key=lambda node: node.start):
        refill = source(node.key) if node.key in paths else None
        if refill is not None and not isinstance(node.key, str):
            path = paths[node.key]
            refill = replace(refill, held=path, attach=[tuple(range(len(path)))])
        if refill is not None:
            found.append(refill)
    return found


def groups_of(packs: Iterable[FreePack]) -> Iterator[list[FreePack]]:
    """Neighbouring packs that hold K,V of one another, in groups."""
    group: list[FreePack] = []
    kept: set[Key] = set()
    for each in packs:
        if group and kept.isdisjoint(node.key for node in each.pack.held):
            yield group
            group, kept = [], set()
        group.append(each)
        kept |= each.pack.keep
    if group:
        yield group


def without_idle(pack: Pack) -> Pack:
    """The pack without the nodes that it holds only for later packs."""
    used = sorted({number for above in pack.attach for number in above})
    numbers = {number: at for at, number in enumerate(used)}
    attach = [tuple(numbers[number] for number in above) for above in pack.attach]
    return replace(pack, attach=attach, held=tuple(pack.held[number] for number in used))


def with_own_prefix(pack: Pack, without: Container[Key], sources: Mapping[Key, Pack]) -> Pack:
    """A pack of at most one read that holds no node of these keys and none below them: it computes them itself.

    `sources` has by key the pack that has computed only that node.
    """
    above = [pack.held[number] for number in pack.attach[0]]
    kept = next((at for at, node in enumerate(above) if node.key in without), len(above))
    if kept == len(above):
        return pack
    spans = [(sources[node.key], node.offset, node.offset + node.length) for node in above[kept:]]
    tokens = [*(source.tokens[start:end] for source, start, end in spans), pack.tokens]
    positions = [*(source.positions[start:end] for source, start, end in spans), pack.positions]
    longer = sum(end - start for _, start, end in spans)
    return replace(
        pack,
        tokens=np.concatenate(tokens),
        positions=np.concatenate(positions),
        offsets=[0, *(offset + longer for offset in pack.offsets[1:])],
        starts=[pack.starts[0] - longer, *pack.starts[1:]],
        attach=[tuple(range(kept)), *pack.attach[1:]],
        held=tuple(above[:kept]),
        images=tuple(dict.fromkeys([*pack.images, *(own for source, _, _ in spans for own in source.images)])),
    )


def alone(key: Key, packs: dict[int, Pack]) -> Pack:
    """A pack that computes only the block or node held under `key`."""
    if isinstance(key, str):
        return next(pack for pack in packs.values() if pack.block == key)
    index, number = key
    source = packs[index]
    path = []
    step = source.parents[number]
    top = number
    while step >= 0:
        length = source.offsets[step + 1] - source.offsets[step]
        path.append(Held((index, step), index, source.starts[step], length))
        step, top = source.parents[step], step
    before = tuple(replace(source.held[at], charged=False) for at in source.attach[top]) + tuple(reversed(path))
    tokens = slice(source.offsets[number], source.offsets[number + 1])
    return Pack(
        index=index,
        tokens=source.tokens[tokens],
        positions=source.positions[tokens],
        offsets=[0, tokens.stop - tokens.start],
        starts=[source.starts[number]],
        parents=[-1],
        attach=[tuple(range(len(before)))],
        reads=[],
        held=before,
        block=key,
        variant=source.variant,
        images=source.images,
    )


# A pack split into smaller ones, for a device whose memory it does not fit.


WORTH = 0.9  # a half with a larger share of the tokens does not pay for computing the common prefix twice
NO_INDEX = -1  # the index of packs outside a plan: they keep nothing of their own


def split_pack(pack: Pack, most: int) -> list[Pack]:
    """Packs that together answer and keep the same as `pack`, of at most `most` tokens each where that pays.

    First each node that later packs hold is computed alone, and the rest reads it. Prefixes that several of the other
    packs share are computed in each of them. A prompt is never split, nor is a pack of which no smaller part is much
    smaller.
    """
    if len(pack.tokens) <= most or not pack.reads:
        return [pack]
    reads = sorted(range(len(pack.reads)), key=lambda read: pack.reads[read][0])
    parts = _halved(pack, reads, set(pack.kept_nodes), most)
    return [pack] if len(pack.kept_nodes) + len(parts) == 1 else _behind_kept(pack, parts)


def isolated_reads(pack: Pack) -> list[Pack]:
    """Packs that together answer and keep the same as `pack`, of one read each."""
    return _behind_kept(pack, [_part(pack, [read], set(pack.kept_nodes)) for read in range(len(pack.reads))])


def _behind_kept(pack: Pack, parts: Sequence[Pack]) -> list[Pack]:
    # The parts below each node that later packs hold, which is computed alone. All keep the same nodes as the pack.
    stays = pack.keep | {node.key for node in pack.held}
    first = [replace(alone(key, {pack.index: pack}), keep=stays) for _, key in sorted(pack.kept_nodes.items())]
    return [*first, *_charged_once([replace(part, keep=stays) for part in parts])]


def _halved(pack: Pack, reads: Sequence[int], kept: set[int], most: int) -> list[Pack]:
    # Packs for these reads, in the order of their nodes.
    whole = _part(pack, reads, kept)
    if len(whole.tokens) <= most or len(reads) == 1:
        return [whole]
    sizes = np.cumsum([pack.offsets[pack.reads[read][0] + 1] - pack.offsets[pack.reads[read][0]] for read in reads])
    middle = min(max(int(np.searchsorted(sizes, sizes[-1] / 2, side="right")), 1), len(reads) - 1)
    halves = [_halved(pack, part, kept, most) for part in (reads[:middle], reads[middle:])]
    if max(len(part.tokens) for half in halves for part in half) > WORTH * len(whole.tokens):
        return [whole]
    return [part for half in halves for part in half]


def _part(pack: Pack, reads: Sequence[int], kept: set[int]) -> Pack:
    # A pack that answers these reads of a pack whose nodes `kept` are held.
    needed: set[int] = set()
    for read in reads:
        node = pack.reads[read][0]  # computed in any case: K,V alone give no answer
        while node >= 0 and node not in needed:
            needed.add(node)
            parent = pack.parents[node]
            node = -1 if parent in kept else parent
    nodes = sorted(needed)
    number = {node: at for at, node in enumerate(nodes)}
    spans = [(pack.offsets[node], pack.offsets[node + 1]) for node in nodes]
    held = list(pack.held)
    place: dict[int, int] = {}
    for node in sorted(kept):
        place[node] = len(held)
        length = pack.offsets[node + 1] - pack.offsets[node]
        held.append(Held(pack.kept_nodes[node], pack.index, pack.starts[node], length))

    def above(node: int) -> tuple[int, ...]:
        # The held nodes on the path to a root of the part.
        path: list[int] = []
        while (parent := pack.parents[node]) >= 0:
            path.append(place[parent])
            node = parent
        return (*pack.attach[node], *reversed(path))

    inside = [pack.parents[node] >= 0 and pack.parents[node] not in kept for node in nodes]
    part = Pack(
        index=NO_INDEX,
        tokens=np.concatenate([pack.tokens[start:end] for start, end in spans]),
        positions=np.concatenate([pack.positions[start:end] for start, end in spans]),
        offsets=[0, *np.cumsum([end - start for start, end in spans]).tolist()],
        starts=[pack.starts[node] for node in nodes],
        parents=[number[pack.parents[node]] if own else -1 for node, own in zip(nodes, inside, strict=True)],
        attach=[() if own else above(node) for node, own in zip(nodes, inside, strict=True)],
        reads=[(number[pack.reads[read][0]], pack.reads[read][1]) for read in reads],
        held=tuple(held),
        variant=pack.variant,
        shorter={
            prompt: pack.shorter[prompt] for read in reads for prompt in pack.reads[read][1] if prompt in pack.shorter
        },
        images=pack.images,
    )
    return without_idle(part)


def _charged_once(parts: Sequence[Pack]) -> list[Pack]:
    # The parts, in which the first that reads a charged node is charged for it.
    seen: set[object] = set()
    found = []
    for part in parts:
        names = [(node.key, node.offset) for node in part.held]
        held = [
            replace(node, charged=node.charged and name not in seen)
            for node, name in zip(part.held, names, strict=True)
        ]
        seen.update(names)
        found.append(replace(part, held=tuple(held)))
    return found


# The computed part of a pack, and the prompts it is charged to. Reads may leave between two layers. A node goes on
# until the last read below it has left, and K,V alone take `KEYS_SHARE` of a layer.


KEYS_SHARE = 0.125
#: Upper bounds of the rows that are left below a shared node; larger numbers are the rest.
LIVE_ROWS = (1, 2, 5, 10)


@dataclass(slots=True)
class LayersDone:
    """The layers that each node of a pack went through, int64 [nodes].

    `full` are whole layers; of `keys` only K,V were computed: the last layer, and those that were peeked at.
    `regroupings` counts how often the rest of the pack was laid out anew. `layers` are those of the model.
    """

    full: npt.NDArray[np.int64]
    keys: npt.NDArray[np.int64]
    regroupings: int = 0
    layers: int = 0

    @classmethod
    def none(cls, pack: Pack) -> LayersDone:
        """Nothing of `pack` is computed yet."""
        nodes = len(pack.parents)
        return cls(np.zeros(nodes, dtype=np.int64), np.zeros(nodes, dtype=np.int64))

    @property
    def work(self) -> npt.NDArray[np.float64]:
        """Layers of a token that were computed for each token of a node, float64 [nodes]."""
        return self.full + KEYS_SHARE * self.keys


def in_full(layers: int) -> float:
    """Layers that are computed for a token if no read leaves: of the last layer only K,V."""
    return layers - 1 + KEYS_SHARE


def carried_by_few(pack: Pack, through: Sequence[int | None], layers: int) -> dict[str, int]:
    """The work on shared nodes after some of their rows have left: layers of a token, by the rows that were left below
    the node.

    It counts whole layers of nodes that several rows share, once some of these have left. Nodes that later packs hold
    do not count, because they go on for others. Read k leaves after `through[k]` layers, or never (None).
    A model has `layers`.
    """
    alive = np.zeros((len(pack.parents), layers - 1), dtype=np.int64)  # rows below a node at each layer
    rows = np.zeros(len(pack.parents), dtype=np.int64)
    for (node, prompts), count in zip(pack.reads, through, strict=True):
        alive[node, :count] += len(prompts)
        rows[node] += len(prompts)
    for node in range(len(pack.parents) - 1, -1, -1):
        if pack.parents[node] >= 0:
            alive[pack.parents[node]] += alive[node]
            rows[pack.parents[node]] += rows[node]
    for node in pack.kept_nodes:
        while node >= 0:
            alive[node] = 0
            node = pack.parents[node]
    tokens = np.broadcast_to(np.diff(pack.offsets)[:, None], alive.shape)
    fewer = (alive > 0) & (alive < rows[:, None])
    bucket = np.searchsorted(LIVE_ROWS, alive[fewer])
    sums = np.bincount(bucket, weights=tokens[fewer], minlength=len(LIVE_ROWS) + 1)
    least = [1, *(most + 1 for most in LIVE_ROWS[:-1])]
    names = [str(a) if a == b else f"{a}-{b}" for a, b in zip(least, LIVE_ROWS, strict=True)]
    return dict(zip([*names, f">{LIVE_ROWS[-1]}"], sums.astype(int).tolist(), strict=True))


# Charging of a pack's tokens: every computed token to one prompt, its time to all prompts that share it.


@dataclass(frozen=True, slots=True)
class Account:
    """A prompt's part of a pack.

    `shared_tokens` of its tokens were computed once for several prompts. `computed_tokens` add up to the pack's and
    its `charged_tokens`: a shared token is counted with the first prompt that reads it. `share` is the prompt's part
    of the pack's time (adds up to 1), a shared token's cost divided among its prompts. `skipped` are the layers of a
    token that exits have spared, counted like `computed_tokens`. K,V that were computed twice are subtracted, so the
    number may be negative for a pack that hardly any read has left.
    """

    prompt: int
    shared_tokens: int
    computed_tokens: int
    share: float
    skipped: float = 0.0


def account(
    pack: Pack, done: LayersDone | None = None, behind: Callable[[int], int] = lambda prompt: 0
) -> list[Account]:
    """One account for each prompt answered in `pack`. `done` says which layers of it were computed, by default all.
    `behind` gives the tokens after a prompt that are read for it."""
    below = [0] * len(pack.parents)
    for node, prompts in pack.reads:
        below[node] += len(prompts)
    for node in range(len(below) - 1, -1, -1):
        if pack.parents[node] >= 0:
            below[pack.parents[node]] += below[node]
    lengths = [b - a for a, b in zip(pack.offsets[:-1], pack.offsets[1:], strict=True)]
    work, spared = _work(done, lengths)
    further = pack.kept_nodes  # later packs' prompts share them too
    shared = [0] * len(below)  # tokens from the root to the node that several prompts share
    fair = [0.0] * len(below)
    for node, parent in enumerate(pack.parents):
        held = sum(pack.held[number].length for number in pack.attach[node])
        inherited = (shared[parent], fair[parent]) if parent >= 0 else (held, 0.0)
        shared[node] = inherited[0] + (lengths[node] if below[node] > 1 or node in further else 0)
        fair[node] = inherited[1] + work[node] / max(below[node], 1)
    charged: set[int] = set()
    charged_above: set[int] = set()  # held nodes
    accounts = []
    for read, (node, prompts) in enumerate(pack.reads):
        own = list(pack.behind_read(read))
        left = sum(lengths[number] for number in own)
        costs, spare = (sum(each[number] for number in own) for each in (work, spared))
        most = sum(map(behind, prompts)) if own else 0
        for prompt in prompts:
            computed = min(behind(prompt), left) if own else 0  # the first prompts pay for tokens that they share
            left -= computed
            part = behind(prompt) / most if most else 0.0
            skipped = spare * part
            step = node
            while step >= 0 and step not in charged:
                charged.add(step)
                computed += lengths[step]
                skipped += spared[step]
                if pack.parents[step] < 0:
                    above = [number for number in pack.attach[step] if pack.held[number].charged]
                    computed += sum(pack.held[number].length for number in above if number not in charged_above)
                    charged_above.update(above)
                step = pack.parents[step]
            accounts.append(Account(prompt, shared[node], computed, fair[node] + costs * part, skipped))
    return accounts


def _work(done: LayersDone | None, lengths: list[int]) -> tuple[list[float], list[float]]:
    # Each node's part of the pack's work, and the layers of a token that it was spared.
    tokens = np.asarray(lengths, dtype=np.float64)
    if done is None:
        return (tokens / tokens.sum()).tolist(), [0.0] * len(lengths)
    work = tokens * done.work
    return (work / work.sum()).tolist(), (tokens * in_full(done.layers) - work).tolist()
