"""Drafts at work: loaded in this process or in workers."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from prefillcli.errors import UsageError, brief
from prefillcli.models.shape import NoCostModel, Shape
from prefillcli.plan.pack import Limits
from prefillcli.plan.plan import Plan, make_plan
from prefillcli.prompts.translation import Overlap, Translation, Translator
from prefillcli.reading.compress.selection import (
    FAILED,
    Estimator,
    ImportanceEstimate,
    Picker,
    select_all,
)
from prefillcli.reading.compress.settings import Compression, compression_of
from prefillcli.rows.records import Prompt
from prefillcli.runtime import log
from prefillcli.stats.arrays import Int32Array, Int64Array

if TYPE_CHECKING:
    from prefillcli.core.models import Models
    from prefillcli.core.request import Tick
    from prefillcli.core.scorer import Remote
    from prefillcli.models.open import Opened
    from prefillcli.reading.compress.draft import Draft

# SpecPrefill: the tokens that a draft model finds important.


class SpecPrefill(Picker):
    """The picker of the tokens that a draft model finds important. Prompts that share a prefix keep the same tokens of
    it, so that it is still computed once.

    With a `translator` the draft reads prompts in its own tokens. The estimate of a prompt that cannot be translated
    has the reason.
    """

    method = "specprefill"

    def __init__(self, draft: Estimator, translator: Translator | None = None) -> None:
        self._draft = draft
        self._translator = translator

    def close(self) -> None:
        self._draft.close()

    def estimate(self, prompts: Sequence[Prompt], tick: Tick) -> list[ImportanceEstimate]:
        tokens, before = [prompt.tokens for prompt in prompts], self._draft.tokens
        if self._translator is None:
            found = self._draft.estimate(tokens, tick)
        else:
            found = self._estimated(self._translator, tokens, tick)
        self.tokens += self._draft.tokens - before
        self.failure = self._draft.failure or self.failure
        return found

    def select(
        self,
        prompts: Sequence[Prompt],
        estimates: Sequence[ImportanceEstimate],
        keeps: Sequence[float | None],
        settings: Compression,
    ) -> list[Int64Array | None]:
        tokens, importances = [prompt.tokens for prompt in prompts], [found.importance for found in estimates]
        return select_all(tokens, importances, keeps, settings)

    def _estimated(
        self, translator: Translator, prompts: Sequence[Int32Array], tick: Tick
    ) -> list[ImportanceEstimate]:
        # A prompt's seconds include its share of the translation.
        begun = time.monotonic()
        translations = self._translated(translator, prompts)
        seconds = (time.monotonic() - begun) / max(1, sum(len(tokens) for tokens in prompts))
        able = [each for each in translations if isinstance(each, Translation)]
        found = iter(self._draft.estimate([each.tokens for each in able], tick, [each.overlap for each in able]))
        estimates = []
        for tokens, translation in zip(prompts, translations, strict=True):
            estimate = ImportanceEstimate(reason=translation) if isinstance(translation, str) else next(found)
            estimate.seconds += seconds * len(tokens)
            estimates.append(estimate)
        return estimates

    def _translated(self, translator: Translator, prompts: Sequence[Int32Array]) -> list[Translation | str]:
        # The prompts in the draft's tokens; where one fails, only that one does.
        try:
            return translator.translate(prompts)
        except Exception as error:  # whatever error a tokenizer raises, the rows can be read in full
            self.failure = error
            if len(prompts) == 1:
                return [FAILED]
            return [self._translated(translator, [tokens])[0] for tokens in prompts]


# The share of the layers that read the whole prompt: FastKV takes 16 of 32, GemFilter 14 of 32 or 20 of 40.
DEPTH = 0.45


def load_draft(models: Models[Any]) -> Draft | None:
    """Load the draft, ready to work, and return it; None where the model picks tokens itself, or nothing does.

    The plan has the limits of its packs. A warning names each of its failures once. Raises UsageError if the model or
    the draft lacks an ability that the settings need.
    """
    from prefillcli.models.rehearsal import check_uses
    from prefillcli.reading.compress.draft import Draft

    settings, opened = models.settings, models.opened
    compression = compression_of(settings.compression)
    if settings.compression.draft is not None:
        drafts = "--draft self" if settings.compression.drafts_itself else None
        check_uses(models.engine.walk.model, drafts=drafts, compresses=True)
    if settings.compression.drafts_itself:
        own_layers(compression, opened)
    if opened.draft is None:
        return None
    if not models.planned:
        before = models.before.get("draft", {})
        models.settled["draft"] = plan_draft(opened, compression, models.budget, settings.packs.chunk_tokens, before)
    plan, told = models.settled["draft"], set()

    def warn(error: BaseException) -> None:
        text = f"{type(error).__name__}: {brief(error)}"
        if text not in told:
            told.add(text)
            log.warning(f"the draft failed, its rows are read in full: {text}")

    return Draft(
        models.small_walk(chunk_tokens=plan["chunk_tokens"]),
        compression,
        limits=Limits(**plan["limits"]),
        max_length=opened.draft.max_length,
        on_failure=warn,
    )


@dataclass(frozen=True, slots=True)
class EstimateTask:
    """Prompts, int32 [tokens] each, for a worker's draft to estimate their tokens' importance; `overlaps` as in
    `Draft.estimate`."""

    prompts: list[Int32Array]
    overlaps: list[Overlap] | None = None

    def answer(self, draft: Draft, tick: Tick) -> Estimated:
        """Ask the draft of the worker."""
        before, draft.failure = draft.tokens, None
        estimates = draft.estimate(self.prompts, tick, self.overlaps)
        failure = draft.failure
        if failure is not None:  # other libraries' exceptions may not survive pickling
            kind = type(failure) if isinstance(failure, MemoryError) else RuntimeError
            failure = kind(brief(failure))
        return Estimated(estimates, draft.tokens - before, failure)


@dataclass(frozen=True, slots=True)
class Estimated:
    """One estimate for each prompt. `failure` is the draft's error, if it failed."""

    estimates: list[ImportanceEstimate]
    draft_tokens: int
    failure: Exception | None = None


