"""The first model of a cascade: it reads rows, and decides those whose answer by the large one it predicts. The model
itself in low precision may do so next.

The reading of a row is what an exit reads after a layer: a hidden state, that of the small model's last layer but one,
and the log-probabilities of the labels, which are its own answer. So it is an exit before the first layer of the large
model. A model with a classification head has the outputs of its classes instead of the labels. The hidden state of an
encoder is what its head reads. The words of a prompt, without any model, are such a reading too.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from prefillcli.core.request import Tick
from prefillcli.engines.base import EarlyExits, Engine, LeavingRule, Readings, Treatment
from prefillcli.images.image import FIRST_FEATURE
from prefillcli.models.open import WORDS, Small
from prefillcli.options.settings import JobSettings
from prefillcli.plan.behind import LabelSet
from prefillcli.plan.pack import Limits
from prefillcli.plan.plan import Plan, make_plan
from prefillcli.prompts.labels import Following, Labels, tail_of
from prefillcli.prompts.questions import Question
from prefillcli.prompts.translation import Translation, Translator
from prefillcli.reading.exits.policy import Decisions, ExitPolicy
from prefillcli.reading.exits.proof import observed_layers, reading_cost
from prefillcli.rows.records import BEFORE, Prompt
from prefillcli.stats.arrays import Int32Array

if TYPE_CHECKING:
    from prefillcli.core.models import Models
    from prefillcli.core.scorer import ModelScorer
    from prefillcli.models.open import Opened
    from prefillcli.stats.arrays import Float32Array, Float64Array

_TAIL_TOKENS = 16
WIDTH = 1 << 13  # numbers of a reading of words
_BLOCK = 1024  # prompts whose words are read at a time
# Odd constants of multiplicative hashing (Knuth, The Art of Computer Programming 3, 6.4): 2^64 over the golden ratio,
# and another one.
_SPREAD, _PAIRS = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)


class FirstPrompt(NamedTuple):
    """A prompt in the tokens of the first model, int32 [tokens], the labels after it, and the rule by which it leaves
    the first model."""

    tokens: Int32Array
    labels: LabelSet
    rule: LeavingRule | None = None


class FirstReading(NamedTuple):
    """A first model's reading of a prompt: its hidden state [hidden], the labels' log-probabilities [labels] or the
    outputs of its head and a 0 [classes + 1], and the tokens and seconds that this took. The prompt has `length` of
    its own tokens.

    `inner` are readings after layers inside the first model, in which `before` are the log-probabilities of the
    layer's input. A prompt that has left after one of them, `left`, has the log-probabilities with which it leaves.
    """

    hidden: Float32Array
    logprobs: Float64Array
    tokens: int
    seconds: float
    length: int = 0
    before: Float64Array | None = None
    inner: tuple[Any, ...] = ()  # of `FirstReading | None`
    left: int | None = None


class InnerRule(NamedTuple):
    """Lets prompts leave a first model after its inner layers: the `LeavingRule` of a policy with these alone. Where
    it `ends` after the last of them, all prompts leave there, whether they are decided or not."""

    policy: ExitPolicy
    ends: bool

    @property
    def layers(self) -> tuple[int, ...]:
        """See `LeavingRule`."""
        return self.policy.layers

    @property
    def reads_logits(self) -> bool:
        """See `LeavingRule`."""
        return self.policy.reads_logits

    def peeks(self, layer: int) -> bool:
        """See `LeavingRule`."""
        return self.policy.peeks(layer)

    def decide(self, layer: int, readings: Readings) -> Decisions:
        """See `LeavingRule`."""
        found = self.policy.decide(layer, readings)
        if self.ends and layer == self.layers[-1]:
            return found._replace(decided=np.ones_like(found.decided))
        return found


def readings_of(found: Sequence[FirstReading | None]) -> Readings:
    """Return the readings of several prompts, as of a layer; those of a prompt that it cannot read are NaN."""
    read = next((each for each in found if each is not None), None)
    hidden = np.full((len(found), 1 if read is None else len(read.hidden)), np.nan, np.float32)
    logits = np.full((len(found), 2 if read is None else len(read.logprobs)), np.nan)
    before = logits.copy()
    for row, each in enumerate(found):
        if each is not None:
            hidden[row], logits[row] = each.hidden, each.logprobs
            before[row] = each.logprobs if each.before is None else each.before
    return Readings(hidden, logits, before)


class FirstPrompts:
    """Makes the prompts of the first model from those of the large one: the same text, in its own tokens."""

    def __init__(self, opened: Opened, small: Small, labels: Labels, settings: JobSettings) -> None:
        own, head = small.tokenizer, small.files.head
        self._whole = small.files.encoder
        self._classes = None if head is None else LabelSet.of([[each] for each in range(len(head.classes))])
        self._embedded = small.files.config.vocab_size
        self._translator = None if own is None else Translator(opened.tokenizer, own, self._embedded)
        self._labels: list[Labels] = []  # after each prompt of a row
        if own is not None and head is None:
            norm, end = settings.answers.label_norm, settings.answers.label_end
            self._labels = [Labels(own, _as_texts(each.question), norm=norm, end=end) for each in labels.asked]

    def of(self, prompts: Sequence[Prompt]) -> list[FirstPrompt | None]:
        """Return each prompt; None for one that the first model has no tokens for."""
        if self._translator is None:
            return [FirstPrompt(prompt.tokens, self._classes or prompt.labels) for prompt in prompts]
        texts = [prompt.tokens for prompt in prompts]
        found = self._translator.whole(texts) if self._whole else self._translator.translate(texts)
        tokens = [each.tokens if isinstance(each, Translation) else each for each in found]
        able = {
            number: each
            for number, each in enumerate(tokens)
            if not isinstance(each, str) and int(each.max(initial=0)) < self._embedded
        }
        made: list[FirstPrompt | None] = [None] * len(prompts)
        if not self._labels:
            for number, own in able.items():
                made[number] = FirstPrompt(own, self._classes or prompts[number].labels)
            return made
        for part, labels in enumerate(self._labels):
            asked = [number for number in able if prompts[number].part == part]
            tails = [tail_of(self._translator.decode(able[number][-_TAIL_TOKENS:])) for number in asked]
            for number, following in zip(asked, labels.resolve_all(tails), strict=True):
                if isinstance(following, Following) and all(
                    int(each.max()) < self._embedded for each in following.labels.sequences
                ):
                    own = able[number]
                    made[number] = FirstPrompt(own[: len(own) - len(following.moved)], following.labels)
        return made


def _as_texts(question: Question) -> Question:
    # Whose answers are texts, where they are tokens of another model.
    return replace(question, answers=tuple(each._replace(tokens=()) for each in question.answers))


class FirstModel:
    """A first model, loaded in this process."""

    def __init__(self, engine: Engine, observed: tuple[int, ...], small: Small) -> None:
        self._engine, self._observed, self._max_length = engine, observed, small.files.max_length
        self._classifies = small.files.head is not None

    def read(
        self, prompts: Sequence[FirstPrompt], tick: Tick = lambda tokens: None, inner: tuple[int, ...] | None = None
    ) -> list[FirstReading | None]:
        """Read each prompt; None for one that is too long, for which memory does not suffice, or
        whose reading has numbers that are not finite.

        Unless `inner` is None, prompts are read after these layers, too, numbered from 0, or leave by their rules; and
        at the end they are read by their log-probabilities alone.
        """
        most = min(self._engine.limits.max_tokens, self._max_length)
        able = [number for number, each in enumerate(prompts) if len(each.tokens) + each.labels.tokens <= most]
        own = [prompts[number] for number in able]
        found: list[FirstReading | None] = [None] * len(prompts)
        plan = make_plan([each.tokens for each in own], self._engine.limits, labels=[each.labels for each in own])
        rules = {number: each.rule for number, each in enumerate(own) if each.rule is not None}
        observed = self._observed if inner is None else inner
        treatment = Treatment(EarlyExits(rules, observed=observed) if rules or observed else None)
        for answers in self._engine.answer_all(plan.packs, lambda number: own[number].labels, tick, treatment):
            for answer in answers:
                shown = answer.readings
                hidden = shown[0].hidden[0] if shown and inner is None else answer.logprobs.astype(np.float32)
                # With a 0 beside them, outputs less their mean keep all information, even a single one.
                ends = self._classifies and answer.exit_layer is None
                logits = np.append(answer.logprobs, 0.0) if ends else answer.logprobs
                if answer.failure is None and np.isfinite(hidden).all() and np.isfinite(logits).all():
                    length = len(own[answer.prompt].tokens)
                    reading = FirstReading(hidden, logits, answer.computed_tokens, answer.seconds, length)
                    if inner is not None:
                        reading = reading._replace(inner=tuple(map(_inner, shown)), left=answer.exit_layer)
                    found[able[answer.prompt]] = reading
        return found


def _inner(reading: Readings) -> FirstReading | None:
    # The reading of a prompt after a layer inside a first model; None where it has numbers that are not finite.
    finite = all(np.isfinite(each).all() for each in (reading.hidden, reading.logits, reading.before))
    return FirstReading(reading.hidden[0], reading.logits[0], 0, 0.0, before=reading.before[0]) if finite else None


@dataclass(frozen=True, slots=True)
class FirstModels:
    """The first models of a job, in their order."""

    models: Sequence[FirstModel]

    def close(self) -> None:
        """Do nothing: whoever made the walks closes them."""


def load_first(models: Models[Any]) -> FirstModels:
    """Load the first models, ready to read, and return them. The plan has the limits of their packs. Raises
    ResourceError."""
    if not models.planned:
        before = models.before.get("first", [])
        models.settled["first"] = [
            _planned(models, each, before[number] if number < len(before) else None)
            for number, each in enumerate(models.opened.small)
        ]
    return FirstModels([_loaded(models, number, plan) for number, plan in enumerate(models.settled["first"])])


def _planned(models: Models[Any], small: Small, before: dict[str, Any] | None) -> dict[str, Any]:
    # The limits of its packs, or those of an earlier attempt. While it reads, the model's engine keeps the K,V of what
    # the next window begins with. An encoder computes a pack in batches of a fixed size.
    from prefillcli.models.law import PACK_TOKENS, choose_chunk, draft_limits, memory_law

    files, device, budget = small.files, models.opened.device, models.budget - models.held_bytes()
    if files.encoder:
        return {"limits": asdict(Limits(max(PACK_TOKENS[device.type], files.max_length), files.max_length))}
    law = memory_law(files.config, files.dtype, None if files.head is None else len(files.head.classes))
    chunk = models.settings.packs.chunk_tokens or choose_chunk(law, budget, device)
    limits = draft_limits(law, budget=budget, device=device, chunk_tokens=chunk, queries=1, all_layers=False)
    if before is not None and before["limits"]["max_tokens"] <= limits.max_tokens:
        return dict(before)
    return {"chunk_tokens": chunk, "limits": asdict(replace(limits, read_tokens=None))}


def _loaded(models: Models[Any], number: int, plan: dict[str, Any]) -> FirstModel:
    from prefillcli.engines.encoders import EncoderEngine
    from prefillcli.engines.torch import TorchEngine

    small, limits = models.opened.small[number], Limits(**plan["limits"])
    if small.files.encoder:
        encoder = EncoderEngine(models.small[number], "none")
        encoder.limits = limits
        return FirstModel(encoder, (), small)
    walk = models.small_walk(number, plan["chunk_tokens"])
    engine = TorchEngine(walk, limits=limits, activation="softmax" if small.files.head is None else "none")
    depth = small.files.config.get_text_config().num_hidden_layers
    return FirstModel(engine, (depth - 2,) if depth > 1 else (), small)


@dataclass(frozen=True, slots=True)
class FirstTask:
    """Prompts for one of the first models of a worker."""

    number: int
    prompts: list[FirstPrompt]
    inner: tuple[int, ...] | None = None

    def answer(self, first: FirstModels, tick: Tick) -> list[FirstReading | None]:
        """Ask the first model of the worker."""
        return first.models[self.number].read(self.prompts, tick, self.inner)


class Reader(Protocol):
    """A reading before the first layer: of a first model, or of words.

    `tokens` and `seconds` are those that it took so far. It reads at most `block` prompts at a time. `inner` are the
    layers inside it after which rows may be decided, numbered like that of its end, just before.
    """

    tokens: int
    seconds: float
    block: int
    inner: tuple[int, ...]

    def read(
        self, prompts: Sequence[Prompt], tick: Tick, policies: Mapping[int, ExitPolicy] | None = None
    ) -> list[FirstReading | None]:
        """Read each prompt; None for one that it cannot read. With `policies`, by the part of a prompt, prompts leave
        after the inner layers; without, they are read there."""


Readers = Mapping[int, tuple[str, Reader]]
"""The readers of a job and their names, by the layer of their end."""


def readers_of(scorer: ModelScorer) -> dict[int, tuple[str, Reader]]:
    """Return the names and readers of `--first` and `--compute` by their layers: the last is that before the first
    layer."""
    names, own = scorer.settings.exits.chain, iter(range(len(scorer.inputs.opened.small)))
    return {
        BEFORE - len(names) + 1 + place: (
            name,
            WordsReader(len(scorer.inputs.labels.names)) if name == WORDS else FirstReader(scorer, next(own)),
        )
        for place, name in enumerate(names)
    }


def model_width(opened: Opened) -> int:
    """Return the width of the model's products."""
    return int(opened.files.config.get_text_config().hidden_size)


