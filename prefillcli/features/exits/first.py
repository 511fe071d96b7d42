"""The first model of a cascade: it reads every row, and decides those whose answer by the large one it can foretell.

Its reading of a row is what an exit reads after a layer: a hidden state, that of its last layer but one, and the
log-probabilities of the labels, which are its own answer. So it is an exit before the first layer of the large model.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from prefillcli.core.question import Tick
from prefillcli.data.prompts.encoding import Encoder
from prefillcli.data.prompts.labels import Following, Labels, parse_labels, tail_of
from prefillcli.data.prompts.translation import Translation, Translator
from prefillcli.data.rows import Int32Array, Prompt
from prefillcli.engines.base import EarlyExits, Engine, Readings, Treatment
from prefillcli.plan.behind import LabelSet
from prefillcli.plan.pack import Limits
from prefillcli.plan.plan import Plan, make_plan

if TYPE_CHECKING:
    from prefillcli.core.feature import Feature, Models, Opened, Scorer
    from prefillcli.features.exits.policy import Float32Array, Float64Array
    from prefillcli.jobs.runners.pool import Pool

_TAIL_TOKENS = 16


class FirstPrompt(NamedTuple):
    """A prompt in the tokens of the first model, int32 [tokens], and the labels behind it."""

    tokens: Int32Array
    labels: LabelSet


class FirstReading(NamedTuple):
    """What the first model makes of a prompt: its hidden state [hidden], the labels' log-probabilities [labels], and
    the tokens and seconds that this took."""

    hidden: Float32Array
    logprobs: Float64Array
    tokens: int
    seconds: float


def readings_of(found: Sequence[FirstReading | None]) -> Readings:
    """The readings of several prompts, as of a layer; those of a prompt that it cannot read are NaN."""
    read = next((each for each in found if each is not None), None)
    hidden = np.full((len(found), 1 if read is None else len(read.hidden)), np.nan, np.float32)
    logits = np.full((len(found), 2 if read is None else len(read.logprobs)), np.nan)
    for row, each in enumerate(found):
        if each is not None:
            hidden[row], logits[row] = each.hidden, each.logprobs
    return Readings(hidden, logits, logits)


class FirstPrompts:
    """Makes the prompts of the first model of those of the large one: the same text, in its own tokens."""

    def __init__(self, opened: Opened, settings: Any) -> None:
        self._translator, self._labels = None, None
        if opened.draft_tokenizer is not None:
            self._translator = Translator(opened.tokenizer, opened.draft_tokenizer)
            self._encoder = Encoder(opened.draft_tokenizer)
            self._labels = Labels(
                opened.draft_tokenizer,
                parse_labels(settings.labels),
                norm=settings.label_norm,
                end=settings.label_end,
            )

    def of(self, prompts: Sequence[Prompt]) -> list[FirstPrompt | None]:
        """Each prompt; None for one that the first model has no tokens for."""
        if self._translator is None or self._labels is None:
            return [FirstPrompt(prompt.tokens, prompt.labels) for prompt in prompts]
        found = self._translator.translate([prompt.tokens for prompt in prompts])
        able = [number for number, each in enumerate(found) if isinstance(each, Translation)]
        tails = [tail_of(self._encoder.decode(found[number].tokens[-_TAIL_TOKENS:].tolist())) for number in able]  # type: ignore[union-attr]
        made: list[FirstPrompt | None] = [None] * len(prompts)
        for number, following in zip(able, self._labels.resolve_all(tails), strict=True):
            if isinstance(following, Following):
                tokens = found[number].tokens  # type: ignore[union-attr]
                made[number] = FirstPrompt(tokens[: len(tokens) - len(following.moved)], following.labels)
        return made


class FirstModel:
    """The first model, loaded in this process."""

    def __init__(self, engine: Engine, observed: tuple[int, ...], max_length: int) -> None:
        self._engine, self._observed, self._max_length = engine, observed, max_length

    def read(self, prompts: Sequence[FirstPrompt], tick: Tick = lambda tokens: None) -> list[FirstReading | None]:
        """The reading of each prompt; None for one that is too long, for which memory does not suffice, or whose
        reading has numbers that are not finite."""
        most = min(self._engine.limits.max_tokens, self._max_length)
        able = [number for number, each in enumerate(prompts) if len(each.tokens) + each.labels.tokens <= most]
        own = [prompts[number] for number in able]
        found: list[FirstReading | None] = [None] * len(prompts)
        plan = make_plan([each.tokens for each in own], self._engine.limits, labels=[each.labels for each in own])
        treatment = Treatment(EarlyExits(observed=self._observed))
        for answers in self._engine.answer_all(plan.packs, lambda number: own[number].labels, tick, treatment):
            for answer in answers:
                shown = answer.readings
                hidden = shown[0].hidden[0] if shown else answer.logprobs.astype(np.float32)
                if answer.failure is None and np.isfinite(hidden).all() and np.isfinite(answer.logprobs).all():
                    found[able[answer.prompt]] = FirstReading(
                        hidden, answer.logprobs, answer.computed_tokens, answer.seconds
                    )
        return found

    def close(self) -> None:
        """The walk is closed by those who made it."""


def load_first(models: Models[Any]) -> FirstModel:
    """The loaded first model, ready to read. The plan has the limits of its packs. Raises ResourceError."""
    from prefillcli.engines.torch import TorchEngine
    from prefillcli.models.law import choose_chunk, draft_limits, memory_law

    small = models.opened.draft
    if small is None:
        raise ValueError("no first model was opened")
    if not models.planned:
        law = memory_law(small.config, small.dtype)
        chunk = models.settings.chunk_tokens or choose_chunk(law, models.budget, models.opened.device)
        limits = draft_limits(
            law,
            budget=models.budget,
            device=models.opened.device,
            chunk_tokens=chunk,
            queries=1,
            all_layers=False,
        )
        made = {"chunk_tokens": chunk, "limits": asdict(replace(limits, read_tokens=None))}
        before = models.before.get("first", {})
        keeps = before and before["limits"]["max_tokens"] <= limits.max_tokens
        models.plan["first"] = dict(before) if keeps else made
    plan = models.plan["first"]
    walk = models.draft_walk(plan["chunk_tokens"])
    depth = small.config.get_text_config().num_hidden_layers
    observed = (depth - 2,) if depth > 1 else ()
    return FirstModel(TorchEngine(walk, limits=Limits(**plan["limits"])), observed, small.max_length)


@dataclass(frozen=True, slots=True)
class FirstTask:
    """Prompts for the first model of a worker."""

    prompts: list[FirstPrompt]

    def answer(self, first: FirstModel, tick: Tick) -> list[FirstReading | None]:
        """Ask it."""
        return first.read(self.prompts, tick)


class FirstReader:
    """The first model of a job, here or in workers."""

    def __init__(self, scorer: Scorer, feature: type[Feature]) -> None:
        from prefillcli.jobs.runners.pool import Pool

        self.tokens = 0  # computed so far
        self.seconds = 0.0
        self._prompts = FirstPrompts(scorer.opened, scorer.settings)
        self._pool: Pool | None = scorer.pool if isinstance(scorer.pool, Pool) else None
        self._model: FirstModel | None = scorer.beside.get(feature)
        self._feature = feature

    def read(self, prompts: Sequence[Prompt], tick: Tick) -> list[FirstReading | None]:
        """The reading of each prompt; None for one that the first model cannot read."""
        begun = time.monotonic()
        made = self._prompts.of(prompts)
        able = [number for number, each in enumerate(made) if each is not None]
        asked = [each for each in made if each is not None]
        own = self._remote(asked, tick) if self._pool is not None else self._local(asked, tick)
        found: list[FirstReading | None] = [None] * len(prompts)
        for number, each in zip(able, own, strict=True):
            found[number] = each
        self.tokens += sum(each.tokens for each in own if each is not None)
        self.seconds += time.monotonic() - begun
        return found

    def _local(self, prompts: Sequence[FirstPrompt], tick: Tick) -> list[FirstReading | None]:
        if self._model is None:
            raise ValueError("no first model was loaded")
        return self._model.read(prompts, tick)

    def _remote(self, prompts: Sequence[FirstPrompt], tick: Tick) -> list[FirstReading | None]:
        pool = self._pool
        if pool is None:
            raise ValueError("there are no workers")
        limits = Limits(**pool.plan["first"]["limits"])
        able = [number for number, each in enumerate(prompts) if len(each.tokens) <= limits.max_tokens]
        plan = make_plan([prompts[number].tokens for number in able], limits)
        parts = [([able[prompt] for prompt in pack.prompts], Plan([pack], 0)) for pack in plan.packs if pack.reads]
        found: list[FirstReading | None] = [None] * len(prompts)

        def took(part: int, result: list[FirstReading | None] | None, lost: Exception | None) -> None:
            for number, each in zip(parts[part][0], result or (), strict=False):
                found[number] = each
            tick(0.0)

        tasks = [(FirstTask([prompts[number] for number in own]), own_plan) for own, own_plan in parts]
        pool.ask_feature(self._feature, tasks, took)
        return found
