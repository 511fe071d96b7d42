"""The same prompts in random orders, packs, chunks, schedules and thread counts, and the bits of their scores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from prefillcli.engines.torch import TorchEngine
from prefillcli.plan import SCHEDULES
from prefillcli.plan.behind import LabelSet
from prefillcli.plan.pack import Limits
from prefillcli.plan.plan import make_plan, packs_to_run
from prefillcli.walk.forest import ATTENTION, register
from prefillcli.walk.walk import LayerWalk
from tests.unit.walk.families import make_model
from tests.unit.walk.test_recurrent import RECURRENT
from tests.unit.walk.test_walk import Prompt, mixed, tokens

#: Grouped queries, two windows with soft caps, sinks with experts, and recurrence beside attention.
FAMILIES: dict[str, Mapping[str, Any]] = {
    "llama": {}, "gemma2": {}, "gpt_oss": {}, "qwen3_next": RECURRENT["qwen3_next"], "lfm2": RECURRENT["lfm2"],
    "nemotron_h": RECURRENT["nemotron_h"],
}  # fmt: skip
#: Many tokens, so that the bits of many logits are seen, and two labels of several.
LABELS = LabelSet.of([*([token] for token in range(3, 67)), [70, 71, 72], [80, 90, 100, 110, 120]])
MOST_THREADS = 3


@dataclass(frozen=True, slots=True)
class Shuffle:
    """What must not change a score: which prompts there are, in which order, and how they are computed.

    The prompts `done` were scored before; what is left is computed as a resumed run does it.
    """

    order: tuple[int, ...]
    done: tuple[int, ...]
    limits: Limits
    schedule: str
    chunk_tokens: int
    offload: bool
    threads: int


def random_shuffle(rng: np.random.Generator, prompts: int) -> Shuffle:
    """Sizes are even on a scale of logarithms; one time in three a part of the prompts is left out or done."""

    def size(least: int, most: int) -> int:
        return int(np.exp(rng.uniform(np.log(least), np.log(most))))

    left = prompts if rng.random() < 2 / 3 else int(rng.integers(1, prompts + 1))
    done = 0 if rng.random() < 2 / 3 else int(rng.integers(0, left))
    return Shuffle(
        order=tuple(int(each) for each in rng.permutation(prompts)[:left]),
        done=tuple(int(each) for each in rng.permutation(left)[:done]),
        limits=Limits(size(40, 4000), 10**6, held_tokens=int(rng.choice([0, 200, 10**6]))),
        schedule=str(rng.choice(list(SCHEDULES))),
        chunk_tokens=size(8, 2048),
        offload=bool(rng.random() < 0.25),
        threads=int(rng.integers(1, MOST_THREADS + 1)),
    )


def as_they_come(prompts: int) -> Shuffle:
    """All prompts in one pack, on one thread."""
    return Shuffle(tuple(range(prompts)), (), Limits(10**6, 10**6), "prefix-tree", 4096, False, 1)


@contextmanager
def computing_with(threads: int) -> Iterator[None]:
    """torch computes with so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@cache
def model_of(family: str, dtype: torch.dtype) -> nn.Module:
    """A small model with random weights."""
    register()
    return make_model(family, dtype, **FAMILIES[family])


def all_kinds() -> list[Prompt]:
    """Short and long prompts, trees of shared prefixes, duplicates far apart, and prompts that others begin with."""
    rng = np.random.default_rng(11)
    found = mixed()
    found += [tokens(rng, 1), tokens(rng, 700), found[3].copy(), found[0][:200].copy(), found[0][:201].copy()]
    return found


def label_bits(
    model: nn.Module, prompts: Sequence[Prompt], shuffle: Shuffle, **options: Any
) -> npt.NDArray[np.uint64]:
    """The bits of each prompt's log-probabilities, [prompts, labels]; 0 for prompts that were not scored.

    `options` go to the walk.
    """
    model.set_attn_implementation(ATTENTION)
    found = np.zeros((len(prompts), len(LABELS)), np.float64)
    walk = LayerWalk(model, chunk_tokens=shuffle.chunk_tokens, offload_held=shuffle.offload, **options)
    engine = TorchEngine(walk, limits=shuffle.limits)
    with closing(engine), computing_with(shuffle.threads):
        plan = make_plan([prompts[each] for each in shuffle.order], engine.limits, shuffle.schedule)
        for pack in packs_to_run(plan, shuffle.done):
            for answers in engine.answer(pack, lambda prompt: LABELS, lambda step: None):
                for answer in answers:
                    found[shuffle.order[answer.prompt]] = answer.logprobs
    return found.view(np.uint64)
