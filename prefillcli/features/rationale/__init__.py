"""`--rationale`: texts behind scored rows, and `--rationale-when`: the rows with further questions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from prefillcli.core.feature import Feature, Objection, features_of
from prefillcli.errors import UsageError
from prefillcli.options.groups import DEFAULT_TEMPLATE
from prefillcli.options.option import RATIONALES, Settings, option
from prefillcli.options.requirements import Requirement

if TYPE_CHECKING:
    from prefillcli.core.condition import RowChoice
    from prefillcli.core.feature import (
        Choice,
        Counts,
        Job,
        Manifest,
        Models,
        Opened,
        Opening,
        OutputSchema,
        RunReport,
        Section,
        TextsOf,
        WantedRow,
    )
    from prefillcli.decode.continuations import Writing
    from prefillcli.features.rationale.writing import Rationales, WrittenRow

SpeculationName = Literal["off", "lookup", "suffix", "retrieval", "draft", "hierarchy"]
BY_DRAFT = ("draft", "hierarchy")  # ways to speculate that need a draft model
RATIONALE = Requirement(lambda s: s.rationale > 0, "needs --rationale", "give --rationale 64")
CHOSEN_ROWS = Requirement(
    lambda s: any(each.asks() for each in features_of(s)),
    "needs --rationale or --evidence, for which it chooses rows",
    "give --rationale 64 or --evidence",
)
CONDITION = Requirement(
    lambda s: CHOSEN_ROWS.met(s) and s.rationale_when is not None,
    "needs --rationale-when",
    "give --rationale-when 'score > 0.4 and score < 0.6'",
)
DRAWN_RATIONALES = Requirement(
    lambda s: s.rationale > 0 and s.rationale_temperature > 0,
    "needs a --rationale-temperature above 0",
    "give --rationale-temperature 0.7",
)
SPECULATION = Requirement(
    lambda s: s.speculates,
    "needs --rationale with speculation",
    "give --rationale, and --speculation other than off",
)
RETRIEVAL = Requirement(
    lambda s: s.speculates and s.speculation in ("retrieval", "hierarchy"),
    "needs speculation with a retrieval cache",
    "give --rationale and --speculation retrieval",
)


class WritingOptions(Settings):
    """Whether a text is written behind a prompt, and how."""

    rationale: int = option(
        0,
        "Let the model write up to N tokens after its answer, as its reasons.",
        RATIONALES, changes="columns", metavar="N", needs="rationales", off=0, ge=0,
    )  # fmt: skip
    rationale_template: str = option(
        DEFAULT_TEMPLATE,
        "Jinja text between the prompt and the rationale; label is the row's answer, labels are all of them.",
        RATIONALES, changes="columns", metavar="JINJA", requires=RATIONALE, text=True,
    )  # fmt: skip
    rationale_temperature: float = option(
        0.0,
        "Draw the tokens at this temperature; 0 takes the likeliest one.",
        RATIONALES, changes="columns", metavar="T", requires=RATIONALE, off=0, ge=0, allow_inf_nan=False,
    )  # fmt: skip
    rationale_seed: int = option(
        0,
        "Seed of these draws. The same seed gives a row the same text.",
        RATIONALES, changes="columns", metavar="N", requires=DRAWN_RATIONALES, ge=0,
    )  # fmt: skip
    speculation: SpeculationName = option(
        "lookup",
        "How tokens are guessed ahead, to write faster; the text stays the same. lookup: from prompt and text.",
        RATIONALES, changes="speed", needs="speculation", requires=RATIONALE,
    )  # fmt: skip
    speculation_tokens: int = option(
        6,
        "Most tokens to guess ahead.",
        RATIONALES, level="settled", changes="speed", metavar="N", needs="speculation", requires=SPECULATION,
        ge=1, le=64,
    )  # fmt: skip
    retrieval_budget: int = option(
        4096,
        "Tokens of each prompt that retrieval speculation reads.",
        RATIONALES, level="settled", changes="speed", metavar="N", needs="speculation", requires=RETRIEVAL, ge=1,
    )  # fmt: skip
    retrieval_chunk: int = option(
        8,
        "Neighbouring tokens that it chooses together.",
        RATIONALES, level="settled", changes="speed", metavar="N", needs="speculation", requires=RETRIEVAL, ge=1,
    )  # fmt: skip

    @property
    def speculates(self) -> bool:
        """Whether tokens may be guessed ahead."""
        return self.rationale > 0 and self.speculation != "off"


class RationaleOptions(WritingOptions):
    """Which rows are written about, and how."""

    rationale_when: str | None = option(
        None,
        "Condition for --rationale and --evidence, e.g. 'score > 0.4 and score < 0.6'. (default: every scored row)",
        RATIONALES, changes="columns", metavar="EXPR", requires=CHOSEN_ROWS,
    )  # fmt: skip
    rationale_limit: int | None = option(
        None,
        "Only the first N rows that --rationale-when chooses.",
        RATIONALES, changes="columns", metavar="N", requires=CONDITION, ge=1,
    )  # fmt: skip


class Rationale(Feature):
    """The rationales of a job, and the choice of rows. The key `rationales` of its report holds a
    `report.RationaleUse`, also where other features ask about the rows."""

    order = 6
    options = {"score": RationaleOptions, "inspect": WritingOptions}
    keys = {"rationales": None}
    draft_advice = "--speculation draft if it is to guess tokens of rationales"
    shown: Sequence[WrittenRow] = ()

    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        self.columns = ("rationales",) if settings.rationale else ()

    @classmethod
    def asked(cls, settings: Any) -> bool:
        return settings.rationale > 0 or bool(getattr(settings, "evidence", False))

    def asks(self) -> bool:
        return bool(self.settings.rationale)

    def check(self) -> None:
        settings = self.settings
        if not settings.rationale:
            return
        if settings.head in ("probability", "value"):
            raise UsageError(
                f"--rationale: with --head {settings.head} the model's classification head is read, which writes "
                "nothing\nleave it out; --evidence works with a head"
            )
        if settings.speculation not in BY_DRAFT:
            return
        if not settings.uses_draft:
            raise UsageError(
                f"--speculation {settings.speculation} needs --draft: a small model with the same tokenizer, "
                "which guesses tokens\nname one, or give --speculation retrieval"
            )
        if settings.draft_tokenizer == "translate":
            raise UsageError(
                f"--speculation {settings.speculation}: a draft with another tokenizer cannot guess the model's tokens"
                "\nleave --draft-tokenizer translate out, or give --speculation lookup"
            )

    def starting(self) -> None:
        if getattr(self.settings, "rationale_when", None) is not None:
            from prefillcli.core.condition import RowCondition

            RowCondition(self.settings.rationale_when)
        if self.settings.rationale:
            self._texts(("Yes", "No"))

    def joint(self, option: str) -> Objection | None:
        if self.settings.rationale_limit is None:
            return None
        return Objection(
            "--rationale-limit counts the chosen rows of the whole input in their order",
            "leave it out, and choose fewer rows with --rationale-when",
        )

    def needs_draft(self) -> bool:
        return bool(self.settings.speculates) and self.settings.speculation in BY_DRAFT

    def models_opened(self, opening: Opening) -> None:
        from prefillcli.data.prompts.labels import ClassLabels

        if not self.settings.rationale:
            return
        if isinstance(opening.labels, ClassLabels):
            raise UsageError(
                "--rationale: the model's classification head is read, which writes nothing\n"
                "leave it out, or read the next token with --head vocabulary; --evidence works with a head"
            )
        for labels in opening.labels.each or (opening.labels,):
            self._texts(labels.names)

    def text_room(self, opened: Opened, names: Sequence[str]) -> tuple[int, TextsOf] | None:
        settings, writing = self.settings, self._writing(opened, names)
        if writing is None:
            return None
        when = getattr(settings, "rationale_when", None)
        later = (
            not isinstance(settings, RationaleOptions)
            or settings.rationale_limit is not None
            or self._asks_several
            or any(each.between_layers() for each in features_of(settings))
        )
        return writing.most_tokens, "later" if later else "all" if when is None else "some"

    def loaded(self, models: Models[Any]) -> None:
        small = models.opened.draft
        if small is None or not self.needs_draft():
            return
        from prefillcli.decode.drafters import DraftModel
        from prefillcli.prefill.forest import UnsupportedModelError

        try:
            models.engine.guess_with(
                DraftModel(models.small_walk(chunk_tokens=self.settings.chunk_tokens), small.max_length)
            )
        except UnsupportedModelError as error:
            raise UsageError(
                f"--speculation {self.settings.speculation}: --draft {small.origin} cannot guess tokens: "
                f"{error}\ntake another draft, or --speculation lookup"
            ) from error

    def condition(self, schema: OutputSchema) -> RowChoice | None:
        if getattr(self.settings, "rationale_when", None) is None:
            return None
        from prefillcli.core.condition import RowChoice, RowCondition

        return RowChoice(RowCondition(self.settings.rationale_when), schema, self.settings.rationale_limit)

    def further(self, opening: Opening, choice: Choice) -> Rationales | None:
        names = opening.labels.names
        writing = self._writing(opening.opened, names)
        if writing is None:
            return None
        from prefillcli.features.rationale.writing import Rationales

        return Rationales(writing, self.settings.rationale_template, opening, choice)

    def ended(self, job: Job) -> None:
        if self.settings.show_text and not job.schema().questions:
            from prefillcli.features.rationale.writing import written_rows

            self.shown = written_rows(job.sink.location, job.groups, self.settings.id_column)

    def reported(self, job: Job, counts: Counts | None) -> None:
        from prefillcli.features.rationale.writing import RationaleUse

        decoded = job.pool.used().decoded if hasattr(job, "pool") else None
        use = RationaleUse.of(decoded, self.settings.speculation if self.settings.rationale else None)
        use.shown = list(self.shown)
        if counts is not None:
            use.take_plan(job.sink.plan)
            use.take(counts)
        job.report.blocks["rationales"] = use

    @classmethod
    def merged(cls, report: RunReport, output: str, manifest: Manifest) -> None:
        from prefillcli.features.rationale.writing import RationaleUse

        counts = manifest.counts
        if counts is not None and (counts.tallies.rationales.rows or counts.tallies.evidence):
            report.blocks["rationales"] = use = RationaleUse()
            use.take(counts)

    def answers_shown(self, row: WantedRow, labels: Sequence[str]) -> Section | None:
        if row.scored.rationale is None:
            return None
        from prefillcli.features.rationale.writing import inspected

        return inspected(row.scored.rationale, self._texts(labels)[labels[row.label]].strip())

    @classmethod
    def section(cls, report: RunReport) -> Section | None:
        if report.blocks["rationales"] is None:
            return None
        from prefillcli.features.rationale.writing import rationale_section

        return rationale_section(report.blocks["rationales"])

    def _texts(self, names: Sequence[str]) -> Mapping[str, str]:
        from prefillcli.data.prompts.templates import rationale_texts

        return rationale_texts(self.settings.rationale_template, names)

    @property
    def _asks_several(self) -> bool:
        # Whether several questions are asked about each row.
        return getattr(self.settings, "questions", None) is not None

    def _writing(self, opened: Opened, names: Sequence[str]) -> Writing | None:
        from prefillcli.features.rationale.writing import writing_of

        return writing_of(self.settings, opened, () if self._asks_several else names)


FEATURE = Rationale
