"""The job of `prefill fit`: rows with right answers -> hidden states at some layers -> heads, and their file."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console

from prefillcli.core.inputs import Inputs
from prefillcli.core.request import Request, plan_requests, thinning_of
from prefillcli.core.scorer import ModelScorer
from prefillcli.engines.base import Answer, EarlyExits, Readings, Treatment
from prefillcli.errors import UsageError, counted, without_secrets
from prefillcli.judging.truth import REVIEW, RIGHT, Mistakes, TruthPlan, doubted, is_blank
from prefillcli.models.open import dtype_name
from prefillcli.models.shape import Shape
from prefillcli.options.commands import FitSettings
from prefillcli.options.judging import truth_by_question
from prefillcli.prompts.labels import Labels
from prefillcli.reading.exits.first import hashed_words
from prefillcli.reading.heads.head import HEAD, FittedHead, HeadFile, Quality, head_file_at
from prefillcli.reading.heads.heads import model_of, wording_of
from prefillcli.report.section import WIDTH, numbers_table, stderr_console
from prefillcli.rows.output.answers import AnswerColumns
from prefillcli.rows.output.store import write_sealed
from prefillcli.rows.records import Prompt, Window
from prefillcli.rows.values import to_python
from prefillcli.runtime import log
from prefillcli.runtime.clock import Progress, step
from prefillcli.runtime.memory import available_memory
from prefillcli.scoring.compose import Parts
from prefillcli.scoring.identity import LocalModels, fingerprint
from prefillcli.scoring.opening import open_inputs, open_rows, require_shares
from prefillcli.scoring.path_table import require_apart
from prefillcli.scoring.scorer import load_here, make_scorer
from prefillcli.scoring.shell import Ended, shell
from prefillcli.stats.arrays import Float32Array, Float64Array, Int64Array
from prefillcli.tools.fit.solve import COMMONEST, OWN, WORDS, Rival, Solution, chance_of, quality, rivals, solve

LEAST_ROWS = 30  # with a right answer and a prompt of their own, of a question
FEW_ROWS = 5  # of an answer: there are no fewer in a fold for each
MOST_ROWS = 5_000  # of a question: more teach little, and a head is solved in the square or cube of their number
HIDDEN_SHARE = 0.25  # of the free memory, that hidden states may take
LAYERS = 8  # at which hidden states are kept
FIRST_LAYER = 0.3  # of the model's depth: below, hidden states know little of a text
BEFORE = "the head before"
DEFAULT = "fitted.head"


def observed_layers(depth: int, most: int | None = None) -> tuple[int, ...]:
    """Return the layers whose hidden states are kept, counted from 0: some eight of a model with this depth, up to
    that with the number `most`."""
    last = min(most or depth, depth)
    shares = np.linspace(min(FIRST_LAYER, last / depth), last / depth, LAYERS)
    return tuple(sorted({max(round(share * depth), 1) - 1 for share in shares}))


class Lessons(NamedTuple):
    """Rows of one question with right answers: hidden states [rows, hidden] by layer, counted from 1, the model's own
    log-probabilities [rows, answers], hashed words [rows, numbers], right answers [rows] and digests of prompts
    [rows]."""

    hidden: dict[int, Any]
    own: Float64Array
    words: Any
    truth: Int64Array
    prompts: Int64Array


@dataclass
class Collected:
    """Rows of one question, as they are read."""

    plan: TruthPlan
    shown: str | None = None  # the column of a review file with the answers that blank right ones confirm
    hidden: list[list[Any]] = field(default_factory=list)
    own: list[Float64Array] = field(default_factory=list)
    words: list[Any] = field(default_factory=list)
    truth: list[int] = field(default_factory=list)
    prompts: list[int] = field(default_factory=list)
    unknown: Counter[str] = field(default_factory=Counter)  # right answers that are none
    left_out: Counter[str] = field(default_factory=Counter)
    most: int = MOST_ROWS  # rows
    is_cut: bool = False  # whether there are more than these

    def lessons(self, layers: Sequence[int]) -> Lessons:
        """Return the rows, with the hidden states of these layers, counted from 0."""
        stacked = {layer + 1: np.stack([each[at] for each in self.hidden]) for at, layer in enumerate(layers)}
        return Lessons(
            stacked,
            np.stack(self.own),
            np.stack(self.words),
            np.array(self.truth, np.int64),
            np.array(self.prompts, np.int64),
        )


@dataclass
class Fitted:
    """A question's head, with the quality of it and its rivals on held-out rows, and whether it is better."""

    head: FittedHead
    rivals: Sequence[Rival]
    probabilities: Float64Array
    truth: Int64Array  # of the rows that the rivals answer
    better: bool
    reason: str
    left_out: Mapping[str, int]


