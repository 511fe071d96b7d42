"""The plain transformers loop as an engine: one forward a prompt, nothing shared. The other engines are compared with
it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel

from prefillcli.engines import encoders
from prefillcli.engines.base import (
    PLAIN,
    Answer,
    Engine,
    Loaded,
    LoadRequest,
    Treatment,
    check_options,
    sequences,
)
from prefillcli.models import open as models
from prefillcli.models.heads import Activation, label_numbers, likeliest_tokens, next_tokens, pointer_numbers
from prefillcli.models.load import add_own_head, load_weights
from prefillcli.models.open import Opened, UseVariant
from prefillcli.models.shape import length_switch
from prefillcli.options.settings import JobSettings
from prefillcli.plan.behind import LabelSet
from prefillcli.plan.pack import Limits, Pack
from prefillcli.plan.trie import TokenArray
from prefillcli.rows.records import ReadTokens
from prefillcli.walk.continuations import Beginning, Continuation, DecodingReport, Writing
from prefillcli.walk.lockstep import Chooser
from prefillcli.walk.model_ends import embedding_device, last_row

# Texts after prompts by transformers' own `generate`. The other ways of writing are compared with it.


def generate(
    model: PreTrainedModel,
    beginnings: Sequence[Beginning],
    writing: Writing,
    *,
    max_length: int,
    report: DecodingReport,
    tick: Callable[[float], None] = lambda tokens: None,
) -> list[Continuation]:
    """Write after each of these prompts, all in one batch. `report` counts the cost.

    The batch is padded on the left, to its longest prompt. `max_length` is the `longest` of `Beginning.room`. `tick`
    is called with 0 in each pass, and may raise to stop.
    """
    contexts = [np.concatenate([each.prompt, np.array(each.tokens, dtype=np.int32)]) for each in beginnings]
    switch = length_switch(model.config.get_text_config())
    room = [each.room(writing.tokens, max_length, switch) for each in beginnings]
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
    first = choosing.first or 0.0
    report.texts += len(texts)
    report.tokens += sum(len(text.tokens) for text in texts)
    report.passes += choosing.passes
    report.row_passes += choosing.row_passes
    report.seconds += time.monotonic() - choosing.begun - first
    report.again_prompts += len(texts)
    report.prompt_tokens += sum(map(len, contexts))
    report.prompt_seconds += first
    return texts


class _Choosing:
    """Turns logits into the numbers of which `generate` takes the largest, and looks at the two best."""

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
        # Both float32 [prompts, vocabulary]; `scores` are logits.
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
    # Without the model's own settings for generation, such as a penalty for repetition.
    own = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = own


def _continuation(tokens: Sequence[int], writing: Writing, gap: float) -> Continuation:
    for place, token in enumerate(tokens):
        if token in writing.stop_tokens:
            return Continuation(tuple(tokens[:place]), "stop", gap)
    return Continuation(tuple(tokens), "length", gap)


OPTIONS = ("attn_implementation",)


def open_models(settings: JobSettings, dtypes: Sequence[str] = ()) -> Opened:
    """As `Loader`; any causal language model of transformers will do, and encoders with a head."""
    check_options("hf", settings.engine.engine_options, OPTIONS)
    opened = models.open_models(settings, dtypes)
    models.check_loadable(opened.files, opened.device)
    return replace(opened, max_length=opened.files.max_length_apart)


def load(request: LoadRequest) -> Loaded[HfEngine] | Loaded[encoders.EncoderEngine]:
    opened = request.opened
    if opened.files.encoder:
        return encoders.load(request)
    models.refuse_what_cannot_fit(opened)
    model = load_weights(
        opened.files,
        opened.device,
        attention=request.options.get("attn_implementation"),
        trust_remote_code=request.trust_remote_code,
    )
    add_own_head(model, opened)
    use_variant = None if opened.variants is None else opened.variants.apply(model)
    engine = HfEngine(model, max_length=opened.max_length, activation=opened.files.activation, use_variant=use_variant)
    return Loaded(engine)


class HfEngine(Engine):
    """Scores prompts one after the other with a transformers model, as it is. `max_length` is in tokens."""

    whole_packs = False
    waits = False

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_length: int,
        activation: Activation = "softmax",
        use_variant: UseVariant | None = None,
    ) -> None:
        self.limits = Limits(tokens=1 << 62, max_tokens=1 << 62, kept_tokens=1 << 62)
        self._max_length = max_length
        self.model = model
        self._activation = activation
        self._use_variant = use_variant
        self._decoding = DecodingReport()

    def answer(
        self,
        pack: Pack,
        labels: Callable[[int], LabelSet],
        tick: Callable[[float], None],
        treatment: Treatment = PLAIN,
    ) -> Iterator[list[Answer]]:
        if self._use_variant is not None:
            self._use_variant(pack.variant)
        step = len(pack.tokens) / len(pack.prompts)
        for prompt, tokens in sequences(pack):
            begun = time.monotonic()
            likeliest, by_token, told = None, None, None
            if count := labels(prompt).likeliest:
                (likeliest,), (logprobs,) = likeliest_tokens(last_logits(self.model, tokens)[None], [0], count)
                computed = len(tokens)
            else:
                logprobs, by_token, computed, last = plain_numbers(
                    self.model, tokens, labels(prompt), self._activation
                )
                if treatment.next_tokens and not labels(prompt).pointers:  # whose head reads no tokens
                    (told,) = next_tokens(last[None], [0], [labels(prompt).first], treatment.next_tokens)
            seconds = time.monotonic() - begun
            answer = Answer(prompt, logprobs, 0, computed, seconds, by_token=by_token, tokens=likeliest, next=told)
            yield [self._written_on(answer, treatment, tick)]
            tick(step)

    def _written_on(self, answer: Answer, treatment: Treatment, tick: Callable[[float], None]) -> Answer:
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

    def decoded(self) -> DecodingReport | None:
        return self._decoding if self._decoding.texts else None

    def close(self) -> None:
        del self.model


def plain_numbers(
    model: PreTrainedModel, tokens: TokenArray, labels: LabelSet, activation: Activation = "softmax"
) -> tuple[npt.NDArray[np.float64], ReadTokens | None, int, Tensor]:
    """A prompt's `logprobs` and `by_token` of an `Answer`, the tokens that this has computed, and the logits of the
    prompt's last token, float32 [vocabulary]."""
    if labels.single is not None:
        last = last_logits(model, tokens)
        (logprobs,) = label_numbers(last[None], [0], [labels.single], activation)
        return labels.divided(logprobs), None, len(tokens), last
    if labels.pointers:
        whole = np.concatenate([tokens, labels.sequences[0][:-1]])
        outputs = _outputs(model, whole, labels.tokens + 1)
        rows = labels.places(np.arange(labels.tokens + 1)).rows
        found = pointer_numbers(outputs[rows].cpu().double().numpy())
        return labels.divided(found), None, len(whole), outputs[-1]
    values, greedy, computed, last = sequence_logprobs(model, tokens, labels.sequences)
    by_token = ReadTokens(values, greedy) if labels.by_token else None
    return labels.divided(labels.logprobs(values)), by_token, computed, last


