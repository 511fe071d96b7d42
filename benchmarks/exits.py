"""`python -m benchmarks.exits`: what early exit brings, and what it flips, on rows after those that it was learnt on.

With `--alone` it is what --max-flips alone brings, by words, int8 and exits, as far as this machine has them. The walk
in full and with exits run in turn in one process. Gains are ratios of processor seconds within a round: give
it one thread (OMP_NUM_THREADS=1). Progress goes to stderr, a table and one line of JSON to stdout.
"""

from __future__ import annotations

import json
import statistics
import time
from collections import Counter
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import numpy as np
import torch
import typer

from benchmarks.console import log
from benchmarks.exit_cases import EXIT_CASES, ExitCase
from prefillcli.core.request import Request, answer_requests, plan_requests
from prefillcli.core.scorer import ModelScorer
from prefillcli.engines.base import Answer, EarlyExits, Treatment
from prefillcli.options.commands import ScoreSettings
from prefillcli.options.requirements import spelled_out
from prefillcli.plan.pack import in_full
from prefillcli.reading.exits.exits import Exits
from prefillcli.reading.exits.first import Readers, all_readers_of
from prefillcli.reading.exits.full_rows import ReadRows, read_first
from prefillcli.reading.exits.learning import with_first
from prefillcli.reading.exits.policy import ExitPolicy
from prefillcli.reading.exits.proof import ExitProof, exit_costs, observed_layers, prove_exits
from prefillcli.reading.exits.ways import ways_of, ways_text
from prefillcli.rows.records import BEFORE, Prompt
from prefillcli.scoring.opening import open_inputs, open_rows
from prefillcli.scoring.scorer import load_here, make_scorer
from prefillcli.stats.arrays import Int64Array
from prefillcli.stats.intervals import exact_interval


def main(
    case: Annotated[list[str] | None, typer.Option(help=f"One of {', '.join(EXIT_CASES)}; repeatable.")] = None,
    rounds: Annotated[int, typer.Option(help="Timed rounds.")] = 3,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    rows: Annotated[int, typer.Option(help="Rows to measure on, at most; 0: all.")] = 0,
    learnt: Annotated[int, typer.Option(help="Rows to learn from; 0: those of the case.")] = 0,
    alone: Annotated[bool, typer.Option(help="All ways that --max-flips alone stands for.")] = False,
) -> None:
    """Learn exits on some rows, then score the others in full and with exits."""
    found = {}
    with TemporaryDirectory() as folder:
        for name in case or list(EXIT_CASES):
            if not EXIT_CASES[name].model().exists():
                log(f"{name} is left out: {EXIT_CASES[name].model()} is not there; make deep-models trains it")
                continue
            log(f"{name}: {EXIT_CASES[name].text}")
            own = EXIT_CASES[name] if not learnt else replace(EXIT_CASES[name], learnt=learnt)
            found[name] = measure_case(own, Path(folder), rounds, dtype, rows, alone)
    print_table(found)
    print(json.dumps({"dtype": dtype, "alone": alone, "threads": torch.get_num_threads(), "cases": found}))