def fit_job(settings: FitSettings) -> dict[str, Any]:
    """Fit heads, report on stderr, and write their file; return the summary for the last line on stdout.

    Errors are reported on stderr, and become the exit code in the summary.
    """
    ending = Ended()
    line: dict[str, Any] = {}
    with shell(ending, debug=settings.run.debug) as stop:
        line = _fit(settings, stop.at_once, stop.check)
        ending.status, ending.exit_code = "complete", 0
    found = {"status": ending.status, "exit_code": ending.exit_code, **line}
    return found | ({"error": ending.error} if ending.error else {})


def _fit(
    settings: FitSettings, at_once: Callable[[], AbstractContextManager[None]], check: Callable[[], None]
) -> dict[str, Any]:
    # Raises UsageError for rows that teach nothing.
    with ExitStack() as stack:
        with at_once():
            if not settings.truth.columns:
                raise UsageError("no --truth given: name the column with the right answers")
            require_apart(settings)
            earlier = None if settings.fitting.add is None else head_file_at(settings.fitting.add, "--add")
            shown = _shown(settings)
            reviewed = (*shown.values(), REVIEW) if shown else ()
            rows, parts = open_rows(settings, (*settings.truth.columns.values(), *reviewed))
            models = LocalModels(settings)
            inputs = open_inputs(rows, parts)
            stack.callback(inputs.builder.close)
            require_shares(inputs.labels, "fit")
            collected = _questions(inputs, shown)
            about = _about(inputs, parts, models)
            if earlier is None:
                layers = observed_layers(about.layers, settings.fitting.most_layers)
            else:  # before rows are read
                layers = tuple(sorted({each.layer - 1 for each in earlier.heads}))
                _require_same(earlier, about, settings)
                _require_fitting(earlier, collected, inputs)
            _limit(collected, len(layers), inputs)
            step("loading the model")
            loaded = load_here(inputs.opened, settings, inputs.labels)
            stack.callback(loaded.close)
            scorer = make_scorer(inputs, parts, loaded)
        _read(scorer, collected, layers, check)
        with at_once():
            models.require_unchanged()
    with at_once():
        step("solving")
        fitted = [_solved(own, inputs, part, layers, earlier) for part, own in sorted(collected.items())]
        kept = [each for each in fitted if each.better or settings.fitting.keep_worse]
        if not settings.run.quiet:
            _print(fitted, about.layers, stderr_console(WIDTH))
        output = settings.fitting.output or settings.fitting.add or DEFAULT
        if kept:
            solved = {each.head.question for each in fitted}
            others = () if earlier is None else (each for each in earlier.heads if each.question not in solved)
            heads = (*others, *(each.head for each in kept))
            own = HeadFile(
                model=about.model, layers=about.layers, dtype=about.dtype, compute=about.compute, heads=heads
            )
            write_sealed(output, own.to_json())
        _tell(fitted, kept, output, quiet=settings.run.quiet)
    return {
        "output": output if kept else None,
        "heads": [
            {
                "question": each.head.question or None,
                "rows": len(each.head.truth),
                "left_out": {why: rows for why, rows in each.left_out.items() if rows},
                "layer": each.head.layer,
                "layers": about.layers,
                "better": each.better,
                "held_out": {name: own.model_dump() for name, own in each.head.held_out.items()},
            }
            for each in fitted
        ],
    }


def _about(inputs: Inputs, parts: Parts, models: LocalModels) -> HeadFile:
    # What the file says of the model, without any head.
    files, read_as = inputs.opened.files, [] if parts.compression is None else parts.compression.read_as()
    return HeadFile.model_construct(
        model=model_of(fingerprint(inputs, parts, models), read_as),
        layers=files.config.get_text_config().num_hidden_layers,
        dtype=dtype_name(files),
        compute=inputs.opened.narrow,
        heads=(),
    )


def _read(
    scorer: ModelScorer, collected: Mapping[int, Collected], layers: Sequence[int], check: Callable[[], None]
) -> None:
    # Read the rows, until there are enough of each question.
    inputs, run = scorer.inputs, scorer.inputs.settings.run
    progress = Progress(inputs.source.expected_rows, interval=run.progress_interval, quiet=run.quiet)
    with progress, inputs.windows() as coming:
        for window in coming:
            if all(len(own.truth) >= own.most for own in collected.values()):
                for own in collected.values():
                    own.is_cut = True
                break
            inputs.labels.check(window)
            _collect(window, scorer, collected, layers, lambda tokens: check())
            progress.advance(len(window.rows), 0.0)


