"""`python -m benchmarks.chains`: which chain of readings pays on real rows, and whether its bound on flips holds.

All passages of reviews are read once, in full and by the first models; the readings are kept in out/real. Then jobs
are drawn. Each calibrates its chains on half as many rows as there are, as `prefill score` does. *Fresh* jobs draw
them without replacement, and flips are counted on the other rows: a finite sample, so their rate may exceed the bound
by chance. *Redrawn* jobs draw them with replacement, and flips are counted on all rows, which are then the population
that the bound is about. Gains are by the cost model, with the measured cost of first models. Progress goes to stderr,
a table to stdout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any
from unittest.mock import patch

import numpy as np
import typer
from transformers import AutoConfig

from benchmarks.console import log
from benchmarks.exit_cases import EXIT_CASES
from prefillcli.bench.material import input_material
from prefillcli.core.question import Question, answer_questions
from prefillcli.data.rows import BEFORE
from prefillcli.engines.base import EarlyExits, Readings, Treatment
from prefillcli.features.exits import Exits, judging
from prefillcli.features.exits.first import FirstReader, readings_of
from prefillcli.features.exits.judging import (
    CalibrationRows,
    ExitCosts,
    calibrate_exits,
    calibration_rows,
    chance_of,
    exit_costs,
    observed_layers,
    work_of,
)
from prefillcli.jobs.scorer import Scorer
from prefillcli.options.commands import ScoreSettings
from prefillcli.plan.pack import in_full
from recipes.real_model import FOLDER

COMPARED = 300  # rows that both models read when the cost of the first one is measured
BY_CHANCE = 0.05
Arrays = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a job's chain does to some rows; `flips` and `rows` are by label."""

    decided: float
    gain: float
    flips: tuple[int, ...]
    rows: tuple[int, ...]


def main(
    first: Annotated[
        list[str] | None, typer.Option(help="A first model; repeatable, in the order of the chain.")
    ] = None,
    max_flips: Annotated[list[float] | None, typer.Option(help="Allowed flips. (default: 0.01, 0.02, 0.05)")] = None,
    jobs: Annotated[int, typer.Option(help="Jobs drawn in each way.")] = 200,
    case: Annotated[str, typer.Option(help=f"One of {', '.join(EXIT_CASES)}.")] = "passages",
) -> None:
    """Draw jobs, and count what their chains decide and flip."""
    config = AutoConfig.from_pretrained(EXIT_CASES[case].model())
    chains, allowed = chains_of(case, first or [], exit_costs(config)), max_flips or [0.01, 0.02, 0.05]
    depth = config.num_hidden_layers
    found: dict[tuple[str, float, str], list[Outcome]] = {}
    for number in range(jobs):
        for way, (drawn, judged) in draws(len(next(iter(chains.values()))[0]), number).items():
            with fitted_once():
                for name, (rows, costs) in chains.items():
                    learnt, others = rows.chosen(drawn), rows.chosen(judged)
                    for most in allowed:
                        own = outcome(learnt, others, most, costs, depth)
                        found.setdefault((name, most, way), []).append(own)
        if number % 10 == 9:
            log(f"{number + 1} of {jobs} jobs in each way")
    print_table(found, EXIT_CASES[case].labels.split(","))


def kept(case: str, first: str) -> Arrays:
    """The readings of a first model, or of the model itself without a name; they stay in a file."""
    path = FOLDER / f"chain.{case}.{Path(first).name or 'model'}.npz"
    if not path.exists():
        log(f"collecting the readings of {first or 'the model'}")
        np.savez(path, **collected(case, first))
    with np.load(path) as file:
        return dict(file)


def collected(case: str, first: str) -> Arrays:
    """The readings of all rows, by the classes that a job reads them with."""
    own = EXIT_CASES[case]
    with TemporaryDirectory() as folder:
        settings = ScoreSettings(
            inputs=(str(own.rows(Path(folder))),), model=str(own.model()), labels=own.labels, dtype="float32",
            chat=False, quiet=True, output=f"{folder}/scores.parquet", exit=not first, first=first or None,
        )  # fmt: skip
        scorer = Scorer(settings)
        scorer.open_source()
        scorer.open_models()
        with scorer.loaded:
            prompts = input_material(scorer.source, scorer.builder, scorer.labels, None).prompts
            scorer.load()
            depth = scorer.opened.files.config.get_text_config().num_hidden_layers
            layers = () if first else observed_layers(depth)
            questions = [Question(prompt) for prompt in prompts[: COMPARED if first else None]]
            answers = answer_questions(scorer.pool, questions, treatment=Treatment(EarlyExits(observed=layers)))
            rows = calibration_rows(questions, answers, layers, len(scorer.labels.names))
            if first:
                read = FirstReader(scorer, Exits).read(prompts, lambda tokens: None)
                cost = per_token(read, prompts) / per_token(answers, prompts)
                return {**named(BEFORE, readings_of(read)), "cost": cost * in_full(depth)}
        shown = {name: value for layer, each in rows.readings.items() for name, value in named(layer, each).items()}
        return {**shown, "layers": layers, "final": rows.final, "weights": rows.weights}


