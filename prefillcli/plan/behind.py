"""What is read after prompts: the token sequences of their labels, as branches of the forest.

A label of one token needs nothing after its prompt. Of a longer one all tokens but the last are computed after it,
and each token is read where the one before it ends. Labels that begin alike share these tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from prefillcli.plan.pack import Pack
from prefillcli.plan.trie import TokenArray, TrieNode, build_forest, forest_tokens, token_order
from prefillcli.stats.labels import read_out

#: For each label the token ids whose probabilities it sums.
LabelTokens = tuple[tuple[int, ...], ...]
FloatArray = npt.NDArray[np.float64]
#: How the probabilities of a label's spellings become its own: their sum; that of the likeliest one; that of the only
#: one among those of all labels, where the model has no other answers; or their mean by rank, where all labels have
#: the same ones, of which a label's first counts 1 and its last 0.
Rule = Literal["sum", "best", "alone", "rating"]


class AnsweringHead(Protocol):
    """What answers a question by a hidden state of the model; a `prefillcli.engines.base.LeavingRule`. It can be
    pickled."""

    @property
    def digest(self) -> str:
        """Return what distinguishes it from others."""

    @property
    def layers(self) -> tuple[int, ...]:
        """Return the one layer that it reads."""

    @property
    def reads_logits(self) -> bool: ...
    def peeks(self, layer: int) -> bool: ...
    def decide(self, layer: int, readings: Any) -> tuple[npt.NDArray[np.bool_], FloatArray]: ...


@dataclass(frozen=True, eq=False)
class LabelSet:
    """The token sequences of each label after a prompt. It can be pickled, and equal ones are equal keys.

    `spellings` has for each label its spellings, int32 [tokens] each. A label's probability is the sum of theirs
    unless the `rule` says otherwise, and a spelling's is the product over its tokens. Outputs of a head stand for
    tokens: ~number is the complement of an output. With `by_token` the numbers of single tokens are wanted too.
    `sizes` are what the labels' log-probabilities are divided by for their scores; None: they are not. `text_bytes`
    are those of the one text that is its label, in UTF-8, and `text_words` its words; 0: it has labels of all rows.
    `texts` are the labels of a row that has its own. With `likeliest` there are no labels: as many of the vocabulary's
    likeliest tokens are read. With `pointers` the one sequence is the end of the prompt, and one token more. Each
    label is read after this many of its tokens, by a head that compares that place with the prompt's end. `weights`
    say how a question's options follow from the labels (`stats.labels.read_out`). With a `head` the
    labels' numbers are that head's.
    """

    spellings: tuple[tuple[TokenArray, ...], ...]
    by_token: bool = False
    sizes: tuple[float, ...] | None = None
    text_bytes: int = 0
    text_words: int = 0
    texts: tuple[str, ...] = ()
    likeliest: int = 0
    pointers: tuple[int, ...] = ()
    rule: Rule = "sum"
    weights: tuple[tuple[float, ...], ...] = ()
    head: AnsweringHead | None = None

    @classmethod
    def of(cls, tokens: Sequence[Sequence[int | Sequence[int]]]) -> LabelSet:
        """Labels by the tokens, or sequences of tokens, of each of their spellings."""
        return cls(tuple(tuple(np.array(each, np.int32).reshape(-1) for each in own) for own in tokens))

    @classmethod
    def behind(cls, tokens: Sequence[int]) -> LabelSet:
        """The set of a prompt with these tokens after it, of which no answer is needed."""
        return cls.of([[[*tokens, 0]]])

    def __len__(self) -> int:
        return self.likeliest or len(self.pointers) or len(self.spellings)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, LabelSet) and self.key == other.key)

    def __hash__(self) -> int:
        return hash(self.key)

    @cached_property
    def key(self) -> tuple[object, ...]:
        """Everything that distinguishes it from others."""
        return (tuple(tuple(each.tobytes() for each in own) for own in self.spellings), *self._rest)

    @property
    def _rest(self) -> tuple[object, ...]:
        rule = self.rule if self.rule != "sum" else None
        every = (self.text_bytes, self.texts, self.likeliest, self.pointers, rule, self.weights)
        own = [each for each in every if each] + ([] if self.head is None else [self.head.digest])
        return (self.by_token, self.sizes, *own)

    def pointed(self, tokens: TokenArray, pointers: Sequence[int]) -> LabelSet:
        """The same labels, read after these numbers of `tokens`, the end of a prompt."""
        sequence = np.append(tokens, np.int32(0))  # the last one is not computed
        return replace(self, spellings=((sequence,),), pointers=tuple(pointers))

    def answered_by(self, head: AnsweringHead, answers: int | None) -> LabelSet:
        """The labels of a question that a head answers. Without the number of its `answers` they can also be read
        after the prompt, where the model answers too."""
        own = self if answers is None else LabelSet.of([[number] for number in range(answers)])
        return replace(own, head=head)

    def with_texts(self, texts: Sequence[str]) -> LabelSet:
        """The same with the texts of the labels."""
        return replace(self, texts=tuple(texts))

    @cached_property
    def sequences(self) -> list[TokenArray]:
        """The spellings of all labels, one after the other."""
        return [each for own in self.spellings for each in own]

    @cached_property
    def single(self) -> LabelTokens | None:
        """The tokens of labels that are read at their prompt's last token alone; None for others. Where a label is no
        sum they are read one by one."""
        if self.by_token or self.pointers or any(len(each) != 1 for each in self.sequences):
            return None
        if self.rule != "sum":
            return tuple((token,) for token in self._places)
        return tuple(tuple(int(each[0]) for each in own) for own in self.spellings)

    @cached_property
    def _places(self) -> dict[int, int]:
        # Of each token that is read one by one, its place among these.
        return {token: at for at, token in enumerate(dict.fromkeys(int(each[0]) for each in self.sequences))}

    @cached_property
    def first(self) -> LabelTokens:
        """The first token of each spelling."""
        return self.single or tuple(tuple(dict.fromkeys(int(each[0]) for each in own)) for own in self.spellings)

    def as_lists(self) -> list[object]:
        """Everything that distinguishes it from others, for JSON."""
        return [[[each.tolist() for each in own] for own in self.spellings], *self._rest]

    @cached_property
    def tokens(self) -> int:
        """The tokens that are computed after a prompt."""
        behind = [each[:-1] for each in self.sequences if len(each) > 1]
        if len(behind) < 2:
            return sum(map(len, behind))
        return forest_tokens(build_forest(behind, token_order(behind)))

    @cached_property
    def depth(self) -> int:
        """The most tokens of a label before its last one, which follow a prompt's last one."""
        return max((len(each) - 1 for each in self.sequences), default=0)

    @cached_property
    def least_depth(self) -> int:
        """The fewest tokens of a label before its last one."""
        return min((len(each) - 1 for each in self.sequences), default=0)

    def within(self, depth: int) -> LabelSet:
        """The spellings with at most `depth` tokens before their last one, token by token."""
        short = tuple(tuple(each for each in own if len(each) <= depth + 1) for own in self.spellings)
        return replace(self, spellings=short, by_token=True, sizes=None)

    def logprobs(self, values: FloatArray) -> FloatArray:
        """The labels' log-probabilities, float64 [labels], from those of the tokens of all `sequences`. They are not
        divided yet."""
        ends = np.cumsum([len(each) for each in self.sequences])
        sums = np.array([values[end - len(each) : end].sum() for each, end in zip(self.sequences, ends, strict=True)])
        ends = np.cumsum([len(own) for own in self.spellings])
        found = [sums[end - len(own) : end] for own, end in zip(self.spellings, ends, strict=True)]
        return np.array([np.logaddexp.reduce(own) for own in found])

    def places(self, rows: npt.NDArray[np.int64]) -> Places:
        """Return where it is read, by the `rows` in which the tokens of all `sequences` are: each of them, or the
        `pointers` and the end."""
        tokens = np.concatenate(self.sequences)
        at = [*self.pointers, -1] if self.pointers else slice(None)
        return Places(rows[at], tokens[at])

    def ruled(self, values: FloatArray) -> FloatArray:
        """The labels' log-probabilities or logits [labels], by those of what is read: of the labels, or of the single
        tokens that the `rule` makes labels of."""
        if self.rule == "sum":
            return values
        by_label = [values[[self._places[int(each[0])] for each in own]] for own in self.spellings]
        if self.rule != "rating":
            best = np.array([own.max() for own in by_label])
            return best - np.logaddexp.reduce(best) if self.rule == "alone" else best
        # The means are of the spellings' shares, and all labels together keep the spellings' mass.
        heat = 1.0 if self.sizes is None else self.sizes[0]
        total, mass = np.logaddexp.reduce(values / heat), np.logaddexp.reduce(values)
        means = [np.linspace(1.0, 0.0, len(own)) @ np.exp(own / heat - total) for own in by_label]
        with np.errstate(divide="ignore"):
            return np.asarray(np.log(means) + mass, np.float64)

    def shares(self, divided: FloatArray, temperature: float) -> FloatArray:
        """The probabilities of the question's options, by the labels' log-probabilities [labels] that were
        `divided`."""
        return read_out(divided, temperature, self.weights)

    def divided(self, values: FloatArray) -> FloatArray:
        """Log-probabilities [labels] divided by the labels' `sizes`, by those of what is read (`ruled`)."""
        found = self.ruled(values)
        return found if self.sizes is None or self.rule == "rating" else found / self.sizes

    def whole(self, divided: FloatArray) -> FloatArray:
        """The log-probabilities [labels] that were `divided`."""
        return divided if self.sizes is None or self.rule == "rating" else divided * self.sizes


