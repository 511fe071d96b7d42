"""What is done with the prompts of a pack: some leave early, some lose tokens, behind some a text is written."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from prefillcli.decode.behind import RowRoom, write_behind
from prefillcli.decode.continuations import DecodingReport
from prefillcli.decode.drafters import JobDrafters
from prefillcli.decode.kept_pack import KeptPack
from prefillcli.engines.base import Answer, EarlyAnswer, EarlyExits, LabelTokens, Readings, ThinnedPrompt, Treatment
from prefillcli.engines.readout import label_logits, output_numbers
from prefillcli.plan.pack import Limits, Pack
from prefillcli.prefill.forest import WatchedLayer
from prefillcli.prefill.layout import Tree
from prefillcli.prefill.walk import LayerWalk, Tick
from prefillcli.prefill.walk_state import REGROUP_LAYERS, Thinned, ThinningRule


class PromptExits:
    """The `ExitRule` of a pack's prompts. `exits` says what is read of them, and who leaves."""

    def __init__(
        self,
        walk: LayerWalk,
        pack: Pack,
        labels: Callable[[int], LabelTokens],
        exits: EarlyExits,
        regroup_cost: float,
    ) -> None:
        self.layers = exits.observed if exits.policy is None else exits.policy.layers
        self.regroup_cost = regroup_cost
        self.going: Sequence[int] = range(len(pack.reads))
        """Numbers of the reads that go on."""
        self.early: dict[int, EarlyAnswer] = {}
        """What decided prompts have left with, or would have, by prompt."""
        self.readings: dict[int, list[Readings]] = {prompt: [] for prompt in pack.prompts}
        """What observed layers show of each prompt."""
        self.first_asked: tuple[int, float] | None = None
        """The first layer that was read, and when."""
        self._walk = walk
        self._pack = pack
        self._labels = labels
        self._exits = exits

    @classmethod
    def of(
        cls, walk: LayerWalk, pack: Pack, labels: Callable[[int], LabelTokens], treatment: Treatment
    ) -> PromptExits | None:
        """Those of a pack; None where nothing of it is read early."""
        if treatment.exits is None or not pack.reads:
            return None
        cost = REGROUP_LAYERS if treatment.regroup_cost is None else treatment.regroup_cost
        return cls(walk, pack, labels, treatment.exits, cost)

    def peeks(self, layer: int) -> bool:
        """Whether only the prompts' last tokens go through the layer before it is decided who leaves."""
        return self._exits.policy is not None and self._exits.policy.peeks(layer)

    def __call__(self, layer: int, reads: Sequence[int], before: Tensor, after: Tensor) -> Sequence[int]:
        prompts = [
            (row, prompt)
            for row, read in enumerate(reads)
            for prompt in self._pack.reads[read][1]
            if prompt not in self.early
        ]
        if not prompts:
            return reads  # all of them are decided, and go on for the audit
        readings = self._read([row for row, _ in prompts], [prompt for _, prompt in prompts], before, after)
        self.first_asked = self.first_asked or (layer, time.monotonic())
        if self._exits.policy is None:
            for number, (_, prompt) in enumerate(prompts):
                self.readings[prompt].append(readings.row(number))
            return reads
        decided, logprobs = self._exits.policy.decide(layer, readings)
        for (_, prompt), leaves, own in zip(prompts, decided.tolist(), logprobs, strict=True):
            if leaves:
                self.early[prompt] = EarlyAnswer(layer, own)
        self.going = [read for read in reads if not all(map(self.has_left, self._pack.reads[read][1]))]
        return self.going

    def has_left(self, prompt: int) -> bool:
        """Whether a prompt has left, and goes no further."""
        return prompt in self.early and prompt not in self._exits.in_full

    def _read(self, rows: list[int], prompts: list[int], before: Tensor, after: Tensor) -> Readings:
        """What some prompts, whose last tokens are these rows of both tensors, show."""
        hidden = after[torch.as_tensor(rows, device=after.device)].float().cpu().numpy()
        own = [self._labels(prompt) for prompt in prompts]
        logits = np.empty((2, len(prompts), len(own[0])))
        for tokens in dict.fromkeys(own):
            at = [number for number, each in enumerate(own) if each == tokens]
            picked = torch.as_tensor([rows[number] for number in at], device=after.device)
            for side, states in enumerate((after, before)):
                logits[side, at] = self._label_logits(states[picked], tokens)
        return Readings(hidden, logits[0], logits[1])

    def _label_logits(self, hidden: Tensor, labels: LabelTokens) -> npt.NDArray[np.float64]:
        """Label logits by the model's own norm and head, variants summed in probability, float64 [rows, labels]."""
        return label_logits(self._walk.label_logits(hidden, output_numbers(labels)), labels)