def words_layer(depth: int) -> int:
    """Return the layer of words before a model of so many layers in low precision, and before those inside it."""
    return BEFORE - depth


def all_readers_of(scorer: ModelScorer) -> dict[int, tuple[str, Reader]]:
    """Return words, and the model in low precision if it is loaded, for --max-flips alone.

    Rows may leave inside the latter, after the layers after which they may leave the model. Without it, the layer of
    words is the same.
    """
    opened = scorer.inputs.opened
    depth = opened.files.config.get_text_config().num_hidden_layers
    found: dict[int, tuple[str, Reader]] = {words_layer(depth): (WORDS, WordsReader(len(scorer.inputs.labels.names)))}
    for number, each in enumerate(opened.small):
        inner = tuple(layer - depth + BEFORE + 1 for layer in observed_layers(depth)[:-1])
        found[BEFORE] = str(each.narrow), FirstReader(scorer, number, inner)
    return found


class WordsReader:
    """Reads the words of prompts: tokens and pairs of neighbours, hashed to the numbers of a vector.

    A token or pair adds 1 or -1 at a place, both of which follow from its hash, so that different ones that meet there
    do not add up on average (Weinberger et al. 2009, arXiv 0902.2206). What repeats counts by its logarithm.
    """

    block = _BLOCK
    inner: tuple[int, ...] = ()

    def __init__(self, labels: int) -> None:
        self.tokens = 0  # none is computed
        self.seconds = 0.0
        self._unsaid = np.zeros(labels)  # words have no answer

    def read(
        self, prompts: Sequence[Prompt], tick: Tick, policies: Mapping[int, ExitPolicy] | None = None
    ) -> list[FirstReading | None]:
        """Read each prompt."""
        begun = time.monotonic()
        found = [hashed_words(each.tokens) for each in prompts]
        taken = time.monotonic() - begun
        self.seconds += taken
        return [FirstReading(each, self._unsaid, 0, taken / len(prompts)) for each in found]


