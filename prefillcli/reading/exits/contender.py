"""The methods of `prefill bench` that decide rows early: learnt on some prompts, compared on others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from prefillcli.bench.contenders import Contender, Cost, Equipment, MethodRun
from prefillcli.bench.material import Material, made_material
from prefillcli.bench.report import ClassFlips, ExitResult
from prefillcli.core.question import Question
from prefillcli.data.rows import BEFORE, Float64Array, Prompt
from prefillcli.engines.base import EarlyExits, Treatment
from prefillcli.plan.pack import in_full
from prefillcli.reading.exits.first import Reader, readers_of
from prefillcli.reading.exits.judging import (
    calibrate_exits,
    calibration_rows,
    exit_costs,
    observed_layers,
    rows_to_learn,
)
from prefillcli.reading.exits.learning import ExitUse, JobExits, with_first
from prefillcli.reading.exits.policy import ExitPolicy
from prefillcli.stats.evaluation import exact_interval

if TYPE_CHECKING:
    from prefillcli.core.feature import Feature

_SEED = 1
EXIT, FIRST, BOTH, INT8 = "early-exit", "first", "first-exit", "int8"  # the methods


class EarlyExit(Contender):
    """The layer walk, from which rows leave as in `prefill score --exit`; with `first`, the readers of `--first`, rows
    may be decided before."""

    def __init__(
        self,
        equipment: Equipment,
        policy: ExitPolicy,
        rows_read: int,
        name: str = EXIT,
        first: Mapping[int, tuple[str, Reader]] = MappingProxyType({}),
    ) -> None:
        super().__init__(name, equipment)
        depth = equipment.config.get_text_config().num_hidden_layers
        use = ExitUse(status="calibrated", max_flips=equipment.settings.max_flips, model_layers=depth)
        self._exits = JobExits(policy, use, first=first)
        self._rows_read = rows_read

    def run(self, prompts: Sequence[Prompt]) -> MethodRun:
        questions = [Question(prompt) for prompt in prompts]
        decided, computed = self._exits.ahead(questions, lambda tokens: None)
        left = [number for number in range(len(questions)) if number not in decided]
        asked = [questions[number] for number in left]
        answers = self._equipment.answers(asked, self._exits.treatment(frozenset())) if asked else []
        layers = {number: answer.exit_layer for number, answer in zip(left, answers, strict=True)}
        layers |= {number: (row.exit_layer or 0) - 1 for number, row in decided.items()}
        logprobs = {number: answer.logprobs for number, answer in zip(left, answers, strict=True)}
        logprobs |= {number: row.logprobs for number, row in decided.items()}
        return MethodRun(
            np.stack([logprobs[number] for number in range(len(questions))]),
            asked,
            draft_tokens=computed,
            exit_layers=[layers[number] for number in range(len(questions))],
            skipped=sum(answer.skipped for answer in answers),
        )

    def cost(self, run: MethodRun) -> Cost:
        cost = super().cost(run)
        if run.draft_tokens:
            return Cost(cost.target_tokens, None, "those of first models are not counted")
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
        return run.skipped / (tokens * in_full(layers)) if tokens else 0.0


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


def learn_exits(
    names: Collection[str], equipment: Equipment, material: Material, feature: type[Feature]
) -> list[EarlyExit]:
    """The methods with these names, learnt on prompts that then leave the material. A note explains each that has no
    exits. What the `feature` has loaded are the first models."""
    settings, config = equipment.settings, equipment.config
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
    depth = config.get_text_config().num_hidden_layers
    layers = observed_layers(depth)
    questions = [Question(prompt) for prompt in prompts]
    answers = equipment.answers(questions, Treatment(EarlyExits(observed=layers)))
    rows = calibration_rows(questions, answers, layers, len(equipment.labels.names))
    readers = readers_of(equipment, feature)
    read = {layer: reader.read(prompts, lambda tokens: None) for layer, (_, reader) in readers.items()}
    rows, used = with_first(equipment.opened, rows, read, readers, questions, answers)
    costs = replace(exit_costs(config), first={each.layer - 1: each.cost * in_full(depth) for each in used})
    methods = []
    for name in names:
        able = {layer: own for layer, own in rows.readings.items() if _takes(name, layer, readers)}
        found = calibrate_exits(
            replace(rows, readings=able),
            layers=depth,
            max_flips=settings.max_flips,
            labels=equipment.labels.names,
            costs=costs,
        )
        if found.policy is None:
            material.notes.append(f"{name} is left out: {found.reason}; --exit-rows and --max-flips decide")
        else:
            methods.append(EarlyExit(equipment, found.policy, len(prompts), name, readers))
    if methods:
        where = "others that were made" if material.made else "others of the file, drawn at random"
        learnt = " and ".join(each.name for each in methods)
        material.notes.append(
            f"{learnt}: learnt on {len(prompts):,} rows: {where}; these are not among those compared"
        )
    return methods


def _takes(name: str, layer: int, readers: Mapping[int, tuple[str, Reader]]) -> bool:
    # Whether rows may leave after a layer in the method with this name.
    by = EXIT if layer > BEFORE else INT8 if readers[layer][0] == INT8 else FIRST
    return by == name or (name == BOTH and by != INT8)