class JobTexts:
    """Writes texts behind the prompts of packs whose K,V survive their scoring.

    The `drafters` guess by what they have seen of all packs. No text is longer than `longest` tokens with its prompt.
    """

    def __init__(self, limits: Limits, longest: int) -> None:
        self.report = DecodingReport()
        self.drafters = JobDrafters()
        self._room = RowRoom(limits.written_tokens or None, limits.row_tokens)
        self._longest = longest

    def keep(self, walk: LayerWalk, pack: Pack, treatment: Treatment, limits: Limits) -> KeptPack | None:
        """What keeps the K,V of a pack; None where nothing is written behind it, or they do not fit."""
        if treatment.continuations is None or not pack.reads or not limits.can_keep(pack):
            return None
        return KeptPack(pack, on_host=walk.device.type == "cuda")

    def write(
        self,
        walk: LayerWalk,
        kept: KeptPack,
        pack: Pack,
        treatment: Treatment,
        answers: Sequence[Answer],
        seconds: float,
        tick: Tick,
    ) -> list[Answer]:
        """The answers of a pack that took `seconds`, those of wanted prompts with their texts."""
        continuations, report = treatment.continuations, self.report
        if continuations is None:
            return list(answers)
        wanted = continuations.wanted(answers)
        if continuations.again:
            report.again_prompts += len(wanted)
            report.prompt_tokens += len(pack.tokens)
            report.prompt_seconds += seconds
        else:
            report.kept_prompts += len(wanted)
        reads = {prompt: read for read, (_, prompts) in enumerate(pack.reads) for prompt in prompts}
        texts = write_behind(
            walk,
            kept,
            [(reads[prompt], beginning) for prompt, beginning in wanted.items()],
            continuations.writing,
            longest=self._longest,
            room=self._room,
            make_drafter=partial(self.drafters.of, writing=continuations.writing, report=report),
            tick=tick,
            report=report,
        )
        found = dict(zip(wanted, texts, strict=True))
        return [replace(each, continuation=found.get(each.prompt)) for each in answers]


class PackThinning:
    """A thinning rule at work on one pack. `found` has what goes on of each prompt, once the rule was asked."""

    def __init__(self, rule: ThinningRule) -> None:
        self.found: dict[int, ThinnedPrompt] = {}
        self._rule = rule

    @property
    def layer(self) -> int:
        return self._rule.layer

    def of(self, prompts: Collection[int]) -> ThinningRule:
        return self._rule.of(prompts)

    def watched(self, pack: Pack, tree: Tree) -> Sequence[int]:
        return self._rule.watched(pack, tree)

    def __call__(self, pack: Pack, tree: Tree, layer: WatchedLayer) -> Sequence[Thinned]:
        thinned = self._rule(pack, tree, layer)
        for (_, prompts), own in zip(pack.reads, thinned, strict=True):
            kept = ThinnedPrompt(tree.depths[own.tokens].astype(np.int32), own.reason)
            self.found |= dict.fromkeys(prompts, kept)
        return thinned
