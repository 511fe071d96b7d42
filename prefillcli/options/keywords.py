"""The options of `prefillcli.Scorer` and `prefillcli.score`: keyword arguments in place of flags."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any, Literal, TypedDict, TypeVar, get_type_hints

from prefillcli.errors import UsageError, did_you_mean
from prefillcli.options.load import load_settings
from prefillcli.options.score import ScoreSettings

StrPath = str | PathLike[str]
AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])


class ScorerOptions(TypedDict, total=False):
    """The options of `prefill score` that say how a row is scored. docs/score.md says what each means."""

    template: StrPath | None
    prompt_column: str
    chat: bool | None
    system: str | None
    max_length: int | None
    on_long: Literal["error", "truncate-left", "truncate-middle", "skip"]
    literal: bool
    max_row_bytes: str | int | None
    labels: str | Sequence[str]
    temperature: float
    calibration: StrPath | None
    calibrate_with: str | Sequence[str]
    calibrate_columns: str | Sequence[str]

    revision: str | None
    trust_remote_code: bool
    head: Literal["auto", "vocabulary", "probability", "value"]
    device: str
    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    threads: int | Literal["auto"]
    adapter: StrPath | Sequence[str] | Mapping[str, StrPath]
    adapter_column: str | None
    engine: str
    engine_options: Mapping[str, Any]

    memory: str | int | None
    pack_tokens: int | None
    chunk_tokens: int | None
    prefix_kv: Literal["auto", "discard", "keep", "offload"]
    schedule: str
    weights: Literal["auto", "resident", "stream"]
    weights_memory: str | int | None
    hidden: Literal["auto", "device", "host"]
    compile: bool
    deterministic: bool

    draft: StrPath | None
    draft_tokenizer: Literal["same", "translate"]
    self_layer: int | None
    keep: float
    paper: bool
    lookahead: int
    query_window: int
    query_reduce: Literal["rank", "mean", "max"]
    pool: int
    select_chunk: int
    compress_above: int | Literal["auto"]
    keep_first: int
    keep_last: int
    keep_private: bool
    compress_per_row: bool

    rationale: int
    rationale_when: str | None
    rationale_template: str
    rationale_temperature: float
    rationale_seed: int
    evidence: bool
    speculation: Literal["off", "lookup", "suffix", "retrieval", "draft", "hierarchy"]
    speculation_tokens: int
    retrieval_budget: int
    retrieval_chunk: int


class FileOptions(TypedDict, total=False):
    """The options of `prefill score` that say which rows and columns of files are read."""

    id_column: str | None
    keep_columns: str | Sequence[str]
    limit: int | None
    sample: int | None
    seed: int


class ScoreOptions(ScorerOptions, FileOptions, total=False):
    """The options of `prefillcli.score`."""


def lists_options(kind: type) -> Callable[[AnyFunction], AnyFunction]:
    """Decorator: `inspect.signature` lists the options of this kind in place of `**options`, with their defaults.

    So notebooks complete their names, and `help` shows them.
    """

    def decorate(function: AnyFunction) -> AnyFunction:
        signature, named = inspect.signature(function), inspect.Parameter.KEYWORD_ONLY
        own = [each for each in signature.parameters.values() if each.kind != inspect.Parameter.VAR_KEYWORD]
        own += [
            inspect.Parameter(name, named, default=ScoreSettings.model_fields[name].default, annotation=annotation)
            for name, annotation in get_type_hints(kind).items()
        ]
        function.__signature__ = signature.replace(parameters=own)  # type: ignore[attr-defined]
        return function

    return decorate


def scorer_settings(
    model: StrPath | None, options: Mapping[str, Any], *, owner: str, paths: Sequence[str] = ()
) -> ScoreSettings:
    """The settings of `prefill score` with these options, without those of the environment.

    `paths` are the files to be read. `owner` is what takes the options, for messages. Raises UsageError; messages name
    options as the command does: `--max-length` is the keyword `max_length`.
    """
    known = {*ScorerOptions.__annotations__, *(FileOptions.__annotations__ if paths else ())}
    for name in options:
        if name in known:
            continue
        if name in FileOptions.__annotations__:
            raise UsageError(
                f"{owner} has no option {name!r}: it is for files, and belongs to score(path, {name}=...)"
            )
        if name in ScoreSettings.model_fields:
            raise UsageError(f"{owner} has no option {name!r}: it is for jobs\ntake the command prefill score")
        raise UsageError(f"{owner} has no option {name!r}{did_you_mean(name, {*known, 'model'})}")
    if options.get("keep") == "auto":
        raise UsageError(
            "keep='auto' chooses one rate for a whole job\nchoose it with prefill score --keep auto, and give it here"
        )
    given = {"model": model, **options}
    flags = {name: _as_flag(name, value) for name, value in given.items() if value is not None}
    return load_settings(ScoreSettings, {"inputs": paths or ("rows",), "quiet": True, **flags}, environment={})


_SIZES = ("max_row_bytes", "memory", "weights_memory")


def _as_flag(name: str, value: Any) -> Any:
    if isinstance(value, PathLike) or (name in _SIZES and type(value) is int):
        return str(value)
    return value
