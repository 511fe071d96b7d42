"""Batch files of the OpenAI API: JSON Lines with `custom_id`, `method`, `url` and `body`, and `--batch-format`."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from prefillcli.core.feature import Feature, Objection
from prefillcli.data.output import format_of
from prefillcli.errors import UsageError
from prefillcli.options.groups import NameList
from prefillcli.options.option import ANSWERS, FILES, Settings, option

if TYPE_CHECKING:
    from pathlib import Path

    from prefillcli.core.feature import (
        Group,
        Labels,
        LocalModels,
        Opened,
        Opening,
        PromptBuilder,
        PromptSettings,
    )

PAIR = "query", "document"  # the columns of a pair of texts
ID, METHOD, URL, BODY = "custom_id", "method", "url", "body"
# Options about labels, of which an output in this format has none, and about columns, of which it has others.
_WITHOUT = (
    *("labels", "label_norm", "label_end", "temperature", "choices_column", "label_values", "questions"),
    *(
        "target_column",
        "exit",
        "first",
        "exit_profile",
        "calibration",
        "calibrate_with",
        "rationale",
        "evidence",
        "truth",
    ),
    *("audit", "min_label_mass", "max_drift", "keep", "keep_columns", "partition", "template"),
)






class BatchFiles(Feature):
    """The batch file of a job, if its input is one."""

    order = 89  # other features that make prompts take precedence, but not those of single pairs
    options = {"score": BatchOptions, "inspect": BatchInput}

    @property
    def _format(self) -> str | None:
        found: str | None = getattr(self.settings, "batch_format", None)
        return found

    @property
    def columns(self) -> Sequence[Group]:  # type: ignore[override]  # as the options say
        return ("openai",) if self._format else ()

    def check(self) -> None:
        settings = self.settings
        if self._format is None:
            return
        fields = type(settings).model_fields
        for name in _WITHOUT:
            if name in fields and getattr(settings, name) != fields[name].default:
                raise UsageError(
                    f"--{name.replace('_', '-')} cannot be combined with --batch-format: the lines of the batch file "
                    "say what is asked and written\nleave one of them out"
                )
        if settings.id_column not in (None, ID):
            raise UsageError(f"--id-column {settings.id_column}: with --batch-format ids are {ID}\nleave it out")
        if settings.engine == "vllm":
            raise UsageError(
                "--batch-format: the engine vllm is asked for chosen tokens, not for the likeliest ones\n"
                "give --engine torch or hf, or use vLLM's own `vllm run-batch`"
            )
        form = None if settings.output is None else format_of(settings.output)
        if form is None or form.parquet:
            raise UsageError("--batch-format: a batch output is JSON Lines\ngive --output a path that ends in .jsonl")

    def joint(self, option: str) -> Objection | None:
        if self._format is None or option not in ("--since", "--retry-errors"):
            return None
        return Objection("a batch output does not have the columns of a score", "leave --batch-format out")

    def carried(self) -> Sequence[str]:
        return (URL, BODY) if self._format else ()

    def id_column(self, available: Sequence[str]) -> str | None:
        return ID if self._recognised(available) else None

    def prompt_columns(self, available: Sequence[str]) -> Sequence[str] | None:
        self.columns_known(available)
        if self._format and not self._recognised(available):
            raise UsageError(
                f"--batch-format: the input is no batch file: its lines have no {ID}, {METHOD}, {URL} and {BODY}\n"
                "leave it out, or name a batch file"
            )
        return (METHOD, URL, BODY) if self._recognised(available) else None

    def _recognised(self, available: Collection[str]) -> bool:
        # Whether rows with these columns are lines of a batch file, from which no option makes other prompts.
        settings = self.settings
        names = ("template", "pair_column", "questions", "target_column")
        others = (getattr(settings, name, None) for name in names)
        usual = "prompt_column" not in settings.model_fields_set and not any(others)
        return usual and {ID, METHOD, URL, BODY} <= set(available)

    def columns_known(self, columns: Collection[str]) -> None:
        if self.settings.served_model_name and not self._recognised(columns):
            raise UsageError("--served-model-name is for batch files, and the input is none\nleave it out")

    def own_labels(self, model: Path) -> bool:
        return self._format is not None

    def labels(self, opened: Opened) -> Labels | None:
        if self._format is None or _scores_pairs(opened):  # which has labels or classes
            return None
        from prefillcli.asking.batch_files import LikeliestTokens

        return LikeliestTokens(opened)

    def prompt_builder(
        self, opening: Opening, settings: PromptSettings, available: Sequence[str]
    ) -> PromptBuilder | None:
        if not self._recognised(available):
            return None
        from prefillcli.asking.batch_files import PairRequestBuilder, RequestBuilder

        opened = opening.opened
        model = str(self.settings.model or opened.files.origin)
        models = self.settings.served_model_name or (model, os.path.basename(model.rstrip("/")))
        if self._format and _scores_pairs(opened):
            pairs = self._pair_builder(opening, settings)
            return PairRequestBuilder(opened.tokenizer, settings, models=models, pairs=pairs)
        if opened.files.encoder:
            raise UsageError(
                "the input is a batch file, and the model an encoder, which scores the pairs of its lines\n"
                "give --batch-format openai"
            )
        return RequestBuilder(opened.tokenizer, settings, models=models, answers=self._format is not None)

    def _pair_builder(self, opening: Opening, settings: PromptSettings) -> PromptBuilder:
        # What makes the prompts of pairs, as if they were rows.
        from prefillcli.data.prompts.builder import prompt_builder

        if opening.opened.files.encoder:
            pairs = replace(settings, prompt_column=PAIR[0], pair_column=PAIR[1])
            return prompt_builder(opening.opened.tokenizer, pairs, PAIR)
        found = opening.make_builder(PAIR)
        if set(found.columns) != set(PAIR):
            found.close()
            raise UsageError(
                f"{opening.opened.files.origin}: its classification head is read, and its files do not say how a pair "
                "of texts becomes its prompt\nread the next token with --head vocabulary"
            )
        return found

    def identity(self, opening: Opening, values: dict[str, Any], models: LocalModels) -> Mapping[str, str]:
        from prefillcli.data.output.target import BATCH_FORMAT

        found = values.pop("batch_format")
        return {BATCH_FORMAT: found} if found else {}


def _scores_pairs(opened: Opened) -> bool:
    # Whether the model scores pairs of texts, and so has no likeliest tokens.
    from prefillcli.models.files import read_reranker

    return opened.files.head is not None or read_reranker(opened.files.path) is not None


FEATURE = BatchFiles