class Places(NamedTuple):
    """The places where the tokens of a label set's `sequences` are read, and these tokens: both [tokens].

    `rows` count the tokens that are read for a prompt: 0 is its last token, the others are after it.
    """

    rows: npt.NDArray[np.int64]
    tokens: TokenArray


def with_labels(pack: Pack, labels: Callable[[int], LabelSet]) -> tuple[Pack, Mapping[int, Places]]:
    """A pack with the tokens of its prompts' labels after them, and for each prompt the places of these labels.

    Prompts whose labels are all single tokens have no places; without others it is the same pack.
    """
    sets = {prompt: labels(prompt) for prompt in pack.prompts}
    if all(each.single is not None for each in sets.values()):
        return pack, {}
    branches, made = {}, dict[tuple[int, ...], _Branches]()
    for node, prompts in pack.reads:  # nearly all of which have the same labels
        own_sets = [sets[prompt] for prompt in prompts]
        key = tuple(map(id, own_sets))
        if key not in made:
            made[key] = _Branches(own_sets)
        branches[node] = made[key]
    places = {
        prompt: sets[prompt].places(rows)
        for node, prompts in pack.reads
        for prompt, rows in zip(prompts, branches[node].rows, strict=True)
        if sets[prompt].single is None
    }
    runs: list[TokenArray] = []
    positions: list[TokenArray] = []
    starts: list[int] = []
    parents: list[int] = []
    number: dict[int, int] = {-1: -1}
    behind: dict[int, tuple[int, ...]] = {}
    for node, parent in enumerate(pack.parents):
        own = slice(pack.offsets[node], pack.offsets[node + 1])
        number[node] = len(runs)
        runs.append(pack.tokens[own])
        positions.append(pack.positions[own])
        starts.append(pack.starts[node])
        parents.append(number[parent])
        if node in branches:
            first, depth, last = len(runs), pack.starts[node] + len(runs[-1]), int(positions[-1][-1])
            for above, start, tokens in branches[node].nodes:
                runs.append(tokens)
                positions.append(np.arange(last + 1 + start, last + 1 + start + len(tokens), dtype=np.int32))
                starts.append(depth + start)
                parents.append(number[node] if above < 0 else first + above)
            behind[node] = tuple(range(first, len(runs)))
    attach: list[tuple[int, ...]] = [()] * len(runs)
    for node, held in enumerate(pack.attach):
        attach[number[node]] = held
    longer = replace(
        pack,
        tokens=np.concatenate(runs),
        positions=np.concatenate(positions),
        offsets=[0, *np.cumsum([len(run) for run in runs]).tolist()],
        starts=starts,
        parents=parents,
        attach=attach,
        reads=[(number[node], prompts) for node, prompts in pack.reads],
        behind=tuple(behind[node] for node, _ in pack.reads),
        moved=number,
    )
    return longer, places


