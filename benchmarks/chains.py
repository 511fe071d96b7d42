"""`python -m benchmarks.chains`: which chain of readings pays on real rows, and whether its bound on flips holds.

All passages of reviews are read once, in full and by the first models; the readings are kept in out/real. Then jobs
are drawn, each with half as many rows to calibrate its chains on as there are, as `prefill score` does:

- *job*: without replacement, with the bound for such draws. It is of the rows that fitted no probe, and their flips
  are all known. *fresh* are those of them that the job has not read before.
- *redrawn*: with replacement, so that all rows are the population that the binomial bound is of.

Gains are by the cost model, with the measured cost of first models. Progress goes to stderr, a table to stdout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, fields, replace
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, NamedTuple
from unittest.mock import patch

import numpy as np
import typer

from benchmarks.console import log
from benchmarks.exit_cases import EXIT_CASES
from prefillcli.core.request import Request, answer_requests
from prefillcli.engines.base import EarlyExits, Readings, Treatment
from prefillcli.models.find import read_model_files
from prefillcli.options.commands import ScoreSettings
from prefillcli.options.load import load_settings
from prefillcli.plan.pack import in_full
from prefillcli.reading.exits import proof
from prefillcli.reading.exits.first import readers_of, readings_of
from prefillcli.reading.exits.policy import ExitPolicy, Probe
from prefillcli.reading.exits.proof import (
    ExitCosts,
    LearningRows,
    exit_costs,
    halves,
    learning_rows,
    observed_layers,
    prove_exits,
    work_of,
)
from prefillcli.rows.records import BEFORE
from prefillcli.scoring.opening import open_inputs, open_rows
from prefillcli.scoring.scorer import load_here, make_scorer
from prefillcli.stats.arrays import Float64Array, Int64Array
from recipes.real_model import FOLDER

COMPARED = 300  # rows that both models read when the cost of the first one is measured
SHARED: list[Any] = []  # of the processes: the material and the allowed flips
Arrays = dict[str, Any]


class Outcome(NamedTuple):
    """What a job's chain does to some rows; `flips` and `rows` are by label."""

    decided: float
    gain: float
    flips: list[int]
    rows: list[int]


@dataclass(frozen=True, eq=False)
class Known(Probe):
    """The predictions of a fitted probe for all rows, by the numbers that their readings hold instead."""

    predicted: Float64Array
    kind = "known"

    def logits(self, readings: Readings) -> Float64Array:
        return np.asarray(self.predicted[readings.hidden[:, 0].astype(np.int64)], np.float64)


class Material:
    """The readings of all rows by layer, and the chains that are made of them: exits alone, each first model alone,
    and each with exits."""

    def __init__(self, case: str, first: Sequence[str], dtype: str) -> None:
        config, model = read_model_files(EXIT_CASES[case].model()).config, kept(case, "", dtype)
        self.depth: int = config.get_text_config().num_hidden_layers
        self.readings = {int(layer): shown(model, int(layer)) for layer in model["layers"]}
        self.final, self.weights = model["final"], model["weights"]
        inside, paid = tuple(self.readings), {}
        self.chains = {"exits": inside}
        for layer, name in zip(range(BEFORE - len(first) + 1, 0), first, strict=True):
            own, called = kept(case, name, dtype), Path(name).name
            self.readings[layer], paid[layer] = shown(own, BEFORE), float(own["cost"])
            self.chains |= {called: (layer,), f"{called}, exits": (layer, *inside)}
            log(f"{called}: a token costs it {paid[layer] / in_full(self.depth):.1%} of the model's work")
            log(f"{called}: {self.known(layer)}")
        self.costs = replace(exit_costs(config), first=paid)

    def rows(self, chosen: Int64Array, layers: Sequence[int]) -> LearningRows:
        """Rows that have their number for a reading after these layers."""
        number = Readings(chosen[:, None].astype(np.float32), self.final[chosen], self.final[chosen])
        return LearningRows(dict.fromkeys(layers, number), self.final[chosen], self.weights[chosen])

    def known(self, layer: int) -> str:
        """What a first model knows, by a probe fitted to some rows, each of which is left out of the fit once: the
        correlation of margins, and the share of rows that could be decided in hindsight at most so many flips of each
        answer: that proves nothing."""
        said, order = [], np.random.default_rng(0).permutation(len(self.final))
        for count in sorted({min(each, len(order)) for each in (700, 2_000, len(order))}):
            own, every = np.sort(order[:count]), self.readings[layer]
            readings = Readings(*(getattr(every, each.name)[own] for each in fields(Readings)))
            rows = LearningRows({layer: readings}, self.final[own], self.weights[own])
            found = proof.candidate_of(rows, layer, 0)
            shares = [f"{decided_in_hindsight(found, rows.truth, most):.0%}" for most in (0.01, 0.02, 0.05)]
            said.append(f"{count:,} rows {found.correlation:.2f}, {', '.join(shares)} at 1, 2, 5 %")
        return "; ".join(said)

    @contextmanager
    def fitted_once(self) -> Iterator[None]:
        """Within it, each layer's probe is fitted once for all chains and bounds: the half of the rows is the same."""
        fit, found = proof.candidate_of, {}

        def once(rows: LearningRows, layer: int, seed: int) -> proof.Candidate:
            if layer not in found:
                numbers, every = rows.readings[layer].hidden[:, 0].astype(np.int64), self.readings[layer]
                own = Readings(*(getattr(every, each.name)[numbers] for each in fields(Readings)))
                made = fit(replace(rows, readings={layer: own}), layer, seed)
                found[layer] = made._replace(probe=Known(made.probe.logits(every)))
            return found[layer]

        with patch.object(proof, "candidate_of", once):
            yield


