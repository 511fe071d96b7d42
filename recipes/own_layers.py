"""What it costs and gains that a model's own first layers pick the tokens, beside a draft: in processor time.

    python -m recipes.own_layers out/real/shared.held.parquet --model out/real/model --draft out/real/draft \
        --labels positive,negative --truth sentiment --limit 24 --keep 0.2,0.5

Every method answers all rows in turn, `--rounds` times, on one thread of one process. Seconds are of the processor, so
that other programs on the machine count little; a method's gain is the median of those within each round. Options are
those of `prefill bench`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from statistics import median

from prefillcli.bench.contenders import Contender, Equipment, MethodRun
from prefillcli.bench.contest import contenders
from prefillcli.bench.material import Material, input_material
from prefillcli.bench.report import REFERENCE
from prefillcli.jobs.load import load_walk
from prefillcli.jobs.opening import Opening
from prefillcli.options.commands import BenchSettings
from prefillcli.report.section import percent_interval
from prefillcli.stats.evaluation import auc, exact_interval, label_probabilities

HEADER = (
    "method",
    "kept",
    "processor seconds",
    "gain",
    "by operations",
    "flips",
    "95 % interval",
    "difference",
    "AUC",
)


def table_lines(material: Material, methods: Sequence[Contender], rounds: int) -> Iterator[str]:
    """Run the methods, and make a table of what they took and answered."""
    seconds: dict[str, list[float]] = {each.name: [] for each in methods}
    runs: dict[str, MethodRun] = {}
    for turn in range(rounds):
        for each in methods:
            begun = time.process_time()
            runs[each.name] = each.run(material.prompts)
            seconds[each.name].append(time.process_time() - begun)
            print(f"round {turn + 1}, {each.name}: {seconds[each.name][-1]:.1f} s", file=sys.stderr)
    shares = {name: label_probabilities(run.logprobs, 1.0) for name, run in runs.items()}
    full, costs = shares[REFERENCE], {each.name: each.cost(runs[each.name]).flops for each in methods}
    known = [number for number, truth in enumerate(material.truths) if truth is not None]
    truths = [bool(material.truths[number]) for number in known]
    yield "| " + " | ".join(HEADER) + " |"
    yield "| " + " | ".join("---" for _ in HEADER) + " |"
    for name, run in runs.items():
        own, rows = shares[name], len(run.questions)
        gains = [first / second for first, second in zip(seconds[REFERENCE], seconds[name], strict=True)]
        least, most = costs[REFERENCE], costs[name]
        flips = int((own.argmax(axis=1) != full.argmax(axis=1)).sum())
        kept = sum(len(each.tokens) for each in run.questions) / sum(len(each.prompt.tokens) for each in run.questions)
        cells = [
            name,
            f"{kept:.1%}",
            f"{median(seconds[name]):.1f}",
            f"{median(gains):.2f} ({min(gains):.2f}-{max(gains):.2f})",
            "" if least is None or most is None else f"{least / most:.2f}",
            "" if name == REFERENCE else f"{flips} of {rows} ({flips / rows:.1%})",
            "" if name == REFERENCE else percent_interval(exact_interval(flips, rows)),
            "" if name == REFERENCE else f"{abs(own[:, 0] - full[:, 0]).mean():.3f}",
            "" if (found := auc([own[number, 0] for number in known], truths)) is None else f"{found:.3f}",
        ]
        yield "| " + " | ".join(cells) + " |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows")
    for name in ("model", "draft", "draft-tokenizer", "labels", "truth", "template", "prompt-column"):
        parser.add_argument(f"--{name}", default=None)
    parser.add_argument("--method", default="specprefill,self-draft")
    parser.add_argument("--keep", default="0.2")
    parser.add_argument("--self-layer", type=int, default=None)
    parser.add_argument("--limit", type=int, default=None)
    parser.add_argument("--rounds", type=int, default=3)
    given = {name: value for name, value in vars(parser.parse_args(arguments)).items() if value is not None}
    rounds, rows = given.pop("rounds"), given.pop("rows")
    lists = {"method": tuple(given["method"].split(",")), "keep": tuple(map(float, given["keep"].split(",")))}
    settings = BenchSettings.model_validate({**given, **lists, "inputs": (rows,), "threads": 1, "chat": False})
    opening = Opening(settings, [settings.truth])
    opening.open_source()
    opening.open_models()
    opened, labels = opening.opened, opening.labels
    with closing(opening.builder) as builder:
        material = input_material(opening.source, builder, labels, settings.truth, None)
    with closing(load_walk(opened, settings)) as loaded:
        equipment = Equipment(loaded, labels)
        methods = contenders(settings.method, equipment, material)
        print("\n".join(table_lines(material, methods, rounds)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
