"""`python -m benchmarks.heads`: what heads fitted to right answers add, at which layer, with how many of them.

    python -m benchmarks.heads --model qwen --int8 -o out/heads          # Typed Decisions, 400 cases
    python -m benchmarks.heads --model qwen --int8 --texts reviews --cases 400 -o out/heads-reviews
    python -m benchmarks.heads --table -o out/heads [--labels 20 --labels 40 --labels 80]
    python -m benchmarks.heads --model qwen --int8 --cases 160 --only security_incidents --reworded -o out/reworded \\
        --fitted-to out/heads
    python -m benchmarks.heads --model qwen --int8 --cases 8 --layer 20     # seconds, with a head after that layer

A model reads the cases once, as requests of System One; the hidden states at the end of each question are kept in
files of the output folder, so that a run that was stopped goes on. Then each question gets a head of its own, as
`prefill fit` solves it, in five folds: four fifths of the cases teach, and the answers to the others are judged. So
are those of its rivals.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Annotated, Any, NamedTuple, cast

import numpy as np
import typer

from benchmarks.console import log
from benchmarks.decisions import TYPES, Case, figures, typed_decisions
from benchmarks.decisions import Judged as JudgedCase
from benchmarks.forms import GOALS, RESAMPLED, TEXTS, model_of, promised
from prefillcli.core.models import Models
from prefillcli.core.request import Request, plan_requests
from prefillcli.engines.base import PLAIN, Answer, EarlyExits, Treatment
from prefillcli.judging.calibration import fit_platt, fit_temperature
from prefillcli.options.commands import ScoreSettings
from prefillcli.options.load import load_settings
from prefillcli.reading.exits.first import hashed_words
from prefillcli.reading.heads.head import HeadRule, moments
from prefillcli.reading.heads.heads import Features
from prefillcli.rows.records import Prompt
from prefillcli.scoring.loading import load_walk
from prefillcli.scoring.opening import open_inputs, open_rows
from prefillcli.stats.arrays import Float64Array, Int64Array
from prefillcli.stats.labels import label_probabilities, log_shares_of
from prefillcli.stats.ridge import ridge
from prefillcli.tools.bench.contest import interleaved
from prefillcli.tools.fit.solve import chance_of, folds_of, solve
from prefillcli.walk.narrow import Narrow, in_smaller_numbers
from recipes.real_model import FOLDER

SHARES = (0.3, 0.4, 0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.9)  # of the depth, after which hidden states are kept
TOGETHER = 20  # cases that are read and kept together


def cases_of(texts: str, folder: Path, count: int) -> list[Case]:
    """The cases: those of Typed Decisions one workflow after the other, so that any beginning has all of them."""
    if texts == "decisions":
        by_workflow: dict[str, list[Case]] = defaultdict(list)
        for case in typed_decisions(folder):
            by_workflow[case.workflow].append(case)
        return [case for each in zip(*by_workflow.values(), strict=True) for case in each][:count]
    found = TEXTS[texts](folder, count)
    questions = found.questions
    gold = [row | {"predicate": None if row["predicate"] is None else 1 - row["predicate"]} for row in found.rows]
    return [
        Case(texts, row["text"], questions, {name: row[name] for name in questions if row[name] is not None})
        for row in gold
    ]


class Reader:
    """A model that reads cases for their hidden states."""

    def __init__(self, model: Path, compute: Narrow | None) -> None:
        self._model, self._compute = model, compute
        self._loaded: Models[Any] | None = None
        self._layers: tuple[int, ...] = ()

    def requests(self, cases: Sequence[Case]) -> list[Request]:
        """The prompts of all questions of the cases; the model is loaded for the first ones."""
        with TemporaryDirectory() as folder:
            source = Path(folder, "in.jsonl")
            source.write_text("".join(json.dumps({"state": c.state, "questions": c.questions}) + "\n" for c in cases))
            given = {"inputs": str(source), "model": str(self._model), "output": str(Path(folder, "out.jsonl"))}
            own = {"quiet": True, "weights": "resident"}
            settings = load_settings(ScoreSettings, {**given, **own}, environment={})
            inputs = open_inputs(*open_rows(settings))
            if self._loaded is None:
                depth = inputs.opened.files.config.get_text_config().num_hidden_layers
                self._layers = tuple(sorted({round(depth * share) - 1 for share in SHARES} | {depth - 2}))
                self._loaded = load_walk(inputs.opened, settings)
                walk = self._loaded.engine.walk
                if self._compute is not None:
                    walk.arithmetic = in_smaller_numbers(walk.model, self._compute)
            requests = [Request(prompt) for window in inputs.windows() for prompt in window.prompts]
            inputs.builder.close()
        return requests

    def answers(self, requests: Sequence[Request], treatment: Treatment) -> tuple[list[Answer], int]:
        """The model's answers, and the tokens that were computed."""
        engine = cast("Models[Any]", self._loaded).engine
        plan = plan_requests(requests, engine.limits)
        found: dict[int, Answer] = {}
        for answers in engine.answer_all(
            plan.packs, lambda i: requests[i].prompt.labels, lambda tokens: None, treatment
        ):
            found |= {answer.prompt: answer for answer in answers}
        return [found[at] for at in range(len(requests))], sum(len(pack.tokens) for pack in plan.packs)

    def read(self, cases: Sequence[Case], first: int) -> dict[str, Any]:
        """Arrays of all questions of the cases, whose first one has this number: hidden states [questions, layers,
        hidden] after `layers`, the model's own log-probabilities [questions, answers], hashed words, the number of the
        case and of its question."""
        requests = self.requests(cases)
        begun = perf_counter()
        read, tokens = self.answers(requests, Treatment(EarlyExits(observed=self._layers)))
        logprobs = np.full((len(read), max(len(each.logprobs) for each in read)), np.nan)
        for row, each in enumerate(read):
            logprobs[row, : len(each.logprobs)] = each.logprobs
        return {
            "hidden": np.stack([np.stack([each.hidden[0] for each in answer.readings]) for answer in read]),
            "logprobs": logprobs,
            "words": np.stack([hashed_words(each.prompt.tokens) for each in requests]).astype(np.float16),
            "row": np.array([first + each.prompt.row for each in requests]),
            "part": np.array([each.prompt.part for each in requests]),
            "layers": np.array(self._layers),
            "tokens": tokens,
            "seconds": perf_counter() - begun,
        }

    def seconds(self, cases: Sequence[Case], layer: int, rounds: int = 3) -> str:
        """The seconds of the cases through all layers and with heads after one, by turns."""
        requests = self.requests(cases)
        width = cast("Models[Any]", self._loaded).opened.files.config.hidden_size

        def by_head(prompt: Prompt) -> Prompt:
            count = len(prompt.labels)
            rule = HeadRule(layer - 1, np.zeros(width), np.ones(width), np.zeros((width, count)), np.zeros(count))
            return replace(prompt, labels=prompt.labels.answered_by(rule, count))

        headed = [Request(by_head(each.prompt)) for each in requests]
        taken = interleaved(
            {
                "all layers": lambda: self.answers(requests, PLAIN),
                f"head after layer {layer}": lambda: self.answers(headed, PLAIN),
            },
            rounds,
        )
        full, cut = (float(np.median(own)) for own in taken.values())
        ratios = [b / a for a, b in zip(*taken.values(), strict=True)]
        return f"all layers {full:.1f} s, head after layer {layer} {cut:.1f} s: {np.median(ratios):.3f} of it"