def sequence_logprobs(
    model: PreTrainedModel, tokens: TokenArray, sequences: Sequence[TokenArray]
) -> tuple[npt.NDArray[np.float64], bool, int, Tensor]:
    """The log-probabilities of the tokens of all `sequences` after a prompt, float64 [tokens]; whether each token is
    the likeliest one; the tokens that this has computed: one forward for each sequence but its last token; and the
    logits of the prompt's last token, float32 [vocabulary]."""
    behind = {each[:-1].tobytes(): each[:-1] for each in sequences if len(each) > 1}
    # The prompt's own last token has the same logits in each forward, unless one changes the position encodings.
    longest = len(tokens) + max(map(len, sequences)) - 1
    changes = len(tokens) <= length_switch(model.config.get_text_config()) < longest
    if not behind or (changes and any(len(each) == 1 for each in sequences)):
        behind[b""] = tokens[:0]
    found: dict[bytes, Tensor] = {}
    for name, before in behind.items():
        found[name] = _outputs(model, np.concatenate([tokens, before]), len(before) + 1)
    found.setdefault(b"", next(iter(found.values()))[:1])
    values, greedy = [], True
    for each in sequences:
        own = found[each[:-1].tobytes()]
        at = torch.as_tensor(each, dtype=torch.long, device=own.device)[:, None]
        # Not torch's log_softmax: in float32 it is off by 1e-5 a token for a large vocabulary, always the same way.
        top = own.max(dim=-1, keepdim=True).values
        rest = torch.exp(own - top).sum(dim=-1).double().log()
        values.append((own.gather(1, at)[:, 0].double() - top[:, 0].double() - rest).cpu().numpy())
        greedy = greedy and bool((own.argmax(dim=-1) == at[:, 0]).all())
    computed = len(tokens) * len(behind) + sum(map(len, behind.values()))
    return np.concatenate(values), greedy, computed, found[b""][0]


def _outputs(model: PreTrainedModel, tokens: TokenArray, count: int) -> Tensor:
    # The logits of this many last tokens, float32 [count, outputs].
    ids = torch.as_tensor(tokens, dtype=torch.long, device=embedding_device(model))[None]
    with torch.inference_mode():
        logits: Tensor = model(input_ids=ids, use_cache=False, logits_to_keep=count).logits
    return logits[0, -count:].float()


def last_logits(model: PreTrainedModel, tokens: TokenArray) -> Tensor:
    """Logits of the last token, float32 [vocabulary] or [classes]: one forward without cache."""
    device = embedding_device(model)
    with torch.inference_mode():
        ids = torch.as_tensor(tokens, dtype=torch.long, device=device)[None]
        keeps_one = {"logits_to_keep": 1} if model.get_output_embeddings() is not None else {}  # else it has few
        return last_row(model(input_ids=ids, use_cache=False, **keeps_one).logits)
