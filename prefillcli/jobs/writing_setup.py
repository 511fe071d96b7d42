"""A job's rationales, made of its options and of what it has opened."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypedDict

from prefillcli.data.prompts.beginnings import Beginnings
from prefillcli.data.prompts.builder import PromptBuilder
from prefillcli.data.prompts.labels import Labels
from prefillcli.data.prompts.sections import Ablation
from prefillcli.data.prompts.templates import rationale_texts
from prefillcli.decode.continuations import Speculation, Writing
from prefillcli.jobs.evidence import Evidence
from prefillcli.jobs.row_choice import RowChoice
from prefillcli.jobs.wanted_rows import JobRationales, LabelledChoice
from prefillcli.models.open import Opened
from prefillcli.options.rationale import WritingOptions
from prefillcli.options.score import ScoreSettings
from prefillcli.stats.calibration import Calibration

if TYPE_CHECKING:  # takes torch along
    from prefillcli.models.law import TextsOf


def writing_of(settings: WritingOptions, opened: Opened, names: Sequence[str]) -> Writing | None:
    """How the texts of a job are written whose labels have these names; None where none are. Raises UsageError for a
    damaged model folder."""
    if not settings.rationale:
        return None
    from prefillcli.models.open import stop_tokens  # takes torch along

    texts = rationale_texts(settings.rationale_template, names).values()
    return Writing(
        tokens=settings.rationale,
        stop_tokens=stop_tokens(opened.files),
        beginning=max(len(opened.tokenizer.encode(f" {text}", add_special_tokens=False)) for text in texts) + 1,
        temperature=settings.rationale_temperature,
        seed=settings.rationale_seed,
        speculation=Speculation(
            drafter=settings.speculation,
            tokens=settings.speculation_tokens,
            budget=settings.retrieval_budget,
            chunk=settings.retrieval_chunk,
        ),
    )


class TextRoom(TypedDict):
    """For how long texts, and of which prompts, memory is needed: see `LoadRequest`."""

    text_tokens: int
    texts_of: TextsOf


def text_room(settings: ScoreSettings, opened: Opened, names: Sequence[str]) -> TextRoom:
    """What room the texts of a job need. Arguments as of `writing_of`."""
    writing = writing_of(settings, opened, names)
    later = settings.rationale_limit is not None or settings.exit or settings.drafts_itself
    texts_of: TextsOf = "later" if later else "all" if settings.rationale_when is None else "some"
    return {"text_tokens": 0 if writing is None else writing.most_tokens, "texts_of": texts_of}


def job_rationales(
    settings: ScoreSettings,
    choice: RowChoice | None,
    opened: Opened,
    labels: Labels,
    builder: PromptBuilder,
    calibration: Calibration | None,
    chosen: Callable[[], int] = lambda: 0,
) -> JobRationales | None:
    """What a job does with the rows of its `choice`; None for nothing. `calibration` makes the scores, and `chosen`
    counts the rows so far."""
    if choice is None:
        return None
    writing = writing_of(settings, opened, labels.names)
    words, evidence, temperature = None, None, settings.temperature
    if writing is not None:
        words = Beginnings(opened.tokenizer, labels, rationale_texts(settings.rationale_template, labels.names))
    if settings.evidence:
        evidence = Evidence(Ablation(builder, labels), temperature, choice.schema.measure)
    return JobRationales(
        LabelledChoice(choice, temperature, calibration),
        writing,
        words,
        settings.rationale_limit,
        chosen,
        settings.id_column,
        evidence,
    )