def hashed_words(tokens: Int32Array) -> Float32Array:
    """Return the hashed tokens and pairs of neighbours of a prompt, but for features of images, float32 [`WIDTH`]."""
    ones = tokens[tokens < FIRST_FEATURE].astype(np.uint64) + np.uint64(1)
    hashed = np.concatenate([ones, ones[:-1] * _SPREAD + ones[1:]]) * _PAIRS
    hashed = (hashed ^ (hashed >> np.uint64(32))) * _PAIRS
    places = (hashed >> np.uint64(51)).astype(np.int64)
    signs = np.where(hashed & np.uint64(1 << 20), 1.0, -1.0)
    counts = np.bincount(places, signs, WIDTH)
    return np.asarray(np.sign(counts) * np.log1p(np.abs(counts)), np.float32)


class FirstReader:
    """A first model of a job, here or in workers."""

    block = 1 << 31  # all at once

    def __init__(self, scorer: ModelScorer, number: int, inner: tuple[int, ...] = ()) -> None:
        self.inner = inner
        self.tokens = 0
        self.seconds = 0.0
        self.small = scorer.inputs.opened.small[number]
        self._prompts = FirstPrompts(scorer.inputs.opened, self.small, scorer.inputs.labels, scorer.settings)
        self._workers = scorer.pool.remote
        self._models: FirstModels | None = scorer.models.beside.get("first")
        self._number = number

    def read(
        self, prompts: Sequence[Prompt], tick: Tick, policies: Mapping[int, ExitPolicy] | None = None
    ) -> list[FirstReading | None]:
        """Read each prompt; None for one that the first model cannot read."""
        begun = time.monotonic()
        made = self._prompts.of(prompts)
        able = [number for number, each in enumerate(made) if each is not None]
        asked = [each for each in made if each is not None]
        shift, inner = self._shift, None
        if self.inner:
            inner = () if policies else tuple(layer + shift for layer in self.inner)
            rules = {part: self._rule(policy) for part, policy in (policies or {}).items()}
            asked = [
                each._replace(rule=rules.get(prompts[number].part)) for number, each in zip(able, asked, strict=True)
            ]
        own = (self._local if self._workers is None else self._remote)(asked, tick, inner)
        found: list[FirstReading | None] = [None] * len(prompts)
        for number, each in zip(able, own, strict=True):
            left = None if each is None or each.left is None else each.left - shift
            found[number] = each if each is None or left is None else each._replace(left=left)
        self.tokens += sum(each.tokens for each in own if each is not None)
        self.seconds += time.monotonic() - begun
        return found

    def cost(self, opened: Opened, lengths: Sequence[tuple[int, int]]) -> float:
        """Return what readings of these lengths cost, over reading in full (`reading_cost`)."""
        return reading_cost(self.small, opened, lengths, model_width(opened) if self.inner else None)

    @property
    def _shift(self) -> int:
        # From the number of an inner layer to that in the first model, from 0.
        depth: int = self.small.files.config.get_text_config().num_hidden_layers
        return depth - BEFORE - 1

    def _rule(self, policy: ExitPolicy) -> InnerRule | None:
        # The rule by which prompts leave inside, in the first model's numbers.
        own = policy.among(self.inner, self._shift)
        return InnerRule(own, BEFORE not in policy.layers) if own.exits else None

    def _local(
        self, prompts: Sequence[FirstPrompt], tick: Tick, inner: tuple[int, ...] | None
    ) -> list[FirstReading | None]:
        if self._models is None:
            raise ValueError("no first model was loaded")
        return self._models.models[self._number].read(prompts, tick, inner)

    def _remote(
        self, prompts: Sequence[FirstPrompt], tick: Tick, inner: tuple[int, ...] | None
    ) -> list[FirstReading | None]:
        workers = self._workers
        if workers is None:
            raise ValueError("there are no workers")
        limits = Limits(**workers.settled["first"][self._number]["limits"])
        able = [number for number, each in enumerate(prompts) if len(each.tokens) <= limits.max_tokens]
        plan = make_plan([prompts[number].tokens for number in able], limits)
        parts = [([able[prompt] for prompt in pack.prompts], Plan([pack], 0)) for pack in plan.packs if pack.reads]
        found: list[FirstReading | None] = [None] * len(prompts)

        def took(part: int, result: list[FirstReading | None] | None, lost: Exception | None) -> None:
            for number, each in zip(parts[part][0], result or (), strict=False):
                found[number] = each
            tick(0.0)

        tasks = [
            (FirstTask(self._number, [prompts[number] for number in own], inner), own_plan) for own, own_plan in parts
        ]
        workers.ask_beside("first", tasks, took)
        return found
