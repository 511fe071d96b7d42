"""The prompts that methods are compared on: those of an input, or made ones."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from prefillcli.bench.needle import make_needles
from prefillcli.data.paths import split_path
from prefillcli.data.prompts.builder import PromptBuilder
from prefillcli.data.prompts.encoding import Encoder
from prefillcli.data.prompts.labels import Labels
from prefillcli.data.prompts.settings import DEFAULT_COLUMN, PromptSettings
from prefillcli.data.reading.source import Source
from prefillcli.data.rows import Prompt, RowBatch, RowError
from prefillcli.data.windows import MAX_ROWS, windows
from prefillcli.errors import PrefillError, UsageError
from prefillcli.models.open import Opened
from prefillcli.options.bench import QUICK_ROWS, BenchSettings

_FEWEST = 8  # prompts of a quick look, however long they are


@dataclass(slots=True)
class Material:
    """Prompts under one name. `truths` says for each whether the first label is right; None if that is not known."""

    name: str
    made: bool
    prompts: list[Prompt]
    truths: list[bool | None]
    notes: list[str] = field(default_factory=list)

    def set_apart(self, count: int, seed: int) -> list[Prompt]:
        """`count` random prompts, which are no part of it any more."""
        apart = set(np.random.default_rng(seed).permutation(len(self.prompts))[:count].tolist())
        taken = [prompt for number, prompt in enumerate(self.prompts) if number in apart]
        self.truths = [truth for number, truth in enumerate(self.truths) if number not in apart]
        self.prompts = [prompt for number, prompt in enumerate(self.prompts) if number not in apart]
        return taken

    def leave_out_longer_than(self, most: int) -> None:
        """Drop prompts of more than `most` tokens, with a note. Raises PrefillError if none is left."""
        fits = [len(prompt.tokens) <= most for prompt in self.prompts]
        if all(fits):
            return
        self.notes.append(f"{fits.count(False):,} prompts do not fit the memory budget ({most:,} tokens)")
        self.truths = [truth for truth, fit in zip(self.truths, fits, strict=True) if fit]
        self.prompts = [prompt for prompt, fit in zip(self.prompts, fits, strict=True) if fit]
        if not self.prompts:
            raise PrefillError(f"{self.name}: {self.notes[-1]}, so nothing is left to compare; raise --memory")


def made_material(settings: BenchSettings, opened: Opened, labels: Labels) -> Material:
    """Needles as `prefill score` would read them: with the chat template, where there is one.

    The questions are of Yes or No: with other labels the truth is not known. Raises UsageError for prompts that are
    longer than the model takes or too short for the task.
    """
    rows, tokens = (
        max(2, round(settings.rows * settings.scale)),
        max(64, round((settings.with_defaults().tokens or 0) * settings.scale)),
    )
    files = opened.files
    most = min(settings.max_length or files.max_length, files.max_length)
    if tokens > most:
        raise UsageError(f"--tokens {tokens}: the model takes up to {most}; lower --tokens or --scale")
    encoder = Encoder(opened.tokenizer)
    try:
        prompts, answers = make_needles(
            rows=rows,
            tokens=tokens,
            seed=settings.seed,
            count=lambda text: len(encoder.encode([text], special=True)[0]),
        )
    except ValueError as error:
        raise UsageError(f"--tokens: {error}; raise --tokens") from None
    prompt_settings = PromptSettings(
        chat=settings.chat,
        system=settings.system,
        max_length=most,
        on_long=settings.on_long,
        vocab_size=files.config.vocab_size,
    )
    builder = PromptBuilder(opened.tokenizer, prompt_settings, (DEFAULT_COLUMN,))
    numbers = np.arange(len(prompts))
    batch = RowBatch(0, numbers, {DEFAULT_COLUMN: prompts}, pa.table({}), {}, 0)
    found, errors = builder.build(batch, labels)
    return _material("needle", True, found, errors, dict(enumerate(answers)), labels)


def input_material(
    source: Source, builder: PromptBuilder, labels: Labels, truth: str | None, most_tokens: int | None = None
) -> Material:
    """The first window of an input, whose columns are selected; `truth` is a carried column.

    Only the first prompts are taken, up to `most_tokens` in all, but at least a few.
    """
    window = next(windows(source, builder, labels, id_column=None), None)
    name = split_path(source.paths[0].rstrip("/"))[1]
    if len(source.paths) > 1:
        name += f" and {len(source.paths) - 1:,} more"
    if window is None:
        raise PrefillError(f"{name}: the input has no rows")
    labels.check(window)
    answers: dict[int, Any] = {}
    if truth is not None:
        values = window.carried.column(truth).to_pylist()
        if source.kind == "jsonl":
            values = [None if value is None else json.loads(value) for value in values]
        answers = dict(zip(window.rows.tolist(), values, strict=True))
    material = _material(name, False, window.prompts, window.errors, answers, labels)
    if len(window.rows) >= MAX_ROWS or len(window.rows) < (source.selected_rows or 0):
        material.notes.append(f"the first {len(window.rows):,} rows are compared, which are planned together")
    if most_tokens is not None:
        lengths = np.cumsum([len(prompt.tokens) for prompt in material.prompts])
        taken = max(int(np.searchsorted(lengths, most_tokens, side="right")), _FEWEST)
        if taken < len(lengths) or len(window.rows) >= QUICK_ROWS:
            material.prompts, material.truths = material.prompts[:taken], material.truths[:taken]
            text = f"a quick look at the first {len(material.prompts):,} rows"
            material.notes.append(f"{text}; --limit or --sample takes others, --full all")
    return material


def _material(
    name: str,
    made: bool,
    prompts: Sequence[Prompt],
    errors: Mapping[int, RowError],
    answers: Mapping[int, Any],
    labels: Labels,
) -> Material:
    if not prompts:
        first = next(iter(errors.values()))
        raise PrefillError(f"{name}: no row can be read; the first: {first.code}: {first.detail}")
    for prompt in prompts:
        prompt.keep = prompt.specprefill = None  # all rows have the rates that are compared
    material = Material(name, made, list(prompts), [labels.is_positive(answers.get(p.row)) for p in prompts])
    if errors:
        counts = Counter(error.code for error in errors.values())
        codes = ", ".join(f"{code} {count:,}" for code, count in sorted(counts.items()))
        material.notes.append(f"{len(errors):,} rows are errors and left out ({codes})")
    return material