def _shown(settings: FitSettings) -> dict[str, str]:
    # Of each column with right answers in a review file, the one with the answers that its blanks confirm; none where
    # they confirm nothing. Raises UsageError.
    found: dict[str, str] = {}
    if settings.fitting.review_blank == "confirmed":
        for column in settings.truth.columns.values():
            if not column.endswith(f".{RIGHT}"):
                raise UsageError(
                    f"--review-blank confirmed: {column} is no column for right answers of prefill score --review\n"
                    "leave it out"
                )
            name = column.removesuffix(f".{RIGHT}")
            named = settings.asking.questions is not None
            found[column] = AnswerColumns(labels=(), name=name if named else "").column("")
    return found


def _questions(inputs: Inputs, shown: Mapping[str, str]) -> dict[int, Collected]:
    # What is collected of each question with right answers, by its prompt. Raises UsageError.
    labels = inputs.labels
    names = [each.question.name for each in labels.asked]
    if len(set(names)) < len(names):
        raise UsageError(
            "a question is asked in several orders or prompts, and a head knows one\n"
            "ask it once, without swap or orders"
        )
    found: dict[int, Collected] = {}
    for name, column in truth_by_question(inputs.settings.truth.columns, names).items():
        part = names.index(name)
        own = inputs.schema.questions[part]
        found[part] = Collected(TruthPlan(own, column, labels.asked[part].labels), shown.get(column))
        if column in inputs.builder.needed:
            log.warning(f"{found[part].plan.option}: the prompt reads this column, so the model sees the right answer")
    return found


def _collect(
    window: Window,
    scorer: ModelScorer,
    collected: Mapping[int, Collected],
    layers: Sequence[int],
    tick: Callable[[float], None],
) -> None:
    # Read the prompts of a window that have right answers, and keep what they teach.
    json_text = scorer.inputs.source.kind == "jsonl"
    truths = {part: _truths(window, own, json_text=json_text) for part, own in collected.items()}
    wanted: list[tuple[Prompt, int]] = []
    asking: Counter[int] = Counter()
    for prompt in window.prompts:
        if prompt.part not in collected:
            continue
        own = collected[prompt.part]
        if len(own.truth) + asking[prompt.part] >= own.most:
            own.is_cut = True
            continue
        value = truths[prompt.part][window.place(prompt.row)]
        number = None if is_blank(value) else own.plan.number_of(value)
        if number is not None:
            wanted.append((prompt, number))
            asking[prompt.part] += 1
        elif is_blank(value):
            own.left_out["without a right answer"] += 1
        else:
            own.unknown[str(value)] += 1
    for own in collected.values():
        own.left_out["that cannot be read"] += len(window.errors)
    requests, _ = scorer.requests([prompt for prompt, _ in wanted], tick)
    most = scorer.pool.limits.max_tokens
    able = [number for number, each in enumerate(requests) if each.size <= most]
    asked: list[Request] = [requests[number] for number in able]
    for number in set(range(len(requests))).difference(able):
        collected[requests[number].prompt.part].left_out["that do not fit the memory"] += 1
    plan = plan_requests(asked, scorer.pool.limits)
    treatment = Treatment(EarlyExits(observed=tuple(layers)), thinning=thinning_of(dict(enumerate(asked))))
    found: dict[int, Answer] = {}
    for answers in scorer.pool.answer_all(plan.packs, lambda i: asked[i].prompt.labels, tick, treatment):
        found |= {answer.prompt: answer for answer in answers}
    for at, request in enumerate(asked):  # in the order of the input, whatever packs they were in
        prompt, number, answer = request.prompt, wanted[able[at]][1], found[at]
        own = collected[prompt.part]
        states = [each.hidden[0] for each in answer.readings]
        if answer.failure is not None:
            own.left_out["that do not fit the memory"] += 1
        elif not all(np.isfinite(each).all() for each in states):
            own.left_out["whose hidden states are not finite"] += 1
        else:
            own.hidden.append(states)
            own.own.append(np.log(np.maximum(prompt.labels.shares(answer.logprobs, 1.0), 1e-300)))
            own.words.append(hashed_words(prompt.tokens))
            own.truth.append(number)
            own.prompts.append(_digest(prompt))


def _truths(window: Window, own: Collected, *, json_text: bool) -> list[Any]:
    # The right answers of a window, as they are written.
    def values(column: str) -> list[Any]:
        found = to_python(window.carried.column(column))
        return [None if value is None else json.loads(value) for value in found] if json_text else found

    truths = values(own.plan.truth)
    if own.shown is None:
        return truths
    return [
        answer if is_blank(truth) and own.plan.own.key in doubted(why) else truth
        for truth, answer, why in zip(truths, values(own.shown), values(REVIEW), strict=True)
    ]


