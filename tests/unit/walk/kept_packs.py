"""Memory of packs whose K,V of all layers are kept, and of the texts after them, against the law."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from benchmarks.memory import peak_in_child
from benchmarks.models import random_llama
from benchmarks.workloads import prompts_with_histories, random_prompt
from prefillcli.models.law import MemoryLaw, limits_with_texts, memory_law, pack_limits
from prefillcli.plan.pack import Limits
from prefillcli.plan.plan import Plan, make_plan
from prefillcli.plan.trie import TokenArray
from prefillcli.runtime.memory import keep_blocks
from prefillcli.walk.continuations import Beginning, Continuation, Speculation, Writing
from prefillcli.walk.decoding import KeptPack, RowRoom, write_behind
from prefillcli.walk.walk import LayerWalk

CPU = torch.device("cpu")
VOCABULARY = 8_000
BEGINNING = 4  # tokens between a prompt and its text
CHUNK = 256  # tokens; what a layer makes of a chunk is no part of the law
GOAL = 1.3  # peak bytes over those of the law


class Case(NamedTuple):
    """Prompts, and after every how many of them a text of so many tokens is written."""

    name: str
    prompts: Callable[[], list[TokenArray]]
    every: int
    text: int


CASES = {
    case.name: case
    for case in (
        Case("one prompt of 24,576 tokens", lambda: [random_prompt(24_576, VOCABULARY)], 1, 32),
        Case("2 x 60 posts, 3,000 + 150 tokens", lambda: prompts_with_histories(2, 60, 3000, 150, VOCABULARY), 1, 32),
        Case("8 prompts of 4,096 tokens", lambda: prompts_with_histories(8, 1, 1, 4096, VOCABULARY), 1, 64),
        Case("the same, one written", lambda: prompts_with_histories(8, 1, 1, 4096, VOCABULARY), 8, 64),
    )
}


def law_bytes(law: MemoryLaw, tokens: int, rows: int, text: int) -> int:
    """What the law says: a row of the residual stream and K,V of all layers for each unique token while a pack is
    walked; K,V of all layers for each token of the texts too while these are written."""
    walked = tokens * (law.residual + law.all_key_values)
    return max(walked, (tokens + rows * (BEGINNING + text)) * law.all_key_values)


def limits_for(law: MemoryLaw, budget: int, text: int) -> Limits:
    """Limits of packs that can be kept, with nothing else in the budget."""
    limits = pack_limits(law, budget=budget, device=CPU, chunk_tokens=CHUNK, pack_tokens=1 << 30, prefix_kv="discard")
    room = budget - law.constant(CHUNK, CPU)
    return limits_with_texts(limits, law, room=room, device=CPU, text_tokens=BEGINNING + text).for_texts()


def write_all(
    walk: LayerWalk, plan: Plan, prompts: Sequence[TokenArray], limits: Limits, every: int, text: int
) -> list[Continuation | None]:
    """Score the packs of a plan and write texts. Raises ValueError for a pack that cannot be kept."""
    writing = Writing(text, speculation=Speculation("off", tokens=0))
    room = RowRoom(limits.written_tokens, limits.row_tokens)
    found: list[Continuation | None] = []
    for pack in plan.packs:
        if not limits.can_keep(pack):
            raise ValueError(f"a pack of {len(pack.tokens):,} tokens cannot be kept: {limits.kept_tokens:,} can")
        kept = KeptPack(pack)
        list(walk.read_logits(pack, kept=kept))
        rows = [
            (read, Beginning(prompts[number], tuple(range(5, 5 + BEGINNING)), str(number)))
            for read, (_, numbers) in enumerate(pack.reads)
            for number in numbers
            if number % every == 0
        ]
        found += write_behind(walk, kept, rows, writing, room=room)
    return found


def ready(name: str, size: str, share: float) -> Callable[[], object]:
    """A case, with `share` of what the law says as the budget, up to the measured step."""
    model, case = random_llama(size, torch.float32), CASES[name]
    prompts = case.prompts()
    budget, limits = _sized(model, prompts, case, share)
    keep_blocks(budget)
    plan, walk = make_plan(prompts, limits), LayerWalk(model, chunk_tokens=CHUNK)
    short = [random_prompt(64, VOCABULARY)]
    write_all(walk, make_plan(short, limits), short, limits, 1, 2)  # what is set up once is not the packs'
    return lambda: write_all(walk, plan, prompts, limits, case.every, case.text)


def _sized(model: PreTrainedModel, prompts: Sequence[TokenArray], case: Case, share: float) -> tuple[int, Limits]:
    """Bytes of the budget, and the limits that follow."""
    law = memory_law(model.config, torch.float32)
    unique = make_plan(prompts, Limits(1 << 30, 1 << 30)).unique_tokens
    budget = int(share * law_bytes(law, unique, -(-len(prompts) // case.every), case.text))
    return budget, limits_for(law, budget, case.text)


def measured(name: str, size: str = "25M", share: float = GOAL) -> dict[str, float]:
    """The peak of a case, in a new process, and what the law says."""
    model, case = random_llama(size, torch.float32), CASES[name]
    prompts = case.prompts()
    law = memory_law(model.config, torch.float32)
    budget, limits = _sized(model, prompts, case, share)
    plan, rows = make_plan(prompts, limits), -(-len(prompts) // case.every)
    bytes_by_law = law_bytes(law, plan.unique_tokens, rows, case.text)
    peak = peak_in_child(ready, name, size, share)
    return {"packs": len(plan.packs), "budget": budget, "law": bytes_by_law, "peak": peak}
