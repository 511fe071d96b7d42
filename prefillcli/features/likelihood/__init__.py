"""`--target-column`: the log-probability of a row's text behind its prompt, or of a whole document."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from prefillcli.core.feature import Feature
from prefillcli.errors import UsageError
from prefillcli.options.option import ANSWERS, Settings, option
from prefillcli.options.requirements import Requirement

if TYPE_CHECKING:
    from prefillcli.core.feature import (
        Counts,
        Group,
        Job,
        Labels,
        Manifest,
        Opened,
        Opening,
        PromptBuilder,
        PromptSettings,
        RunReport,
        Section,
    )

TARGET = Requirement(
    lambda s: s.target_column is not None,
    "is for the likelihood of a text, but there is none",
    "name its column with --target-column",
)
# Options of labels, of which there are none.
_OF_LABELS = (
    *("labels", "label_norm", "label_end", "temperature", "choices_column", "label_values", "questions"),
    *("exit", "first", "exit_profile", "calibration", "calibrate_with", "rationale", "evidence", "truth", "audit"),
    *("min_label_mass", "max_drift"),
)


class LikelihoodOptions(Settings):
    """The texts whose likelihood is asked for."""

    target_column: str | None = option(
        None,
        "Column with a text: the score is its log-probability after the prompt. If the prompt is empty, the text "
        "is a whole document.",
        ANSWERS, changes="scores", metavar="COLUMN",
    )  # fmt: skip
    token_logprobs: bool = option(
        False,
        "Also write the log-probability of each token of the target.",
        ANSWERS, changes="columns", requires=TARGET,
    )  # fmt: skip
    stride: int | None = option(
        None,
        "Tokens that each window of a long document predicts, e.g. 512. (default: as many as it holds)",
        ANSWERS, changes="scores", metavar="N", requires=TARGET, ge=1,
    )  # fmt: skip


class Likelihood(Feature):
    """The likelihoods of a job. The key `likelihood` of its report has a `report.LikelihoodUse`."""

    order = 3
    options = {"score": LikelihoodOptions}
    keys = {"likelihood": None}

    @classmethod
    def asked(cls, settings: LikelihoodOptions) -> bool:
        return settings.target_column is not None

    @property
    def columns(self) -> Sequence[Group]:  # type: ignore[override]  # as the options say
        return ("token_logprobs",) if self.settings.token_logprobs else ()

    def check(self) -> None:
        settings = self.settings
        fields = type(settings).model_fields
        given = {name for name, field in fields.items() if getattr(settings, name) != field.default}
        for name in _OF_LABELS:
            if name in given:
                raise UsageError(
                    f"--{name.replace('_', '-')} is about labels, and --target-column asks for the likelihood of a "
                    "text instead\nleave one of them out"
                )
        if getattr(settings, "keep", None) == "auto":
            raise UsageError(
                "--keep auto: the rate is chosen by flips of labels, and --target-column has none\n"
                "give a rate, like --keep 0.2"
            )

    def check_columns(self, available: Sequence[str]) -> None:
        from prefillcli.data.rows import require_columns

        require_columns([self.settings.target_column], available, "the input")

    def prompt_columns(self, available: Sequence[str]) -> Sequence[str] | None:
        from prefillcli.features.likelihood.targets import has_prompts

        return None if has_prompts(self.settings, available) else (self.settings.target_column,)

    def labels(self, opened: Opened) -> Labels:
        from prefillcli.features.likelihood.targets import Targets

        if opened.files.head is not None:
            raise UsageError(
                "--target-column: the model's classification head is read, which has no tokens\n"
                "read the next token with --head vocabulary"
            )
        return Targets(opened.tokenizer, self.settings.target_column, literal=self.settings.literal)

    def prompt_builder(self, opening: Opening, settings: PromptSettings, available: Sequence[str]) -> PromptBuilder:
        from prefillcli.features.likelihood.targets import TargetBuilder, has_prompts

        return TargetBuilder(
            opening.opened.tokenizer,
            settings,
            available,
            stride=self.settings.stride,
            prompts=has_prompts(self.settings, available),
        )

    def reported(self, job: Job, counts: Counts | None) -> None:
        from prefillcli.features.likelihood.report import use_of

        job.report.blocks["likelihood"] = use_of(counts)

    @classmethod
    def merged(cls, report: RunReport, output: str, manifest: Manifest) -> None:
        from prefillcli.features.likelihood.report import use_of

        if manifest.counts is not None and manifest.counts.tallies.likelihood.tokens:
            report.blocks["likelihood"] = use_of(manifest.counts)

    @classmethod
    def section(cls, report: RunReport) -> Section | None:
        found: Any = report.blocks["likelihood"]
        if found is None:
            return None
        from prefillcli.features.likelihood.report import section

        return section(found)


FEATURE = Likelihood
