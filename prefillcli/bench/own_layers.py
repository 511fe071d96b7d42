"""The methods by which the model's own first layers pick tokens: in one pass, or before a second one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import numpy as np

from prefillcli.bench.contenders import Compressed, Cost, Equipment, MethodRun, PickedOnce
from prefillcli.bench.report import StateDrift
from prefillcli.compress.answers import method_of
from prefillcli.compress.compressor import Compressor
from prefillcli.compress.pickers.gemfilter import GemFilter
from prefillcli.compress.selection import Request
from prefillcli.compress.self_draft import SelfDraft
from prefillcli.data.rows import Prompt
from prefillcli.models.shape import NoCostModel, Shape, answer_flops, table5, walk_flops
from prefillcli.plan.plan import make_plan


def compressed_by(equipment: Equipment, compressor: Compressor, keep: float, picked: PickedOnce) -> Compressed:
    """The contender of a compressor's picker."""
    kind = {SelfDraft: SelfDrafted, GemFilter: Filtered}.get(type(compressor.picker), Compressed)
    return kind(equipment, compressor, keep, picked)


class _OwnLayers(Compressed):
    """The model's own `layers` first layers read whole prompts."""

    @property
    def layers(self) -> int:
        return cast("SelfDraft | GemFilter", self._compressor.picker).layer + 1

    def predictions(self, run: MethodRun) -> tuple[float, float] | None:
        """As of `Contender`, with the first layers' share of all in place of a draft's operations."""
        config, keep = self._equipment.config, self.keep or 1.0
        try:
            whole = sum(table5(config, len(request.prompt.tokens)).total for request in run.requests)
            part = sum(table5(config, len(request.tokens)).total for request in run.requests)
            depth = self.layers / Shape(config).layers
        except NoCostModel:  # `cost` says why
            return None
        again = self._again(depth)
        return 1 / (depth + again * keep), whole / (depth * whole + again * part)

    def _again(self, depth: float) -> float:
        """Share of the layers that read what is kept."""
        raise NotImplementedError


class SelfDrafted(_OwnLayers):
    """One pass: what the first layers keep goes on to the others."""

    def _read(self, prompts: Sequence[Prompt], keeps: Sequence[float | None], picked: PickedOnce) -> MethodRun:
        requests = self._compressor.select(prompts, keeps, picked.estimates)
        answers = self._equipment.answers(requests)
        read = [
            replace(request, thinning=None, method=method_of(request, answer))
            if answer.thinned is None or len(answer.thinned.kept) == len(request.tokens)
            else Request(request.prompt, answer.thinned.kept.astype(np.int64), request.method)
            for request, answer in zip(requests, answers, strict=True)
        ]
        return MethodRun(np.stack([each.logprobs for each in answers]), read, thinned=requests)

    def cost(self, run: MethodRun) -> Cost:
        equipment, layers = self._equipment, self.layers
        whole, part = equipment.plan(run.thinned), equipment.plan(run.requests)
        try:
            flops = walk_flops(equipment.config, whole, only=layers)
            flops += walk_flops(equipment.config, part, skipped=layers) + answer_flops(equipment.config, part)
            return Cost(whole.computed_tokens, flops)
        except NoCostModel as error:
            return Cost(whole.computed_tokens, None, str(error))

    def drift(self, run: MethodRun) -> StateDrift | None:
        return None  # its first layers read whole prompts

    def _again(self, depth: float) -> float:
        return 1 - depth


class Filtered(_OwnLayers):
    """Two passes: the first layers read whole prompts, then all layers what they keep."""

    def cost(self, run: MethodRun) -> Cost:
        equipment = self._equipment
        part, whole = equipment.plan(run.requests), make_plan(run.drafted, equipment.limits)
        try:
            flops = walk_flops(equipment.config, whole, only=self.layers)
            flops += walk_flops(equipment.config, part) + answer_flops(equipment.config, part)
            return Cost(part.computed_tokens, flops)
        except NoCostModel as error:
            return Cost(part.computed_tokens, None, str(error))

    def _again(self, depth: float) -> float:
        return 1.0
