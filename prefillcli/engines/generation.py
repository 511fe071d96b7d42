"""Texts behind prompts by transformers' own `generate`: what the other ways of writing are held against."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel

from prefillcli.decode.continuations import Beginning, Continuation, DecodingReport, Writing
from prefillcli.decode.token_choice import Chooser
from prefillcli.prefill.layer_place import embedding_device


def generate(
    model: PreTrainedModel,
    beginnings: Sequence[Beginning],
    writing: Writing,
    *,
    max_length: int,
    report: DecodingReport,
    tick: Callable[[float], None] = lambda tokens: None,
) -> list[Continuation]:
    """Write behind each of these prompts, all in one batch. `report` counts what it took.

    The batch is padded on the left, to its longest prompt. A prompt, what follows it and its text take at most
    `max_length` tokens. `tick` is called with 0 in each pass, and may raise to stop.
    """
    contexts = [np.concatenate([each.prompt, np.array(each.tokens, dtype=np.int32)]) for each in beginnings]
    room = [min(writing.tokens, max_length - len(context)) for context in contexts]
    if max(room) < 1:
        return [Continuation((), "length", float("inf")) for _ in beginnings]
    longest = max(map(len, contexts))
    ids = torch.zeros(len(contexts), longest, dtype=torch.long)
    for row, context in enumerate(contexts):
        ids[row, longest - len(context) :] = torch.as_tensor(context)
    padding = torch.tensor([longest - len(context) for context in contexts])
    device = embedding_device(model)
    choosing = _Choosing(beginnings, room, writing, tick)
    with torch.inference_mode(), _no_other_settings(model):
        found = model.generate(
            input_ids=ids.to(device),
            attention_mask=(torch.arange(longest) >= padding[:, None]).long().to(device),
            logits_processor=LogitsProcessorList([choosing]),
            generation_config=GenerationConfig(
                do_sample=False,
                max_new_tokens=max(room),
                eos_token_id=sorted(writing.stop_tokens) or None,
                pad_token_id=0,
            ),
        )
    texts = [
        _continuation(tokens[:most], writing, gap)
        for tokens, most, gap in zip(found[:, longest:].tolist(), room, choosing.gaps, strict=True)
    ]
    _count(report, texts, choosing, sum(map(len, contexts)))
    return texts


class _Choosing:
    """Makes of logits the numbers whose largest one `generate` takes, and looks at the two best of them."""

    def __init__(
        self, beginnings: Sequence[Beginning], room: Sequence[int], writing: Writing, tick: Callable[[float], None]
    ) -> None:
        self.gaps = [float("inf")] * len(beginnings)
        self.begun = time.monotonic()
        self.first: float | None = None  # seconds until the prompts were read
        self.passes = 0
        self.row_passes = 0
        self._beginnings = beginnings
        self._room = room
        self._writing = writing
        self._tick = tick
        self._chooser = Chooser(writing.temperature, writing.seed)
        self._going = set(range(len(beginnings)))

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Both float32 [prompts, vocabulary]; `scores` are logits."""
        if self.first is None:
            self.first = time.monotonic() - self.begun
        if self._writing.temperature > 0:
            noise = [self._chooser.noise(each.key, self.passes, scores.shape[-1]) for each in self._beginnings]
            scores = scores / self._writing.temperature + torch.from_numpy(np.stack(noise)).to(scores.device)
        best = scores.topk(2)
        gaps = (best.values[:, 0] - best.values[:, 1]).tolist()
        for row, token in enumerate(best.indices[:, 0].tolist()):
            if row not in self._going:
                continue
            self.row_passes += 1
            self.gaps[row] = min(self.gaps[row], gaps[row])
            if token in self._writing.stop_tokens or self.passes + 1 == self._room[row]:
                self._going.discard(row)
        self.passes += 1
        self._tick(0)
        return scores


@contextmanager
def _no_other_settings(model: PreTrainedModel) -> Iterator[None]:
    """Without what the model's own settings say of generation, such as a penalty for repetition."""
    own = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = own


def _continuation(tokens: Sequence[int], writing: Writing, gap: float) -> Continuation:
    """The text of what was generated, up to the stop token."""
    for place, token in enumerate(tokens):
        if token in writing.stop_tokens:
            return Continuation(tuple(tokens[:place]), "stop", gap)
    return Continuation(tuple(tokens), "length", gap)


def _count(report: DecodingReport, texts: Sequence[Continuation], choosing: _Choosing, prompt_tokens: int) -> None:
    first = choosing.first or 0.0
    report.texts += len(texts)
    report.tokens += sum(len(text.tokens) for text in texts)
    report.passes += choosing.passes
    report.row_passes += choosing.row_passes
    report.seconds += time.monotonic() - choosing.begun - first
    report.again_prompts += len(texts)
    report.prompt_tokens += prompt_tokens
    report.prompt_seconds += first