class Asked(NamedTuple):
    """A question with the cases that have a right answer to it: hidden states [cases, hidden] by layer, counted from
    1, the model's own log-probabilities [cases, answers], words, and right answers [cases]."""

    type: str
    hidden: Mapping[int, Any]
    own: Float64Array
    words: Float64Array
    truth: Int64Array


def reworded(case: Case) -> Case:
    """The same case with other words around its questions."""

    def said(question: Mapping[str, Any]) -> dict[str, Any]:
        own = question["instructions"]
        return {**question, "instructions": f"Read the text above with care. {own} Choose what fits best."}

    return case._replace(questions={name: said(own) for name, own in case.questions.items()})


def asked_of(cases: Sequence[Case], output: Path) -> dict[str, Asked]:
    """What was read about each question, by its name."""
    parts = [dict(np.load(file)) for file in sorted(output.glob("*.npz"))]
    layers = [int(layer) + 1 for layer in parts[0]["layers"]]
    found: dict[str, list[tuple[Any, Any, Any, int]]] = defaultdict(list)
    types: dict[str, str] = {}
    for part in parts:
        for at, (row, number) in enumerate(zip(part["row"].tolist(), part["part"].tolist(), strict=True)):
            case = cases[row]
            name = list(case.questions)[number]
            if name in case.gold:
                own = part["logprobs"][at]
                key = f"{case.workflow}.{name}"
                found[key].append((part["hidden"][at], own[~np.isnan(own)], part["words"][at], case.gold[name]))
                types[key] = case.questions[name]["type"]
    return {
        key: Asked(
            types[key],
            {layer: np.stack([each[0][at] for each in rows]) for at, layer in enumerate(layers)},
            np.stack([each[1] for each in rows]),
            np.stack([each[2] for each in rows]).astype(np.float64),
            np.array([each[3] for each in rows]),
        )
        for key, rows in found.items()
    }


