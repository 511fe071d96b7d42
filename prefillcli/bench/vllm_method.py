"""vLLM among the methods of `prefill bench`."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from prefillcli.bench.contenders import Contender, Cost, Equipment, MethodRun
from prefillcli.bench.material import Material
from prefillcli.bench.text_methods import TextMethod, TextRun, TextTask
from prefillcli.core.request import Request, plan_requests
from prefillcli.data.rows import Prompt
from prefillcli.decode.continuations import DecodingReport
from prefillcli.engines.base import Answer, LoadRequest, Treatment
from prefillcli.plan.plan import make_plan

if TYPE_CHECKING:
    from prefillcli.engines.vllm import VllmEngine

SHARE = 0.5  # of the free memory, for vLLM and for the layer walk each: both keep the model loaded, and take turns
CORES = "VLLM_CPU_OMP_THREADS_BIND"


class VllmTextMethod(TextMethod):
    """The engine of `prefill score --engine vllm`, which scores the prompts and writes behind them."""

    elsewhere = True

    def __init__(self, scoring: VllmMethod) -> None:
        super().__init__(scoring.name)
        self._scoring = scoring

    def run(self, task: TextTask) -> TextRun:
        engine = self._scoring.engine
        engine.forget()
        before, run = engine.decoded(), TextRun()
        packs = make_plan(task.prompts, engine.limits).packs
        for answers in engine.answer_all(packs, task.labels, lambda tokens: None, Treatment(continuations=task)):
            run.texts |= {each.prompt: each.continuation for each in answers if each.continuation is not None}
        now = engine.decoded() or DecodingReport()
        for name in ("texts", "tokens", "passes", "row_passes", "seconds"):
            setattr(run.report, name, getattr(now, name) - (getattr(before, name) if before else 0))
        return run

    def close(self) -> None:
        self._scoring.close()


class VllmMethod(Contender):
    """The engine of `prefill score --engine vllm`, with the prompts in the order of a plan."""

    def __init__(self, equipment: Equipment, engine: VllmEngine) -> None:
        super().__init__("vllm", equipment)
        self.engine = engine
        self._started.callback(engine.close)

    @property
    def elsewhere(self) -> bool:
        return True

    def run(self, prompts: Sequence[Prompt]) -> MethodRun:
        requests = [Request(prompt) for prompt in prompts]
        sets = self._equipment.labels.sets
        self.engine.forget()
        packs = plan_requests(requests, self.engine.limits).packs
        found: dict[int, Answer] = {}
        for answers in self.engine.answer_all(packs, lambda i: sets[requests[i].prompt.labels], lambda tokens: None):
            found |= {each.prompt: each for each in answers}
        in_order = [found[number] for number in range(len(requests))]
        return MethodRun(
            np.stack([each.logprobs for each in in_order]),
            requests,
            computed_tokens=sum(each.computed_tokens for each in in_order),
        )

    def cost(self, run: MethodRun) -> Cost:
        return Cost(run.computed_tokens, None)


def start_vllm(equipment: Equipment, material: Material, text_tokens: int = 0) -> VllmMethod:
    """vLLM with a copy of the model, for prompts as long as these and `text_tokens` behind them. Close it in any case.

    A note says how it runs. Raises UsageError or ResourceError.
    """
    from prefillcli.engines import vllm

    longest = max(len(prompt.tokens) for prompt in material.prompts)
    opened = replace(equipment.opened, max_length=longest + text_tokens)
    begun = time.perf_counter()
    request = LoadRequest(opened, equipment.settings, _room(opened.device), share=SHARE)
    engine = vllm.load(request).engine
    where = f"on cores {os.environ[CORES]}" if opened.device.type == "cpu" else "on the same device"
    name = "vllm-cpu" if opened.device.type == "cpu" else "vllm"
    material.notes.append(
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
