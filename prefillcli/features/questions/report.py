"""What a run reports on questions that are asked in both orders."""

from __future__ import annotations

from pydantic import BaseModel

from prefillcli.data.output.columns import Counts
from prefillcli.report.section import Section, percent_interval
from prefillcli.stats.evaluation import Estimate, share_estimate


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


def section(orders: list[OrderUse]) -> Section:
    """The section on these questions."""
    made = Section(title="Both orders")
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
