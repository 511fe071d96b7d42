"""Texts behind scored rows, and evidence beside them."""

from __future__ import annotations

from typing import Literal

from prefillcli.errors import UsageError
from prefillcli.options import requirements
from prefillcli.options.groups import SELF
from prefillcli.options.option import RATIONALES, Settings, option

DEFAULT_TEMPLATE = "{{ label }} because"
SpeculationName = Literal["off", "lookup", "suffix", "retrieval", "draft", "hierarchy"]
BY_DRAFT = ("draft", "hierarchy")
"""Ways to speculate that need a draft model."""


class EvidenceOptions(Settings):
    """Whether the sections of prompts are weighed."""

    evidence: bool = option(
        False,
        "Score the row once more without each section of its prompt: how much each of them changes the score.",
        RATIONALES, changes="columns", needs="evidence",
    )  # fmt: skip


class WritingOptions(EvidenceOptions):
    """Whether something is written behind a prompt, and how."""

    rationale: int = option(
        0,
        "Write up to N tokens behind the row's answer: what the model gives as its reasons.",
        RATIONALES, changes="columns", metavar="N", needs="rationales", off=0, ge=0,
    )  # fmt: skip
    rationale_template: str = option(
        DEFAULT_TEMPLATE,
        "Jinja text that a rationale continues, behind the prompt; label is the row's answer, labels are all.",
        RATIONALES, changes="columns", metavar="JINJA", requires=requirements.RATIONALE,
    )  # fmt: skip
    rationale_temperature: float = option(
        0.0,
        "Draw the tokens at this temperature; 0 takes the likeliest one.",
        RATIONALES, changes="columns", metavar="T", requires=requirements.RATIONALE, off=0, ge=0, allow_inf_nan=False,
    )  # fmt: skip
    rationale_seed: int = option(
        0,
        "Seed of these draws. The same seed gives a row the same text.",
        RATIONALES, changes="columns", metavar="N", requires=requirements.DRAWN_RATIONALES, ge=0,
    )  # fmt: skip
    speculation: SpeculationName = option(
        "lookup",
        "How tokens are guessed ahead, to write faster; the text stays the same. lookup: from prompt and text.",
        RATIONALES, changes="speed", needs="speculation", requires=requirements.RATIONALE,
    )  # fmt: skip
    speculation_tokens: int = option(
        6,
        "Most tokens to guess ahead.",
        RATIONALES, changes="speed", metavar="N", needs="speculation", requires=requirements.SPECULATION, ge=1, le=64,
    )  # fmt: skip
    retrieval_budget: int = option(
        4096,
        "Tokens of each prompt that retrieval speculation reads.",
        RATIONALES, changes="speed", metavar="N", needs="speculation", requires=requirements.RETRIEVAL, ge=1,
    )  # fmt: skip
    retrieval_chunk: int = option(
        8,
        "Neighbouring tokens that it chooses together.",
        RATIONALES, changes="speed", metavar="N", needs="speculation", requires=requirements.RETRIEVAL, ge=1,
    )  # fmt: skip

    @property
    def chooses_rows(self) -> bool:
        """Whether anything is done with chosen rows, once they are scored."""
        return self.rationale > 0 or self.evidence

    @property
    def speculates(self) -> bool:
        """Whether tokens may be guessed ahead."""
        return self.rationale > 0 and self.speculation != "off"

    @property
    def speculates_with_draft(self) -> bool:
        """Whether a draft model may guess tokens."""
        return self.speculates and self.speculation in BY_DRAFT


class RationaleOptions(WritingOptions):
    """Which rows are written about, and how."""

    rationale_when: str | None = option(
        None,
        "Rows that --rationale and --evidence choose, e.g. 'score > 0.4 and score < 0.6'. (default: every scored row)",
        RATIONALES, changes="columns", metavar="EXPR", requires=requirements.CHOSEN_ROWS,
    )  # fmt: skip
    rationale_limit: int | None = option(
        None,
        "At most N chosen rows: the first ones of the input.",
        RATIONALES, changes="columns", metavar="N", requires=requirements.CONDITION, ge=1,
    )  # fmt: skip


def check_writing(settings: WritingOptions, *, head: str, draft: str | None, own_tokenizer: bool) -> None:
    """Raise UsageError for a rationale that this model or draft cannot write.

    `head` and `draft` are those options; `own_tokenizer` says that the draft may have other tokens than the model.
    """
    if settings.rationale and head in ("probability", "value"):
        raise UsageError(
            f"--rationale: with --head {head} the model's classification head is read, which writes nothing\n"
            "leave it out; --evidence works with a head"
        )
    if not settings.rationale or settings.speculation not in BY_DRAFT:
        return
    if draft is None or draft == SELF:
        raise UsageError(
            f"--speculation {settings.speculation} needs --draft: a small model with the same tokenizer, "
            "which guesses tokens\nname one, or give --speculation retrieval"
        )
    if own_tokenizer:
        raise UsageError(
            f"--speculation {settings.speculation}: a draft with another tokenizer cannot guess the model's tokens\n"
            "leave --draft-tokenizer translate out, or give --speculation lookup"
        )
