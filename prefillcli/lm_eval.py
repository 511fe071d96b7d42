"""The model `prefill` of lm-evaluation-harness: its requests, answered by the layer walk.

    python -m prefillcli.lm_eval --model prefill --model_args pretrained=DIR,dtype=bfloat16 --tasks ...

takes the arguments of `lm_eval`. From Python, importing this module makes `prefill` known to
`lm_eval.simple_evaluate`. The harness has no entry point through which it would find the model by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jinja2 import TemplateError
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import (
    _add_special_kwargs,
    handle_stop_sequences,
    has_bos_prefix,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from prefillcli.core.further import GivenContinuations
from prefillcli.core.models import Models
from prefillcli.core.request import require_answered
from prefillcli.engines.base import PLAIN, Answer, Treatment
from prefillcli.errors import ResourceError, UsageError, did_you_mean
from prefillcli.models.open import stop_tokens
from prefillcli.options.load import scorer_settings
from prefillcli.plan.behind import LabelSet
from prefillcli.plan.pack import Limits
from prefillcli.plan.plan import make_plan
from prefillcli.plan.trie import TokenArray
from prefillcli.runtime import log
from prefillcli.scoring.loading import load_models, open_models
from prefillcli.walk.continuations import Beginning, Writing

#: Options of `prefill score` about the model and its memory, which are arguments of the model too.
OPTIONS = (
    *("revision", "trust_remote_code", "dtype", "threads", "adapter", "max_length", "deterministic"),
    *("memory", "pack_tokens", "chunk_tokens", "prefix_kv", "weights", "weights_memory", "hidden"),
    *("compile", "draft", "speculation", "speculation_tokens"),
)


@register_model("prefill")
class PrefillLM(TemplateLM):  # type: ignore[misc]  # the harness has no types
    """A causal model whose requests are planned together: what several of them begin with is computed once.

    `pretrained` is a folder, a GGUF file or a hub name. `peft` is an adapter's folder. `add_bos_token` and
    `prefix_token_id` are as for the model `hf`. Other arguments are `OPTIONS`. `batch_size` has no effect: packs are
    planned by memory. Raises UsageError for an unknown argument, and for a model that cannot answer.
    """

    def __init__(
        self,
        pretrained: str,
        *,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        peft: str | None = None,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        for name in options:
            if name not in OPTIONS:
                raise UsageError(f"the model prefill has no argument {name!r}{did_you_mean(name, OPTIONS)}")
        if batch_size not in (None, 1, "1", "auto") or max_batch_size is not None:
            log.warning("batch_size has no effect on the model prefill, whose packs are planned by memory")
        if device == "cuda:0" and not torch.cuda.is_available():
            device = None  # the harness's default, which the model `hf` does not take at its word either
        given = {"device": device, "adapter": peft} | options
        self._model = pretrained
        self._options = {name: value for name, value in given.items() if value is not None}
        self._add_bos, self._prefix_token = add_bos_token, prefix_token_id
        self._text_tokens = 0  # of the longest text that there is room for
        self._loaded = self._load()
        self.tokenizer = self._loaded.opened.tokenizer
        if add_bos_token is not None:
            self.tokenizer.add_bos_token = add_bos_token  # also where the tokenizer's files put no token before a text

    def _load(self) -> Models[Any]:
        texts = {"rationale": self._text_tokens} if self._text_tokens else {}
        settings = scorer_settings(self._model, self._options | texts, owner="the model prefill")
        opened = open_models(settings)
        if opened.files.head is not None:
            raise UsageError(f"{self._model}: the model has a classification head, which reads no text")
        return load_models(opened, settings)

    @property
    def eot_token_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """The token in front of a text without a context."""
        found = (self._prefix_token, self.tokenizer.bos_token_id, self.tokenizer.eos_token_id)
        return next(int(each) for each in found if each is not None)

    @property
    def max_length(self) -> int:
        """Tokens of the longest prompt with its answer."""
        longest: int = self._loaded.opened.max_length
        return min(longest, int(self._options.get("max_length", longest)))

    @property
    def max_gen_toks(self) -> int:
        """The most tokens of a text whose task sets no limit."""
        return 256

    @property
    def tokenizer_name(self) -> str:
        """The name under which the harness keeps rendered requests."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    @property
    def device(self) -> Any:
        """The device that computes."""
        return self._loaded.opened.device

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Return the tokens of a text, as the model `hf` makes them."""
        special = _add_special_kwargs(add_special_tokens, self._add_bos)
        if add_special_tokens is None and has_bos_prefix(string, self.tokenizer.decode(self.prefix_token_id)):
            special["add_special_tokens"] = False
        return list(self.tokenizer.encode(string, **special))

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return the chat as one text, as for `hf`: a template without the role `system` renders it without its
        messages."""
        without = [message for message in chat_history if message["role"] != "system"]
        for history in (chat_history, without):
            with suppress(TemplateError):
                return str(
                    self.tokenizer.apply_chat_template(
                        history,
                        tokenize=False,
                        add_generation_prompt=add_generation_prompt,
                        continue_final_message=not add_generation_prompt,
                    )
                )
        raise UsageError("the chat template cannot render the messages of this task")

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        prompts, labels = [], []
        for _, context, continuation in requests:
            if not 0 < len(continuation) <= self.max_length:
                raise UsageError(
                    f"a continuation of {len(continuation):,} tokens: the model reads 1 to {self.max_length:,}"
                )
            tokens = np.array([*context, *continuation][-(self.max_length + 1) :], np.int32)
            prompts.append(tokens[: -len(continuation)])
            labels.append(LabelSet(((tokens[-len(continuation) :],),), by_token=True))
        found = []
        answers = self._answers(prompts, labels, self._loaded.engine.limits, disable_tqdm=disable_tqdm)
        for (texts, _, _), answer in zip(requests, answers, strict=True):
            if answer.by_token is None:
                raise RuntimeError("an answer has no numbers of single tokens")
            found.append((float(answer.by_token.logprobs.sum()), answer.by_token.greedy))
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, found[-1])
        return found

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of whole texts, by the harness's windows."""
        windows, ends = [], []
        for request in requests:
            rolling = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            windows += [(None, *make_disjoint_window(each)) for each in rolling]
            ends.append(len(windows))
        answers = self._loglikelihood_tokens(windows, disable_tqdm)
        found = []
        for request, start, end in zip(requests, [0, *ends], ends, strict=False):
            found.append(sum(logprob for logprob, _ in answers[start:end]))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, found[-1])
        return found

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return greedy texts after contexts, up to a stop text. Raises UsageError for sampling."""
        eos = self.tokenizer.decode(self.eot_token_id, skip_special_tokens=False)
        groups: dict[tuple[tuple[str, ...], int], list[int]] = {}
        for number, request in enumerate(requests):
            given = dict(normalize_gen_kwargs(request.args[1], self.max_gen_toks))
            until, tokens = tuple(handle_stop_sequences(given.pop("until", None), eos)), given.pop("max_gen_toks")
            if given.pop("do_sample", False) or given.pop("temperature", 0.0):
                raise UsageError("the model prefill writes greedily: do_sample must be false, and temperature 0")
            if other := given.keys() - {"top_p", "top_k", "min_p"}:  # which always leave the likeliest token
                raise UsageError(f"the model prefill has no generation argument {', '.join(map(repr, sorted(other)))}")
            if not 0 < tokens < self.max_length:
                raise UsageError(f"max_gen_toks {tokens:,}: the model reads {self.max_length:,} tokens in all")
            groups.setdefault((until, tokens), []).append(number)
        self._make_room(max((tokens for _, tokens in groups), default=0))
        found = [""] * len(requests)
        for (until, tokens), numbers in groups.items():
            contexts = [requests[number].args[0] for number in numbers]
            for number, text in zip(numbers, self._write(contexts, until, tokens, disable_tqdm), strict=True):
                found[number] = text
                self.cache_hook.add_partial("generate_until", requests[number].args, text)
        return found

    def _make_room(self, tokens: int) -> None:
        # Packs keep the K,V of all layers for texts of this length. That needs a new plan of the memory.
        if tokens > self._text_tokens:
            self._text_tokens = tokens
            self._loaded.close()
            self._loaded = self._load()

    def _write(self, contexts: Sequence[str], until: Sequence[str], tokens: int, disable_tqdm: bool) -> list[str]:
        prompts, beginnings = [], {}
        for number, context in enumerate(contexts):
            ids = np.array(self.tok_encode(context)[-(self.max_length - tokens) :], np.int32)
            if len(ids) < 2:
                raise UsageError(f"the context {context!r} has {len(ids)} tokens: a text is written after 2 or more")
            prompts.append(ids[:-1])
            beginnings[number] = Beginning(ids[:-1], (int(ids[-1]),), "")
        stops = stop_tokens(self._loaded.opened.files) | {self.eot_token_id}
        writing = Writing(tokens, stops, beginning=1, ends=TextEnd(self.tokenizer, tuple(until)))
        treatment = replace(PLAIN, continuations=GivenContinuations(writing, beginnings, again=False))
        limits = self._loaded.engine.limits.for_texts()
        labels = [LabelSet.behind(each.tokens if limits.switch else ()) for each in beginnings.values()]
        found = []
        for answer in self._answers(prompts, labels, limits, treatment, disable_tqdm=disable_tqdm):
            if answer.continuation is None or answer.continuation.finish_reason not in ("stop", "length"):
                raise ResourceError("the memory does not suffice to write after the longest contexts: raise memory=")
            text = self.tokenizer.decode(answer.continuation.tokens, skip_special_tokens=True)
            found.append(postprocess_generated_text(text, list(until), None))
        return found

    def _answers(
        self,
        prompts: Sequence[TokenArray],
        labels: Sequence[LabelSet],
        limits: Limits,
        treatment: Treatment = PLAIN,
        *,
        disable_tqdm: bool,
    ) -> list[Answer]:
        # The answer to each of the prompts, which are planned together.
        if not prompts:
            return []
        plan = make_plan(prompts, limits, labels=labels)
        found: dict[int, Answer] = {}
        total = sum(len(pack.tokens) for pack in plan.packs)
        with tqdm(total=total, unit=" tokens", unit_scale=True, disable=disable_tqdm) as bar:
            for answers in self._loaded.engine.answer_all(plan.packs, lambda at: labels[at], bar.update, treatment):
                found |= {each.prompt: each for each in require_answered(answers)}
        return [found[number] for number in range(len(prompts))]


@dataclass(frozen=True, slots=True)
class TextEnd:
    """Finds out whether the tokens of a text hold one of the texts that end it."""

    tokenizer: Any
    until: tuple[str, ...]

    def __call__(self, tokens: Sequence[int]) -> bool:
        # A token has a byte at least, so this many of the last ones hold every text that may have been completed.
        last = max(len(each.encode()) for each in self.until) + 16
        text = self.tokenizer.decode(tokens[-last:], skip_special_tokens=True)
        return any(each and each in text for each in self.until)


def main() -> None:
    """Run the command `lm_eval`, which knows the model `prefill`."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()
