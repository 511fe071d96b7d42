"""The ways to write texts behind scored prompts: lock-step decoding with each drafter, and transformers' `generate`.

Each scores the prompts and writes behind all of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from prefillcli.data.rows import Float64Array
from prefillcli.decode.behind import write_behind
from prefillcli.decode.continuations import Beginning, Continuation, DecodingReport, Writing
from prefillcli.decode.drafters import DraftModel, JobDrafters
from prefillcli.decode.kept_pack import KeptPack
from prefillcli.engines.base import Answer, LabelTokens
from prefillcli.engines.hf import generate
from prefillcli.models.heads import label_numbers
from prefillcli.plan.pack import Limits, Pack
from prefillcli.plan.plan import make_plan
from prefillcli.plan.trie import TokenArray
from prefillcli.prefill.walk import LayerWalk

# Sets the model up for the layer walk, for as long as it is used.
Walking = Callable[[], AbstractContextManager[LayerWalk]]


@dataclass(frozen=True, slots=True)
class TextTask:
    """Prompts that are scored and written on, in packs of these `limits`, whose K,V of all layers fit.

    `beginning` says what is written behind a prompt, by its number and its label log-probabilities, float64 [labels].
    A prompt, what follows it and its text take at most `longest` tokens.
    """

    prompts: Sequence[TokenArray]
    labels: Callable[[int], LabelTokens]
    beginning: Callable[[int, Float64Array], Beginning]
    writing: Writing
    limits: Limits
    longest: int
    again: bool = False

    def with_drafter(self, name: str) -> TextTask:
        """The task for the drafter of this name."""
        speculation = replace(self.writing.speculation, drafter=name)
        return replace(self, writing=replace(self.writing, speculation=speculation))

    # As `Continuations` of all prompts, for engines:

    def wanted(self, answers: Sequence[Answer]) -> Mapping[int, Beginning]:
        return {answer.prompt: self.beginning(answer.prompt, answer.logprobs) for answer in answers}

    def of(self, prompts: Collection[int]) -> TextTask:
        return self


@dataclass(slots=True)
class TextRun:
    """The texts, by prompt, and what writing them took."""

    texts: dict[int, Continuation] = field(default_factory=dict)
    report: DecodingReport = field(default_factory=DecodingReport)


class TextMethod(ABC):
    """A way to score prompts and to write behind them, under its name."""

    elsewhere = False  # it computes in other processes, so the memory of this one says nothing of it

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    def run(self, task: TextTask) -> TextRun:
        """Score all prompts and write behind them. This is what is timed."""

    def close(self) -> None:  # noqa: B027 - most have started nothing
        """Let go of what it has started."""


class ScoredPack(NamedTuple):
    """A pack that is scored, and what its prompts are written behind. `kept` are the K,V of its layers."""

    pack: Pack
    kept: KeptPack | None
    beginnings: dict[int, Beginning]

    @property
    def rows(self) -> list[tuple[int, Beginning]]:
        """The number of each prompt's read in the pack, and its beginning, in the order of `beginnings`."""
        reads = {prompt: read for read, (_, prompts) in enumerate(self.pack.reads) for prompt in prompts}
        return [(reads[prompt], beginning) for prompt, beginning in self.beginnings.items()]


def scored_packs(walk: LayerWalk, task: TextTask, *, keep: bool) -> Iterator[ScoredPack]:
    """Score the prompts of a task, pack by pack, and `keep` the K,V of each until the next one."""
    for pack in make_plan(task.prompts, task.limits).packs:
        kept = KeptPack(pack) if keep else None
        logits = torch.cat(list(walk.read_logits(pack, kept=kept)))
        beginnings = {}
        for read, (_, prompts) in enumerate(pack.reads):
            for prompt in prompts:
                (logprobs,) = label_numbers(logits, [read], [task.labels(prompt)])
                beginnings[prompt] = task.beginning(prompt, logprobs)
        yield ScoredPack(pack, kept, beginnings)
        if kept is not None:
            kept.release()


class LockStepTexts(TextMethod):
    """Lock-step decoding behind the packs, with the `drafter` of this name; "off": without guesses."""

    def __init__(self, name: str, drafter: str, walking: Walking, draft: DraftModel | None = None) -> None:
        super().__init__(name)
        self._drafter = drafter
        self._walking = walking
        self._draft = draft

    def run(self, task: TextTask) -> TextRun:
        task, run = task.with_drafter(self._drafter), TextRun()
        drafters = JobDrafters()
        drafters.draft = self._draft
        with self._walking() as walk:
            for scored in scored_packs(walk, task, keep=True):
                write_on(walk, scored, task, drafters, run)
        return run


def write_on(walk: LayerWalk, scored: ScoredPack, task: TextTask, drafters: JobDrafters, run: TextRun) -> None:
    """Write behind the prompts of a scored pack, whose K,V are kept, in lock step."""
    if scored.kept is None:
        raise ValueError("the K,V of this pack are not kept")
    texts = write_behind(
        walk,
        scored.kept,
        scored.rows,
        task.writing,
        longest=task.longest,
        make_drafter=lambda forward: drafters.of(forward, task.writing, run.report),
        report=run.report,
    )
    run.texts |= {prompt: text for prompt, text in zip(scored.beginnings, texts, strict=True) if text is not None}


class GeneratedTexts(TextMethod):
    """Scores by the layer walk, then texts by transformers' `generate`, which reads the prompts again.

    Of the prompts, longest first, so many are generated behind together as take `together` tokens with padding; at
    least one is.
    """

    def __init__(self, name: str, model: PreTrainedModel, walking: Walking, together: int) -> None:
        super().__init__(name)
        self._model = model
        self._walking = walking
        self._together = together

    def run(self, task: TextTask) -> TextRun:
        beginnings = dict[int, Beginning]()
        with self._walking() as walk:
            for scored in scored_packs(walk, task, keep=False):
                beginnings |= scored.beginnings
        return self.write(task, beginnings)

    def write(self, task: TextTask, beginnings: Mapping[int, Beginning]) -> TextRun:
        """Write behind prompts that are scored, by their numbers."""
        run = TextRun()
        self._model.set_attn_implementation("sdpa")
        for batch in self._batches(task, beginnings):
            together = [beginnings[prompt] for prompt in batch]
            texts = generate(self._model, together, task.writing, max_length=task.longest, report=run.report)
            run.texts |= dict(zip(batch, texts, strict=True))
        return run

    def _batches(self, task: TextTask, beginnings: Mapping[int, Beginning]) -> Iterator[list[int]]:
        batch: list[int] = []
        for prompt in sorted(beginnings, key=lambda prompt: -len(task.prompts[prompt])):
            if batch and (len(batch) + 1) * len(task.prompts[batch[0]]) > self._together:
                yield batch
                batch = []
            batch.append(prompt)
        if batch:
            yield batch
