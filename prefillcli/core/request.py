"""A prompt as the model reads it, and the answer of an engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from prefillcli.engines.base import PLAIN, Answer, EarlyAnswer, PlanEngine, Treatment
from prefillcli.errors import ResourceError
from prefillcli.plan.blocks import CarriedBlock
from prefillcli.plan.pack import Limits, Pack
from prefillcli.plan.plan import Plan, make_plan
from prefillcli.plan.trie import token_order
from prefillcli.rows.input.selection import Selection
from prefillcli.rows.records import FALLBACK, FULL, Prompt, ScoredRow, Window, early_exit_method, head_method
from prefillcli.stats.arrays import Int32Array, Int64Array

if TYPE_CHECKING:
    from prefillcli.walk.continuations import Beginning, Writing
    from prefillcli.walk.walk import ThinningRule

Tick = Callable[[float], None]
"""Called with the tokens that a step has advanced by; it may raise to stop."""


class Thinning(ABC):
    """The way in which the model itself drops tokens of a prompt while it reads it."""

    keep: float
    """The share of the tokens that its last layers read, besides those that they always read."""
    alone: bool
    """Whether it chooses for each prompt separately: the last layers then hold shared tokens once for each prompt."""

    @abstractmethod
    def most_kept(self, tokens: int) -> int:
        """Return how many of a prompt's tokens the last layers read, at most."""

    @abstractmethod
    def rule(self, thinnings: Mapping[int, Thinning]) -> ThinningRule:
        """Return the rule for prompts that are planned together. `thinnings` has the prompts to thin, by their numbers
        in the plan."""


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt that the target answers, and how it reads that prompt.

    `kept` are the indices of the tokens it reads, ascending, which are their positions too; None: all of them. With a
    `thinning` it reads all at first. `method` is the output's word for it: `full`, the name of a picker, or
    `fallback:` with a reason.
    """

    prompt: Prompt
    kept: Int64Array | None = None
    method: str = FULL
    pick_seconds: float = 0.0
    """The prompt's share of the time that picking took."""
    thinning: Thinning | None = None
    text: tuple[Writing, Beginning] | None = None
    """The way to write a text after the prompt, and how it begins; None: no text is written."""
    take: Callable[[Answer | None], None] | None = None
    """For a question about a scored row, this receives the answer; None: there is no answer."""
    required: bool = False
    """Whether a scored row without an answer to it is an error row."""
    early: EarlyAnswer | None = None
    """Of an audited prompt, the answer that it would have without the model."""

    @property
    def tokens(self) -> Int32Array:
        """The token ids that the target reads, int32 [kept]."""
        return self.prompt.tokens if self.kept is None else self.prompt.tokens[self.kept]

    @property
    def size(self) -> int:
        """The number of tokens computed for it: those that are read, and its labels' after them."""
        return len(self.tokens) + self.prompt.labels.tokens

    @property
    def positions(self) -> Int32Array | None:
        """Their positions, int32 [kept]; None where these are 0, 1, 2, ..."""
        if self.prompt.positions is not None:
            return self.prompt.positions if self.kept is None else self.prompt.positions[self.kept]
        return None if self.kept is None else self.kept.astype(np.int32)

    @property
    def compressed(self) -> bool:
        """True if some of the prompt's tokens are left out."""
        return self.kept is not None or self.thinning is not None

    @property
    def most_kept(self) -> int:
        """The most tokens that the last layers read: some chosen ones may be among those that are kept anyway."""
        tokens = len(self.tokens)
        return tokens if self.thinning is None else self.thinning.most_kept(tokens)


TokenReason = Literal["first", "last", "chosen", "shared", "dropped", "full"]
"""Why a token is kept or dropped."""


@dataclass(frozen=True, slots=True)
class ReadPrompt:
    """The model's reading of a prompt, the importance of its tokens (None without a draft), and why each of them is
    kept.

    `voters` are the draft's layers that voted, by their numbers from 0. `in_full` is the reason why a prompt that
    might have been compressed is read in full.
    """

    request: Request
    importance: npt.NDArray[np.float32] | None
    why: list[TokenReason]
    voters: tuple[int, ...] = ()
    in_full: str | None = None

    @classmethod
    def whole(cls, prompt: Prompt, why: str | None = None) -> ReadPrompt:
        """A prompt that is read in full."""
        return cls(Request(prompt), None, ["full"] * len(prompt.whole), in_full=why)


