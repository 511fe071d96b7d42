"""The job of `prefill inspect`: one row, read as `prefill score` reads it, in full and compressed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

import numpy as np
from rich.console import Console

from prefillcli.asking.decisions import DecisionAsking
from prefillcli.asking.labels import LabelAsking
from prefillcli.asking.layouts import LayoutUse
from prefillcli.asking.questions import QuestionAsking
from prefillcli.core.further import FurtherQuestions, WantedRow
from prefillcli.core.inputs import Inputs
from prefillcli.core.models import Models
from prefillcli.core.request import ReadPrompt, Request, Tick, answer_requests, scored_row
from prefillcli.core.windows import FoundRow, find_row
from prefillcli.engines.base import Answer, EarlyExits, Engine, Treatment
from prefillcli.errors import UsageError, did_you_mean
from prefillcli.images.image import ImageLayout, PlacedImage
from prefillcli.images.thumbnails import thumbnails_of
from prefillcli.options.commands import InspectSettings
from prefillcli.options.requirements import compresses
from prefillcli.prompts.labels import Labels
from prefillcli.prompts.questions import Question
from prefillcli.reading.compress.compressor import compressor_of, inspected
from prefillcli.reading.exits.policy import inspected_policies
from prefillcli.report.section import Part, Section
from prefillcli.rows.output.tallies import shown_ids
from prefillcli.rows.records import ErrorCode, Prompt, RowError, ScoredRow, Window, joined_row, unasked
from prefillcli.runtime import log
from prefillcli.runtime.clock import Progress
from prefillcli.scoring.compose import Parts
from prefillcli.scoring.identity import require_model_of_heads
from prefillcli.scoring.loading import load_walk
from prefillcli.scoring.loop import NEXT_TOKENS, FollowUpWork
from prefillcli.scoring.opening import open_inputs, open_rows, require_shares
from prefillcli.scoring.path_table import require_apart
from prefillcli.scoring.scorer import further_questions
from prefillcli.scoring.shell import Ended, shell
from prefillcli.stats.arrays import Float64Array
from prefillcli.stats.labels import normalised, read_out
from prefillcli.tools.inspection import (
    MOST_IMAGES,
    AnswerView,
    Inspection,
    image_views,
    margin_curve,
    next_views,
    no_score,
    print_inspection,
    shared_prefixes,
    shared_tokens,
    token_views,
    write_html,
)

MOST_TOKENS = 5_000  # tokens of a prompt that are printed; the page has all of them


@dataclass
class Summary(Ended):
    """The last line on stdout."""

    row: int | None = None
    id: str | None = None
    method: str | None = None
    prompt_tokens: int | None = None
    kept_tokens: int | None = None
    score: float | None = None  # of the prompt in full
    score_compressed: float | None = None
    html: str | None = None
    images: list[dict[str, int]] | None = None  # width, height, tokens, first: the number of its first token


def inspect_job(settings: InspectSettings) -> dict[str, Any]:
    """Show one row on stderr, and with `html` as a page; return the summary for the last line on stdout.

    Errors are reported on stderr, and become the exit code in the summary.
    """
    summary = Summary()
    with shell(summary, debug=settings.run.debug) as stop:
        inspection = _inspect(settings, summary, stop.at_once, stop.check)
        if not settings.run.quiet:
            print_inspection(inspection, Console(stderr=True), most_tokens=MOST_TOKENS)
        if settings.shown.html is not None:
            write_html(inspection, settings.shown.html)
            summary.html = settings.shown.html
        summary.status, summary.exit_code = "complete", 0
    told = vars(summary).items()
    return {name: value for name, value in told if name not in ("error", "images") or value is not None}


def _inspect(
    settings: InspectSettings,
    summary: Summary,
    at_once: Callable[[], AbstractContextManager[None]],
    check: Callable[[], None],
) -> Inspection:
    # Signals end work that is done `at_once`; else `check` notices them. Findings on the row go into the summary at
    # once. Raises UsageError where the row is not found, PrefillError where it is an error row.
    _check(settings)
    require_apart(settings)
    with ExitStack() as stack:
        with at_once():
            rows, parts = open_rows(settings, [settings.ids.id_column])
            inputs = open_inputs(rows, parts)
            opened, every, settings = inputs.opened, inputs.labels, cast("InspectSettings", inputs.settings)
            require_shares(every, "inspect")
            require_model_of_heads(settings, opened, parts)
            if parts.heads is not None:
                parts.heads.require_wording(inputs)
            if isinstance(rows.asking, QuestionAsking):
                _part(settings, [each.question for each in every.asked])  # before rows are read
            found = _find(settings.shown.row, inputs, every)
            summary.row, summary.id, window = found.row, found.id, found.window
            every.check(window)
            if found.row in window.errors:
                raise no_score(found.row, found.id, window.errors[found.row])
            asked = _asked(inputs, window, found.row)
            part = _part(settings, asked)
            names = [label.name for label in asked[part].read.labels]
            policy = inspected_policies(settings.exit_profile.exit_profile, opened, every).get(asked[part].name)
            further = further_questions(inputs, parts)
            if further is not None:
                stack.callback(further.close)
            loaded = load_walk(opened, settings, names=names)
            stack.callback(loaded.close)
        prompts = window.prompts
        number = next(at for at, prompt in enumerate(prompts) if (prompt.row, prompt.part) == (found.row, part))
        prompt, shared = prompts[number], shared_tokens(prompts, number)
        summary.prompt_tokens = len(prompt.whole)
        progress = stack.enter_context(
            Progress(None, interval=settings.run.progress_interval, quiet=settings.run.quiet)
        )

        def tick(tokens: float) -> None:
            progress.advance(0, tokens)
            check()

        read = ReadPrompt.whole(prompt)
        if (draft := loaded.beside.get("draft")) is not None:
            read = inspected(compressor_of(settings, opened, draft), prompts, shared, number, tick)
        request = read.request
        if read.in_full is not None:
            log.warning(f"row {found.row} is read in full: {read.in_full}")
        summary.method = request.method
        summary.kept_tokens = len(prompt.whole if request.kept is None else request.tokens)
        answers = _answers(inputs, loaded, request, summary, tick)
        views = [
            None if own is None else AnswerView.of(names, prompt.labels, own.logprobs, settings.answers.temperature)
            for own in answers
        ]
        full, compressed = answers
        shown = compressed or full  # as a job reads the row
        if shown is None:
            raise ValueError("the prompt was not read")
        scored = scored_row(request, shown)
        summary.method = scored.method
        if compressed is not None and full is not None:
            scored.audit = full.logprobs
        sections, whole = [], scored
        if len(asked) > 1:
            every_answer = _answers_of(loaded.engine, [each for each in prompts if each.row == found.row], tick)
            sections.append(_every_answer(every_answer, asked, settings.answers.temperature))
            every_answer[part] = scored
            whole = joined_row([every_answer.get(at) or unasked(found.row) for at in range(len(asked))])
        if further is not None:
            labels_of_row = further.choice.wanted(window, [whole]).get(found.row, {})
            if part in labels_of_row:
                row = WantedRow(request, scored, labels_of_row[part])
                sections += _further(parts, further, loaded.engine, window, row, names, tick)
    for view, own in zip(views, answers, strict=True):
        if view is not None and own is not None and not view.is_finite:
            detail = f"label log-probabilities {own.logprobs.tolist()}"
            raise no_score(found.row, found.id, RowError(ErrorCode.NONFINITE_SCORE, detail))
    images = image_views(prompt, lambda each: _layout(inputs, each))
    summary.images = [asdict(each) for each in images] or None
    most = 0 if settings.shown.html is None or settings.thumbnails.no_thumbnails else MOST_IMAGES
    summary.score, summary.score_compressed = (None if view is None else view.score for view in views)
    return Inspection(
        row=prompt.row,
        row_id=str(prompt.row) if found.id is None else found.id,
        model=settings.lm.model or str(opened.files.origin),
        draft=settings.compression.draft,
        labels=list(names),
        tokens=token_views(opened.tokenizer, read),
        shared=shared_prefixes(
            [
                common
                for other, common in enumerate(shared)
                if other != number and prompts[other].variant == prompt.variant
            ]
        ),
        full=views[0],
        compressed=views[1],
        settings=_shown(settings, inputs),
        method=scored.method,
        voters=tuple(number + 1 for number in read.voters),
        draft_layers=0 if opened.draft is None else opened.draft.config.get_text_config().num_hidden_layers,
        margins=None
        if _reads_states(inputs, prompt)
        else margin_curve(shown.readings, shown.logprobs, names, None if policy is None else policy.inside),
        scored=scored,
        further=sections,
        next=next_views(opened.tokenizer, shown.next),
        images=images,
        thumbnails=thumbnails_of([each.image for each in prompt.images], most),
    )


def _layout(inputs: Inputs, placed: PlacedImage) -> ImageLayout:
    image = placed.image
    return inputs.opened.images.processing.layout(image.width, image.height, placed.several)


def _answers(
    inputs: Inputs, loaded: Models[Any], request: Request, summary: Summary, tick: Tick
) -> tuple[Answer | None, Answer | None]:
    # The answers to the prompt in full, if that fits, and compressed, if it is, with readings of every layer but the
    # last. Raises PrefillError.
    most = loaded.engine.limits.max_tokens
    wanted = [Request(request.prompt)] + ([request] if request.kept is not None else [])
    able = [each for each in wanted if each.size <= most]
    if not able:
        detail = f"{request.size} tokens; the memory budget holds {most}"
        raise no_score(request.prompt.row, summary.id, RowError(ErrorCode.EXCEEDS_MEMORY, detail))
    if len(able) < len(wanted):
        log.warning(f"the memory budget holds {most:,} tokens: the prompt is not read in full")
    layers = inputs.opened.files.config.get_text_config().num_hidden_layers
    states = _reads_states(inputs, request.prompt)
    asked = NEXT_TOKENS if inputs.opened.files.head is None and not states else 0
    observing = Treatment(EarlyExits(observed=() if states else tuple(range(layers - 1))), next_tokens=asked)
    found = answer_requests(loaded.engine, able, tick, treatment=observing)
    return found[0] if able[0].kept is None else None, found[-1] if able[-1].kept is not None else None


def _reads_states(inputs: Inputs, prompt: Prompt) -> bool:
    # Whether the answer is that of a head of hidden states, which reads no tokens, and the states of one layer alone.
    return inputs.opened.points or prompt.labels.head is not None


def _further(
    parts: Parts,
    further: FurtherQuestions,
    engine: Engine,
    window: Window,
    row: WantedRow,
    names: Sequence[str],
    tick: Tick,
) -> list[Section]:
    # The findings about a row with these names of labels, after further questions about it; it takes the answers.
    # Raises ResourceError if the engine cannot go on.
    follow = FollowUpWork(window, [row], further, engine.limits)
    for pack in follow.plan.packs:
        for answers in engine.answer(
            pack, lambda number: follow.requests[number].prompt.labels, tick, follow.treatment(pack)
        ):
            follow.take(pack, answers)
    return list(filter(None, (each.shown(row, names) for each in parts.follow_ups)))


def _find(row: str | None, inputs: Inputs, labels: Labels) -> FoundRow:
    # The row with this id, or else with this number. Requests have ids without an option. Raises UsageError.
    id_column: str | None = inputs.settings.ids.id_column
    is_number = row is None or (row.isascii() and row.isdigit())
    if id_column is None and not is_number:
        raise UsageError(f"--row {row}: a row's number counts from 0; for an id, name its column with --id-column")
    try:
        return find_row(inputs.source, inputs.builder, labels, row=row, id_column=id_column)
    except UsageError:
        if id_column is None or row is None or not is_number:
            raise
    try:
        found = find_row(inputs.source, inputs.builder, labels, row=row, id_column=None)
    except UsageError as error:
        raise UsageError(f"{error}, and no such id in column {id_column!r}") from None
    ids = found.window.carried[id_column].slice(found.window.place(found.row), 1)
    return replace(found, id=shown_ids(ids, inputs.source.kind == "jsonl")[0])


def _asked(inputs: Inputs, window: Window, row: int) -> list[Question]:
    # What each prompt of a row asks.
    if isinstance(inputs.rows.asking, DecisionAsking):
        return inputs.rows.asking.questions(window, row)
    return [each.question for each in inputs.labels.asked]


def _part(settings: InspectSettings, asked: Sequence[Question]) -> int:
    # The number of the prompt that is shown: the first of its question.
    names = list(dict.fromkeys(each.name for each in asked))
    if settings.shown.question is None:
        return 0
    if names == [""]:
        raise UsageError("--question: the rows ask one question, which has no name\nleave it out")
    if settings.shown.question not in names:
        near = did_you_mean(settings.shown.question, names)
        raise UsageError(f"--question: no question {settings.shown.question!r}{near}\nthere are {', '.join(names)}")
    return [each.name for each in asked].index(settings.shown.question)


def _answers_of(engine: Engine, prompts: Sequence[Prompt], tick: Tick) -> dict[int, ScoredRow]:
    # The answers to these prompts of a row, read in full, by their numbers; none to those that do not fit the memory.
    able = [request for each in prompts if (request := Request(each)).size <= engine.limits.max_tokens]
    answers = zip(able, answer_requests(engine, able, tick), strict=True)
    return {request.prompt.part: scored_row(request, answer) for request, answer in answers}


def _every_answer(answers: Mapping[int, ScoredRow], asked: Sequence[Question], temperature: float) -> Section:
    # The answer to each question of a row; of several orders the mean.
    found: dict[str, list[Float64Array]] = {}
    for part, own in answers.items():
        question = asked[part]
        found.setdefault(question.name, []).append(read_out(own.logprobs, temperature, question.read.weights))
    rows = [["question", "answer", "probability"]]
    for name, each in found.items():
        shares = normalised(np.mean(each, axis=0))
        names = next(question.names for question in asked if question.name == name)
        rows.append([name, names[int(shares.argmax())], f"{shares.max():.4g}"])
    note = "Of all prompts of the row, read in full; of a question in several orders, the mean. Levels that are asked "
    note += "about one by one have shares of the sum."
    return Section(title="All questions", parts=[Part(table=rows, words=(0, 1), note=note)])


def _check(settings: InspectSettings) -> None:
    # Raises UsageError for mistakes that do not depend on the input.
    if settings.compression.draft is not None and not settings.uses_draft:
        raise UsageError(
            f"--draft {settings.compression.draft}: prefill inspect shows the tokens that a draft model picks\n"
            "score the row with prefill score, which shows how many tokens it kept"
        )
    if settings.shown.html is not None and not settings.shown.html.lower().endswith((".html", ".htm")):
        raise UsageError(f"--html {settings.shown.html}: the page's name ends in .html")


def _shown(settings: InspectSettings, inputs: Inputs) -> dict[str, Any]:
    # The settings that the page names: those that decide on the answers.
    asked = ["labels"] if isinstance(inputs.rows.asking, LabelAsking) else ["questions", "question", "format"]
    names = ["template", "prompt_column", "system", "max_length", "on_long", "empty_text", *asked, "temperature"]
    names += [name for name in ("chat_option", "answer_prefix") if settings.value(name)]
    places = ["compression"] if compresses(settings) else []
    places += ["adapters"] if settings.adapters.adapter else []
    own = [name for name in settings.changing("scores") if settings.places()[name] in places and name != "draft"]
    names += [*own, *(["deterministic"] if settings.layers.deterministic else [])]
    found = {name: value for name in names if (value := settings.value(name)) is not None}
    way = inputs.builder.way
    found |= {"chat": way.said} if way is not None and way.said else {}
    return found if (use := LayoutUse.of(inputs.opened, inputs.rows.asking)) is None else found | {"layout": use.text}
