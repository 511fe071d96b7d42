"""`python -m benchmarks.head_choices -o out/heads --labels 20 --labels 80`: how the layer of a head is best chosen,
and how its scores become probabilities, by what `python -m benchmarks.heads` has read.

Each rule chooses by the squared errors of left-out cases that teach; what it is worth is told by other cases.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer

from benchmarks.heads import Asked, asked_of, cases_of, features_of
from prefillcli.judging.calibration import fit_platt, fit_temperature
from prefillcli.stats.arrays import BoolArray, Float64Array
from prefillcli.stats.ridge import ridge
from prefillcli.tools.fit.solve import folds_of
from recipes.real_model import FOLDER

Errors = Mapping[int, Float64Array]  # of each case, by layer


class Drawn(NamedTuple):
    """Heads of one fold at each layer: their errors in left-out cases that teach [cases], whether they are right in
    others [cases], and of each scaling of the scores the probabilities of the right answers [cases] and whether the
    likeliest answer is right [cases], by layer."""

    errors: dict[int, Float64Array]
    right: dict[int, BoolArray]
    scaled: dict[tuple[str, int], tuple[Float64Array, BoolArray]]


def within(errors: Errors, standard_errors: float) -> int:
    """The lowest layer whose error is within so many standard errors of the least."""
    least = min(errors.values(), key=np.mean)
    gaps = {layer: own - least for layer, own in sorted(errors.items())}
    near = [layer for layer, gap in gaps.items() if gap.mean() <= standard_errors * gap.std() / np.sqrt(len(gap))]
    return near[0]


def smoothed(errors: Errors, neighbours: int) -> int:
    """The layer with the least mean error of it and its neighbours."""
    layers = sorted(errors)
    means = [float(errors[layer].mean()) for layer in layers]
    around = [np.mean(means[max(0, at - neighbours) : at + neighbours + 1]) for at in range(len(layers))]
    return layers[int(np.argmin(around))]


RULES: dict[str, Callable[[Errors], int]] = {
    "the least error": lambda errors: within(errors, 0.0),
    "within half a standard error": lambda errors: within(errors, 0.5),
    "within one": lambda errors: within(errors, 1.0),
    "within two": lambda errors: within(errors, 2.0),
    "of three layers together": lambda errors: smoothed(errors, 1),
}


def drawn(asked: Asked, labels: int) -> Iterator[Drawn]:
    """The heads of each fold, taught by this many right answers."""
    answers = asked.own.shape[1]
    for rows, rest in folds_of(asked.truth):
        some = np.random.default_rng(0).permutation(rows)[:labels]
        truth, told = asked.truth[some], asked.truth[rest]
        if len(set(truth.tolist())) < 2:
            continue
        found = Drawn({}, {}, {})
        for layer, states in asked.hidden.items():
            fitted = ridge(features_of(states, some, some), np.eye(answers)[truth])
            scores = features_of(states, some, rest) @ fitted.weights + fitted.bias
            found.errors[layer] = np.square(fitted.held_out - np.eye(answers)[truth]).sum(axis=1)
            found.right[layer] = scores.argmax(axis=1) == told
            for name, fit in (("temperature", fit_temperature), ("slope and biases", fit_platt)):
                shares = fit(fitted.held_out, truth).apply(scores)
                right = shares.argmax(axis=1) == told
                found.scaled[name, layer] = shares[np.arange(len(told)), told], right
        yield found


def table(every: Sequence[Drawn]) -> Iterator[str]:
    """What each rule, fixed layer and scaling is worth."""
    yield "| layer | right | mean layer |"
    yield "| --- | --- | --- |"
    fixed = {f"always {layer}": (lambda errors, layer=layer: layer) for layer in every[0].errors}
    for name, rule in {**RULES, **fixed}.items():
        chosen = [(rule(each.errors), each) for each in every]
        right = np.concatenate([each.right[layer] for layer, each in chosen])
        yield f"| {name} | {right.mean():.3f} | {np.mean([layer for layer, _ in chosen]):.1f} |"
    yield "\n| scores become probabilities by | right | log loss |\n| --- | --- | --- |"
    by: dict[str, list[Any]] = defaultdict(list)
    for each in every:
        layer = within(each.errors, 1.0)
        for (name, at), found in each.scaled.items():
            if at == layer:
                by[name].append(found)
    for name, pairs in by.items():
        said, right = (np.concatenate([own[at] for own in pairs]) for at in (0, 1))
        yield f"| {name} | {right.mean():.3f} | {-np.log(np.maximum(said, 1e-6)).mean():.3f} |"


def main(
    texts: Annotated[str, typer.Option(help="decisions, reviews or rated, as they were read.")] = "decisions",
    labels: Annotated[list[int] | None, typer.Option(help="Right answers that teach a head; repeatable.")] = None,
    cases: Annotated[int, typer.Option(help="Cases that were read, as it was asked for.")] = 400,
    folder: Annotated[Path, typer.Option(help="Where texts are, or go.")] = FOLDER,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of what was read.")] = Path("out/heads"),
) -> None:
    """Compare ways to choose the layer of a head, and to scale its scores."""
    asked = asked_of(cases_of(texts, folder, cases), output)
    for count in labels or [80]:
        print(f"\n{count} right answers teach\n")
        print("\n".join(table([each for own in asked.values() for each in drawn(own, count)])))


if __name__ == "__main__":
    typer.run(main)
