"""The report of a run on several questions: those asked in both orders, and the correlation of their answers
(Spearman's, between their scores)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations, combinations_with_replacement
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from pydantic import BaseModel, RootModel

from prefillcli.core.roles import Judge
from prefillcli.report.finding import Finding
from prefillcli.report.section import Part, Section, counted, percent_interval
from prefillcli.rows.output.answers import AnswerColumns
from prefillcli.rows.output.destination import Destination
from prefillcli.rows.output.tallies import Counts
from prefillcli.stats.evaluation import correlation
from prefillcli.stats.intervals import Estimate, share_estimate

if TYPE_CHECKING:
    from prefillcli.core.run import Reached, Run
    from prefillcli.report.run import RunReport
    from prefillcli.rows.output.destination import Manifest


class OrderUse(BaseModel):
    """The number of rows in which the order of a question's two values decided its prediction."""

    question: str
    rows: int  # with an answer
    decided: int  # whose two orders have different predictions
    share: Estimate  # of these rows, with its exact 95 % interval


class OrderUses(Finding, RootModel[list[OrderUse]]):
    """The questions that are asked in both orders."""

    key: ClassVar[str] = "orders"
    place: ClassVar[int] = 2

    def sections(self, report: RunReport) -> Iterable[Section]:
        """Return the section on these questions."""
        return [_orders_section(self.root)]


def orders_of(counts: Counts | None) -> OrderUses | None:
    """Return the questions that are asked in both orders, of an output with these counts; None: there are none."""
    found = {} if counts is None else counts.tallies.orders
    uses = [
        OrderUse(question=name, rows=own.rows, decided=own.decided, share=share_estimate(own.decided, own.rows))
        for name, own in found.items()
    ]
    return OrderUses(uses) if uses else None


def _orders_section(orders: list[OrderUse]) -> Section:
    """Return the section on these questions."""
    made = Section(title="Questions")
    shares: dict[str, float] = {}
    for each in orders:
        value, interval = each.share.value, each.share.interval
        if value is not None and interval is not None:
            shares[each.question] = value
            said = f"decided {each.decided:,} of {counted(each.rows, 'row')} ({value:.1%}, 95 % interval "
            made.lines.append((f"order of {each.question}", f"{said}{percent_interval(interval)})"))
    if shares:
        text = "Share of rows whose prediction the order of two values decided."
        made.metric("order_decided_share", text, shares, "question")
    return made


class Correlations(Finding):
    """The questions, and the correlations of each with all others, in the same order."""

    key: ClassVar[str] = "correlations"
    place: ClassVar[int] = 3

    questions: list[str]
    rows: list[list[int]]  # that have both scores
    spearman: list[list[float | None]]  # None where these are too few, or all the same

    def sections(self, report: RunReport) -> Iterable[Section]:
        """Return the section with the matrix."""
        return [_correlation_section(self)]


def correlations_of(output: str, questions: Sequence[AnswerColumns]) -> Correlations:
    """Return the correlations of a finished output with these questions. Raises what pyarrow raises, or ValueError, if
    it is damaged."""
    pieces = [np.empty((len(questions), 0))]
    for table in Destination.parse(output).tables([name for own in questions for name in own.told]):
        pieces.append(np.stack([own.shares_in(table)[:, 0] for own in questions]))
    scores = np.concatenate(pieces, axis=1)
    most = range(len(questions))
    found = Correlations(
        questions=[own.name for own in questions],
        rows=[[0 for _ in most] for _ in most],
        spearman=[[None for _ in most] for _ in most],
    )
    for one, other in combinations_with_replacement(most, 2):
        known = ~np.isnan(scores[one] + scores[other])
        value = correlation(scores[one][known], scores[other][known], ranks=True).value
        for here, there in ((one, other), (other, one)):
            found.rows[here][there], found.spearman[here][there] = int(known.sum()), value
    return found


def _correlation_section(found: Correlations) -> Section:
    """Return the matrix on the page, and the strongest correlation in the terminal."""
    table = [["", *found.questions]]
    for name, row in zip(found.questions, found.spearman, strict=True):
        table.append([name, *("" if value is None else f"{value:.2f}" for value in row)])
    made = Section(
        title="Correlation between questions", parts=[Part(table=table, note="Spearman's, of their scores.")]
    )
    pairs = {pair: found.spearman[pair[0]][pair[1]] for pair in combinations(range(len(found.questions)), 2)}
    known = {pair: value for pair, value in pairs.items() if value is not None}
    if known:
        (one, other), value = max(known.items(), key=lambda item: abs(item[1]))
        rows = counted(found.rows[one][other], "row")
        text = f"{value:.2f} between {found.questions[one]} and {found.questions[other]}, over {rows}"
        made.lines = [("strongest correlation", text)]
    return made


class QuestionJudge(Judge):
    """Judges how the answers to several questions correlate, and how often their order decided."""

    def __init__(self, asked: Sequence[AnswerColumns]) -> None:
        self._asked = asked

    def ended(self, run: Run) -> None:
        with run.clock.phase("evaluate"), run.stop.at_once():
            _correlate(run.report, run.sink.location, self._asked)

    def reported(self, report: RunReport, reached: Reached) -> None:
        report.add(orders_of(reached.counts))

    @classmethod
    def merged(cls, report: RunReport, output: str, manifest: Manifest) -> None:
        report.add(orders_of(manifest.counts))
        _correlate(report, output, manifest.job.answers)


def _correlate(report: RunReport, output: str, asked: Sequence[AnswerColumns]) -> None:
    if len(asked) > 1:
        report.add(correlations_of(output, asked))