class _Branches:
    """What the labels of prompts with the same last token have after it, each shared beginning once.

    `nodes` are (node above or -1, tokens before it, its tokens), depth first; `rows` are the `Places.rows` of each
    set.
    """

    def __init__(self, sets: Sequence[LabelSet]) -> None:
        found = {each[:-1].tobytes(): each[:-1] for own in sets for each in own.sequences if len(each) > 1}
        sequences = list(found.values())
        self.nodes: list[tuple[int, int, TokenArray]] = []
        rows: dict[bytes, npt.NDArray[np.int64]] = {b"": np.zeros(1, np.int64)}
        read = 1  # the prompt's own last token is row 0
        stack: list[tuple[TrieNode, int, npt.NDArray[np.int64]]] = [
            (root, -1, rows[b""]) for root in reversed(build_forest(sequences, token_order(sequences)))
        ]
        while stack:
            node, above, before = stack.pop()
            number = len(self.nodes)
            self.nodes.append((above, node.start, sequences[node.prompt][node.start : node.end]))
            path = np.concatenate([before, np.arange(read, read + node.length)])
            read += node.length
            rows.update((sequences[each].tobytes(), path) for each in node.ending)
            stack.extend((child, number, path) for child in reversed(node.children))
        self.rows = [np.concatenate([rows[each[:-1].tobytes()] for each in own.sequences]) for own in sets]
