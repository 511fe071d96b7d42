"""The plain transformers loop as an engine: one forward a prompt, nothing shared. What the others are held against."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from prefillcli.decode.continuations import DecodingReport
from prefillcli.engines.base import (
    PLAIN,
    Answer,
    EngineChoice,
    LabelTokens,
    Loaded,
    LoadRequest,
    PackByPack,
    Treatment,
    sequences,
)
from prefillcli.engines.engine_options import check_options
from prefillcli.engines.generation import generate
from prefillcli.engines.readout import activation_of, label_numbers
from prefillcli.models import open as models
from prefillcli.models.adapter_merging import ExchangedAdapters, merge_adapters
from prefillcli.models.adapters import open_adapters
from prefillcli.models.heads import Activation
from prefillcli.models.load import load_weights
from prefillcli.models.open import Opened
from prefillcli.plan.pack import Key, Limits, Pack
from prefillcli.plan.trie import TokenArray
from prefillcli.prefill.layer_place import embedding_device
from prefillcli.prefill.model_ends import last_row

OPTIONS = ("attn_implementation",)


def open_models(choice: EngineChoice) -> Opened:
    """As `Loader`; any causal language model of transformers will do."""
    check_options("hf", choice.engine_options, OPTIONS)
    opened = models.open_models(choice)
    models.check_loadable(opened.files, opened.device)
    opened = open_adapters(opened, choice, choice.trust_remote_code)
    return replace(opened, max_length=opened.files.max_length_apart)


def load(request: LoadRequest) -> Loaded[HfEngine]:
    """As `Loader`."""
    opened = request.opened
    models.refuse_what_cannot_fit(opened)
    model = load_weights(
        opened.files,
        opened.device,
        attention=request.options.get("attn_implementation"),
        trust_remote_code=request.choice.trust_remote_code,
    )
    activation, adapters = activation_of(opened.files), merge_adapters(model, opened)
    return Loaded(HfEngine(model, max_length=opened.max_length, activation=activation, adapters=adapters))


class HfEngine(PackByPack):
    """Scores prompts one after the other with a transformers model, as it is. `max_length` is in tokens."""

    whole_packs = False
    waits = False

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_length: int,
        activation: Activation = "softmax",
        adapters: ExchangedAdapters | None = None,
    ) -> None:
        self.limits = Limits(tokens=1 << 62, max_tokens=max_length, kept_tokens=1 << 62)
        self._max_length = max_length
        self.model = model
        self._activation = activation
        self._adapters = adapters
        self._decoding = DecodingReport()

    def answer(
        self,
        pack: Pack,
        labels: Callable[[int], LabelTokens],
        tick: Callable[[float], None],
        treatment: Treatment = PLAIN,
    ) -> Iterator[list[Answer]]:
        if self._adapters is not None:
            self._adapters.use(pack.adapter)
        step = len(pack.tokens) / len(pack.prompts)
        for prompt, tokens in sequences(pack):
            begun = time.monotonic()
            logits = last_logits(self.model, tokens)
            (logprobs,) = label_numbers(logits[None], [0], [labels(prompt)], self._activation)
            answer = Answer(prompt, logprobs, 0, len(tokens), time.monotonic() - begun)
            yield [self._written_on(answer, treatment, tick)]
            tick(step)

    def _written_on(self, answer: Answer, treatment: Treatment, tick: Callable[[float], None]) -> Answer:
        """The answer, with a text behind its prompt if that is wanted. The prompt is read again."""
        if treatment.continuations is None:
            return answer
        wanted = treatment.continuations.wanted([answer])
        if answer.prompt not in wanted:
            return answer
        (text,) = generate(
            self.model,
            [wanted[answer.prompt]],
            treatment.continuations.writing,
            max_length=self._max_length,
            report=self._decoding,
            tick=tick,
        )
        return replace(answer, continuation=text)

    def holds(self, key: Key) -> bool:
        return False

    def weights_report(self) -> None:
        return None

    def decoded(self) -> DecodingReport | None:
        return self._decoding if self._decoding.texts else None

    def close(self) -> None:
        del self.model


def last_logits(model: PreTrainedModel, tokens: TokenArray) -> Tensor:
    """Logits of the last token, float32 [vocabulary] or [classes]: one forward without cache."""
    device = embedding_device(model)
    with torch.inference_mode():
        ids = torch.as_tensor(tokens, dtype=torch.long, device=device)[None]
        keeps_one = {"logits_to_keep": 1} if model.get_output_embeddings() is not None else {}  # else it has few
        return last_row(model(input_ids=ids, use_cache=False, **keeps_one).logits)
