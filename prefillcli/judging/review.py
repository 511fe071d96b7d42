"""Answers that a person should look at: their own probability is below the floor of their question."""

from __future__ import annotations

from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from prefillcli.stats.acceptance import RISK, Acceptance

ANSWER: Final = "answer"  # the name of the only question, in an output without named ones

Share = float
Value = bool | int | str
"""An answer: the name of a label or an option, true or false, or the number of a level."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class AnswerFloor(_Frozen):
    """The floor of the answers to a question, or of one of them, and the labelled rows that prove it."""

    answer: Value | None  # None: any
    floor: float | None  # None: none is proven, and a person looks at all
    rows: int  # with this answer
    accepted: int  # of them, those at or above the floor
    errors: int  # of these, wrong ones
    bound: float | None  # the accuracy that the accepted ones prove
    share: float  # of the rows that is accepted
    needed: int | None  # rows that would probably prove one; None: there is one, or no number would

    @classmethod
    def of(cls, answer: Value | None, found: Acceptance) -> AnswerFloor:
        """Return the entry of an answer."""
        names = ("floor", "rows", "accepted", "errors", "bound", "share", "needed")
        return cls(answer=answer, **{name: getattr(found, name) for name in names})


class QuestionFloors(_Frozen):
    """The floors of a question."""

    truth: str  # the column with the right answers
    floors: tuple[AnswerFloor, ...] = Field(min_length=1)
    left_out: dict[str, int] = {}  # rows that were not used, by reason


class FloorFile(_Frozen):
    """The content of `floors.json`."""

    schema_version: Literal[1] = 1
    accuracy: float = Field(gt=0, lt=1)
    confidence: float = 1 - RISK
    questions: dict[str, QuestionFloors]  # by name
    scores: str = ""  # the output of `prefill score`, as the user named it
    job: dict[str, str] = {}  # the fingerprint of the scoring job; empty where it is unknown