class RemoteDraft:
    """The drafts of workers, as one `Estimator`: each pack is estimated by one of them."""

    def __init__(self, pool: Remote) -> None:
        self.tokens = 0
        self.failure: BaseException | None = None
        self._pool = pool

    def close(self) -> None:
        pass

    def estimate(
        self, prompts: Sequence[Int32Array], tick: Tick, overlaps: Sequence[Overlap] | None = None
    ) -> list[ImportanceEstimate]:
        limits = Limits(**self._pool.settled["draft"]["limits"])
        most = limits.max_tokens if limits.read_tokens is None else min(limits.max_tokens, limits.read_tokens)
        able = [number for number, tokens in enumerate(prompts) if len(tokens) <= most]
        plan = make_plan([prompts[number] for number in able], limits)
        parts = [([able[prompt] for prompt in pack.prompts], Plan([pack], 0)) for pack in plan.packs]
        if too_long := sorted(set(range(len(prompts))) - set(able)):
            parts.append((too_long, Plan([], 0)))  # the draft gives the reason
        estimates: dict[int, ImportanceEstimate] = {}

        def took(part: int, result: Estimated | None, lost: Exception | None) -> None:
            own = parts[part][0]
            if result is not None:
                estimates.update(zip(own, result.estimates, strict=True))
                self.tokens += result.draft_tokens
                self.failure = result.failure or self.failure
            elif lost is not None:
                self.failure = lost
                estimates.update((number, ImportanceEstimate(reason=FAILED)) for number in own)
            tick(0.0)

        def task_of(own: list[int]) -> EstimateTask:
            return EstimateTask([prompts[n] for n in own], None if overlaps is None else [overlaps[n] for n in own])

        self._pool.ask_beside("draft", [(task_of(own), part) for own, part in parts], took)
        return [estimates[number] for number in range(len(prompts))]


def plan_draft(
    opened: Opened, compression: Compression, budget: int, chunk_tokens: int | None, before: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the limits of one pack of the draft in `budget` bytes; those of an earlier attempt stand if they still
    fit.

    Raises ResourceError where nothing fits.
    """
    from prefillcli.models.law import choose_chunk, draft_limits, memory_law

    if opened.draft is None:
        raise ValueError("no draft was opened")
    law = memory_law(opened.draft.config, opened.draft.dtype)
    chunk = chunk_tokens or choose_chunk(law, budget, opened.device)
    limits = draft_limits(
        law,
        budget=budget,
        device=opened.device,
        chunk_tokens=chunk,
        queries=compression.queries,
        all_layers=compression.decoded > 0,
    )
    if before and before["limits"]["max_tokens"] <= limits.max_tokens:
        return dict(before)
    return {"chunk_tokens": chunk, "limits": asdict(limits)}


def translator_of(opened: Opened) -> Translator | None:
    """Return the map from prompts to the tokens of the draft; None where model and draft share a tokenizer."""
    if opened.draft is None or opened.draft_tokenizer is None:
        return None
    return Translator(opened.tokenizer, opened.draft_tokenizer, opened.draft.config.vocab_size)


def own_layers(compression: Compression, opened: Opened) -> int:
    """Return the number of layers after which the model chooses tokens itself. Raises UsageError where none of them
    can."""
    return choosing_layers(opened.files.config, compression.self_layer, opened.max_length)


def choosing_layers(config: Any, wanted: int | None, max_length: int) -> int:
    """Return the number of first layers of a model with this text configuration that read the whole prompt; the last
    of them chooses.

    The last one must see whole prompts of `max_length` tokens: no sliding window. If `wanted` is None, the number is
    `DEPTH` of the layers, or the nearest one whose last layer sees whole prompts (the larger of two). Raises
    UsageError where the last of `wanted` layers does not, or no layer does.
    """
    try:
        windows = Shape(config).windows
    except NoCostModel as error:
        raise UsageError(
            f"--draft self: which layers of this model see the whole prompt is not known: {error}"
        ) from None
    able = [number for number, window in enumerate(windows[:-1], start=1) if window is None or window >= max_length]
    if not able:
        raise UsageError(
            f"--draft self: no layer but the last attends to prompts of {max_length:,} tokens: the model has "
            f"{len(windows)} layers, and the others have sliding windows or are recurrent\n"
            "name a small model with the same tokenizer as --draft"
        )
    if wanted is None:
        return min(able, key=lambda number: (abs(number - DEPTH * len(windows)), -number))
    if wanted not in able:
        near = min(able, key=lambda number: abs(number - wanted))
        why = (
            "has a sliding window or is recurrent, so it does not attend to a whole prompt"
            if wanted < len(windows)
            else f"leaves no layer that reads less: the model has {len(windows)}"
        )
        raise UsageError(f"--set self_layer={wanted}: that layer {why}\nthe nearest that can choose is {near}")
    return wanted
