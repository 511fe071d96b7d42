"""The options that Python takes as keywords, made of the options themselves (`make reference`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, Literal, TypedDict

from prefillcli.prompts.questions import Question

StrPath = str | PathLike[str]


class ScorerOptions(TypedDict, total=False):
    """The options of `prefill score` that determine how a row is scored. docs/score.md explains each."""

    prompt_column: str
    template: StrPath | None
    chat: bool | None
    system: str | None
    thinking: Literal["auto", "off", "on"]
    chat_option: Mapping[str, Any]
    answer_prefix: str | None
    max_length: int | None
    on_long: Literal["error", "truncate-left", "truncate-middle", "truncate-right", "skip"]
    empty_text: Literal["skip", "error"]
    literal: bool
    max_row_bytes: str | int | None
    image_column: str | Sequence[str]
    image_root: StrPath | None
    allow_urls: bool
    max_image_pixels: int
    max_pixels: int | None
    min_pixels: int | None
    labels: str | Sequence[str]
    label_norm: Literal["none", "tokens", "bytes"]
    label_end: str | None
    temperature: float
    label_values: str | Sequence[float]
    choices_column: str | None
    ask: str | None
    options: str | Sequence[str]
    levels: str | Sequence[str]
    orders: int
    questions: StrPath | Sequence[Question | Mapping[str, Any]] | None
    pair_column: str | None
    target_column: str | None
    token_logprobs: bool
    stride: int | None
    calibration: StrPath | None
    calibrate_with: str | Sequence[str]
    calibrate_columns: str | Sequence[str]
    revision: str | None
    trust_remote_code: bool
    device: str
    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    head: StrPath
    layout: Literal["auto", "generic"]
    threads: int | Literal["auto"]
    any_wording: bool
    adapter: StrPath | Sequence[str] | Mapping[str, StrPath]
    adapter_column: str | None
    engine: str
    engine_options: Mapping[str, Any]
    memory: str | int | None
    pack_tokens: int | None
    chunk_tokens: int | None
    prefix_kv: Literal["auto", "discard", "keep", "offload"]
    hidden: Literal["auto", "device", "host"]
    compile: bool
    weights: Literal["auto", "resident", "stream"]
    weights_memory: str | int | None
    deterministic: bool
    draft: StrPath | None
    draft_tokenizer: Literal["same", "translate"]
    keep: float
    self_layer: int | None
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
    served_model_name: str | Sequence[str]
    rationale: int
    rationale_template: str
    rationale_temperature: float
    rationale_seed: int
    speculation: Literal["off", "lookup", "retrieval", "draft", "hierarchy"]
    speculation_tokens: int
    retrieval_budget: int
    retrieval_chunk: int
    evidence: bool
    rationale_when: str | None


class FileOptions(TypedDict, total=False):
    """The options of `prefill score` that choose the rows and columns of files."""

    id_column: str | None
    keep_columns: str | Sequence[str]
    limit: int | None
    sample: int | None
    seed: int
    csv_separator: str
    csv_quoting: Literal["auto", "quotes", "none"]


class ScoreOptions(ScorerOptions, FileOptions, total=False):
    """The options of `prefillcli.score`."""