class Told(NamedTuple):
    """The probabilities that each way gives to the held-out cases of a question, the layers of its heads, and the
    share of held-out cases that a head at each layer is right in."""

    type: str
    truth: Int64Array
    by: dict[str, Float64Array]
    layers: list[int]
    right_at: dict[int, float]


def told(asked: Asked, labels: int | None = None, seed: int = 0) -> Told:
    """The answers to held-out cases by each way, with heads taught by this many `labels` (None: all others)."""
    truth, answers = asked.truth, asked.own.shape[1]
    ways = ["the commonest answer", "own", "own, calibrated", "own, prior out", "words", "head"]
    found = {way: np.full((len(truth), answers), np.nan) for way in ways}
    right = {layer: np.zeros(len(truth), bool) for layer in asked.hidden}
    chosen, shares = [], log_shares_of(asked.own)
    for rows, rest in folds_of(truth, seed):
        some = rows if labels is None else np.random.default_rng(seed).permutation(rows)[:labels]
        counts = np.bincount(truth[some], minlength=answers) + 1.0
        found["the commonest answer"][rest] = counts / counts.sum()
        found["own"][rest] = label_probabilities(asked.own[rest])
        found["own, calibrated"][rest] = fit_platt(shares[some], truth[some]).apply(shares[rest])
        found["own, prior out"][rest] = label_probabilities(asked.own[rest] - shares[rows].mean(axis=0))
        found["words"][rest] = _by_words(asked.words, truth, answers, some, rest)
        head = solve({layer: states[some] for layer, states in asked.hidden.items()}, truth[some], answers)
        found["head"][rest] = label_probabilities(
            features_of(asked.hidden[head.layer], some, rest) @ head.weights + head.bias
        )
        chosen.append(head.layer)
        for layer, states in asked.hidden.items():
            fitted = ridge(features_of(states, some, some), np.eye(answers)[truth[some]])
            said = features_of(states, some, rest) @ fitted.weights + fitted.bias
            right[layer][rest] = said.argmax(axis=1) == truth[rest]
    return Told(asked.type, truth, found, chosen, {layer: float(each.mean()) for layer, each in right.items()})


def features_of(states: Any, some: Int64Array, rows: Int64Array) -> Float64Array:
    """Hidden states of `rows`, less the mean of those of `some`, over their standard deviation."""
    mean, scale = moments(states[some])
    return np.asarray((states[rows].astype(np.float64) - mean) / scale, np.float64)