def measure_case(case: ExitCase, folder: Path, rounds: int, dtype: str, rows: int, alone: bool) -> dict[str, Any]:
    """What exits bring on one case, as a value for JSON."""
    rows_of, model = str(case.rows(folder)), str(case.model())
    given = {"inputs": (rows_of,), "model": model, "labels": case.labels, "dtype": dtype, "chat": case.chat}
    bound = {"max_flips": min(case.max_flips)} if alone else {"exit": True}
    settings = ScoreSettings.of(given | bound | {"quiet": True})
    opened, parts = open_rows(settings)
    inputs = open_inputs(opened, parts)
    with inputs.windows(inputs.builder.close) as coming:
        prompts = next(coming).prompts
    if alone:
        ways = ways_of(inputs, 1_000_000)  # of a job so large that learning costs little
        log(ways.unable or ways_text(ways, inputs))
        own = replace(inputs.rows, settings=spelled_out(settings))
        inputs = replace(inputs, rows=own, opened=replace(inputs.opened, small=ways.small(inputs)))
    with closing(load_here(inputs.opened, inputs.settings, inputs.labels)) as loaded:
        scorer = make_scorer(inputs, parts, loaded)
        readers = all_readers_of(scorer) if alone else {}
        learnt, measured = prompts[: case.learnt], prompts[case.learnt :]
        measured = measured[: rows or len(measured)]
        log(f"{len(learnt):,} rows are read in full, to learn")
        shown = read_in_full(scorer, learnt, readers)
        found = {most: calibrate(scorer, shown, most, readers) for most in case.max_flips}
        policies = {most: own.policy for most, own in found.items() if own.policy is not None}
        full, runs, seconds = timed(scorer, policies, readers, measured, rounds)
        plan = plan_requests([Request(prompt) for prompt in measured], scorer.pool.limits)
    return {
        "text": case.text,
        "learnt": len(learnt),
        "rows": len(measured),
        "tokens": sum(len(prompt.tokens) for prompt in measured),
        "computed_tokens": plan.computed_tokens,
        "layers": depth_of(scorer),
        "seconds": {"full": seconds[None]} | {str(most): seconds[most] for most in policies},
        "exits": {
            str(most): {"reason": own.reason}
            if most not in policies
            else outcome(scorer, own, full, runs[most], seconds[None], seconds[most])
            for most, own in found.items()
        },
    }


def depth_of(scorer: ModelScorer) -> int:
    """The number of layers of the model."""
    depth: int = scorer.inputs.opened.files.config.get_text_config().num_hidden_layers
    return depth


def read_in_full(scorer: ModelScorer, prompts: list[Prompt], readers: Readers) -> ReadRows:
    """The rows that exits are learnt on."""
    layers, questions = observed_layers(depth_of(scorer)), [Request(prompt) for prompt in prompts]
    answers = answer_requests(scorer.pool, questions, treatment=Treatment(EarlyExits(observed=layers)))
    return ReadRows(questions, answers, 0, layers, read_first(readers, prompts, lambda tokens: None))


def calibrate(scorer: ModelScorer, rows: ReadRows, max_flips: float, readers: Readers) -> ExitProof:
    """The exits that these rows prove."""
    begun, opened, depth = time.process_time(), scorer.inputs.opened, depth_of(scorer)
    found = prove_exits(
        rows.of_part(0, len(scorer.inputs.labels.names)),
        layers=depth,
        max_flips=max_flips,
        labels=scorer.inputs.labels.names,
        costs=with_first(exit_costs(opened.files.config), rows.first_use(opened, readers), depth),
    )
    log(f"--max-flips {max_flips:g}: {found.reason or 'exits after layers ' + _layers(found)}")
    log(f"learnt in {time.process_time() - begun:.1f} s")
    return found


def timed(
    scorer: ModelScorer, policies: dict[float, ExitPolicy], readers: Readers, prompts: list[Prompt], rounds: int
) -> tuple[list[Answer], dict[float, list[Answer]], dict[float | None, list[float]]]:
    """The answers, and the processor seconds of each round; None: in full."""
    seconds: dict[float | None, list[float]] = {most: [] for most in (None, *policies)}
    questions = [Request(prompt) for prompt in prompts]
    answer_requests(scorer.pool, questions[:20])

    def run(most: float | None, policy: ExitPolicy) -> list[Answer]:
        begun = time.process_time()
        found = answered(scorer, policy, readers, questions)
        seconds[most].append(time.process_time() - begun)
        log(f"{'in full' if most is None else f'exits, {most:g}'}: {seconds[most][-1]:.2f} s")
        return found

    for _ in range(rounds):
        full = run(None, ExitPolicy(()))
        runs = {most: run(most, policy) for most, policy in policies.items()}
    return full, runs, seconds