def _digest(prompt: Prompt) -> int:
    return int.from_bytes(hashlib.sha256(prompt.content).digest()[:8], "little", signed=True)


def _require_same(earlier: HeadFile, about: HeadFile, settings: FitSettings) -> None:
    # Raise UsageError for heads of another model or number format.
    for what, name in (("model", "model"), ("number format", "dtype"), ("low precision", "compute")):
        if getattr(earlier, name) != getattr(about, name):
            raise UsageError(
                f"--add {without_secrets(settings.fitting.add or '')}: it was fitted to another {what}\n"
                "give the model and options that it was fitted with, or fit all rows anew"
            )


def _solved(own: Collected, inputs: Inputs, part: int, layers: Sequence[int], earlier: HeadFile | None) -> Fitted:
    # The head of a question. Raises UsageError for rows that teach nothing.
    labels: Labels = inputs.labels.asked[part]
    plan, name = own.plan, labels.question.name
    plan.tell(Mistakes.of(own.unknown, plan.names))
    if own.is_cut:
        log.warning(
            f"{plan.option}: the first {own.most:,} rows with a right answer are used, and later ones are not read\n"
            f"give --sample {own.most} for rows from all over the input"
        )
    answers, wording = len(labels.names), wording_of(inputs.builder, inputs.labels, part)
    before = None if earlier is None else earlier.by_question.get(name)
    _require_enough(own, plan, before)
    lessons = own.lessons(layers)
    hidden, truth, prompts = lessons.hidden, lessons.truth, lessons.prompts
    compared = np.ones(len(truth), np.bool_)
    if before is None:
        given = rivals(lessons.own, lessons.words, truth, answers, prompts=prompts)
    else:
        learnt = np.isin(prompts, before.prompts)  # by the head before, so they say little of how good it is
        compared = compared if learnt.all() else ~learnt
        added = hidden[before.layer]
        given = [Rival(BEFORE, np.exp(before.rule().decide(0, _readings(added[compared]))[1]))]
        keep = ~np.isin(before.prompts, prompts)
        hidden = {before.layer: np.concatenate([before.hidden[keep], added])}
        truth, prompts = np.concatenate([before.truth[keep], truth]), np.concatenate([before.prompts[keep], prompts])
    found: Solution = solve(hidden, truth, answers, prompts=prompts)
    shown, right = found.held_out[len(truth) - len(lessons.truth) :][compared], lessons.truth[compared]
    held = {each.name: quality(each.probabilities, right) for each in given}
    held[HEAD] = quality(shown, right)
    head = FittedHead(
        question=name,
        labels=labels.names,
        wording=wording,
        layer=found.layer,
        weights=found.weights.astype(np.float64),
        bias=found.bias.astype(np.float64),
        hidden=hidden[found.layer],
        truth=truth,
        prompts=prompts,
        strength=found.strength,
        held_out=held,
    )
    better, reason = _verdict(held)
    return Fitted(head, given, shown, right, better, reason, own.left_out)


def _readings(hidden: Float32Array) -> Readings:
    none = np.full((len(hidden), 1), np.nan)
    return Readings(hidden, none, none)


def _require_enough(own: Collected, plan: TruthPlan, before: FittedHead | None) -> None:
    count = len({*own.prompts, *(() if before is None else before.prompts.tolist())})
    if not own.truth and own.unknown:
        mistakes = Mistakes.of(own.unknown, plan.names)
        if mistakes is not None:
            raise plan.no_answer(mistakes)
    others = ", ".join(f"{rows:,} {why}" for why, rows in own.left_out.items() if rows)
    left_out = f" ({others})" if others else ""
    if before is not None and not own.truth:
        raise UsageError(
            f"{plan.option}: no row has a right answer{left_out}, so there is nothing to add\nfill some in"
        )
    if count < LEAST_ROWS:
        raise UsageError(
            f"{plan.option}: {counted(count, 'row')} with a right answer and another prompt than the others{left_out}"
            f"; a head takes at least {LEAST_ROWS}\ngive {LEAST_ROWS - count} more"
        )
    truth = own.truth if before is None else [*own.truth, *before.truth.tolist()]
    counts = np.bincount(truth, minlength=len(plan.labels)).tolist()
    if sum(map(bool, counts)) < 2:
        raise UsageError(
            f"{plan.option}: {plan.name_of(truth[0])} is the right answer of all {count:,} rows, and a head learns to "
            "tell answers apart\ngive rows with other right answers"
        )
    never = [plan.name_of(at) for at, rows in enumerate(counts) if not rows]
    if never:
        log.warning(f"{plan.option}: no row has the right answer {', '.join(never)}, so the head hardly ever gives it")
    few = [f"{plan.name_of(at)} ({rows})" for at, rows in enumerate(counts) if 0 < rows < FEW_ROWS]
    if few:
        log.warning(
            f"{plan.option}: few rows have the right answer {', '.join(few)}: how often it is found is not known\n"
            "give more of them"
        )


