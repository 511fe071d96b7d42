"""What a run reports of its heads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar

from pydantic import BaseModel, ConfigDict

from prefillcli.errors import counted
from prefillcli.report.finding import Finding
from prefillcli.report.section import Section

if TYPE_CHECKING:
    from prefillcli.report.run import RunReport

SHIFTED = 0.5
"""Standard deviations from which on a head reads other rows than those that it was fitted to."""


class QuestionHead(BaseModel):
    """The head of a question: the layer that it reads, the rows that it was fitted to, and their right answers among
    held-out ones.

    Over `compared` rows of this run, `shift` is the distance of its mean features from those of the fit, a root mean
    square over all features in their standard deviations, less what chance makes of so many rows. `spread` is the
    median standard deviation of features, 1 at the fit. Both are null where fewer than 20 rows are compared. `adapted`
    says that the features have the mean and scale of this job.
    """

    model_config = ConfigDict(frozen=True)

    layer: int
    fitted_rows: int
    accuracy: float | None = None
    compared: int = 0
    shift: float | None = None
    spread: float | None = None
    adapted: int = 0  # rows whose mean and scale were taken; 0: those of the fit


class HeadUse(Finding):
    """The heads of a run, by question; the name of the only one may be empty. Of `model_layers`, `read_layers` were
    computed at most."""

    key: ClassVar[str] = "heads"
    place: ClassVar[int] = 6

    file: str
    model_layers: int
    read_layers: int
    loaded_layers: int
    questions: dict[str, QuestionHead]

    @property
    def shifted(self) -> dict[str, float]:
        """The questions whose rows are not like those of the fit, with the distance."""
        found = {name: own.shift for name, own in self.questions.items() if not own.adapted}
        return {name: shift for name, shift in found.items() if shift is not None and shift > SHIFTED}

    def sections(self, report: RunReport) -> Iterable[Section]:
        """Return the section on heads."""
        found = Section()
        above = "" if self.loaded_layers == self.model_layers else "; those above were not loaded"
        found.lines.append(("head", f"{self.read_layers} of {self.model_layers} layers computed{above}: {self.file}"))
        for name, own in self.questions.items():
            text = f"layer {own.layer}, fitted to {counted(own.fitted_rows, 'row')}"
            if own.accuracy is not None:
                text += f", {own.accuracy:.1%} of held-out ones right"
            if own.adapted:
                text += f"; features adapted to {counted(own.adapted, 'row')} of this job"
            elif own.shift is not None:
                text += f"; features {own.shift:.2f} standard deviations from those"
            found.lines.append((f"head of {name}" if name else "", text))
        shifts = {name: own.shift for name, own in self.questions.items() if own.shift is not None}
        if shifts:
            what = "Distance of mean features from those of the head's fit, in standard deviations."
            found.metric("head_shift", what, shifts, "question")
        return [found]
