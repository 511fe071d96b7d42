"""The method early-exit of `prefill bench`: learnt on some prompts, compared on others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from prefillcli.bench.contenders import Contender, Cost, Equipment, MethodRun
from prefillcli.bench.material import Material, made_material
from prefillcli.bench.report import ClassFlips, ExitResult
from prefillcli.core.question import Question
from prefillcli.data.rows import Float64Array, Prompt
from prefillcli.engines.base import EarlyExits, Treatment
from prefillcli.features.exits.judging import (
    calibrate_exits,
    calibration_rows,
    exit_costs,
    observed_layers,
    rows_to_learn,
)
from prefillcli.features.exits.policy import ExitPolicy
from prefillcli.plan.pack import in_full
from prefillcli.stats.evaluation import exact_interval

_SEED = 1


class EarlyExit(Contender):
    """The layer walk, from which rows leave as in `prefill score --exit`."""

    def __init__(self, equipment: Equipment, policy: ExitPolicy, rows_read: int) -> None:
        super().__init__("early-exit", equipment)
        self._between = Treatment(EarlyExits(policy))
        self._rows_read = rows_read

    def run(self, prompts: Sequence[Prompt]) -> MethodRun:
        questions = [Question(prompt) for prompt in prompts]
        answers = self._equipment.answers(questions, self._between)
        return MethodRun(
            np.stack([answer.logprobs for answer in answers]),
            questions,
            exit_layers=[answer.exit_layer for answer in answers],
            skipped=sum(answer.skipped for answer in answers),
        )

    def cost(self, run: MethodRun) -> Cost:
        cost = super().cost(run)
        left = 1 - self._saved(run, cost.target_tokens)
        return Cost(cost.target_tokens, None if cost.flops is None else cost.flops * left, cost.unknown)

    def exits(self, run: MethodRun, full: Float64Array) -> ExitResult:
        equipment = self._equipment
        through = Counter("full" if layer is None else str(layer + 1) for layer in run.exit_layers)
        order = sorted(through, key=lambda name: (name == "full", int(name) if name != "full" else 0))
        return ExitResult(
            max_flips=equipment.settings.max_flips,
            rows_read=self._rows_read,
            left={name: through[name] for name in order},
            layers_saved=self._saved(run, super().cost(run).target_tokens),
            classes=class_flips(equipment.labels.names, full, run.logprobs),
        )

    def _saved(self, run: MethodRun, tokens: int) -> float:
        # Share of the layers of computed tokens that exits spared.
        layers = self._equipment.config.get_text_config().num_hidden_layers
        return run.skipped / (tokens * in_full(layers))


def class_flips(names: Sequence[str], full: Float64Array, early: Float64Array) -> list[ClassFlips]:
    """Flips among the rows of each label that the full read gives; both arrays are [rows, labels]."""
    truth, said = full.argmax(axis=1), early.argmax(axis=1)
    found = []
    for number, name in enumerate(names):
        own = truth == number
        rows, flips = int(own.sum()), int((said[own] != number).sum())
        interval = exact_interval(flips, rows) if rows else None
        found.append(ClassFlips(label=name, rows=rows, flips=flips, interval=interval))
    return found


def learn_exits(equipment: Equipment, material: Material) -> EarlyExit | None:
    """The method, learnt on prompts that then leave the material; None, with a note, if there are no exits."""
    settings = equipment.settings
    count = settings.exit_rows or rows_to_learn(settings.max_flips, len(equipment.labels.names))
    if material.made:
        more = {
            "rows": count,
            "scale": 1.0,
            "tokens": max(64, round((settings.tokens or 0) * settings.scale)),
            "seed": settings.seed + _SEED,
        }
        other = made_material(settings.model_copy(update=more), equipment.opened, equipment.labels)
        prompts = [prompt for prompt in other.prompts if len(prompt.tokens) <= equipment.limits.max_tokens]
    else:
        prompts = material.set_apart(min(count, len(material.prompts) // 2), settings.seed)
    depth = equipment.config.get_text_config().num_hidden_layers
    layers, names = observed_layers(depth), equipment.labels.names
    questions = [Question(prompt) for prompt in prompts]
    answers = equipment.answers(questions, Treatment(EarlyExits(observed=layers)))
    found = calibrate_exits(
        calibration_rows(questions, answers, layers, len(names)),
        layers=depth,
        max_flips=settings.max_flips,
        labels=names,
        costs=exit_costs(equipment.config),
    )
    if found.policy is None:
        material.notes.append(f"early-exit is left out: {found.reason}; --exit-rows and --max-flips decide")
        return None
    where = "others that were made" if material.made else "others of the file, drawn at random"
    material.notes.append(
        f"early-exit was learnt on {len(prompts):,} rows: {where}; these are not among those compared"
    )
    return EarlyExit(equipment, found.policy, len(prompts))