def per_token(read: Sequence[Any], prompts: Sequence[Any]) -> float:
    """The median seconds of a token of the prompts."""
    pairs = zip(read, prompts, strict=False)
    return float(np.median([each.seconds / len(prompt.tokens) for each, prompt in pairs if each is not None]))


def named(layer: int, readings: Readings) -> Arrays:
    return {f"{each.name}.{layer}": getattr(readings, each.name) for each in fields(Readings)}


def chains_of(case: str, first: Sequence[str], costs: ExitCosts) -> dict[str, tuple[CalibrationRows, ExitCosts]]:
    """The readings and costs of each chain: exits alone, each first model alone, and all together."""
    model, small = kept(case, ""), {Path(name).name: kept(case, name) for name in first}

    def shown(arrays: Arrays, layer: int) -> Readings:
        return Readings(*(arrays[f"{each.name}.{layer}"] for each in fields(Readings)))

    inside = {int(layer): shown(model, layer) for layer in model["layers"]}
    rows = CalibrationRows(inside, model["final"], model["weights"])
    found = {"exits": (rows, costs)}
    for name, own in small.items():
        paid, before = replace(costs, first=float(own["cost"])), {BEFORE: shown(own, BEFORE)}
        found[name] = (replace(rows, readings=before), paid)
        found[f"{name}, exits"] = (replace(rows, readings={**before, **inside}), paid)
        log(f"{name}: a token costs it {float(own['cost']):.2f} layers of the model")
    return found


def draws(rows: int, number: int) -> dict[str, tuple[Any, Any]]:
    """For each way to draw jobs, the rows that the chain is calibrated on, and those that its flips are counted on."""
    rng = np.random.default_rng(number)
    order = rng.permutation(rows)
    half = rows // 2
    return {"fresh": (order[:half], order[half:]), "redrawn": (rng.integers(rows, size=half), np.arange(rows))}


@contextmanager
def fitted_once() -> Iterator[None]:
    """Within it, the probe of a layer is fitted once for all chains and bounds: its half of the rows is the same."""
    fit, found = judging.candidate_of, {}

    def once(rows: CalibrationRows, layer: int, seed: int) -> judging.Candidate:
        if layer not in found:
            found[layer] = fit(rows, layer, seed)
        return found[layer]

    with patch.object(judging, "candidate_of", once):
        yield


def outcome(drawn: CalibrationRows, rows: CalibrationRows, max_flips: float, costs: ExitCosts, depth: int) -> Outcome:
    """Calibrate a chain on the `drawn` rows, as a job does, and apply it to others."""
    found = calibrate_exits(drawn, layers=depth, max_flips=max_flips, costs=costs)
    counts = np.bincount(rows.truth, minlength=rows.labels).tolist()
    if found.policy is None:
        return Outcome(0.0, 1.0, (0,) * rows.labels, tuple(counts))
    exits = [found.policy.decide(layer, rows.readings[layer]) for layer in found.policy.layers]
    work = work_of(
        np.stack([each.decided for each in exits]), found.policy.layers, rows.weights, depth, costs, rows.paying
    )
    said = np.stack([each.logprobs.argmax(axis=1) for each in exits])[work.left, np.arange(len(rows))]
    flipped = rows.truth[(work.left >= 0) & (said != rows.truth)]
    flips = np.bincount(flipped, minlength=rows.labels).tolist()
    return Outcome(float(np.mean(work.left >= 0)), 1 / work.share, tuple(flips), tuple(counts))


def print_table(found: Mapping[tuple[str, float, str], Sequence[Outcome]], labels: Sequence[str]) -> None:
    """For docs/benchmarks.md: means over the jobs, and how many of them flip too much."""
    head = ["chain", "max flips", "jobs", "decide", "decided", "gain"]
    print(f"| {' | '.join([*head, *(f'{name}: flips, too many, more than chance explains' for name in labels)])} |")
    print("|" + " --- |" * (len(head) + len(labels)))
    for (name, most, way), own in found.items():
        deciding = np.mean([each.decided > 0 for each in own])
        cells = [name, f"{most:.0%}", way, f"{deciding:.0%}", f"{np.mean([each.decided for each in own]):.1%}"]
        cells.append(f"{1 / np.mean([1 / each.gain for each in own]):.2f}x")
        for label in range(len(labels)):
            counts = [(each.flips[label], each.rows[label]) for each in own]
            rate = sum(flips for flips, _ in counts) / sum(rows for _, rows in counts)
            over = np.mean([flips > most * rows for flips, rows in counts])
            beyond = np.mean([chance_of(flips, rows, most) < BY_CHANCE for flips, rows in counts])
            cells.append(f"{rate:.2%}, {over:.1%}, {beyond:.1%}")
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    typer.run(main)