def plan_requests(
    requests: Sequence[Request],
    limits: Limits,
    *,
    carried: Sequence[CarriedBlock] = (),
    block_tokens: int = 0,
) -> Plan:
    """Plan the tokens that the target reads. `carried` and `block_tokens` as in `make_plan`.

    Where the target drops tokens itself, nothing is held from pack to pack: its last layers have no K,V of a whole
    prefix.
    """
    if any(request.thinning is not None for request in requests):
        return _joined(requests, limits)
    return make_plan(
        [request.tokens for request in requests],
        limits,
        positions=[request.positions for request in requests],
        variants=planned_variants(requests),
        labels=[each.prompt.labels for each in requests],
        images=[each.prompt.images for each in requests],
        carried=carried,
        block_tokens=block_tokens,
    )


def planned_variants(requests: Sequence[Request]) -> list[str | None]:
    """Return the variants that read the questions."""
    return [each.prompt.variant for each in requests]


def thinning_of(requests: Mapping[int, Request]) -> ThinningRule | None:
    """Return the rule by which the model drops tokens of these questions, by their numbers in a plan; None if it drops
    none."""
    own = {number: each.thinning for number, each in requests.items() if each.thinning is not None}
    return next(iter(own.values())).rule(own) if own else None


def method_of(request: Request, answer: Answer) -> str:
    """Return how the target has read a prompt: by the question's method, unless it should have dropped tokens itself
    and did not."""
    thinned = answer.thinned
    if request.thinning is None or (thinned is not None and len(thinned.kept) < len(request.tokens)):
        return request.method
    return FULL if thinned is None or thinned.reason is None else FALLBACK + thinned.reason


def kept_tokens(request: Request, answer: Answer) -> int:
    """Return how many tokens of a prompt went through all layers."""
    if answer.thinned is not None:
        return len(answer.thinned.kept)
    return len(request.prompt.whole) if request.kept is None else len(request.kept)


def answer_requests(
    engine: PlanEngine,
    requests: Sequence[Request],
    tick: Tick = lambda tokens: None,
    treatment: Treatment = PLAIN,
) -> list[Answer]:
    """Return the engine's answer to each question; `tick` and `treatment` as in `Engine.answer`.

    Raises ResourceError if the engine cannot go on.
    """
    found: dict[int, Answer] = {}
    plan = plan_requests(requests, engine.limits)
    treatment = replace(treatment, thinning=thinning_of(dict(enumerate(requests))))
    for answers in engine.answer_all(plan.packs, lambda i: requests[i].prompt.labels, tick, treatment):
        found |= {each.prompt: each for each in require_answered(answers)}
    return [found[number] for number in range(len(requests))]


def require_answered(answers: Sequence[Answer]) -> Sequence[Answer]:
    """Return the answers. Raises ResourceError if memory has run out on one of the prompts."""
    for each in answers:
        if each.failure is not None:
            raise ResourceError(each.failure)
    return answers


def _joined(requests: Sequence[Request], limits: Limits) -> Plan:
    """Return the plans of groups that share no pack, one after the other."""
    packs: list[Pack] = []
    unique = behind = 0
    limits = replace(limits, held_tokens=0)
    for group, own in _groups(requests, limits):
        some = [requests[number] for number in group]
        plan = make_plan(
            [request.tokens for request in some],
            own,
            positions=[request.positions for request in some],
            variants=planned_variants(some),
            labels=[each.prompt.labels for each in some],
        )
        for pack in plan.packs:
            packs.append(pack.renumbered(group).shifted(len(packs) - pack.index))
        unique += plan.unique_tokens
        behind += plan.behind_tokens
    return Plan(packs, unique, behind_tokens=behind)


