"""The interface between a job and an engine."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar, cast

import numpy as np
import numpy.typing as npt

from prefillcli.engines.memory_plan import REDUCED as REDUCED
from prefillcli.engines.memory_plan import Measured
from prefillcli.errors import UsageError, did_you_mean
from prefillcli.models.open import Opened
from prefillcli.options.engines import ENGINES
from prefillcli.options.groups import LayerOptions, MemoryOptions
from prefillcli.options.settings import JobSettings
from prefillcli.plan.behind import LabelSet
from prefillcli.plan.pack import Key, Limits, Pack
from prefillcli.plan.trie import TokenArray
from prefillcli.rows.records import NextTokens, ReadTokens
from prefillcli.runtime.extras import light_imports
from prefillcli.walk.continuations import Beginning, Continuation, DecodingReport, Writing

if TYPE_CHECKING:
    from prefillcli.models.law import TextsOf
    from prefillcli.models.weights import WeightsPlan
    from prefillcli.walk.draft_model import DraftModel
    from prefillcli.walk.walk import Arithmetic, ThinningRule


@dataclass(frozen=True, slots=True)
class Readings:
    """Readings of some rows after a layer, at the last token of each prompt.

    `hidden` is the residual stream, float32 [rows, hidden]. `logits` are the labels' logits when the model's own norm
    and head read it, float64 [rows, labels], with the variants of a label summed in probability; `before` are those of
    the layer's input. Both are NaN for a rule that does not look at them.
    """

    hidden: npt.NDArray[np.float32]
    logits: npt.NDArray[np.float64]
    before: npt.NDArray[np.float64]

    def row(self, number: int) -> Readings:
        """The readings of one row alone."""
        own = slice(number, number + 1)
        return Readings(self.hidden[own].copy(), self.logits[own].copy(), self.before[own].copy())


class LeavingRule(Protocol):
    """Decides which prompts leave after which layers, numbered from 0. It can be pickled."""

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers after which prompts may leave, ascending."""

    @property
    def reads_logits(self) -> bool:
        """Return whether it looks at the labels' logits beside the hidden states."""

    def peeks(self, layer: int) -> bool:
        """Return whether only the prompts' last tokens go through the layer before the decision."""

    def decide(self, layer: int, readings: Readings) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.float64]]:
        """The rows that leave after a layer [rows], and their label log-probabilities among the labels alone [rows,
        labels]."""


@dataclass(frozen=True, slots=True)
class EarlyExits:
    """The layers after which prompts are read.

    Prompts with a rule leave after its layers once they are decided. Those `in_full` go on to the end all the same,
    and their answers hold the early answers too. Without `rules` all prompts go on, and their answers hold the
    readings of the `observed` layers. Where readings are `shown`, the answers hold those of rules, too.
    """

    rules: Mapping[int, LeavingRule] = field(default_factory=dict)
    in_full: frozenset[int] = frozenset()
    observed: tuple[int, ...] = ()
    shown: bool = False

    def of(self, prompts: Collection[int]) -> EarlyExits:
        """The exits of these prompts alone."""
        rules = {prompt: rule for prompt, rule in self.rules.items() if prompt in prompts}
        return replace(self, rules=rules, in_full=self.in_full.intersection(prompts))


class Continuations(Protocol):
    """The choice of a pack's prompts that are written on. It can be pickled."""

    @property
    def writing(self) -> Writing: ...
    @property
    def again(self) -> bool:
        """Return whether the prompts were scored before, and are read once more for their texts."""

    def wanted(self, answers: Sequence[Answer]) -> Mapping[int, Beginning]:
        """The texts to write after these prompts, by prompt."""

    def of(self, prompts: Collection[int]) -> Continuations:
        """The continuations of these prompts alone."""