def _by_words(words: Float64Array, truth: Int64Array, answers: int, some: Any, rest: Any) -> Float64Array:
    lengths = np.linalg.norm(words, axis=1, keepdims=True)
    points = words / np.where(lengths > 0, lengths, 1)
    fitted = ridge(points[some], np.eye(answers)[truth[some]])
    held, scores = fitted.held_out, points[rest] @ fitted.weights + fitted.bias
    return np.asarray(fit_temperature(held, truth[some]).apply(scores))


def judged(every: Sequence[Told], way: str) -> list[JudgedCase]:
    """The answers of a way to all questions, for `benchmarks.decisions.figures`."""
    return [
        JudgedCase(("", ""), each.type, shares.tolist(), int(right))
        for each in every
        for shares, right in zip(each.by[way], each.truth, strict=True)
    ]


def table(every: Sequence[Told], depth: int) -> Iterator[str]:
    """A table in Markdown: accuracy, Brier score and log loss of each way, in all and by type, the calibration error,
    and the layers of one forward."""
    yield "| way | all | noul | choice | score | calibration error | layers |"
    yield "| --- " * 7 + "|"
    for way in every[0].by:
        each = judged(every, way)
        cells = [each, *([own for own in each if own.type == kind] for kind in TYPES)]
        shown = " | ".join(
            " ".join(f"{figures(own)[name]:.3f}" for name in ("accuracy", "brier", "loss")) if own else ""
            for own in cells
        )
        layers = "0" if way in ("the commonest answer", "words") else f"{depth}"
        if way == "head":
            layers = f"{np.mean([layer for own in every for layer in own.layers]):.1f} on average"
        yield f"| {way} | {shown} | {figures(each)['error']:.3f} | {layers} |"


ADAPTED = 30  # rows without right answers, of which mean and scale are taken


def moved(asked: Asked, other: Asked, seed: int = 0) -> dict[str, Any]:
    """How often a head is right in held-out cases: asked as it was fitted, asked in `other` words as it is, and with
    the mean and scale of some cases in these. And how far mean features are away, in standard deviations, in the same
    words and in others."""
    count = len(other.truth)
    found: dict[str, list[Any]] = defaultdict(list)
    for rows, rest in folds_of(asked.truth, seed):
        head = solve(
            {layer: states[rows] for layer, states in asked.hidden.items()}, asked.truth[rows], asked.own.shape[1]
        )
        rule = HeadRule(head.layer - 1, *moments(asked.hidden[head.layer][rows]), head.weights, head.bias)
        held, some = rest[rest < count], rows[rows < count][:ADAPTED]
        mean, scale = moments(other.hidden[head.layer][some])
        adapted = replace(rule, mean=mean, scale=scale)
        for name, own, states in (
            ("as fitted", rule, asked.hidden),
            ("in other words", rule, other.hidden),
            ("in other words, adapted", adapted, other.hidden),
        ):
            found[name] += (own.logits(states[head.layer][held]).argmax(axis=1) == asked.truth[held]).tolist()
        for name, states in (("shift", asked.hidden), ("shift in other words", other.hidden)):
            features = Features.of(rule)
            features.add(rule.features(states[head.layer][held]))
            found[name].append(features.moved(len(rows))[0])
    return {name: float(np.mean(values)) for name, values in found.items()}


def by_layer(every: Sequence[Told]) -> str:
    """How often heads at each layer are right, a mean over the questions."""
    layers = every[0].right_at
    return ", ".join(f"{layer}: {np.mean([each.right_at[layer] for each in every]):.3f}" for layer in layers)


def promises(every: Sequence[Told]) -> Iterator[str]:
    """A table in Markdown: how often floors of `prefill calibrate --accuracy` break their promise, over all questions,
    as in `benchmarks.forms.promise_table`."""
    yield f"| floors | goal | right of all | found | accepted | broken of {RESAMPLED:,} |"
    yield "| --- " * 6 + "|"
    for way in ("own, calibrated", "head"):
        surest = np.concatenate([each.by[way].max(axis=1) for each in every])
        right = np.concatenate([each.by[way].argmax(axis=1) == each.truth for each in every])
        for goal in GOALS:
            accepted, broken = promised(surest, right, goal)
            if accepted:
                cells = f"{len(accepted) / RESAMPLED:.0%} | {np.mean(accepted):.0%} | {broken:,}"
                yield f"| {way} | {goal:g} | {right.mean():.0%} of {len(right)} | {cells} |"


