"""The schema of an output: the id, the columns carried from the input, and those that scoring adds."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import pyarrow as pa

from prefillcli.data.output.column_groups import NO_GROUPS, ColumnGroups
from prefillcli.data.output.columns import ROW_COLUMN, result_schema
from prefillcli.data.output.counts import Counts
from prefillcli.data.output.json_columns import type_for, typed_column
from prefillcli.data.output.manifest import Job
from prefillcli.data.output.tallies import ROW
from prefillcli.data.proof.seals import JOB_KEY
from prefillcli.errors import UsageError
from prefillcli.stats.probabilities import Measure


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputSchema:
    """The columns of a job's output."""

    labels: tuple[str, ...]
    id_name: str | None
    """The carried column with the ids; None where rows go by their number."""
    carried: pa.Schema
    """Id and kept columns as the parts have them; from JSON Lines every one is JSON text."""
    json_carried: bool
    """Whether the carried columns are JSON text."""
    json_text: bool
    """Whether such text is written as it is; else its values get the type that holds them."""
    truth: str | None
    """The carried column with the right answers."""
    groups: ColumnGroups = NO_GROUPS
    """Which columns there are beside those of every output."""
    measure: Measure = Measure.SHARES
    """What the numbers of the labels are."""

    def require_distinct(self) -> None:
        """Raise UsageError if a carried column has the name of another column of the output."""
        row = [ROW_COLUMN] if self.id_name is None else []
        taken = [*row, *self._results.names, ROW]
        for name in self.carried.names:
            if name in taken:
                option = {self.truth: "--truth", self.id_name: "--id-column"}.get(name, "--keep-columns")
                raise UsageError(f"{option} {name}: the output has a column {name} already\nrename it in the input")

    @property
    def json_columns(self) -> tuple[str, ...]:
        """The columns of the output that are JSON text."""
        return tuple(self.carried.names) if self.json_carried and self.json_text else ()

    def arrow(self, job: Job, json_kinds: Mapping[str, Iterable[str]]) -> pa.Schema:
        """The Arrow schema of an output of `job`; `json_kinds` are the kinds of values in carried JSON text."""
        carried = list(self.carried)
        if self._typed:
            carried = [
                pa.field(field.name, type_for(json_kinds.get(field.name, ()), ids=field.name == self.id_name))
                for field in carried
            ]
        if self.id_name is None:
            carried.insert(0, pa.field(ROW_COLUMN, pa.int64()))
        else:
            carried.sort(key=lambda field: field.name != self.id_name)
        metadata = {JOB_KEY: json.dumps(job.to_json()).encode()}
        return pa.schema([*carried, *self._results], metadata=metadata)

    def table(self, rows: pa.Table, schema: pa.Schema) -> pa.Table:
        """Rows of parts as rows of the output, whose `arrow` schema is given."""
        columns = []
        for field in schema:
            column = rows[ROW if field.name == ROW_COLUMN and self.id_name is None else field.name]
            if self._typed and field.name in self.carried.names:
                column = typed_column(column, field.type)
            columns.append(column)
        return pa.Table.from_arrays(columns, schema=schema)

    @property
    def _results(self) -> pa.Schema:
        """The columns that scoring adds."""
        return result_schema(self.labels, self.groups, self.measure)

    @property
    def _typed(self) -> bool:
        return self.json_carried and not self.json_text

    def count(self, counts: Counts, rows: pa.Table) -> Counts:
        """Add rows of parts to `counts`."""
        counts.add_rows(rows, self.truth, id_name=self.id_name, json_carried=self.json_carried)
        return counts