def decided_in_hindsight(found: proof.Candidate, truth: Int64Array, most: float) -> float:
    """The share of the rows that leave at the lowest levels at which at most so many of each answer's rows flip."""
    levels = []
    for label in np.unique(truth):
        own = truth == label
        danger = np.sort(proof.endangered(found.reach[None, own], found.label[None, own] != label))[::-1]
        levels.append(max(float(danger[int(most * len(danger))]), 0.0))  # the first flip too many
    others = [max(each for other, each in enumerate(levels) if other != label) for label in range(len(levels))]
    return float(np.mean(found.reach > np.asarray(others)[found.label]))


def main(
    first: Annotated[list[str] | None, typer.Option(help="As of prefill score; repeatable.")] = None,
    max_flips: Annotated[list[float] | None, typer.Option(help="Allowed flips. (default: 0.01, 0.02, 0.05)")] = None,
    jobs: Annotated[int, typer.Option(help="Jobs drawn in each way.")] = 200,
    case: Annotated[str, typer.Option(help=f"One of {', '.join(EXIT_CASES)}.")] = "passages",
    dtype: Annotated[str, typer.Option(help="As of prefill score.")] = "float32",
    processes: Annotated[int, typer.Option(help="Jobs at a time.")] = 1,
) -> None:
    """Draw jobs, and count what their chains decide and flip."""
    found: dict[tuple[str, float, str], list[Outcome]] = {}
    shared = Material(case, first or [], dtype), max_flips or [0.01, 0.02, 0.05]
    with get_context("fork").Pool(processes, SHARED.extend, [shared]) as pool:
        for number, own in enumerate(pool.imap(job, range(jobs)), 1):
            for name, outcome in own.items():
                found.setdefault(name, []).append(outcome)
            if number % 10 == 0:
                log(f"{number} of {jobs} jobs in each way")
    print_table(found, EXIT_CASES[case].labels.split(","))