def _groups(requests: Sequence[Request], limits: Limits) -> Iterator[tuple[list[int], Limits]]:
    """Yield the numbers of questions that may share packs, and the limits of these.

    A prompt that is read both ways is in two groups: one pack computes a prompt once. Where each row chooses for
    itself, rows of another rate, or without one, are apart too. The last layers then hold shared tokens once for each
    row, so groups are small enough for that to fit.
    """
    thinned = {request.prompt.row for request in requests if request.thinning is not None}
    twins = [n for n, each in enumerate(requests) if each.thinning is None and each.prompt.row in thinned]
    apart = set(twins)
    ordinary = [number for number in range(len(requests)) if number not in apart]
    if not any(each.thinning is not None and each.thinning.alone for each in requests):
        yield ordinary, limits
    else:
        rates: dict[float | None, list[int]] = {}
        for number in ordinary:
            own = requests[number].thinning
            rates.setdefault(None if own is None else own.keep, []).append(number)
        for rate, numbers in rates.items():
            yield from [(numbers, limits)] if rate is None else _small_groups(requests, numbers, limits)
    if twins:
        yield twins, limits


def _small_groups(
    requests: Sequence[Request], numbers: Sequence[int], limits: Limits
) -> Iterator[tuple[list[int], Limits]]:
    """Yield groups of questions. Their tokens fit half of the memory before thinning and the other half after it,
    where each question has its own. Questions too long for that are alone. Those that begin alike are together."""
    half = limits.max_tokens // 2
    small = replace(limits, tokens=min(limits.tokens, half), max_tokens=half)
    group: list[int] = []
    kept = 0
    for at in token_order([requests[number].tokens for number in numbers]):
        request = requests[numbers[at]]
        if request.size > half:
            yield [numbers[at]], limits
            continue
        own = request.most_kept + request.prompt.labels.tokens
        if group and kept + own > half:
            yield sorted(group), small
            group, kept = [], 0
        group.append(numbers[at])
        kept += own
    if group:
        yield sorted(group), small


# The choice of compressed rows that are also read in full, for the audit.


_SEED = 20_261


class AuditDraw:
    """Draws `rows` random rows of the `selection` from `total`, window by window: the same ones every time.

    Each window gives its share of the rows; one that has fewer candidates makes the draw smaller.
    """

    def __init__(self, rows: int, selection: Selection, total: int) -> None:
        self._rows = rows
        self._selection = selection
        self._total = max(selection.count(total), 1)

    def draw(self, window: Window, candidates: Sequence[int]) -> list[int]:
        """Draw the share of `window` from the `candidates` (any numbers)."""
        quota = self._before(int(window.rows[-1]) + 1) - self._before(int(window.rows[0]))
        return draw(candidates, quota, window.index)

    def _before(self, row: int) -> int:
        """Return the number of rows that are drawn before this one."""
        return -(-self._rows * self._selection.before(row) // self._total)


def draw(candidates: Sequence[int], count: int, number: int) -> list[int]:
    """Draw `count` of the candidates or all of them, ascending, seeded by `number`."""
    if count <= 0:
        return []
    order = np.random.default_rng([_SEED, number]).permutation(len(candidates))[:count]
    return [candidates[at] for at in sorted(order.tolist())]


def scored_row(request: Request, answer: Answer, *, audited: bool = False) -> ScoredRow:
    """Return a row scored by an answer. An `audited` one has two results: the one an exit would have given, and the
    full read's."""
    logprobs, layer, audit = answer.logprobs, answer.exit_layer, None
    if audited:
        audit = answer.logprobs
        if (early := request.early or answer.early) is not None:
            layer, logprobs = early
    method = method_of(request, answer)
    if layer is not None:
        by_head = request.prompt.labels.head is not None
        method = head_method(method) if by_head else early_exit_method(method, layer)
    return ScoredRow(
        row=request.prompt.row,
        logprobs=logprobs,
        shared_tokens=answer.shared_tokens,
        computed_tokens=answer.computed_tokens,
        kept_tokens=kept_tokens(request, answer),
        seconds=answer.seconds + request.pick_seconds,
        method=method,
        exit_layer=None if layer is None else layer + 1,
        audit=audit,
        by_token=answer.by_token,
        tokens=answer.tokens,
        next=answer.next,
    )
