"""The methods of `prefill bench`: each answers the same prompts, and afterwards reports its work."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from prefillcli.bench.report import ExitResult, StateDrift
from prefillcli.core.question import Question, answer, answer_questions, plan_questions
from prefillcli.data.prompts.labels import Labels
from prefillcli.data.rows import Float64Array, Int32Array, Prompt
from prefillcli.engines.base import PLAIN, Answer, LoadRequest, Treatment
from prefillcli.engines.hf import plain_numbers
from prefillcli.engines.torch import TorchEngine
from prefillcli.jobs.load import Models
from prefillcli.models.shape import (
    NoCostModel,
    answer_flops,
    prefill_flops,
    walk_flops,
)
from prefillcli.plan.plan import Plan
from prefillcli.prefill.forest import ATTENTION
from prefillcli.prefill.walk import LayerWalk

if TYPE_CHECKING:
    from prefillcli.engines.vllm import VllmEngine


@dataclass(slots=True)
class MethodRun:
    """The results of a method for some prompts.

    `logprobs` are label log-probabilities, float64 [prompts, labels]; `questions` hold the target's reading, `drafted`
    the draft's.
    """

    logprobs: Float64Array
    questions: list[Question]
    drafted: list[Int32Array] = field(default_factory=list)
    draft_tokens: int = 0  # computed by the draft
    reused_seconds: float = 0.0  # of the estimates, if another run made them
    thinned: list[Question] = field(default_factory=list)  # the original ones, if the target dropped tokens itself
    computed_tokens: int = 0  # by a method that plans by itself
    exit_layers: list[int | None] = field(default_factory=list)  # layers after which prompts left, numbered from 0
    skipped: float = 0.0  # layers of a token that exits spared


@dataclass(frozen=True, slots=True)
class Cost:
    """The work of a run. `flops` are those of both models, or None: `unknown` then says why they are not counted."""

    target_tokens: int
    flops: float | None
    unknown: str | None = None


class Equipment:
    """The loaded models, and the settings with which `prefill score` would walk them. `limits` are those of the
    target's packs."""

    def __init__(self, loaded: Models[TorchEngine], labels: Labels) -> None:
        opened = loaded.opened
        settings: Any = loaded.settings  # those of the command
        self.limits = loaded.engine.limits
        self.device = opened.device
        self.tokenizer = opened.tokenizer
        self.config: Any = opened.files.config
        self.opened = opened
        self.settings = settings
        self.labels = labels
        self.model = loaded.engine.walk.model
        self._activation = opened.files.activation
        self.loaded = loaded
        self.beside = loaded.beside
        self.pool = None  # there are no workers
        self._chunk_tokens: int = loaded.plan["chunk_tokens"]
        self._offload = settings.prefix_kv == "offload"
        self._schedule = settings.schedule
        loaded.engine.close()  # each run sets the model up as it needs it

    def plain(self, prompts: Sequence[Prompt]) -> Float64Array:
        """Label log-probabilities [prompts, labels] by transformers' own forward, prompt by prompt."""
        self.model.set_attn_implementation("sdpa")
        return np.stack([plain_numbers(self.model, own.tokens, own.labels, self._activation)[0] for own in prompts])

    def walk(self, groups: Sequence[Sequence[Question]]) -> Float64Array:
        """Label log-probabilities [questions, labels] by the layer walk; questions share within their group."""
        with self.walking() as walk:
            engine = self._engine(walk)
            return np.concatenate([answer(engine, questions, schedule=self._schedule) for questions in groups])

    def answers(self, questions: Sequence[Question], treatment: Treatment = PLAIN) -> list[Answer]:
        """The layer walk's answers to questions that are planned together, with the actions between layers."""
        with self.walking() as walk:
            engine = self._engine(walk)
            return answer_questions(engine, questions, schedule=self._schedule, treatment=treatment)

    def _engine(self, walk: LayerWalk) -> TorchEngine:
        return TorchEngine(walk, limits=self.limits, activation=self._activation)

    @contextmanager
    def walking(self) -> Iterator[LayerWalk]:
        """The model as the layer walk uses it."""
        self.model.set_attn_implementation(ATTENTION)
        walk = LayerWalk(self.model, chunk_tokens=self._chunk_tokens, offload_held=self._offload)
        try:
            yield walk
        finally:
            walk.close()

    def machine(self) -> dict[str, str | int]:
        """The properties that determine how fast the models are here."""
        on_gpu = self.device.type == "cuda"
        return {
            "device": torch.cuda.get_device_name(self.device) if on_gpu else self.device.type,
            "dtype": str(self.opened.files.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
        }

    def plan(self, questions: Sequence[Question]) -> Plan:
        return plan_questions(questions, self.limits, self._schedule)


class Contender(ABC):
    """A method under its name. `keep` is the rate of the tokens that it keeps; None if it drops none."""

    elsewhere = False  # whether it computes in other processes: this one's memory then does not show its use

    def __init__(self, name: str, equipment: Equipment, keep: float | None = None) -> None:
        self.name = name if keep is None else f"{name}@{keep:g}"
        self.keep = keep
        self._equipment = equipment
        self._started = ExitStack()

    @abstractmethod
    def run(self, prompts: Sequence[Prompt]) -> MethodRun:
        """Answer the prompts. This call is timed."""

    def close(self) -> None:
        """End the processes that it has started."""
        self._started.close()

    def first_run(self, prompts: Sequence[Prompt]) -> MethodRun:
        """Answer the prompts; the findings of another method about them may be used again."""
        return self.run(prompts)

    def cost(self, run: MethodRun) -> Cost:
        """The work of a run, by the plans that it must have made."""
        equipment = self._equipment
        plans = [equipment.plan(questions) for questions in self._groups(run.questions)]
        tokens = sum(plan.computed_tokens for plan in plans)
        try:
            flops = sum(walk_flops(equipment.config, plan) + answer_flops(equipment.config, plan) for plan in plans)
            return Cost(tokens, flops)
        except NoCostModel as error:
            return Cost(tokens, None, str(error))

    def exits(self, run: MethodRun, full: Float64Array) -> ExitResult | None:
        """The layers where prompts left, against the label log-probabilities `full` [prompts, labels]; None if they
        cannot leave."""
        return None

    def drift(self, run: MethodRun) -> StateDrift | None:
        """The distance of recurrent layers' final states from those of whole prompts; None without such layers, or if
        all tokens are kept."""
        return None

    def predictions(self, run: MethodRun) -> tuple[float, float] | None:
        """Predicted speedups: 1 / (r + keep) at the mean length, and table 5 over all prompts and their kept tokens.

        None for a method that keeps all tokens, and for an architecture without a cost model.
        """
        return None

    def _groups(self, questions: list[Question]) -> list[list[Question]]:
        # The questions in groups that are planned together.
        return [questions]


class Plain(Contender):
    """Plain transformers: one forward per prompt, SDPA, no cache, logits of the last token."""

    def run(self, prompts: Sequence[Prompt]) -> MethodRun:
        return MethodRun(self._equipment.plain(prompts), [Question(prompt) for prompt in prompts])

    def cost(self, run: MethodRun) -> Cost:
        lengths = [len(question.tokens) for question in run.questions]
        try:
            return Cost(sum(lengths), sum(prefill_flops(self._equipment.config, length).total for length in lengths))
        except NoCostModel as error:
            return Cost(sum(lengths), None, str(error))


class Alone(Contender):
    """The layer walk over each prompt by itself."""

    def run(self, prompts: Sequence[Prompt]) -> MethodRun:
        questions = [Question(prompt) for prompt in prompts]
        return MethodRun(self._equipment.walk(self._groups(questions)), questions)

    def _groups(self, questions: list[Question]) -> list[list[Question]]:
        return [[question] for question in questions]


class Hybrid(Contender):
    """The layer walk over the forest of all prompts, as in `prefill score`."""

    def run(self, prompts: Sequence[Prompt]) -> MethodRun:
        questions = [Question(prompt) for prompt in prompts]
        return MethodRun(self._equipment.walk([questions]), questions)


# vLLM, with a copy of the model.


SHARE = 0.5  # of the free memory, for vLLM and for the layer walk each: both keep the model loaded, and take turns
CORES = "VLLM_CPU_OMP_THREADS_BIND"


class VllmMethod(Contender):
    """The engine of `prefill score --engine vllm`, with the prompts in the order of a plan."""

    def __init__(self, equipment: Equipment, engine: VllmEngine) -> None:
        super().__init__("vllm", equipment)
        self.engine = engine
        self._started.callback(engine.close)

    elsewhere = True

    def run(self, prompts: Sequence[Prompt]) -> MethodRun:
        questions = [Question(prompt) for prompt in prompts]
        self.engine.forget()
        packs = plan_questions(questions, self.engine.limits).packs
        found: dict[int, Answer] = {}
        for answers in self.engine.answer_all(packs, lambda i: questions[i].prompt.labels, lambda tokens: None):
            found |= {each.prompt: each for each in answers}
        in_order = [found[number] for number in range(len(questions))]
        return MethodRun(
            np.stack([each.logprobs for each in in_order]),
            questions,
            computed_tokens=sum(each.computed_tokens for each in in_order),
        )

    def cost(self, run: MethodRun) -> Cost:
        return Cost(run.computed_tokens, None)


def start_vllm(equipment: Equipment, longest: int, notes: list[str]) -> VllmMethod:
    """vLLM with a copy of the model, for prompts of up to `longest` tokens, texts included. Always close it.

    A note says how it runs. Raises UsageError or ResourceError.
    """
    from prefillcli.engines import vllm

    opened = replace(equipment.opened, max_length=longest)
    begun = time.perf_counter()
    question = LoadRequest(opened, equipment.settings, _room(opened.device), share=SHARE)
    engine = vllm.load(question).engine
    where = f"on cores {os.environ[CORES]}" if opened.device.type == "cpu" else "on the same device"
    name = "vllm-cpu" if opened.device.type == "cpu" else "vllm"
    notes.append(
        f"vllm: {name} {version(name)} {where}, with its own copy of the model; it took "
        f"{time.perf_counter() - begun:.0f} s to start, which is not timed, and every run begins with an empty prefix "
        "cache"
    )
    return VllmMethod(equipment, engine)


def _room(device: torch.device) -> dict[str, Any]:
    # As many threads as the layer walk has, on cores of this process; or its share of a device's free memory.
    if device.type == "cpu":
        cores = sorted(os.sched_getaffinity(0))[: torch.get_num_threads()]
        os.environ.setdefault(CORES, ",".join(map(str, cores)))
        return {}
    free, total = torch.cuda.mem_get_info(device)
    return {"gpu_memory_utilization": round(SHARE * free / total, 3)}
