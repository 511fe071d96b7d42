"""What a run reports on questions that are asked in both orders, and on the audit of each."""

from __future__ import annotations

from pydantic import BaseModel

from prefillcli.data.output.columns import Counts
from prefillcli.report.section import Section, percent_interval
from prefillcli.stats.evaluation import Audit, Estimate, audit_lines, audit_of, share_estimate


class OrderUse(BaseModel):
    """How often the order of a question's two values decided its prediction."""

    question: str
    rows: int  # with an answer
    decided: int  # whose two orders have different predictions
    share: Estimate  # of these rows, with its exact 95 % interval


def orders_of(counts: Counts | None) -> list[OrderUse] | None:
    """The questions that are asked in both orders, of an output with these counts; None: there are none."""
    found = {} if counts is None else counts.tallies.orders
    return [
        OrderUse(question=name, rows=own.rows, decided=own.decided, share=share_estimate(own.decided, own.rows))
        for name, own in found.items()
    ] or None


class AuditUse(BaseModel):
    """The flips of a question's answers, of rows whose prompts were also read in full."""

    question: str
    audit: Audit


def audits_of(counts: Counts | None) -> list[AuditUse] | None:
    """The audit of each question, of an output with these counts; None: there is none."""
    found = {} if counts is None else counts.audits
    return [
        AuditUse(
            question=name,
            audit=audit_of([(score, full, None) for score, full, *_ in rows], [flipped for _, _, flipped, _ in rows]),
        )
        for name, rows in found.items()
    ] or None


def section(orders: list[OrderUse], audits: list[AuditUse]) -> Section:
    """The section on these questions."""
    made = Section(title="Questions")
    for audited in audits:
        made.lines += [(f"{name} of {audited.question}", said) for name, said in audit_lines(audited.audit)]
    shares: dict[str, float] = {}
    for each in orders:
        value, interval = each.share.value, each.share.interval
        if value is not None and interval is not None:
            shares[each.question] = value
            said = f"decided {each.decided:,} of {each.rows:,} rows ({value:.1%}, 95 % interval "
            made.lines.append((f"order of {each.question}", f"{said}{percent_interval(interval)})"))
    if shares:
        text = "Share of rows whose prediction the order of two values decided."
        made.metric("order_decided_share", text, shares, "question")
    return made