def job(number: int) -> dict[tuple[str, float, str], Outcome]:
    """What the chains of the jobs with this number do, by chain, allowed flips and way."""
    material, allowed = SHARED
    rng, every = np.random.default_rng(number), np.arange(len(material.final))
    order, again = rng.permutation(every), rng.choice(every, len(every) // 2)
    drawn, rest = order[: len(again)], order[len(again) :]
    judge = halves(material.rows(drawn, [0]), 0)[1].readings[0].hidden[:, 0].astype(np.int64)
    found = {}
    for rows, of, ways in (
        (drawn, len(every), {"job": np.concatenate([judge, rest]), "fresh": rest}),
        (again, None, {"redrawn": every}),
    ):
        with material.fitted_once():
            for name, layers in material.chains.items():
                for most in allowed:
                    learnt = prove_exits(
                        material.rows(rows, layers), layers=material.depth, max_flips=most, costs=material.costs, of=of
                    )
                    for way, counted in ways.items():
                        others = material.rows(counted, layers)
                        found[name, most, way] = outcome(learnt.policy, others, material.costs, material.depth)
    return found


def outcome(policy: ExitPolicy | None, rows: LearningRows, costs: ExitCosts, depth: int) -> Outcome:
    """What a chain does to rows."""
    counts = np.bincount(rows.truth, minlength=rows.labels).tolist()
    if policy is None:
        return Outcome(0.0, 1.0, [0] * rows.labels, counts)
    exits = [policy.decide(layer, rows.readings[layer]) for layer in policy.layers]
    work = work_of(np.stack([each.decided for each in exits]), policy.layers, rows.weights, depth, costs)
    said = np.stack([each.logprobs.argmax(axis=1) for each in exits])[work.left, np.arange(len(rows))]
    flipped = rows.truth[(work.left >= 0) & (said != rows.truth)]
    flips = np.bincount(flipped, minlength=rows.labels).tolist()
    return Outcome(float(np.mean(work.left >= 0)), 1 / work.share, flips, counts)


def print_table(found: Mapping[tuple[str, float, str], Sequence[Outcome]], labels: Sequence[str]) -> None:
    """For docs/benchmarks.md: means over the jobs, and the share of the jobs that flip too much."""
    head = ["chain", "max flips", "rows", "jobs that decide", "decided", "gain"]
    print(f"| {' | '.join([*head, *(f'flips of {name}, jobs with too many' for name in labels)])} |")
    print("|" + " --- |" * (len(head) + len(labels)))
    for (name, most, way), own in found.items():
        deciding = np.mean([each.decided > 0 for each in own])
        cells = [name, f"{most:.0%}", way, f"{deciding:.0%}", f"{np.mean([each.decided for each in own]):.1%}"]
        cells.append(f"{1 / np.mean([1 / each.gain for each in own]):.2f}x")
        for label in range(len(labels)):
            counts = [(each.flips[label], each.rows[label]) for each in own]
            rate = sum(flips for flips, _ in counts) / sum(rows for _, rows in counts)
            cells.append(f"{rate:.2%}, {np.mean([flips > most * rows for flips, rows in counts]):.1%}")
        print(f"| {' | '.join(cells)} |", flush=True)


def kept(case: str, first: str, dtype: str) -> Arrays:
    """The readings of a first model, or of the model itself without a name; they stay in a file."""
    path = FOLDER / f"chain.{case}.{dtype}.{Path(first).name or 'model'}.npz"
    if not path.exists():
        log(f"collecting the readings of {first or 'the model'}")
        np.savez(path, **collected(case, first, dtype))
    with np.load(path) as file:
        return dict(file)


def collected(case: str, first: str, dtype: str) -> Arrays:
    """The readings of all rows, by the classes that a job reads them with."""
    own = EXIT_CASES[case]
    with TemporaryDirectory() as folder:
        flags: Arrays = {"inputs": [str(own.rows(Path(folder)))], "model": str(own.model()), "labels": own.labels}
        flags |= {"dtype": dtype, "chat": own.chat, "quiet": True, "output": f"{folder}/scores.parquet"}
        flags |= {"first": first} if first else {"exit": True}
        opened, parts = open_rows(load_settings(ScoreSettings, flags, environment={}))
        inputs = open_inputs(opened, parts)
        with inputs.windows(inputs.builder.close) as coming:
            prompts = next(coming).prompts
        with closing(load_here(inputs.opened, inputs.settings, inputs.labels)) as loaded:
            scorer = make_scorer(inputs, parts, loaded)
            depth = inputs.opened.files.config.get_text_config().num_hidden_layers
            layers = () if first else observed_layers(depth)
            questions = [Request(prompt) for prompt in prompts[: COMPARED if first else None]]
            answers = answer_requests(scorer.pool, questions, treatment=Treatment(EarlyExits(observed=layers)))
            rows = learning_rows(questions, answers, layers, len(inputs.labels.names))
            if first:
                read = readers_of(scorer)[BEFORE][1].read(prompts, lambda tokens: None)
                cost = per_token(read, prompts) / per_token(answers, prompts)
                return {**named(BEFORE, readings_of(read)), "cost": cost * in_full(depth)}
        found = {name: value for layer, each in rows.readings.items() for name, value in named(layer, each).items()}
        return {**found, "layers": layers, "final": rows.final, "weights": rows.weights}


def per_token(read: Sequence[Any], prompts: Sequence[Any]) -> float:
    """The median seconds of a token of the prompts."""
    pairs = zip(read, prompts, strict=False)
    return float(np.median([each.seconds / len(prompt.tokens) for each, prompt in pairs if each is not None]))


def named(layer: int, readings: Readings) -> Arrays:
    return {f"{each.name}.{layer}": getattr(readings, each.name) for each in fields(Readings)}


def shown(arrays: Arrays, layer: int) -> Readings:
    return Readings(*(arrays[f"{each.name}.{layer}"] for each in fields(Readings)))


if __name__ == "__main__":
    typer.run(main)
