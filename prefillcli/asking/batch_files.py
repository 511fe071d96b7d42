"""The requests of a batch file: the question of a body, the prompt made of it, and the tokens that answer it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from prefillcli.asking.labels import PAIR, LabelAsking
from prefillcli.asking.requests import is_request_file, makes_prompts
from prefillcli.errors import UsageError
from prefillcli.models.files import read_reranker
from prefillcli.models.open import Opened, stop_tokens
from prefillcli.options.asking import BATCH_ID
from prefillcli.options.requirements import compresses
from prefillcli.options.settings import JobSettings
from prefillcli.plan.behind import LabelSet
from prefillcli.prompts.builder import PromptBuilder, prompt_builder
from prefillcli.prompts.encoding import Encoder, Marks
from prefillcli.prompts.images import PLACE
from prefillcli.prompts.labels import Following, LabelError, Labels
from prefillcli.prompts.questions import Label, Question
from prefillcli.prompts.settings import PromptSettings
from prefillcli.prompts.templates import RowTemplate
from prefillcli.rows.output.batches import CHAT, COMPLETION, PAIR_NAMES, RERANK, SCORE, Responses, as_list
from prefillcli.rows.output.columns import added
from prefillcli.rows.output.decisions import DECISIONS, SYSTEM_ONE
from prefillcli.rows.output.destination import FORMAT
from prefillcli.rows.records import ErrorCode, Prompt, RowBatch, RowError, TokenText
from prefillcli.rows.values import brief_json, encode_json
from prefillcli.stats.labels import Measure

METHOD, URL, BODY = "method", "url", "body"  # of a line, beside its `BATCH_ID`
MOST_TOP = 20  # log-probabilities that a body may ask for
_REPLACEMENT = "\ufffd"  # what undecodable bytes become

# Keys of a body that have no effect on the likeliest token.
_NO_EFFECT = {
    *("model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "seed"),
    *("top_p", "stop", "logprobs", "max_tokens"),
}
_OWN = {CHAT: {"messages", "top_logprobs", "max_completion_tokens"}, COMPLETION: {"prompt"}}
# Keys that a body may have with this value alone, which asks for nothing.
_ONLY: Mapping[str, Any] = {
    **{"n": 1, "best_of": 1, "temperature": 0, "frequency_penalty": 0, "presence_penalty": 0},
    **{"stream": False, "echo": False, "suffix": "", "logit_bias": {}, "tools": [], "modalities": ["text"]},
    "response_format": {"type": "text"},
}
# The same of a body with pairs of texts.
_PAIRS_NO_EFFECT = {"model", "user", "request_id", "priority", "cache_salt"}
_PAIRS_ONLY: Mapping[str, Any] = {
    "max_tokens_per_query": 0,
    "max_tokens_per_doc": 0,
    "use_activation": True,
    "padding": "do_not_pad",
}
_MESSAGE = {"role", "content", "name"}


def is_batch_file(settings: JobSettings, available: Collection[str]) -> bool:
    """Return whether rows with these columns are lines of a batch file, unless an option makes other prompts of
    them."""
    return {BATCH_ID, METHOD, URL, BODY} <= set(available) and not makes_prompts(settings)


def require_batch_file(settings: JobSettings, available: Collection[str]) -> None:
    """Raise UsageError if an option is for batch files, but rows with these columns are not from one."""
    if is_batch_file(settings, available) or is_request_file(settings, available):
        return
    if settings.requests.served_model_name:
        raise UsageError("--set served_model_name is for batch files, and the input is not one\nleave it out")
    if settings.requests.format:
        raise UsageError(
            f"--format: the input is not a batch file: lines have no {BATCH_ID}, {METHOD}, {URL} and {BODY}, and are "
            "no requests with input or state, and questions\nleave it out, or name another file"
        )


def require_no_image_column(settings: JobSettings) -> None:
    """Raise UsageError for a column of images beside requests."""
    if settings.images.image_column:
        raise UsageError(
            "--image-column: the rows are requests, which bring their own images\nleave it out, and put data URLs "
            "into them"
        )


SERVED = "--set served_model_name=NAME lets it answer to other names"


def served_names(settings: JobSettings, opened: Opened) -> Sequence[str]:
    """Return the names by which requests may ask for the model."""
    model = str(settings.lm.model or opened.files.origin)
    return settings.requests.served_model_name or (model, os.path.basename(model.rstrip("/")))


class BatchAsking(LabelAsking):
    """The requests of a batch file: with `--format` what each asks for, else the labels after its prompt."""

    requests = (URL, BODY)

    def __init__(self, settings: JobSettings) -> None:
        super().__init__(settings)
        require_no_image_column(settings)
        self._answers = settings.requests.format is not None
        self.carried = (URL, BODY) if self._answers else ()
        self._lines = self._answers and "files" in settings.groups()
        self.groups |= added({"pair_scores": self._lines})
        if self._answers and settings.engine.engine == "vllm":
            raise UsageError(
                "--format cannot be combined with --engine vllm: that engine is asked for chosen tokens, not for the "
                "likeliest ones\ngive --engine torch or hf, or use vLLM's own `vllm run-batch`"
            )
        if self._answers and compresses(settings):
            raise UsageError(
                "--format cannot be combined with --keep: the likeliest token of a prompt is asked for\n"
                "leave one of them out"
            )

    def columns(self, available: Sequence[str], template: RowTemplate | None) -> Sequence[str]:
        return (METHOD, URL, BODY)

    def named_labels(self, model: Path) -> Labels | None:
        return None if self._answers else super().named_labels(model)

    def labels(self, opened: Opened) -> Labels:
        return LikeliestTokens(opened) if self._answers and not _scores_pairs(opened) else super().labels(opened)

    def builder(
        self,
        opened: Opened,
        labels: Labels,
        settings: PromptSettings,
        available: Sequence[str],
        template: RowTemplate | None,
    ) -> PromptBuilder:
        models = served_names(self.settings, opened)
        if self._answers and _scores_pairs(opened):
            pairs = self._pair_builder(opened, labels, settings)
            return PairRequestBuilder(opened.tokenizer, settings, models=models, pairs=pairs)
        if opened.files.encoder:
            raise UsageError(
                "the input is a batch file, and the model an encoder, which scores the pairs of its lines\n"
                "give --format openai"
            )
        return RequestBuilder(opened.tokenizer, settings, models=models, answers=self._answers)

    def _pair_builder(self, opened: Opened, labels: Labels, settings: PromptSettings) -> PromptBuilder:
        # The builder of prompts of pairs, as if they were rows.
        if opened.files.encoder:
            pairs = replace(settings, prompt_column=PAIR[0], pair_column=PAIR[1])
            return prompt_builder(opened.tokenizer, pairs, PAIR)
        found = super().builder(opened, labels, settings, PAIR, None)
        if set(found.columns) != set(PAIR):
            found.close()
            raise UsageError(
                f"{opened.files.origin}: its classification head is read, and its files do not show how a pair "
                "of texts becomes its prompt\nread the next token with --head vocabulary"
            )
        return found

    def responses(self, opened: Opened, labels: Labels) -> Responses | None:
        if not self._answers:
            return None
        return Responses(self._lines, text_of=labels.text_of if isinstance(labels, LikeliestTokens) else None)

    def identity(self, values: dict[str, Any]) -> Mapping[str, str]:
        found = values.pop("format")
        return {FORMAT: found} if found else {}


def _scores_pairs(opened: Opened) -> bool:
    # Whether the model scores pairs of texts, and so has no likeliest tokens.
    return opened.files.head is not None or read_reranker(opened.files.path) is not None


class LikeliestTokens(Labels):
    """After each prompt, the likeliest tokens of the whole vocabulary."""

    measure = Measure.TOKENS

    def __init__(self, opened: Opened) -> None:
        self.question = Question(answers=(Label("token"),))
        self._encoder = Encoder(opened.tokenizer)
        self._stops = stop_tokens(opened.files)
        self._texts: dict[int, TokenText] = {}
        self._asked = Following(LabelSet((), likeliest=min(MOST_TOP, opened.files.config.vocab_size)))

    def resolve_all(
        self, tails: Sequence[str], *, literal: bool = False, values: Sequence[Sequence[Any]] = ()
    ) -> list[Following | LabelError]:
        """Return the same set for each prompt."""
        return [self._asked] * len(tails)

    def text_of(self, token: int) -> TokenText:
        """Return the text of a token, and what it adds to an answer."""
        if token not in self._texts:
            text = self._encoder.text_behind(token)
            ends = token in self._stops
            part = text.endswith(_REPLACEMENT)  # part of a character, which only further tokens would complete
            empty = ends or part or token in self._encoder.special_ids
            self._texts[token] = TokenText(text, "" if empty else text, ends)
        return self._texts[token]


class RequestBuilder(PromptBuilder):
    """Makes prompts of the lines of a batch file, which may ask for these `models`. With `answers` they must ask for
    the one token that is written."""

    def __init__(self, tokenizer: Any, settings: PromptSettings, *, models: Sequence[str], answers: bool) -> None:
        super().__init__(tokenizer, settings)
        self._models, self._answers = models, answers
        self.column = "body"
        self.columns = ("method", "url", "body")
        self.needed = (*self.columns, *settings.label_columns)
        self.chat = False  # only messages are put into the chat template

    @property
    def _makes_chats(self) -> bool:
        return self._has_chat_template and self.settings.chat is not False

    def another(self) -> PromptBuilder:
        return RequestBuilder(self._tokenizer, self.settings, models=self._models, answers=self._answers)

    def _values(self, batch: RowBatch, errors: dict[int, RowError]) -> Iterator[tuple[int, Any, Marks | None]]:
        columns = [batch.columns[name] for name in self.columns]
        for row, method, url, body in zip(batch.rows.tolist(), *columns, strict=True):
            if row in errors:
                continue
            wrong = self._objection(method, url, body)
            if wrong is not None:
                yield row, RowError(ErrorCode.INVALID_REQUEST, wrong), None
                continue
            value = body["messages"] if url == CHAT else _one_prompt(body["prompt"])
            yield row, *self._literal(value, joined=url == CHAT)

    def _chats_in(self, batch: RowBatch) -> list[Any]:
        lines = zip(batch.columns["url"], batch.columns["body"], strict=True)
        return [body.get("messages") if url == CHAT and isinstance(body, dict) else None for url, body in lines]

    def _with_chats(self, batch: RowBatch, chats: list[Any]) -> RowBatch:
        bodies = zip(batch.columns["body"], chats, strict=True)
        given = [body if chat is None else body | {"messages": chat} for body, chat in bodies]
        return replace(batch, columns={**batch.columns, "body": given})

    def _cuttable(self, batch: RowBatch, place: int) -> dict[str, Any]:
        return {"messages": batch.columns["body"][place]["messages"]}

    def _shorter(self, cut: dict[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
        return {"body": values["body"] | cut}

    def _objection(self, method: Any, url: Any, body: Any) -> str | None:
        # The reason why a line is not answered, or None.
        if method != "POST":
            return f"method is {brief_json(method)}, not POST"
        if url in (DECISIONS, SYSTEM_ONE):
            return f"url {brief_json(url)}: typed questions are answered where the first line of a file asks some"
        if not self._is_answered(url):
            return f"url {brief_json(url)}: {self._answered}"
        if not isinstance(body, dict):
            return "body is not an object"
        if body.get("model") not in self._models:
            return f"model {brief_json(body.get('model'))} is not the one of this job, {self._models[-1]}; {SERVED}"
        return self._wrong(url, body)

    _answered = (
        f"only {CHAT} and {COMPLETION} are answered; scores of pairs need --format and a model whose files show "
        "that it reads pairs"
    )

    def _is_answered(self, url: Any) -> bool:
        return url in (CHAT, COMPLETION)

    def _wrong(self, url: str, body: dict[str, Any]) -> str | None:
        # The fault of a body of this kind.
        return (
            _not_done(body, _NO_EFFECT | _OWN[url], _ONLY)
            or _lengths(url, body, answers=self._answers)
            or _logprobs(url, body)
            or _stop(body.get("stop"))
            or (_chat(body.get("messages")) if url == CHAT else _prompt(body.get("prompt")))
        )


class PairRequestBuilder(RequestBuilder):
    """Makes a prompt of each pair of texts in a line; `pairs` makes those of rows with the columns of `PAIR`."""

    _answered = "the model scores pairs of texts, so only /v1/score and /v1/rerank are answered"
    _makes_chats = False

    def __init__(
        self,
        tokenizer: Any,
        settings: PromptSettings,
        *,
        models: Sequence[str],
        pairs: PromptBuilder,
    ) -> None:
        super().__init__(tokenizer, replace(settings, pair_column=None), models=models, answers=True)
        self._pairs = pairs

    def another(self) -> PromptBuilder:
        return PairRequestBuilder(self._tokenizer, self.settings, models=self._models, pairs=self._pairs.another())

    def fingerprint(self) -> str:
        return hashlib.sha256(f"{super().fingerprint()}{self._pairs.fingerprint()}".encode()).hexdigest()

    def build(self, batch: RowBatch, labels: Labels) -> tuple[list[Prompt], dict[int, RowError]]:
        """Make the prompts of a batch, ascending by row and part. An error of any pair is one of its row."""
        errors = dict(batch.errors)
        places: list[tuple[int, int]] = []  # the row of each pair, and its number there
        texts: list[tuple[str, str]] = []
        lines = zip(batch.rows.tolist(), *(batch.columns[name] for name in self.columns), strict=True)
        for row, method, url, body in lines:
            if row in errors:
                continue
            if (wrong := self._objection(method, url, body)) is not None:
                errors[row] = RowError(ErrorCode.INVALID_REQUEST, wrong)
                continue
            own = _pairs(url, body)
            places += [(row, part) for part in range(len(own))]
            texts += own
        columns = dict(zip(PAIR, map(list, zip(*texts, strict=True)), strict=True)) if texts else {}
        apart = replace(
            batch, rows=np.arange(len(texts)), columns=columns, carried=batch.carried.slice(0, 0), errors={}
        )
        prompts, wrongs = self._pairs.build(apart, labels) if texts else ([], {})
        for number, error in sorted(wrongs.items()):
            row, part = places[number]
            errors.setdefault(row, error._replace(detail=f"pair {part + 1}: {error.detail}"))
        for prompt in prompts:
            prompt.row, prompt.part = places[prompt.row]
        self.render_seconds += self._pairs.render_seconds
        self.tokenize_seconds += self._pairs.tokenize_seconds
        self._pairs.render_seconds = self._pairs.tokenize_seconds = 0.0
        return [prompt for prompt in prompts if prompt.row not in errors], errors

    def close(self) -> None:
        """Stop rendering and tokenising for good, in whatever thread."""
        super().close()
        self._pairs.close()

    def _is_answered(self, url: Any) -> bool:
        return isinstance(url, str) and url.endswith((SCORE, RERANK))

    def _wrong(self, url: str, body: dict[str, Any]) -> str | None:
        names = _pair_names(url, body)
        if names is None:
            return f"the two texts are missing: {' or '.join(f'{one} and {two}' for one, two in PAIR_NAMES)}"
        own = {*names, "top_n"} if url.endswith(RERANK) else set(names)
        return _not_done(body, _PAIRS_NO_EFFECT | own, _PAIRS_ONLY) or _texts(url, body, names)


def _not_done(body: dict[str, Any], known: Set[str], only: Mapping[str, Any]) -> str | None:
    # The wishes of a body that cannot be met.
    for key, value in body.items():
        if value is None or key in known:
            continue
        if key not in only:
            return f"{key}: not supported here"
        if value != only[key]:
            return f"{key} {brief_json(value)}: only {encode_json(only[key])} is supported here"
    return None


def _pair_names(url: str, body: dict[str, Any]) -> tuple[str, str] | None:
    # The names of the two texts of each pair in a body.
    if url.endswith(RERANK):
        return "query", "documents"
    return next((names for names in PAIR_NAMES if all(body.get(name) is not None for name in names)), None)


def _texts(url: str, body: dict[str, Any], names: tuple[str, str]) -> str | None:
    # The fault of the texts, or of the number of results.
    for name in names:
        alone = name == "query"
        texts = [body.get(name)] if alone else as_list(body.get(name))
        if not texts or not all(isinstance(each, str) for each in texts):
            return f"{name} must be a text{'' if alone else ', or a list of texts'}"
    one, two = (len(as_list(body[name])) for name in names)
    if one not in (1, two):
        return f"{one} {names[0]} and {two} {names[1]}: give one, or as many as there are of the others"
    top = body.get("top_n")
    if top is not None and (type(top) is not int or top < 0):
        return f"top_n {brief_json(top)}: must be a whole number, and 0 stands for all"
    return None


def _pairs(url: str, body: dict[str, Any]) -> list[tuple[str, str]]:
    # The pairs of a valid body: one text with each of the others, or each with its own.
    names = _pair_names(url, body) or ("", "")
    ones, others = (as_list(body[name]) for name in names)
    return list(zip(ones * len(others) if len(ones) == 1 else ones, others, strict=True))


def _lengths(url: str, body: dict[str, Any], *, answers: bool) -> str | None:
    names = ("max_tokens", "max_completion_tokens") if url == CHAT else ("max_tokens",)
    given = {name: body[name] for name in names if body.get(name) is not None}
    for name, value in given.items():
        if type(value) is not int or value != 1:
            return f"{name} {brief_json(value)}: one token is answered, so it must be 1"
    return f"{' or '.join(names)} must be 1: one token is answered" if answers and not given else None


def _logprobs(url: str, body: dict[str, Any]) -> str | None:
    given, top = body.get("logprobs"), body.get("top_logprobs")
    if url == COMPLETION:
        name, top = "logprobs", given
    elif given not in (None, True, False) or type(given) is int:
        return f"logprobs {brief_json(given)}: must be true or false"
    elif top is not None and not given:
        return "top_logprobs needs logprobs: true"
    else:
        name = "top_logprobs"
    if top is not None and (type(top) is not int or not 0 <= top <= MOST_TOP):
        return f"{name} {brief_json(top)}: must be a whole number from 0 to {MOST_TOP}"
    return None


def _stop(value: Any) -> str | None:
    texts = [value] if isinstance(value, str) else value
    if texts is None or (isinstance(texts, list) and all(isinstance(each, str) and each for each in texts)):
        return None
    return f"stop {brief_json(value)}: must be a text, or a list of texts"


def _chat(messages: Any) -> str | None:
    if not isinstance(messages, list) or not messages:
        return "messages must be a list with a message"
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict):
            return f"message {number} is not an object"
        for key, value in message.items():
            if key not in _MESSAGE and value is not None:
                return f"message {number} has {key}: not supported here"
        content = message.get("content")
        if isinstance(content, str):
            continue
        if not isinstance(content, list) or not content:
            return f"the content of message {number} must be a text, or a list of text parts"
        for part in content:
            if part == PLACE:
                continue
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                return f"message {number} has a part that is not text"
    return None


def _prompt(value: Any) -> str | None:
    if isinstance(value, list) and len(value) > 1 and all(isinstance(each, str | list) for each in value):
        return f"prompt has {len(value)} prompts: one is answered"
    one = _one_prompt(value)
    if isinstance(one, str) or (isinstance(one, list) and one and all(type(each) is int for each in one)):
        return None
    return "prompt must be a text, a list with one text, or a list of token ids"


def _one_prompt(value: Any) -> Any:
    # The text or the token ids of a prompt, which may be the one item of a list.
    return value[0] if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list) else value