def _require_fitting(earlier: HeadFile, collected: Iterable[int], inputs: Inputs) -> None:
    # Raise UsageError for heads of these questions that were fitted to other words.
    for part in collected:
        labels: Labels = inputs.labels.asked[part]
        before = earlier.by_question.get(labels.question.name)
        if before is None:
            continue
        others = before.labels != labels.names
        if others or before.wording != wording_of(inputs.builder, inputs.labels, part):
            what = "answers" if others else "words around a row's text"
            raise UsageError(
                f"--add: its head of {before.question or 'the question'} was fitted with other {what}\n"
                "ask with the same question and options, or fit all rows anew"
            )


def _limit(collected: Mapping[int, Collected], layers: int, inputs: Inputs) -> None:
    # Bound the rows of each question by the memory that their hidden states take.
    width: int = Shape(inputs.opened.files.config.get_text_config()).hidden
    room = int(HIDDEN_SHARE * available_memory(torch.device("cpu"))) // (len(collected) * layers * width * 4)
    for own in collected.values():
        own.most = min(MOST_ROWS, max(room, LEAST_ROWS))


def _verdict(held: Mapping[str, Quality]) -> tuple[bool, str]:
    # Whether the head is better than its rivals, and why not.
    head = held[HEAD]
    for name in (BEFORE,) if BEFORE in held else (OWN, COMMONEST):
        rival = held[name]
        if head.accuracy < rival.accuracy or (head.accuracy == rival.accuracy and head.log_loss >= rival.log_loss):
            return False, f"it is right in {head.accuracy:.1%} of held-out rows, {name} in {rival.accuracy:.1%}"
    return True, ""


def _print(fitted: Any, depth: int, console: Console) -> None:
    for each in fitted:
        head = each.head
        title = f"{head.question}: " if head.question else ""
        counts = Counter(head.labels[at] for at in head.truth.tolist()).most_common()
        by_answer = ", ".join(f"{rows:,} {name}" for name, rows in counts)
        left = ", ".join(f"{rows:,} {why}" for why, rows in each.left_out.items() if rows)
        console.print(f"{title}{counted(len(head.truth), 'row')} ({by_answer}){f'; left out: {left}' if left else ''}")
        table = [["held-out rows", "right", "log loss", "Brier", "ECE", "by chance", "layers"]]
        for rival in each.rivals:
            own = head.held_out[rival.name]
            chance = chance_of(each.probabilities, rival.probabilities, each.truth)
            through = {COMMONEST: "0", WORDS: "0", BEFORE: f"{head.layer} of {depth}"}.get(rival.name, f"{depth}")
            table.append(_line(rival.name, own, f"{chance:.3f}", through))
        table.append(_line(f"{HEAD} *", head.held_out[HEAD], "", f"{head.layer} of {depth}"))
        console.print(numbers_table(table))
        console.print()


def _line(name: str, own: Quality, chance: str, layers: str) -> list[str]:
    return [name, f"{own.accuracy:.3f}", f"{own.log_loss:.3f}", f"{own.brier:.3f}", f"{own.ece:.3f}", chance, layers]


def _tell(fitted: Any, kept: Sequence[Fitted], output: str, *, quiet: bool) -> None:
    shown = without_secrets(output)
    for each in fitted:
        own = f"{each.head.question}: " if each.head.question else ""
        if not each.better:
            what = "written all the same (keep_worse)" if each in kept else "not written"
            log.warning(f"{own}the head is no better, and {what}: {each.reason}")
        words, head = each.head.held_out.get(WORDS), each.head.held_out[HEAD]
        if words is not None and words.accuracy >= head.accuracy:
            log.warning(
                f"{own}words alone are right as often as the head ({words.accuracy:.1%}), without any model: a "
                "bag-of-words classifier may be all that this question needs"
            )
    if kept and not quiet:
        console = stderr_console(WIDTH)
        console.print(
            "right: share of rows. by chance: how likely so large a difference from the head would be by chance "
            "(McNemar's exact test). ECE: expected calibration error."
        )
        console.print(f"next: prefill score ... --head {shown}")
