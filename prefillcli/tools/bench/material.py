"""The rows of a comparison: the first window of the input."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from prefillcli.core.windows import MAX_ROWS
from prefillcli.errors import PrefillError, UsageError, counted
from prefillcli.options.commands import QUICK_ROWS, BenchSettings
from prefillcli.options.judging import truth_by_question
from prefillcli.rows.filesystems import split_path
from prefillcli.rows.output import ANSWER
from prefillcli.rows.records import PromptKey, Window
from prefillcli.rows.values import to_python

if TYPE_CHECKING:
    from prefillcli.core.inputs import Inputs
    from prefillcli.tools.bench.report import WorkloadResult

_FEWEST = 8  # prompts of a quick look, however long they are


def read_rows(
    reference: Inputs, settings: BenchSettings, result: WorkloadResult, most_tokens: int | None = None
) -> tuple[Window, dict[PromptKey, bool | None]]:
    """Read the first window of the input, and for each prompt whether the first label is right.

    Of the window only the first prompts are taken, up to `most_tokens` in total but at least a few. Raises
    PrefillError without any.
    """
    source, labels = reference.source, reference.labels
    more = f" and {len(source.paths) - 1:,} more" if len(source.paths) > 1 else ""
    result.workload = split_path(source.paths[0].rstrip("/"))[1] + more
    with reference.windows(reference.builder.close) as coming:
        window = next(coming, None)
    if window is None:
        raise PrefillError(f"{result.workload}: the input has no rows")
    if not window.prompts:
        first = next(iter(window.errors.values()))
        raise PrefillError(f"{result.workload}: no row can be read; the first: {first.code}: {first.detail}")
    labels.check(window)
    if any(own.conditional for own in window.prompts):
        raise UsageError(
            "--questions: which rows a question with when is asked about depends on answers, and so on the method\n"
            "leave its when out"
        )
    if window.errors:
        counts = Counter(error.code for error in window.errors.values())
        codes = ", ".join(f"{code} {count:,}" for code, count in sorted(counts.items()))
        result.notes.append(f"left out: {counted(len(window.errors), 'row')} with an error ({codes})")
    prompts, rows = window.prompts, len(window.rows)
    if rows >= MAX_ROWS or rows < (source.selected_rows or 0):
        result.notes.append(f"the first {rows:,} rows are compared, which are planned together")
    if most_tokens is not None:
        lengths = np.cumsum([len(prompt.tokens) for prompt in prompts])
        prompts = prompts[: max(int(np.searchsorted(lengths, most_tokens, side="right")), _FEWEST)]
        if len(prompts) < len(window.prompts) or rows >= QUICK_ROWS:
            text = f"a quick look at the first {len({own.row for own in prompts}):,} rows"
            result.notes.append(f"{text}; --limit or --sample takes others, --full all")
    truths: dict[PromptKey, bool | None] = {}
    names = [each.question.name or ANSWER for each in labels.asked]
    for name, column in truth_by_question(settings.truth.columns, names).items():
        part, values = names.index(name), to_python(window.carried.column(column))
        if source.kind == "jsonl":
            values = [None if value is None else json.loads(value) for value in values]
        asked = labels.asked[part]
        truths |= {(row, part): asked.is_positive(own) for row, own in zip(window.rows.tolist(), values, strict=True)}
    return window.only(prompts), truths