def compared(every: Sequence[Told]) -> Iterator[str]:
    """How likely the difference between heads and each rival is by chance, over all questions."""
    truth = np.concatenate([each.truth for each in every])
    width = max(each.by["head"].shape[1] for each in every)

    def wide(way: str) -> Float64Array:
        own = [np.pad(each.by[way], ((0, 0), (0, width - each.by[way].shape[1]))) for each in every]
        return np.concatenate(own)

    for way in ("own", "own, calibrated", "the commonest answer", "words"):
        yield f"head against {way}: p = {chance_of(wide('head'), wide(way), truth):.2g}"


def reader_of(model: str, folder: Path, int8: bool) -> Reader:
    """The reader of a model with this name, or in this folder or file."""
    file = Path(model).expanduser()
    return Reader(file if file.exists() else model_of(model, folder)[0], "int8" if int8 else None)


def main(
    model: Annotated[str, typer.Option(help="smollm2, gemma, qwen, or a folder or file.")] = "smollm2",
    texts: Annotated[str, typer.Option(help="decisions, reviews or rated.")] = "decisions",
    cases: Annotated[int, typer.Option(help="Cases, at most.")] = 400,
    compute: Annotated[bool, typer.Option("--int8", help="Let the model compute in int8.")] = False,
    labels: Annotated[list[int] | None, typer.Option(help="Right answers that teach a head; repeatable.")] = None,
    only: Annotated[str | None, typer.Option(help="Of Typed Decisions, only cases of this workflow.")] = None,
    layer: Annotated[int | None, typer.Option(help="Tell the seconds with a head after this layer.")] = None,
    other_words: Annotated[bool, typer.Option("--reworded", help="Ask in other words.")] = False,
    fitted_to: Annotated[
        Path | None, typer.Option(help="Folder of what heads are fitted to, for other words.")
    ] = None,
    folder: Annotated[Path, typer.Option(help="Where models and texts are, or go.")] = FOLDER,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of what was read.")] = Path("out/heads"),
    only_table: Annotated[bool, typer.Option("--table", help="Read nothing; tell what was read before.")] = False,
) -> None:
    """Read cases once, and compare heads with other answers on held-out ones."""
    output.mkdir(parents=True, exist_ok=True)
    every = [case for case in cases_of(texts, folder, cases) if only in (None, case.workflow)]
    if layer is not None:
        print(reader_of(model, folder, compute).seconds(every, layer))
        return
    if other_words:
        every = [reworded(case) for case in every]
    reader = reader_of(model, folder, compute)
    for at in range(0, 0 if only_table else len(every), TOGETHER):
        if not (path := output / f"{at:05d}.npz").exists():
            found = reader.read(every[at : at + TOGETHER], at)
            np.savez(path, **found)
            log(f"{at + TOGETHER} cases: {found['tokens'] / found['seconds']:.0f} tokens/s")
    asked = asked_of(every, output)
    if fitted_to is not None:
        before = asked_of(cases_of(texts, folder, max(cases, 400)), fitted_to)
        each = [moved(before[name], own) for name, own in asked.items()]
        for way in each[0]:
            print(
                f"{way}: {np.mean([own[way] for own in each]):.3f} ({min(own[way] for own in each):.2f} to "
                f"{max(own[way] for own in each):.2f} by question)"
            )
        return
    depth = max(next(iter(asked.values())).hidden) + 1
    for count in labels or (None,):
        answers = [told(each, count) for each in asked.values()]
        rows = min(len(each.truth) for each in asked.values())
        print(f"\n{rows} cases a question or more, {count or 'four fifths of them'} teach\n")
        print("\n".join(table(answers, depth)))
        print(f"\nright at layer {by_layer(answers)}")
        print("\n" + "\n".join([*compared(answers), "", *promises(answers)]))


if __name__ == "__main__":
    typer.run(main)
