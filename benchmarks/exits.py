"""`python -m benchmarks.exits`: what early exit brings, and what it flips, on rows after those that it was learnt on.

The walk in full and with exits run in turn in one process. Gains are ratios of processor seconds within a round: give
it one thread (OMP_NUM_THREADS=1). Progress goes to stderr, a table and one line of JSON to stdout.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import numpy as np
import torch
import typer

from benchmarks.console import log
from benchmarks.exit_cases import EXIT_CASES, ExitCase
from prefillcli.bench.contenders import Equipment, Hybrid, MethodRun
from prefillcli.bench.material import input_material
from prefillcli.core.question import Question
from prefillcli.data.rows import Prompt
from prefillcli.engines.base import EarlyExits, Treatment
from prefillcli.reading.exits.contender import EarlyExit
from prefillcli.reading.exits.judging import (
    CalibrationRows,
    ExitCalibration,
    calibrate_exits,
    calibration_rows,
    exit_costs,
    observed_layers,
)
from prefillcli.jobs.load import load_walk
from prefillcli.jobs.opening import Opening
from prefillcli.options.commands import BenchSettings


def main(
    case: Annotated[list[str] | None, typer.Option(help=f"One of {', '.join(EXIT_CASES)}; repeatable.")] = None,
    rounds: Annotated[int, typer.Option(help="Timed rounds.")] = 3,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    rows: Annotated[int, typer.Option(help="Rows to measure on, at most; 0: all.")] = 0,
) -> None:
    """Learn exits on some rows, then score the others in full and with exits."""
    found = {}
    with TemporaryDirectory() as folder:
        for name in case or list(EXIT_CASES):
            if not EXIT_CASES[name].model().exists():
                log(f"{name} is left out: {EXIT_CASES[name].model()} is not there; make deep-models trains it")
                continue
            log(f"{name}: {EXIT_CASES[name].text}")
            found[name] = measure_case(EXIT_CASES[name], Path(folder), rounds, dtype, rows)
    print_table(found)
    print(json.dumps({"dtype": dtype, "threads": torch.get_num_threads(), "cases": found}))


def measure_case(case: ExitCase, folder: Path, rounds: int, dtype: str, rows: int) -> dict[str, Any]:
    """What exits bring on one case, as a value for JSON."""
    settings = BenchSettings(
        inputs=(str(case.rows(folder)),), model=str(case.model()), labels=case.labels, dtype=dtype, chat=False,
        quiet=True, full=True,
    )  # fmt: skip
    opening = Opening(settings)
    opening.open_source()
    opening.open_models()
    opened, labels = opening.opened, opening.labels
    material = input_material(opening.source, opening.builder, labels, None)
    with closing(load_walk(opened, settings)) as loaded:
        equipment = Equipment(loaded, labels)
        learnt, measured = material.prompts[: case.learnt], material.prompts[case.learnt :]
        measured = measured[: rows or len(measured)]
        log(f"{len(learnt):,} rows are read in full, to learn")
        shown = read_in_full(equipment, learnt)
        calibrations = {most: calibrate(equipment, shown, most) for most in case.max_flips}
        policies = {most: found.policy for most, found in calibrations.items() if found.policy is not None}
        methods = {most: EarlyExit(equipment, policy, len(learnt)) for most, policy in policies.items()}
        full, runs, seconds = timed(Hybrid("hybrid", equipment), methods, measured, rounds)
    return {
        "text": case.text,
        "learnt": len(learnt),
        "rows": len(measured),
        "tokens": sum(len(prompt.tokens) for prompt in measured),
        "computed_tokens": equipment.plan([Question(prompt) for prompt in measured]).computed_tokens,
        "layers": equipment.config.get_text_config().num_hidden_layers,
        "seconds": {"full": seconds[None]} | {str(most): seconds[most] for most in methods},
        "exits": {
            str(most): {"reason": found.reason}
            if most not in methods
            else outcome(methods[most], found, full, runs[most], seconds[None], seconds[most])
            for most, found in calibrations.items()
        },
    }


def read_in_full(equipment: Equipment, prompts: list[Prompt]) -> CalibrationRows:
    """The rows that exits are learnt on."""
    layers = observed_layers(equipment.config.get_text_config().num_hidden_layers)
    questions = [Question(prompt) for prompt in prompts]
    answers = equipment.answers(questions, Treatment(EarlyExits(observed=layers)))
    return calibration_rows(questions, answers, layers, len(equipment.labels.names))


def calibrate(equipment: Equipment, rows: CalibrationRows, max_flips: float) -> ExitCalibration:
    """The exits that these rows prove."""
    begun = time.process_time()
    found = calibrate_exits(
        rows,
        layers=equipment.config.get_text_config().num_hidden_layers,
        max_flips=max_flips,
        labels=equipment.labels.names,
        costs=exit_costs(equipment.config),
    )
    log(f"--max-flips {max_flips:g}: {found.reason or 'exits after layers ' + _layers(found)}")
    log(f"learnt in {time.process_time() - begun:.1f} s")
    return found


def timed(
    whole: Hybrid, methods: dict[float, EarlyExit], prompts: list[Prompt], rounds: int
) -> tuple[MethodRun, dict[float, MethodRun], dict[float | None, list[float]]]:
    """The runs, and the processor seconds of each round; None: in full."""
    seconds: dict[float | None, list[float]] = {most: [] for most in (None, *methods)}
    whole.run(prompts[:20])

    def run(most: float | None, method: Callable[[list[Prompt]], MethodRun]) -> MethodRun:
        begun = time.process_time()
        found = method(prompts)
        seconds[most].append(time.process_time() - begun)
        log(f"{'in full' if most is None else f'exits, {most:g}'}: {seconds[most][-1]:.2f} s")
        return found

    for _ in range(rounds):
        full = run(None, whole.run)
        runs = {most: run(most, method.run) for most, method in methods.items()}
    return full, runs, seconds


def outcome(
    method: EarlyExit,
    found: ExitCalibration,
    full: MethodRun,
    run: MethodRun,
    whole: list[float],
    own: list[float],
) -> dict[str, Any]:
    """What exits with one bound gave."""
    result = method.exits(run, full.logprobs)
    gain = statistics.median(first / second for first, second in zip(whole, own, strict=True))
    counted = 1 / (1 - result.layers_saved)
    return {
        "gain": gain,
        "gain_by_layers": counted,
        "gain_expected": found.findings.gain,
        "measured_over_predicted": gain / counted,
        "left": result.left,
        "layers_saved": result.layers_saved,
        "flips": [each.model_dump() for each in result.classes],
        "flip_rate": float(np.mean(full.logprobs.argmax(1) != run.logprobs.argmax(1))),
        "exits": [
            {"layer": each.layer + 1, "probe": each.probe, "peek": each.peek, "correlation": each.correlation}
            for each in found.findings.exits
        ],
        "judged": [each.model_dump() for each in found.findings.classes],
    }


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


def _layers(found: ExitCalibration) -> str:
    return ", ".join(str(each.layer + 1) for each in found.findings.exits)


if __name__ == "__main__":
    typer.run(main)
