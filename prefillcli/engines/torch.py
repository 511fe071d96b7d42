"""The layer walk as an engine, and how it is loaded."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedModel

from prefillcli.engines.base import Answer, EngineChoice, LabelTokens, Loaded, LoadRequest, PackByPack
from prefillcli.engines.memory_plan import budget_of, keep_plan, plan_packs
from prefillcli.models import open as models
from prefillcli.models.load import load_model
from prefillcli.models.open import Opened
from prefillcli.plan.account import account
from prefillcli.plan.pack import Key, Limits, Pack
from prefillcli.prefill.walk import LayerWalk
from prefillcli.runtime.memory import available_memory


def open_models(choice: EngineChoice) -> Opened:
    """As `Loader`; the model must be one that can be walked layer by layer."""
    return models.open_models(choice)


def load(request: LoadRequest) -> Loaded[TorchEngine]:
    """As `Loader`. Packs are sized by what is free when the weights are there, unless `--memory` says it."""
    opened, choice = request.opened, request.choice
    models.refuse_what_cannot_fit(opened, draft=False)  # it is there by now
    model = load_model(opened.files, opened.device, trust_remote_code=choice.trust_remote_code)
    free = None if choice.memory else int(available_memory(opened.device) * request.share)
    budget = budget_of(choice, free)
    plan = dict(request.before)
    if not request.planned:
        plan = keep_plan(plan, plan_packs(opened, choice, budget, request.measured))
    engine = TorchEngine(
        model,
        limits=Limits(**plan["limits"]),
        chunk_tokens=plan["chunk_tokens"],
        offload_held=choice.prefix_kv == "offload",
    )
    return Loaded(engine, plan, budget)


class TorchEngine(PackByPack):
    """Walks packs through a transformers model on one device."""

    whole_packs = True
    waits = False

    def __init__(
        self, model: PreTrainedModel, *, limits: Limits, chunk_tokens: int, offload_held: bool = False
    ) -> None:
        self.limits = limits
        self.model = model
        self._walk = LayerWalk(model, chunk_tokens=chunk_tokens, offload_held=offload_held)
        self._block_seconds = 0.0  # of packs without answers since the last one with some

    def answer(
        self, pack: Pack, labels: Callable[[int], LabelTokens], tick: Callable[[float], None]
    ) -> Iterator[list[Answer]]:
        begun = time.monotonic()
        logprobs: dict[int, npt.NDArray[np.float64]] = {}
        at = 0
        for logits in self._walk.read_logits(pack, tick):
            reads = pack.reads[at : at + len(logits)]
            at += len(logits)
            prompts = [(row, prompt) for row, (_, numbers) in enumerate(reads) for prompt in numbers]
            found = label_logprobs(logits, [row for row, _ in prompts], [labels(prompt) for _, prompt in prompts])
            logprobs.update(zip((prompt for _, prompt in prompts), found, strict=True))
        seconds = time.monotonic() - begun + self._block_seconds
        self._block_seconds = 0.0 if pack.reads else seconds
        yield [
            Answer(part.prompt, logprobs[part.prompt], part.shared_tokens, part.computed_tokens, seconds * part.share)
            for part in account(pack)
        ]

    def holds(self, key: Key) -> bool:
        return self._walk.holds(key)

    def close(self) -> None:
        self._walk.close()


def label_logprobs(logits: Tensor, rows: list[int], labels: list[LabelTokens]) -> npt.NDArray[np.float64]:
    """Log-probabilities float64 [answers, labels] over the whole vocabulary.

    Answer i reads row `rows[i]` of `logits` (float32 [reads, vocabulary]) for `labels[i]`; a label's tokens are summed
    in probability.
    """
    total = torch.logsumexp(logits, dim=-1)
    result = np.empty((len(rows), len(labels[0])), dtype=np.float64)
    for tokens in set(labels):
        answers = [i for i, own in enumerate(labels) if own == tokens]
        at = torch.as_tensor([rows[i] for i in answers], device=logits.device)
        for number, ids in enumerate(tokens):
            picked = logits[at][:, list(ids)].double()
            result[answers, number] = (torch.logsumexp(picked, dim=-1) - total[at].double()).cpu().numpy()
    return result
