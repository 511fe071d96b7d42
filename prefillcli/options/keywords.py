"""The options of `prefillcli.Scorer` and `prefillcli.score`: keyword arguments in place of flags."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any, Literal, TypedDict, TypeVar, get_args, get_type_hints

from prefillcli.engines.registry import ENGINES
from prefillcli.errors import UsageError, did_you_mean
from prefillcli.options.load import load_settings
from prefillcli.options.option import details_of
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
    speculation: Literal["auto", "off", "lookup", "suffix", "retrieval", "draft", "hierarchy"]
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


_WRITES = "nothing is written: the scores come back as a table"
_ONE_PROCESS = (
    "it computes in this process\nfor more of them take prefill score --workers, or prefillcli.ray.Scorer in Ray Data"
)
_PLANS = "it is for planning a job: take prefill score --dry-run"
_AUDITS = "it is for the report of a job: take prefill score --audit"
_EXITS = "exits are learnt on rows drawn from a whole job: take prefill score --exit"
_EVALUATES = "it is for the report of a job: take prefill score --truth, or compare the columns score and prediction"
_GATES = "it judges a whole job: take prefill score, or look at the columns score and label_mass"
_LIMITS = "it counts the rows of a whole job: take prefill score --rationale-limit"
REFUSED = {
    "rationale_limit": _LIMITS,
    **dict.fromkeys(
        ("output", "overwrite", "resume", "report", "metrics_file", "partition", "rejects", "retry_errors"), _WRITES
    ),
    **dict.fromkeys(("workers", "runner", "ray_address", "worker_resources", "ray_timeout"), _ONE_PROCESS),
    **dict.fromkeys(("dry_run", "profile", "price_per_hour"), _PLANS),
    **dict.fromkeys(("audit", "max_flips"), _AUDITS),
    **dict.fromkeys(("exit", "exit_rows", "exit_profile"), _EXITS),
    **dict.fromkeys(("truth", "wanted_precision", "show_text"), _EVALUATES),
    **dict.fromkeys(("quiet", "progress_interval"), "it says nothing unless score() is given progress=True"),
    "since": "it is for the output of a job: take prefill score --since",
    **dict.fromkeys(("expect_rows", "min_label_mass", "max_drift", "drift_from"), _GATES),
    **dict.fromkeys(("log_format", "run_id"), "it is for the lines and the report of the command"),
    "shard": "it scores all rows that it is given\nto share files among machines take prefill score --shard",
    "max_error_rate": "error rows are rows of the table\ngive score() on_error='raise' to make them an exception",
    "skip_empty": "without rows the table is empty",
    "debug": "an exception shows where it was raised",
    "inputs": "the rows are the first argument of score()",
    "recipe": "recipes are for the command\ngive its options by name",
}
"""Options of the command that have no meaning here, with the reason."""


def scorer_settings(
    model: StrPath | None, options: Mapping[str, Any], *, owner: str, paths: Sequence[str] = ()
) -> ScoreSettings:
    """The settings of `prefill score` with these options, without those of the environment.

    `paths` are the files to be read. `owner` is what takes the options, for messages. Raises UsageError.
    """
    known = {*ScorerOptions.__annotations__, *(FileOptions.__annotations__ if paths else ())}
    for name in options:
        if name in known:
            continue
        if name in FileOptions.__annotations__:
            raise UsageError(
                f"{owner} has no option {name!r}: it is for files, and belongs to score(path, {name}=...)"
            )
        reason = REFUSED.get(name) or (_COMMANDS_OWN if name in ScoreSettings.model_fields else None)
        why = did_you_mean(name, {*known, "model"}) if reason is None else f": {reason}"
        raise UsageError(f"{owner} has no option {name!r}{why}")
    if options.get("keep") == "auto":
        raise UsageError(
            "keep='auto' chooses one rate for a whole job\nchoose it with prefill score --keep auto, and give it here"
        )
    given = {"model": model, **options}
    flags = {name: _as_flag(name, value) for name, value in given.items() if value is not None}
    return load_settings(ScoreSettings, {"inputs": paths or ("rows",), "quiet": True, **flags}, environment={})


_COMMANDS_OWN = "it is for the command prefill score"
_SIZES = ("max_row_bytes", "memory", "weights_memory")
_FLAG = re.compile(r"--([a-z]+(?:-[a-z]+)*)(?:[ =]([\w.-]+))?")


def as_keywords(message: str) -> str:
    """A message to users of the command, for those of Python: `--keep 0.2` is `keep=0.2`, `--draft` is `draft`."""
    negative = {details_of(ScoreSettings, name).negative or f"no-{name}": name for name in ScoreSettings.model_fields}

    def keyword(found: re.Match[str]) -> str:
        flag, word = found[1], found[2]
        after = found[0].partition(flag)[2]
        if flag.replace("-", "_") in REFUSED:
            return found[0]  # it is about the command
        if (name := negative.get(flag) or negative.get(flag.replace("-", "_"))) is not None:
            return f"{name}=False{after}"
        name = flag.replace("-", "_")
        if name not in ScoreSettings.model_fields:
            return found[0]
        if word and word[0].isdigit():
            return f"{name}={word}"
        return f"{name}={word!r}" if word in _choices(name) else f"{name}{after}"

    return _FLAG.sub(keyword, message)


def _choices(name: str) -> tuple[str, ...]:
    """The words that are values of an option."""
    if name == "engine":
        return tuple(ENGINES)
    kind = ScoreSettings.model_fields[name].annotation
    inner = [kind, *get_args(kind)]
    return tuple(word for each in inner for word in get_args(each) if isinstance(word, str))


def _as_flag(name: str, value: Any) -> Any:
    if isinstance(value, PathLike) or (name in _SIZES and type(value) is int):
        return str(value)
    return value
