"""The options of questions about scored rows."""

from __future__ import annotations

from typing import Literal

from prefillcli.options.groups import DEFAULT_TEMPLATE
from prefillcli.options.option import RATIONALES, Options, option
from prefillcli.options.requirements import Requirement, asks_more

SpeculationName = Literal["off", "lookup", "retrieval", "draft", "hierarchy"]


BY_DRAFT = ("draft", "hierarchy")  # ways to speculate that need a draft model


RATIONALE = Requirement(lambda s: s.rationales.rationale > 0, "needs --rationale", "give --rationale 64")


CHOSEN_ROWS = Requirement(
    asks_more,
    "needs --rationale or --evidence, for which it chooses rows",
    "give --rationale 64 or --evidence",
)


CONDITION = Requirement(
    lambda s: CHOSEN_ROWS.met(s) and s.chosen.rationale_when is not None,
    "needs --rationale-when",
    "give --rationale-when 'score > 0.4 and score < 0.6'",
)


DRAWN_RATIONALES = Requirement(
    lambda s: s.rationales.rationale > 0 and s.rationales.rationale_temperature > 0,
    "needs a --rationale-temperature above 0",
    "give --rationale-temperature 0.7",
)


SPECULATION = Requirement(
    lambda s: s.rationales.speculates,
    "needs --rationale with speculation",
    "give --rationale, and --speculation other than off",
)


RETRIEVAL = Requirement(
    lambda s: s.rationales.speculates and s.rationales.speculation in ("retrieval", "hierarchy"),
    "needs speculation with a retrieval cache",
    "give --rationale and --speculation retrieval",
)


class WritingOptions(Options):
    """The text written after a prompt, and the weighing of its sections, if any."""

    rationale: int = option(
        0,
        "Let the model write up to N tokens of reasons after its answer.",
        RATIONALES, changes="columns", metavar="N", needs="rationales", off=0, ge=0,
    )  # fmt: skip
    rationale_template: str = option(
        DEFAULT_TEMPLATE,
        "Jinja text between the prompt and the rationale; label is the row's answer, labels are all of them.",
        RATIONALES, changes="columns", metavar="JINJA", requires=RATIONALE, text=True,
    )  # fmt: skip
    rationale_temperature: float = option(
        0.0,
        "Sampling temperature; 0 takes the likeliest token.",
        RATIONALES, changes="columns", metavar="T", requires=RATIONALE, off=0, ge=0, allow_inf_nan=False,
    )  # fmt: skip
    rationale_seed: int = option(
        0,
        "Seed for sampling. The same seed gives a row the same text.",
        RATIONALES, level="rare", changes="columns", metavar="N", requires=DRAWN_RATIONALES, ge=0,
    )  # fmt: skip
    speculation: SpeculationName = option(
        "lookup",
        "How to guess tokens ahead, to write faster; the text stays the same. lookup: from prompt and text.",
        RATIONALES, changes="speed", needs="speculation", requires=RATIONALE,
    )  # fmt: skip
    speculation_tokens: int = option(
        6,
        "Most tokens to guess ahead.",
        RATIONALES, level="rare", changes="speed", metavar="N", needs="speculation", requires=SPECULATION,
        ge=1, le=64,
    )  # fmt: skip
    retrieval_budget: int = option(
        4096,
        "Tokens of each prompt that retrieval speculation reads.",
        RATIONALES, level="rare", changes="speed", metavar="N", needs="speculation", requires=RETRIEVAL, ge=1,
    )  # fmt: skip
    retrieval_chunk: int = option(
        8,
        "Neighbouring tokens that it chooses together.",
        RATIONALES, level="rare", changes="speed", metavar="N", needs="speculation", requires=RETRIEVAL, ge=1,
    )  # fmt: skip

    evidence: bool = option(
        False,
        "Score the row again without each section of its prompt, to show how much each one changes the score.",
        RATIONALES, changes="columns", needs="evidence",
    )  # fmt: skip

    @property
    def speculates(self) -> bool:
        """True if tokens may be guessed ahead."""
        return self.rationale > 0 and self.speculation != "off"

    @property
    def speculates_by_draft(self) -> bool:
        """True if a draft model guesses tokens ahead."""
        return self.speculates and self.speculation in BY_DRAFT


class ChosenOptions(Options):
    """The rows that are asked about further."""

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
