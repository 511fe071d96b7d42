"""Encoders with a classification head: texts of about one length go through transformers' own model in padded
batches. There is nothing to share, because every token of an encoder sees all of its text."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from prefillcli.engines.base import PLAIN, Answer, Engine, Loaded, LoadRequest, Readings, Treatment, sequences
from prefillcli.errors import brief, out_of_memory
from prefillcli.models.heads import Activation, label_numbers
from prefillcli.models.load import load_weights
from prefillcli.models.open import refuse_what_cannot_fit
from prefillcli.plan.behind import LabelSet
from prefillcli.plan.pack import Limits, Pack
from prefillcli.plan.trie import TokenArray

_CPU_TOKENS = 512  # of a batch: products are no faster with more, and leave the caches
_DEVICE_TOKENS = 1 << 15


def load(request: LoadRequest) -> Loaded[EncoderEngine]:
    """As `Loader`."""
    opened = request.opened
    refuse_what_cannot_fit(opened)
    model = load_weights(
        opened.files,
        opened.device,
        attention=request.options.get("attn_implementation"),
        trust_remote_code=request.trust_remote_code,
    )
    return Loaded(EncoderEngine(model, opened.files.activation))


class EncoderEngine(Engine):
    """Scores texts with an encoder. Equal texts of a pack are computed once."""

    whole_packs = False
    waits = False

    def __init__(self, model: PreTrainedModel, activation: Activation) -> None:
        self.limits = Limits(tokens=1 << 62, max_tokens=1 << 62, kept_tokens=1 << 62)
        self.model = model
        self.batch_tokens = _CPU_TOKENS if model.device.type == "cpu" else _DEVICE_TOKENS
        self._activation = activation
        self._takes_types = "token_type_ids" in inspect.signature(model.forward).parameters
        self._pooled: Tensor | None = None  # what the last map to the classes reads, [texts, hidden]
        for part in reversed(list(model.modules())):
            if isinstance(part, nn.Linear) and part.out_features == model.config.num_labels:
                part.register_forward_pre_hook(self._notice)
                break

    def answer(
        self,
        pack: Pack,
        labels: Callable[[int], LabelSet],
        tick: Callable[[float], None],
        treatment: Treatment = PLAIN,
    ) -> Iterator[list[Answer]]:
        readers: dict[bytes, list[int]] = {}
        for prompt, tokens in sequences(pack):
            readers.setdefault(tokens.tobytes(), []).append(prompt)
        texts = sorted((np.frombuffer(text, np.int32) for text in readers), key=len, reverse=True)
        step = len(pack.tokens) / len(pack.prompts)
        while texts:
            count = max(1, self.batch_tokens // len(texts[0]))
            batch = texts[:count]
            begun = time.monotonic()
            failure = None
            try:
                outputs = self.outputs(batch)
            except Exception as error:
                if not out_of_memory(error):
                    raise
                if count > 1:
                    self.batch_tokens = count // 2 * len(batch[0])
                    continue
                failure = brief(error)
                outputs = torch.full((1, self.model.config.num_labels), torch.nan)
            del texts[:count]
            own = [(row, prompt) for row, text in enumerate(batch) for prompt in readers[text.tobytes()]]
            rows, sets = [row for row, _ in own], [labels(prompt) for _, prompt in own]
            numbers = label_numbers(outputs, rows, [each.single or () for each in sets], self._activation)
            seconds = (time.monotonic() - begun) / len(own)
            answers = []
            for (row, prompt), found in zip(own, numbers, strict=True):
                size, (first, *others) = len(batch[row]), readers[batch[row].tobytes()]
                shared, computed = size if others else 0, size if prompt == first else 0
                shown = () if treatment.exits is None or failure else (self._reading(row, found),)
                answers.append(Answer(prompt, found, shared, computed, seconds, readings=shown, failure=failure))
            yield answers
            tick(step * len(own))

    def _notice(self, _part: nn.Module, given: tuple[Tensor, ...]) -> None:
        self._pooled = given[0]

    def _reading(self, row: int, numbers: npt.NDArray[np.float64]) -> Readings:
        # Of a text of the last batch: the hidden state that the head reads, else its outputs.
        pooled = numbers if self._pooled is None else self._pooled[row].flatten().float().cpu().numpy()
        return Readings(pooled[None].astype(np.float32), numbers[None], numbers[None])

    def outputs(self, texts: Sequence[TokenArray]) -> Tensor:
        """The outputs of the head for each text, float32 [texts, classes].

        A token of the second kind has its id and the size of the vocabulary as its number.
        """
        padding = max(self.model.config.pad_token_id or 0, 0)  # masked; some files have -1
        ids = np.full((len(texts), max(map(len, texts))), padding)
        types, mask = np.zeros_like(ids), np.zeros_like(ids)
        for row, text in enumerate(texts):
            types[row, : len(text)], ids[row, : len(text)] = divmod(text, self.model.config.vocab_size)
            mask[row, : len(text)] = 1
        given = {"input_ids": ids, "attention_mask": mask} | ({"token_type_ids": types} if self._takes_types else {})
        with torch.inference_mode():
            device = self.model.device
            logits: Tensor = self.model(
                **{name: torch.from_numpy(each).to(device) for name, each in given.items()}
            ).logits
            return logits.float()

    def close(self) -> None:
        del self.model