@dataclass(frozen=True, slots=True)
class Treatment:
    """The work on the prompts of a pack, beside reading their labels. It can be pickled.

    Engines that read layer by layer let prompts leave as `exits` say. `thinning` chooses the tokens of prompts that
    go no further. `continuations` chooses the prompts that are written on, and how. This many `next_tokens` are given,
    the likeliest after each prompt.
    """

    exits: EarlyExits | None = None
    thinning: ThinningRule | None = None
    continuations: Continuations | None = None
    next_tokens: int = 0

    def of(self, prompts: Collection[int]) -> Treatment:
        """The treatment of these prompts alone."""
        exits, thinning, texts = self.exits, self.thinning, self.continuations
        return replace(
            self,
            exits=None if exits is None else exits.of(prompts),
            thinning=None if thinning is None else thinning.of(prompts),
            continuations=None if texts is None else texts.of(prompts),
        )


PLAIN = Treatment()  # every prompt goes through all layers as it is, and nothing is written


class ThinnedPrompt(NamedTuple):
    """The part of a prompt that went on: the indices of its tokens, int32 [kept], ascending.

    `reason` says why all of them went on although some should not have.
    """

    kept: npt.NDArray[np.int32]
    reason: str | None = None


class EarlyAnswer(NamedTuple):
    """The answer of a prompt that leaves after a layer: label log-probabilities among the labels alone, float64
    [labels]."""

    layer: int
    logprobs: npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Answer:
    """The engine's answer to one prompt, and its cost.

    `logprobs` are the label log-probabilities over the whole vocabulary, float64 [labels], divided by the labels'
    sizes where their set has some; those of a prompt that has left after `exit_layer` are among the labels alone.
    `early` is the early answer of a prompt that was read in full. Over all answers, `computed_tokens` and `seconds`
    add up to the engine's work, `skipped` to the work that exits spared it, in layers of a token, and `full_seconds`
    to the time without exits. `shared_tokens` of the prompt were computed once for several prompts. The cost of a
    block is in the answers of the packs that read it first.
    `readings` are those of the observed layers, or those that are shown, with one row each. `thinned` is the part that
    went on of a prompt that may lose tokens. `continuation` is the text written after the prompt, if it was wanted and
    there was room.
    `by_token` has the numbers of single tokens, of a label set that wants them. `tokens` are the likeliest ones, the
    likeliest first, of a label set that asks for these; `logprobs` are theirs. `next` has those that the treatment
    asks for, as far as the engine knows them.
    `failure` says why there is no answer: memory ran out on this prompt alone. Then `logprobs` are NaN.
    """

    prompt: int
    logprobs: npt.NDArray[np.float64]
    shared_tokens: int
    computed_tokens: int
    seconds: float
    exit_layer: int | None = None
    early: EarlyAnswer | None = None
    skipped: float = 0.0
    full_seconds: float = 0.0
    readings: tuple[Readings, ...] = ()
    thinned: ThinnedPrompt | None = None
    continuation: Continuation | None = None
    by_token: ReadTokens | None = None
    tokens: npt.NDArray[np.int64] | None = None
    next: NextTokens | None = None
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class WeightsReport:
    """The way in which an engine keeps its weights, and the cost of reading them while packs ran.

    `bytes` are those of the whole model in its dtype, `memory_bytes` those on the device at a time, at most.
    `weights_over_memory` is `bytes` over all memory of the device. In `seconds_waited` nothing was computed, because a
    layer was still being read. With `own_cache` the layers are called with the model's own attention and cache.
    `quantisation` says for people how weights were quantised, and whether they are kept packed. `avoided_paths` are
    the ways to compute attention that are wrong on the device, and not taken.
    """

    mode: str  # "resident" or "stream"
    bytes: int
    memory_bytes: int
    weights_over_memory: float
    bytes_read: int = 0
    seconds_waited: float = 0.0
    own_cache: bool = False
    quantisation: str | None = None
    avoided_paths: tuple[str, ...] = ()

    @classmethod
    def of_workers(cls, used: Sequence[WeightsReport]) -> WeightsReport | None:
        """The sum over several workers; None without any. Of their waiting, the longest."""
        if not used:
            return None
        return replace(
            used[0],
            memory_bytes=sum(each.memory_bytes for each in used),
            bytes_read=sum(each.bytes_read for each in used),
            seconds_waited=max(each.seconds_waited for each in used),
        )


