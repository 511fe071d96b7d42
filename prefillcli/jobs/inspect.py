"""The job of `prefill inspect`: one row, read as `prefill score` reads it, in full and compressed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from rich.console import Console

from prefillcli.core.feature import Feature, features_of
from prefillcli.core.further import FurtherQuestions, WantedRow
from prefillcli.core.request import Request, Tick, plan_requests, require_answered, scored_row
from prefillcli.data.prompts.encoding import Encoder, token_texts
from prefillcli.data.prompts.labels import Labels
from prefillcli.data.rows import ErrorCode, RowError, ScoredRow, Window
from prefillcli.data.windows import find_row
from prefillcli.engines.base import Answer, EarlyExits, Engine, LabelTokens, LeavingRule, PlanEngine, Treatment
from prefillcli.errors import PrefillError, UsageError
from prefillcli.jobs.load import Models, load_walk
from prefillcli.jobs.loop import FollowUp
from prefillcli.jobs.opening import Opening, require_shares
from prefillcli.jobs.path_table import require_apart
from prefillcli.jobs.shell import shell
from prefillcli.models.open import Opened
from prefillcli.options.commands import InspectSettings
from prefillcli.options.option import details_of
from prefillcli.plan.trie import common_prefix
from prefillcli.report.inspection import (
    AnswerView,
    CommonPrefix,
    Inspection,
    ReadPrompt,
    TokenView,
    margin_curve,
    print_inspection,
    write_html,
)
from prefillcli.report.section import Section, visible
from prefillcli.runtime import log
from prefillcli.runtime.clock import Progress
from prefillcli.runtime.signals import Stop
from prefillcli.stats.evaluation import label_mass, label_probabilities


class Explainer:
    """Asks further questions about a row of an input, as `prefill score` does with these settings."""

    def __init__(self, opening: Opening) -> None:
        self._opening = opening
        self._further = FurtherQuestions.of(opening)

    def explain(
        self, engine: Engine, window: Window, request: Request, scored: ScoredRow, tick: Tick
    ) -> list[Section]:
        """What features say of a row that was read by this request; the row takes the answers. `tick` as in
        `Engine.answer`. Raises ResourceError if the engine cannot go on."""
        further, labels = self._further, self._opening.labels
        label = None if further is None else further.choice.wanted(window, [scored]).get(scored.row)
        if further is None or label is None:
            return []
        row = WantedRow(request, scored, label)
        follow = FollowUp(window, [row], further, engine.limits, "prefix-tree")
        for pack in follow.plan.packs:
            for answers in engine.answer(
                pack,
                lambda number: labels.sets[follow.requests[number].prompt.labels],
                tick,
                follow.treatment(pack),
            ):
                follow.take(pack, answers)
        found = [each.answers_shown(row, labels.names) for each in self._opening.features]
        return [each for each in found if each is not None]

    def close(self) -> None:
        """Let go of the process that renders templates."""
        if self._further is not None:
            self._further.close()


# Answers of the layer walk with what each layer shows of the prompts.


def answer_by_layer(
    engine: PlanEngine, requests: Sequence[Request], labels: Sequence[LabelTokens], tick: Tick, layers: int
) -> list[Answer]:
    """Answers [requests] of a model that has so many `layers`, with `readings` of every layer but the last.

    `labels` are `Labels.sets`, which the prompts refer to. `tick` as in `Engine.answer`. Raises ResourceError if the
    engine cannot go on.
    """
    treatment = Treatment(EarlyExits(observed=tuple(range(layers - 1))))
    found: dict[int, Answer] = {}
    packs = plan_requests(requests, engine.limits).packs
    for answers in engine.answer_all(packs, lambda i: labels[requests[i].prompt.labels], tick, treatment):
        found |= {each.prompt: each for each in require_answered(answers)}
    return [found[number] for number in range(len(requests))]


MOST_TOKENS = 5_000  # tokens of a prompt that are printed; the page has all of them
LEAST_SHARED = 16  # tokens; shorter overlaps are chance
MOST_PREFIXES = 10


@dataclass(slots=True)
class Summary:
    """The last line on stdout."""

    status: Literal["complete", "failed", "interrupted"] = "failed"
    exit_code: int = 1
    row: int | None = None
    id: str | None = None
    method: str | None = None
    prompt_tokens: int | None = None
    kept_tokens: int | None = None
    score: float | None = None  # of the prompt in full
    score_compressed: float | None = None
    html: str | None = None
    error: str | None = None

    def line(self) -> dict[str, Any]:
        line = {field.name: getattr(self, field.name) for field in fields(self)}
        if self.error is None:
            del line["error"]
        return line


def inspect_job(settings: InspectSettings) -> dict[str, Any]:
    """Show one row on stderr, and with `html` as a page; return the summary for the last line on stdout.

    Errors are told on stderr, and become the exit code in the summary.
    """
    summary = Summary()
    with shell(summary, debug=settings.debug) as stop:
        inspection = _InspectJob(settings, summary, stop).run()
        if not settings.quiet:
            print_inspection(inspection, Console(stderr=True), most_tokens=MOST_TOKENS)
        if settings.html is not None:
            write_html(inspection, settings.html)
            summary.html = settings.html
        summary.status, summary.exit_code = "complete", 0
    return summary.line()


def shared_prefixes(shared: Sequence[int]) -> list[CommonPrefix]:
    """Prefix lengths at which the number of rows that share the prompt's beginning changes, ascending.

    `shared` are the tokens that each other row has in common with the prompt. Of many lengths those stay at which most
    rows part.
    """
    parting = Counter(common for common in shared if common >= LEAST_SHARED)
    lengths = sorted(parting, key=lambda tokens: (-parting[tokens], -tokens))[:MOST_PREFIXES]
    return [CommonPrefix(tokens, 1 + sum(common >= tokens for common in shared)) for tokens in sorted(lengths)]


class _InspectJob:
    """One run of `prefill inspect`; what is known of the row goes into `summary` at once."""

    def __init__(self, settings: InspectSettings, summary: Summary, stop: Stop) -> None:
        self._settings = settings
        self._summary = summary
        self._stop = stop
        self._rule: LeavingRule | None = None

    def run(self) -> Inspection:
        # Raises UsageError where the row is not found, PrefillError where it is an error row.
        settings, summary = self._settings, self._summary
        _check(settings)
        require_apart(settings)
        opening = Opening(settings, [settings.id_column])
        with self._stop.at_once():
            opening.open_source()
            opening.open_models()
            source, opened, builder, labels = opening.source, opening.opened, opening.builder, opening.labels
            require_shares(labels, "inspect")
            found = find_row(source, builder, labels, row=settings.row or "", id_column=settings.id_column)
            summary.row, summary.id = found.row, found.id
            labels.check(found.window)
            if found.row in found.window.errors:
                raise self._error(found.window.errors[found.row])
            rules = [each.leaving_rule(opened, labels) for each in opening.features]
            self._rule = next(filter(None, rules), None)
            explainer = Explainer(opening)
            loaded = load_walk(
                opened,
                settings,
                placement=settings,
                names=labels.names,
            )
        try:
            return self._inspect(opened, loaded, labels, found.window, explainer, opening.features)
        finally:
            explainer.close()
            loaded.close()

    def _error(self, error: RowError) -> PrefillError:
        name = f"row {self._summary.row}" + ("" if self._summary.id is None else f" ({self._summary.id})")
        return PrefillError(visible(f"{name} has no score: {error.code}: {error.detail}", line=True))

    def _inspect(
        self,
        opened: Opened,
        loaded: Models[Engine],
        labels: Labels,
        window: Window,
        explainer: Explainer,
        features: Sequence[Feature],
    ) -> Inspection:
        settings, summary, prompts = self._settings, self._summary, window.prompts
        number = next(at for at, prompt in enumerate(prompts) if prompt.row == summary.row)
        prompt = prompts[number]
        summary.prompt_tokens = len(prompt.tokens)
        shared = [common_prefix(prompt.tokens, other.tokens) for other in prompts]
        with Progress(None, interval=settings.progress_interval, quiet=settings.quiet) as progress:

            def tick(tokens: float) -> None:
                progress.advance(0, tokens)
                self._stop.check()

            found = (each.inspected(loaded, prompts, number, shared, tick) for each in features)
            read = next(filter(None, found), ReadPrompt.whole(prompt))
            if read.in_full is not None:
                log.warning(f"row {summary.row} is read in full: {read.in_full}")
            summary.method, summary.kept_tokens = read.request.method, len(read.request.tokens)
            answers = self._answers(loaded, labels, read.request, opened, tick)
            scored, further = self._explained(explainer, loaded.engine, window, read.request, answers, tick)
        full, compressed = (None if own is None else self._view(labels.names, own.logprobs) for own in answers)
        summary.score = None if full is None else full.score
        summary.score_compressed = None if compressed is None else compressed.score
        shown = answers[1] or answers[0]  # as a job reads the row
        return Inspection(
            row=prompt.row,
            row_id=str(prompt.row) if summary.id is None else summary.id,
            model=settings.model or str(opened.files.origin),
            draft=settings.draft,
            labels=list(labels.names),
            tokens=_views(Encoder(opened.tokenizer), read),
            shared=shared_prefixes(
                [
                    common
                    for other, common in enumerate(shared)
                    if other != number and prompts[other].variant == prompt.variant
                ]
            ),
            full=full,
            compressed=compressed,
            settings=_shown(settings),
            method=read.request.method,
            voters=tuple(number + 1 for number in read.voters),
            draft_layers=0 if opened.draft is None else opened.draft.config.get_text_config().num_hidden_layers,
            margins=None if shown is None else margin_curve(shown.readings, shown.logprobs, labels.names, self._rule),
            scored=scored,
            further=further,
        )

    def _answers(
        self, loaded: Models[Engine], labels: Labels, request: Request, opened: Opened, tick: Tick
    ) -> tuple[Answer | None, Answer | None]:
        # The answers to the prompt in full, if it fits, and compressed, if it is. Raises PrefillError.
        most = loaded.engine.limits.max_tokens
        wanted = [Request(request.prompt)] + ([request] if request.kept is not None else [])
        able = [each for each in wanted if len(each.tokens) <= most]
        if not able:
            detail = f"{len(request.tokens)} tokens; the memory budget holds {most}"
            raise self._error(RowError(ErrorCode.EXCEEDS_MEMORY, detail))
        if len(able) < len(wanted):
            log.warning(f"the memory budget holds {most:,} tokens: the prompt is not read in full")
        layers = opened.files.config.get_text_config().num_hidden_layers
        found = answer_by_layer(loaded.engine, able, labels.sets, tick, layers)
        return (
            found[0] if able[0].kept is None else None,
            found[-1] if able[-1].kept is not None else None,
        )

    def _explained(
        self,
        explainer: Explainer,
        engine: Engine,
        window: Window,
        request: Request,
        answers: tuple[Answer | None, Answer | None],
        tick: Tick,
    ) -> tuple[ScoredRow, list[Section]]:
        # The row as a job has it, and what features say of it; `answers` are in full and compressed.
        full, compressed = answers
        answer = compressed or full
        if answer is None:
            raise ValueError("the prompt was not read")
        scored = scored_row(request, answer)
        if compressed is not None and full is not None:
            scored.audit = full.logprobs
        return scored, explainer.explain(engine, window, request, scored, tick)

    def _view(self, names: Sequence[str], logprobs: npt.NDArray[np.float64]) -> AnswerView:
        # What label log-probabilities [labels] say. Raises PrefillError.
        probabilities = label_probabilities(logprobs, self._settings.temperature)
        if not np.isfinite(probabilities).all():
            raise self._error(RowError(ErrorCode.NONFINITE_SCORE, f"label log-probabilities {logprobs.tolist()}"))
        return AnswerView(
            logprobs=dict(zip(names, logprobs.tolist(), strict=True)),
            score=float(probabilities[0]),
            label_mass=float(label_mass(logprobs)),
            prediction=names[int(probabilities.argmax())],
        )


def _check(settings: InspectSettings) -> None:
    # What can be wrong before anything is read.
    row = settings.row or ""
    if settings.id_column is None and not (row.isascii() and row.isdigit()):
        raise UsageError(f"--row {row}: a row's number counts from 0; for an id, name its column with --id-column")
    if settings.html is not None and not settings.html.lower().endswith((".html", ".htm")):
        raise UsageError(f"--html {settings.html}: the page's name ends in .html")


def _views(encoder: Encoder, read: ReadPrompt) -> list[TokenView]:
    ids = read.request.prompt.tokens.tolist()
    importance = [None] * len(ids) if read.importance is None else read.importance.tolist()
    parts = zip(ids, token_texts(encoder.decode, ids), importance, read.why, strict=True)
    return [
        TokenView(at, number, text, value, why != "dropped", why)
        for at, (number, text, value, why) in enumerate(parts)
    ]


def _shown(settings: InspectSettings) -> dict[str, Any]:
    # The settings that the page names: those that decide on the answers.
    names = ["template", "prompt_column", "system", "max_length", "on_long", "labels", "temperature"]
    for each in features_of(settings):
        own = each.options["inspect"].model_fields
        names += [name for name in own if name != "draft" and details_of(type(settings), name).changes == "scores"]
    return {name: value for name in names if (value := getattr(settings, name)) is not None}
