"""The ways to write texts that `prefill bench --rationale` compares: lock-step decoding, `generate`, vLLM.

Each scores the prompts and writes behind all of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from transformers import PreTrainedModel

from prefillcli.bench.contenders import Equipment, VllmMethod, start_vllm
from prefillcli.decode.behind import KeptPack, RowRoom, write_behind
from prefillcli.decode.continuations import DRAFTERS, Beginning, Continuation, DecodingReport
from prefillcli.decode.drafters import DraftModel, JobDrafters
from prefillcli.engines.base import Treatment
from prefillcli.engines.hf import generate
from prefillcli.followup.contest import MOST_WORDS, TEXT_METHODS, TEXT_REFERENCE, TextTask
from prefillcli.models.heads import label_numbers
from prefillcli.plan.plan import make_plan
from prefillcli.prefill.forest import UnsupportedModelError
from prefillcli.prefill.walk import LayerWalk

if TYPE_CHECKING:
    from prefillcli.core.feature import Material, Pack

# Sets the model up for the layer walk, for as long as it is used.
Walking = Callable[[], AbstractContextManager[LayerWalk]]


@dataclass(slots=True)
class TextRun:
    """The texts, by prompt, and the cost of writing them."""

    texts: dict[int, Continuation] = field(default_factory=dict)
    report: DecodingReport = field(default_factory=DecodingReport)


class TextMethod(ABC):
    """A way to score prompts and to write behind them, under its name."""

    elsewhere = False  # it computes in other processes, so this one's memory says nothing about it

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    def run(self, task: TextTask) -> TextRun:
        """Score all prompts and write behind them. The contest times this call."""


class ScoredPack(NamedTuple):
    """A scored pack, and the beginnings of its prompts' texts. `kept` are the K,V of its layers."""

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
                (logprobs,) = label_numbers(logits, [read], [task.labels(prompt).first])
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
        room=RowRoom(longest=task.longest),
        make_drafter=lambda forward: drafters.of(forward, task.writing, run.report),
        report=run.report,
    )
    run.texts |= {prompt: text for prompt, text in zip(scored.beginnings, texts, strict=True) if text is not None}


class GeneratedTexts(TextMethod):
    """Scores by the layer walk, then texts by transformers' `generate`, which reads the prompts again.

    Prompts are batched longest first, as many as fit `together` tokens with padding; at least one.
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


class VllmTexts(TextMethod):
    """The engine of `prefill score --engine vllm`, which scores the prompts and writes behind them."""

    elsewhere = True

    def __init__(self, scoring: VllmMethod) -> None:
        super().__init__(scoring.name)
        self._engine = scoring.engine

    def run(self, task: TextTask) -> TextRun:
        engine, run = self._engine, TextRun()
        engine.forget()
        before = engine.decoded() or DecodingReport()
        packs = make_plan(task.prompts, engine.limits).packs
        for answers in engine.answer_all(packs, task.labels, lambda tokens: None, Treatment(continuations=task)):
            run.texts |= {each.prompt: each.continuation for each in answers if each.continuation is not None}
        now = engine.decoded() or DecodingReport()
        for name in ("texts", "tokens", "passes", "row_passes", "seconds"):
            setattr(run.report, name, getattr(now, name) - getattr(before, name))
        return run


# Prompt tokens of a padded batch: a mask of that number times the longest prompt must fit beside them.
PADDED_TOKENS = 32_768
# The ways of transformers, and the number of prompt tokens in one batch of each.
TOGETHER = {"generate": 1, "generate-padded": PADDED_TOKENS}


@contextmanager
def text_methods(
    names: Sequence[str], equipment: Equipment, material: Material, tokens: int
) -> Iterator[list[TextMethod]]:
    """The ways to write by name, the reference among them; without names all but vLLM."""
    writer = _writer(equipment, material)
    found: list[TextMethod] = [LockStepTexts(TEXT_REFERENCE, "off", equipment.walking)]
    with ExitStack() as stack:
        for name in names or [name for name in TEXT_METHODS if name != "vllm"]:
            if name in DRAFTERS:
                if writer is not None or not DRAFTERS[name].needs_draft:
                    found.append(LockStepTexts(name, name, equipment.walking, writer))
            elif name in TOGETHER:
                found.append(GeneratedTexts(name, equipment.model, equipment.walking, TOGETHER[name]))
            elif name == "vllm":
                scoring = start_vllm(equipment, material.longest + tokens + MOST_WORDS, material.notes)
                stack.callback(scoring.close)
                found.append(VllmTexts(scoring))
        yield found


def _writer(equipment: Equipment, material: Material) -> DraftModel | None:
    # The draft as a guesser of tokens; None, with a note, if its tokens are not the model's or it cannot guess.
    small = equipment.opened.draft
    if small is None or equipment.opened.draft_tokenizer is not None:
        return None
    try:
        return DraftModel(equipment.loaded.small_walk(chunk_tokens=equipment.settings.chunk_tokens), small.max_length)
    except UnsupportedModelError as error:
        material.notes.append(f"the draft cannot guess tokens: {error}")
        return None
