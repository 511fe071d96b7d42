"""Which rows are written about or weighed, once they are scored."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from prefillcli.data.output.columns import ColumnGroups, OutputSchema, ResultRows
from prefillcli.data.prompts.labels import Labels
from prefillcli.data.prompts.templates import rationale_texts
from prefillcli.data.row_condition import RowCondition, known_columns, row_values
from prefillcli.data.rows import Window
from prefillcli.options.score import ScoreSettings


def check_rationales(settings: ScoreSettings) -> None:
    """Raise UsageError for a condition or a template that is wrong whatever the input holds."""
    if settings.rationale_when is not None:
        RowCondition(settings.rationale_when)
    if settings.rationale:
        rationale_texts(settings.rationale_template, ("Yes", "No"))


def column_groups(settings: ScoreSettings) -> ColumnGroups:
    """The columns that a job's output has beside those of every output."""
    return ColumnGroups(
        audit=settings.audit > 0,
        calibrated=settings.calibrates,
        exits=settings.exit,
        adapters=settings.adapter_column is not None,
        rationales=settings.rationale > 0,
        evidence=settings.evidence,
    )


@dataclass(frozen=True, slots=True)
class RowChoice:
    """Chooses rows by `--rationale-when`; without a condition every row that has a score. It can be pickled."""

    condition: RowCondition | None
    schema: OutputSchema

    @classmethod
    def of(cls, settings: ScoreSettings, labels: Labels, carried: pa.Schema, kind: str) -> RowChoice | None:
        """None if nothing is done with chosen rows. `carried` are the id and the kept columns of an input of this
        `kind`. Raises UsageError for a condition on what its rows do not have, and for a template that gives one of
        the labels no text."""
        if not settings.chooses_rows:
            return None
        schema = OutputSchema(
            labels=labels.names,
            id_name=settings.id_column,
            carried=carried,
            json_carried=kind == "jsonl",
            json_text=False,
            truth=settings.truth,
            groups=column_groups(settings),
            measure=labels.measure,
        )
        condition = None
        if settings.rationale_when is not None:
            condition = RowCondition(settings.rationale_when)
            condition.check(*known_columns(schema))
        if settings.rationale:
            rationale_texts(settings.rationale_template, labels.names)
        return cls(condition, schema)

    @property
    def columns(self) -> frozenset[str]:
        """The columns that the condition looks at."""
        return frozenset() if self.condition is None else self.condition.columns

    def chosen(self, window: Window, rows: ResultRows) -> list[int]:
        """The numbers of the chosen rows, ascending; a row without a score is not chosen."""
        scored = {each.row for each in rows.scored}
        if self.condition is None:
            return sorted(scored)
        values = row_values(window, rows, self.schema, self.columns)
        pairs = zip(rows.numbers.tolist(), values, strict=True)
        return [row for row, each in pairs if row in scored and self.condition(each)]
