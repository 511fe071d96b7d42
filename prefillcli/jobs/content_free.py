"""Contextual calibration: the job's template with text that says nothing in the place of the row's own."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa

from prefillcli.compress.answers import answer
from prefillcli.compress.base import Tick
from prefillcli.compress.request import Request
from prefillcli.data.prompts.builder import PromptBuilder
from prefillcli.data.prompts.labels import Labels
from prefillcli.data.reading.record_batches import TableRows
from prefillcli.data.reading.source import Source
from prefillcli.data.rows import Prompt, RowBatch
from prefillcli.engines.base import PlanEngine
from prefillcli.errors import PrefillError, UsageError
from prefillcli.options.calibrate import ProbabilityOptions
from prefillcli.stats.calibration import Calibration, content_free_calibration

OPTION = "--calibrate-with"


def content_free_prompts(
    settings: ProbabilityOptions, source: Source | TableRows, builder: PromptBuilder, labels: Labels
) -> list[Prompt]:
    """A prompt for each text of `--calibrate-with`; none without any.

    The text takes the place of the template's columns that hold text, or of those in `--calibrate-columns`. All other
    columns must have one value in the first rows, up to 2,048; it stays. Raises UsageError if that is not so, or if no
    prompt can be made.
    """
    texts = settings.calibrate_with
    if not texts:
        return []
    for name in settings.calibrate_columns:
        if name not in builder.columns:
            listed = ", ".join(builder.columns) or "none"
            raise UsageError(f"--calibrate-columns {name}: the template has no such column\nit has: {listed}")
    columns = _first_rows(source, builder.columns)
    content = set(settings.calibrate_columns or filter(lambda name: _is_content(columns[name]), builder.columns))
    if not content:
        raise UsageError(f"{OPTION}: no column of the template holds text\nname the content with --calibrate-columns")
    fixed = {name: _one_value(name, columns[name]) for name in builder.columns if name not in content}
    batch = RowBatch(
        first_row=0,
        rows=np.arange(len(texts), dtype=np.int64),
        columns={name: list(texts) if name in content else [fixed[name]] * len(texts) for name in builder.columns},
        carried=pa.table({}),
        errors={},
        nbytes=0,
    )
    prompts, errors = builder.build(batch, labels)
    for row, error in errors.items():
        raise UsageError(
            f"{OPTION} {texts[row]!r}: no prompt can be made of the template: {error.code}: {error.detail}"
        )
    return prompts


def contextual_calibration(
    prompts: Sequence[Prompt], labels: Labels, engine: PlanEngine, tick: Tick = lambda tokens: None
) -> Calibration:
    """What the engine answers to prompts without content, divided out. Raises PrefillError if that is no number."""
    requests = [Request(prompt) for prompt in prompts]
    too_long = max(len(request.tokens) for request in requests)
    if too_long > engine.limits.max_tokens:
        raise UsageError(
            f"{OPTION}: the prompt without content has {too_long:,} tokens; the memory budget holds "
            f"{engine.limits.max_tokens:,}\ngive more --memory"
        )
    logprobs = answer(engine, requests, labels.sets, tick)
    if not np.isfinite(logprobs.max(axis=1)).all() or np.isnan(logprobs).any():
        raise PrefillError(f"{OPTION}: the model's answer is not a finite number: {logprobs.tolist()}")
    return content_free_calibration(labels.names, logprobs)


def _first_rows(source: Source | TableRows, names: Sequence[str]) -> dict[str, list[Any]]:
    """The values of these columns in the first rows that could be read."""
    batches = source.batches()
    for batch in islice(batches, 1):
        good = [at for at, row in enumerate(batch.rows.tolist()) if row not in batch.errors]
        return {name: [batch.columns[name][at] for at in good] for name in names}
    return {name: [] for name in names}


def _is_content(values: Sequence[Any]) -> bool:
    """Whether a column holds text; one that holds nothing may."""
    return any(isinstance(value, str) for value in values) or all(value is None for value in values)


def _one_value(name: str, values: Sequence[Any]) -> Any:
    """The value that all rows have. Raises UsageError if they differ."""
    for value in values[1:]:
        if _shown(value) != _shown(values[0]):
            raise UsageError(
                f"{OPTION}: column {name} keeps its value, but it differs from row to row\n"
                "only text that is the same in all rows is no content: name all other columns with --calibrate-columns"
            )
    return values[0] if values else None


def _shown(value: Any) -> str:
    return repr(value.tolist() if isinstance(value, np.ndarray) else value)
