"""The schema of an output: the id, the columns that are carried from the input, and those that scoring adds.

The kinds of its values decide the type of a column carried from JSON Lines: b true or false, i integer, f other
number, s string, j anything else (arrays, objects, integers beyond 64 bits). A column of one kind gets its type; i and
f together are float64, unless they are ids; any other mix is text, with strings as they are and everything else as
JSON.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat

import pyarrow as pa
import pyarrow.compute as pc

from prefillcli.errors import UsageError
from prefillcli.rows.output import batches
from prefillcli.rows.output.answers import AnswerColumns
from prefillcli.rows.output.batches import Responses
from prefillcli.rows.output.columns import COLUMNS, ROW, ROW_COLUMN, Column, Groups, answer_columns
from prefillcli.rows.output.tallies import (
    AnswerTally,
    Counts,
    OrderRows,
    audited_exits_of,
    audited_of,
    exit_layers_of,
    summed,
)
from prefillcli.rows.records import ScoredRow
from prefillcli.rows.values import text_of
from prefillcli.stats.labels import Measure

_PREDICTIONS = ("prediction", "audit_prediction")
_TOLD = ("score", "prediction")  # what is counted of the answers to questions, under these names of every other output


def _scale(own: AnswerColumns) -> dict[str, str]:
    # The metadata of the column with an expected level: the number that each level stands for.
    numbers = {
        name: int(value) if value.is_integer() else value for name, value in zip(own.labels, own.values, strict=True)
    }
    return {"levels": json.dumps(numbers, ensure_ascii=False)}


_TYPES = {
    frozenset("b"): pa.bool_(),
    frozenset("i"): pa.int64(),
    frozenset("f"): pa.float64(),
    frozenset("if"): pa.float64(),
}


def kinds_of(texts: pa.ChunkedArray) -> str:
    """Return the kinds of values in a column of JSON texts, as letters."""
    return "".join(sorted({_kind(text) for text in texts.to_pylist() if text is not None}))


def type_for(kinds: Iterable[str], *, ids: bool = False) -> pa.DataType:
    """Return the type of a column that holds these kinds of values. Among `ids`, 1 and 1.0 differ, so they stay
    texts."""
    found = frozenset(kinds)
    return pa.string() if ids and len(found) > 1 else _TYPES.get(found, pa.string())


def typed_column(texts: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    """Return JSON texts as values of `kind`."""
    if kind != pa.string():
        return texts.cast(kind)
    values = [None if text is None else text_of(text) for text in texts.to_pylist()]
    return pa.chunked_array([pa.array(values, pa.string())])


def _kind(text: str) -> str:
    first = text[0]
    if first == '"':
        return "s"
    if first in "tf":
        return "b"
    if first in "[{":
        return "j"
    if "." in text or "e" in text or "E" in text:
        return "f"
    return "i" if len(text) < 19 or -(2**63) <= int(text) < 2**63 else "j"


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputSchema:
    """The columns of a job's output."""

    questions: tuple[AnswerColumns, ...]  # one or more; a question without a name is the only one
    id_name: str | None = None  # the carried column with the ids; None where rows are identified by their number
    # Id and kept columns as the parts have them; from JSON Lines every one is JSON text.
    carried: pa.Schema = field(default_factory=lambda: pa.schema([]))
    json_carried: bool = False  # whether the carried columns are JSON text
    # Whether such text is written as it is; else its values get the type that holds them.
    json_text: bool = False
    groups: Groups = frozenset()  # the groups of further columns, beside those of every output
    responses: Responses | None = None  # of a job whose rows are requests that are answered in the form of their API

    @property
    def asked(self) -> tuple[AnswerColumns, ...]:
        """The question of each prompt of a row."""
        return (*self.questions, *(each for each in self.questions for _ in each.others))

    def answers_of(self, scored: ScoredRow) -> tuple[ScoredRow, ...]:
        """Return the answers of a row to the prompts of its questions. The only one may have any number of prompts,
        like the pieces of a text: the row as a whole answers it."""
        return scored.answers if len(self.asked) > 1 else (scored,)

    def answered(self, scored: ScoredRow) -> Iterable[tuple[AnswerColumns, ScoredRow]]:
        """Return the answers to all prompts of a row, each with its question."""
        asked = self.asked
        return zip(asked if len(asked) > 1 else repeat(asked[0]), scored.answers, strict=False)

    def require_distinct(self, truths: Collection[str] = ()) -> None:
        """Raise UsageError if a carried column has the name of another column of the output. `truths` are those with
        right answers."""
        row = [ROW_COLUMN] if self.id_name is None else []
        told = (
            f"{prefix}{name}" for own in self.questions if own.name for prefix in ("", own.prefix) for name in _TOLD
        )
        taken = [*row, *self.results.names, ROW, *told]
        for name in self.carried.names:
            if name in taken:
                truths = (*truths, *(own.truth for own in self.questions if own.truth))
                options = dict.fromkeys(truths, "--truth") | {self.id_name: "--id-column"}
                option = options.get(name, "--keep-columns")
                raise UsageError(f"{option} {name}: the output has a column {name} already\nrename it in the input")

    @property
    def json_columns(self) -> tuple[str, ...]:
        """The columns of the output that are JSON text."""
        if self.lines is not None:
            return batches.JSON_COLUMNS
        return tuple(self.carried.names) if self.json_carried and self.json_text else ()

    def arrow(self, json_kinds: Mapping[str, Iterable[str]]) -> pa.Schema:
        """Return the Arrow schema of the output; `json_kinds` are the kinds of values in carried JSON text."""
        if self.lines is not None:
            return batches.LINE
        carried = list(self.carried)
        if self._typed:
            carried = [
                pa.field(each.name, type_for(json_kinds.get(each.name, ()), ids=each.name == self.id_name))
                for each in carried
            ]
        if self.id_name is None:
            carried.insert(0, pa.field(ROW_COLUMN, pa.int64()))
        else:
            carried.sort(key=lambda each: each.name != self.id_name)
        return pa.schema([*carried, *self.results])

    def table(self, rows: pa.Table, schema: pa.Schema) -> pa.Table:
        """Return rows of parts as rows of the output, whose `arrow` schema is given."""
        if self.lines is not None:
            return batches.lines_of(rows, ROW, self.id_name or ROW, self.lines.model).cast(schema)
        columns = []
        for own in schema:
            column = rows[ROW if own.name == ROW_COLUMN and self.id_name is None else own.name]
            if self._typed and own.name in self.carried.names:
                column = typed_column(column, own.type)
            columns.append(column)
        return pa.Table.from_arrays(columns, schema=schema)

    @property
    def columns(self) -> list[Column]:
        """The columns that scoring adds; of some there is one for each label. Those of questions with a name are
        first."""
        found = [
            (0 if own.name else COLUMNS.index(column), column.of_question(number, own))
            for number, own in enumerate(self.questions)
            for column in answer_columns(own)
        ]
        found += [
            (place, column)
            for place, column in enumerate(COLUMNS)
            if column.part == "row" and (column.group is None or column.group in self.groups)
        ]
        return [column for _, column in sorted(found, key=lambda each: each[0])]

    @property
    def results(self) -> pa.Schema:
        """Names and types of all columns that scoring adds."""
        scales = {own.name: own for own in self.questions if own.type == "score"}
        return pa.schema(
            pa.field(name, column.type, metadata=_scale(scales[name]) if name in scales else None)
            for column in self.columns
            for name in column.names
        )

    @property
    def conditional(self) -> pa.Schema:
        """Names and types of the columns that a `RowCondition` may use."""
        return pa.schema(
            [(name, column.type) for column in self.columns if column.conditional for name in column.names]
        )

    @property
    def predictions(self) -> dict[str, Sequence[str]]:
        """The labels that each column with a prediction may have, by its name."""
        found: dict[str, Sequence[str]] = {own.name: own.labels for own in self.questions if own.type == "choice"}
        for own in self.questions:
            if not own.name and own.measure is not Measure.CHOICES and len(own.labels) > 1:
                found |= dict.fromkeys(_PREDICTIONS, own.labels)
        return found

    @property
    def means(self) -> list[str]:
        """The columns with the means of ordered labels."""
        return [
            own.name or "mean"
            for own in self.questions
            if (own.type == "score" if own.name else "ordered" in own.groups)
        ]

    @property
    def lines(self) -> Responses | None:
        """How its rows are written where these are lines with responses."""
        return self.responses if self.responses is not None and self.responses.lines else None

    @property
    def _typed(self) -> bool:
        return self.json_carried and not self.json_text

    def count(self, counts: Counts, rows: pa.Table) -> Counts:
        """Add rows of parts to `counts`."""
        for own in self.questions:
            rows = self._count_answers(own, counts, rows)
        first = self.questions[0].prefix
        if first:
            rows = rows.append_column("score", rows[f"{first}score"])
        counts.add_rows(rows, id_name=self.id_name, json_carried=self.json_carried, means=self.means, first=first)
        return counts

    def _count_answers(self, own: AnswerColumns, counts: Counts, rows: pa.Table) -> pa.Table:
        # The rows with what is counted of the answers to a question.
        if own.has_shares and self.lines is None:
            shares, rows = own.shares_in(rows), own.with_answer(rows)
            mass = None if own.classes else own.column("label_mass")
            tally = AnswerTally.of_rows(rows, shares, own.labels, mass, self.id_name, self.json_carried)
            counts.tallies.answers = summed(counts.tallies.answers, {own.key: tally})
        if "audit" in own.groups:
            audited = audited_of(rows, own.prefix, own.truth, self.json_carried)
            counts.audits = summed(counts.audits, {own.key: audited})
        if "exits" in own.groups:
            scored = rows.filter(pc.is_valid(rows[f"{own.prefix}score"]))
            layers = exit_layers_of(scored, own.prefix)
            counts.tallies.exit_layers = summed(counts.tallies.exit_layers, {own.key: layers})
        if {"exits", "audit"} <= own.groups:
            flips = audited_exits_of(rows, own.prefix)
            counts.audited_exits = summed(counts.audited_exits, {own.key: flips})
        if "orders" in own.groups:
            decided = rows[f"{own.name}.order_decided"].drop_null()
            found = OrderRows(len(decided), pc.sum(decided).as_py() or 0)
            counts.tallies.orders = summed(counts.tallies.orders, {own.key: found})
        return rows