def answered(scorer: ModelScorer, policy: ExitPolicy, readers: Readers, questions: list[Request]) -> list[Answer]:
    """The answers of a job with these exits, in the order of the questions."""
    exits = Exits(scorer.settings.exits, scorer.settings.flips)
    exits.use_policies({0: policy}, readers)
    ahead, _ = exits.ahead(questions, lambda tokens: None)
    left = [number for number in range(len(questions)) if number not in ahead]
    asked = [questions[number] for number in left]
    found = answer_requests(scorer.pool, asked, treatment=exits.treatment(dict(enumerate(asked)), frozenset()))
    answers = dict(zip(left, found, strict=True))
    for number, row in ahead.items():
        layer = BEFORE if row.exit_layer is None else row.exit_layer - 1
        answers[number] = Answer(number, row.logprobs, 0, 0, row.seconds, exit_layer=layer)
    return [answers[number] for number in range(len(questions))]


def outcome(
    scorer: ModelScorer,
    found: ExitProof,
    full: list[Answer],
    run: list[Answer],
    whole: list[float],
    own: list[float],
) -> dict[str, Any]:
    """What exits with one bound gave."""
    computed, depth = sum(each.computed_tokens for each in run), depth_of(scorer)
    saved = sum(each.skipped for each in run) / max(computed * in_full(depth), 1)  # of rows that the model began
    left = Counter("full" if each.exit_layer is None else str(each.exit_layer + 1) for each in run)
    gain = statistics.median(first / second for first, second in zip(whole, own, strict=True))
    truth, said = likeliest(full), likeliest(run)
    flips = []
    for number, label in enumerate(scorer.inputs.labels.names):
        rows, flipped = int((truth == number).sum()), int((said[truth == number] != number).sum())
        interval = exact_interval(flipped, rows) if rows else None
        flips.append({"label": label, "rows": rows, "flips": flipped, "interval": interval})
    return {
        "gain": gain,
        "gain_by_layers": 1 / (1 - saved),
        "gain_expected": found.findings.gain,
        "measured_over_predicted": gain * (1 - saved),
        "left": dict(sorted(left.items(), key=lambda each: (each[0] == "full", int(each[0].replace("full", "0"))))),
        "layers_saved": saved,
        "flips": flips,
        "flip_rate": float(np.mean(truth != said)),
        "exits": [
            each.model_dump(include={"probe", "peek", "correlation", "leaving", "saves"}) | {"layer": each.layer + 1}
            for each in found.findings.exits
        ],
        "judged": [each.model_dump() for each in found.findings.classes],
    }


def likeliest(answers: list[Answer]) -> Int64Array:
    """The number of each row's likeliest label."""
    found: Int64Array = np.stack([each.logprobs for each in answers]).argmax(axis=1)
    return found


def print_table(found: dict[str, Any]) -> None:
    """For docs/benchmarks.md."""
    print("| case | max flips | exits after layers | rows that left | gain | by layers | flips by answer |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name, case in found.items():
        for most, each in case["exits"].items():
            if "reason" in each:
                print(f"| {name} | {most} | none: {each['reason']} | | | | |")
                continue
            left = 1 - each["left"].get("full", 0) / case["rows"]
            flips = ", ".join(f"{own['flips']} of {own['rows']:,} {own['label']}" for own in each["flips"])
            layers = ", ".join(str(own["layer"]) for own in each["exits"])
            print(
                f"| {name} | {float(most):.1%} | {layers} of {case['layers']} | {left:.0%} | {each['gain']:.2f} | "
                f"{each['gain_by_layers']:.2f} | {flips} |"
            )


def _layers(found: ExitProof) -> str:
    return ", ".join(str(each.layer + 1) for each in found.findings.exits)


if __name__ == "__main__":
    typer.run(main)
