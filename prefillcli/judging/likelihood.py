"""`--target-column`: the log-probability of a row's text behind its prompt, or of a whole document."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from prefillcli.core.feature import Feature
from prefillcli.errors import UsageError, counted
from prefillcli.options.option import ANSWERS, Settings, option
from prefillcli.options.requirements import Requirement

if TYPE_CHECKING:
    from pathlib import Path

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

# Options of labels, of which there are none.
_OF_LABELS = (
    *("labels", "label_norm", "label_end", "temperature", "choices_column", "label_values", "questions"),
    *(
        "exit",
        "first",
        "exit_profile",
        "compute",
        "calibration",
        "calibrate_with",
        "rationale",
        "evidence",
        "truth",
        "audit",
    ),
    *("min_label_mass", "max_drift"),
)




class Likelihood(Feature):
    """The likelihoods of a job. The key `likelihood` of its report has a `LikelihoodUse`."""

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
        from prefillcli.asking.targets import has_prompts

        return None if has_prompts(self.settings, available) else (self.settings.target_column,)

    def own_labels(self, model: Path) -> bool:
        return True

    def labels(self, opened: Opened) -> Labels:
        from prefillcli.asking.targets import Targets

        if opened.files.head is not None:
            raise UsageError(
                "--target-column: the model's classification head is read, which has no tokens\n"
                "read the next token with --head vocabulary"
            )
        return Targets(opened.tokenizer, self.settings.target_column, literal=self.settings.literal)

    def prompt_builder(self, opening: Opening, settings: PromptSettings, available: Sequence[str]) -> PromptBuilder:
        from prefillcli.asking.targets import TargetBuilder, has_prompts

        return TargetBuilder(
            opening.opened.tokenizer,
            settings,
            available,
            stride=self.settings.stride,
            prompts=has_prompts(self.settings, available),
        )

    def reported(self, job: Job, counts: Counts | None) -> None:
        job.report.blocks["likelihood"] = use_of(counts)

    @classmethod
    def merged(cls, report: RunReport, output: str, manifest: Manifest) -> None:
        if manifest.counts is not None and manifest.counts.tallies.likelihood.tokens:
            report.blocks["likelihood"] = use_of(manifest.counts)

    @classmethod
    def section(cls, report: RunReport) -> Section | None:
        found: Any = report.blocks["likelihood"]
        return None if found is None else _section(found)


class LikelihoodUse(BaseModel):
    """Sums over the scored rows, and the figures that follow from them."""

    logprob: float = 0.0  # of all targets together
    target_tokens: int = 0
    target_bytes: int = 0
    target_words: int = 0
    greedy_rows: int = 0  # rows whose target greedy decoding would write
    perplexity: float | None = None  # of a token: exp(-logprob / target_tokens)
    word_perplexity: float | None = None  # exp(-logprob / target_words)
    byte_perplexity: float | None = None  # exp(-logprob / target_bytes)
    bits_per_byte: float | None = None  # -logprob / ln 2 / target_bytes


def use_of(counts: Counts | None) -> LikelihoodUse:
    """The figures of an output with these counts."""
    found = LikelihoodUse()
    if counts is None or not counts.tallies.likelihood.tokens:
        return found
    own = counts.tallies.likelihood
    return LikelihoodUse(
        logprob=own.logprob,
        target_tokens=own.tokens,
        target_bytes=own.bytes,
        target_words=own.words,
        greedy_rows=own.greedy,
        perplexity=_perplexity(own.logprob, own.tokens),
        word_perplexity=_perplexity(own.logprob, own.words),
        byte_perplexity=_perplexity(own.logprob, own.bytes),
        bits_per_byte=-own.logprob / math.log(2) / own.bytes,
    )


def _perplexity(logprob: float, count: int) -> float:
    # Beyond that a double has no such number.
    return math.exp(min(-logprob / count, 709.0))


def _section(found: LikelihoodUse) -> Section:
    """The section on the figures."""
    from prefillcli.report.section import Section, three_digits

    made = Section(title="Likelihood")
    if found.perplexity is None or found.bits_per_byte is None or found.word_perplexity is None:
        return made
    made.lines = [
        ("perplexity", f"{three_digits(found.perplexity)} a token, over {counted(found.target_tokens, 'token')}"),
        ("word perplexity", f"{three_digits(found.word_perplexity)}, over {found.target_words:,} words"),
        ("bits per byte", f"{found.bits_per_byte:.4f}, over {found.target_bytes:,} bytes"),
        ("greedy", f"{found.greedy_rows:,} targets are what greedy decoding would write"),
    ]
    made.tiles = [("perplexity", three_digits(found.perplexity))]
    made.metric("perplexity", "Perplexity per token over all targets.", found.perplexity)
    made.metric("word_perplexity", "Perplexity per word over all targets.", found.word_perplexity)
    made.metric("bits_per_byte", "Bits per byte over all targets.", found.bits_per_byte)
    made.summary = {name: getattr(found, name) for name in ("perplexity", "word_perplexity", "bits_per_byte")}
    return made


FEATURE = Likelihood