@dataclass(frozen=True, slots=True)
class ReducedPacks:
    """The smaller sizes that an engine has used since the device's memory ran out, which happened `failures` times.

    A layer takes at most `chunk_tokens` at a time; packs of more than `pack_tokens` are split (None: none).
    """

    failures: int
    chunk_tokens: int
    pack_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """The work of a worker in a run, and its cost.

    `tokens` are computed ones. `seconds` are those in which it worked on packs, not waited. `host_bytes` and
    `device_bytes` are its peaks; `own_bytes` is its part of the host's memory at the end, with pages that several
    processes share divided among them (proportional set size; None where the system does not report it). `threads` are
    the fewest and the most that computed.
    """

    number: int
    packs: int
    tokens: int
    seconds: float
    host_bytes: int
    device_bytes: int
    own_bytes: int | None
    threads: tuple[int, int] | None
    weights: WeightsReport | None = None
    reduced: ReducedPacks | None = None


@dataclass(frozen=True, slots=True)
class PoolUse:
    """The work of the engines of a run: one in this process, or those of `workers`. None: not reported, or it did not
    happen."""

    weights: WeightsReport | None = None
    reduced: ReducedPacks | None = None
    decoded: DecodingReport | None = None
    workers: Sequence[WorkerReport] = ()


class PlanEngine(Protocol):
    """Answers all packs of a plan: an engine, or several at work in other processes."""

    @property
    def limits(self) -> Limits:
        """Return how much a pack for this engine holds."""

    @property
    def whole_packs(self) -> bool:
        """A pack is one pass over the model: a resumed run makes the same packs again. Else it plans the rest."""

    def answer_all(
        self,
        packs: Sequence[Pack],
        labels: Callable[[int], LabelSet],
        tick: Callable[[float], None],
        treatment: Treatment = PLAIN,
    ) -> Iterator[list[Answer]]:
        """One answer for each prompt of a plan's `packs`, as they are ready. The other arguments as in
        `Engine.answer`."""


class Engine:
    """Answers packs, one after the other, in the order of a plan. It is a `PlanEngine`."""

    limits: Limits
    whole_packs: bool
    waits: bool  # it waits for other processes, so a signal may end `answer` anywhere

    def answer(
        self,
        pack: Pack,
        labels: Callable[[int], LabelSet],
        tick: Callable[[float], None],
        treatment: Treatment = PLAIN,
    ) -> Iterable[list[Answer]]:
        """One answer for each prompt of `pack`, as they are ready: answers that come together may be written together.

        `labels` gives a prompt's labels. `tick` is called with the tokens each step advanced by (they add up to
        the pack's) and may raise to stop. The engine can do everything in the `treatment`. Raises ResourceError if the
        engine cannot go on.
        """
        raise NotImplementedError

    def answer_all(
        self,
        packs: Sequence[Pack],
        labels: Callable[[int], LabelSet],
        tick: Callable[[float], None],
        treatment: Treatment = PLAIN,
    ) -> Iterator[list[Answer]]:
        for at, pack in enumerate(packs):
            self.expect(packs[at : at + 2])
            yield from self.answer(pack, labels, tick, treatment)

    def expect(self, packs: Sequence[Pack]) -> None:
        """These packs come next: what they need may be made beside other work."""

    def holds(self, key: Key) -> bool:
        """Return whether the K,V held by this key are at hand, from an earlier pack."""
        return False

    def weights_report(self) -> WeightsReport | None:
        """Return how it keeps its weights; None where it does not know."""
        return None

    def reduced(self) -> ReducedPacks | None:
        """Return how it has gone on since memory ran out; None if it has not."""
        return None

    def decoded(self) -> DecodingReport | None:
        """The cost of writing continuations so far; None if nothing was written."""
        return None

    def guess_with(self, draft: DraftModel) -> None:
        """This model may guess the tokens of continuations."""

    def close(self) -> None:
        """Release memory, and end other processes."""


RESIDENT = LayerOptions(weights="resident", hidden="device")  # all on the device


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """What an engine is loaded with; each takes the fields that it needs.

    `options` are those of the engine itself. `before` is what an earlier attempt at the job has settled, or empty.
    With `planned` it is what another worker of this attempt has settled, and binding. `measured` comes from a profile
    of the model. `share` is the engine's part of the free memory: other workers take the rest. `layers` say which data
    may be kept outside the device, `arithmetic` how the layer walk computes (None: the fastest way). Texts of up to
    `text_tokens`, beginnings and guesses included, are written after the prompts that `texts_of` names; 0: none are.
    The layer walk asks `plan_weights` how the weights are kept, when the draft is loaded (None: all on the device).
    """

    opened: Opened
    packs: MemoryOptions
    options: Mapping[str, Any] = field(default_factory=dict)
    before: Mapping[str, Any] = field(default_factory=dict)
    measured: Measured | None = None
    share: float = 1.0
    planned: bool = False
    layers: LayerOptions = RESIDENT
    trust_remote_code: bool = False
    text_tokens: int = 0
    texts_of: TextsOf = "all"
    arithmetic: Arithmetic | None = None
    plan_weights: Callable[[], WeightsPlan] | None = None


AnyEngine = TypeVar("AnyEngine", bound=Engine, covariant=True)


@dataclass(frozen=True, slots=True)
class Loaded(Generic[AnyEngine]):
    """An engine, ready to answer.

    A resumed run must take over `settled` to cut the same packs; it is empty where the engine plans by itself.
    `budget` is the number of bytes that packs may take, where prefill decides it. No pack takes less than
    `pack_seconds`, the time to read the weights.
    """

    engine: AnyEngine
    settled: dict[str, Any] = field(default_factory=dict)
    budget: int | None = None
    pack_seconds: float = 0.0


class Loader(Protocol):
    """A module that brings an engine, as `prefillcli.options.engines` names it."""

    def open_models(self, settings: JobSettings, dtypes: Sequence[str] = ()) -> Opened:
        """Check the model's files and everything else that can be known before weights are loaded. `dtypes` are those
        of the models that are chosen already.

        Raises UsageError or ResourceError.
        """

    def load(self, request: LoadRequest) -> Loaded[Engine]:
        """Load the weights. Raises ResourceError where they cannot fit, before they are loaded, and UsageError."""


def loader_of(engine: str) -> Loader:
    """Return the module that opens and loads the engine of this name."""
    module = ENGINES[engine].module
    own = module.startswith(f"{__package__}.")  # another engine may need no torch
    with light_imports() if own else nullcontext():
        return cast("Loader", import_module(module))


def sequences(pack: Pack) -> Iterator[tuple[int, TokenArray]]:
    """The prompts of a pack and their whole token sequences, int32 [tokens], in the order of the plan.

    The pack begins at the root: nothing of it is held by another (`Limits.held_tokens` is 0).
    """
    for node, prompts in pack.reads:
        path = []
        step = node
        while step >= 0:
            path.append(pack.tokens[pack.offsets[step] : pack.offsets[step + 1]])
            step = pack.parents[step]
        tokens = np.concatenate(path[::-1])
        for prompt in prompts:
            yield prompt, tokens


# Options that go to an engine unchanged.


def check_options(
    engine: str, options: Mapping[str, Any], known: Collection[str], taken: Mapping[str, str] = {}
) -> None:
    """Raise UsageError for an option that is not `known`, with the nearest known one, and for one that is `taken`: an
    option of prefill, or prefill itself, decides it."""
    for key in options:
        if key in taken:
            raise UsageError(f"--engine-options {key}: {taken[key]}")
        if key not in known:
            raise UsageError(
                f"--engine-options {key}: the {engine} engine has no such option{did_you_mean(key, known)}"
            )
