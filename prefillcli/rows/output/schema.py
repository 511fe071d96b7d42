"""The schema of an output: the id, the columns that are carried from the input, and those that scoring adds.

The kinds of its values decide the type of a column carried from JSON Lines: b true or false, i integer, f other
number, s string, j anything else (arrays, objects, integers beyond 64 bits). A column of one kind gets its type; i and
f together are float64, unless they are ids; any other mix is text, with strings as they are and everything else as
JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from prefillcli.errors import UsageError
from prefillcli.rows.output import ANSWER, batches
from prefillcli.rows.output.answers import AnswerColumns
from prefillcli.rows.output.batches import Responses
from prefillcli.rows.output.columns import (
    COLUMNS,
    ROW,
    ROW_COLUMN,
    Column,
    Groups,
    ResultRows,
    of_question,
    typed_answer,
)
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
from prefillcli.stats.arrays import Float64Array
from prefillcli.stats.labels import Measure, label_scores

_PREDICTIONS = ("prediction", "audit_prediction")
_TOLD = ("score", "prediction")  # what is counted of the answers to questions, under these names of every other output


def _scale(own: OutputSchema) -> dict[str, str]:
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

    labels: tuple[str, ...]
    id_name: str | None = None  # the carried column with the ids; None where rows are identified by their number
    # Id and kept columns as the parts have them; from JSON Lines every one is JSON text.
    carried: pa.Schema = field(default_factory=lambda: pa.schema([]))
    json_carried: bool = False  # whether the carried columns are JSON text
    # Whether such text is written as it is; else its values get the type that holds them.
    json_text: bool = False
    truth: str | None = None  # the carried column with the right answers
    groups: Groups = frozenset()  # the groups of further columns, beside those of every output
    measure: Measure = Measure.SHARES  # the meaning of the labels' numbers
    values: tuple[float, ...] = ()  # the number that each label stands for, if they are ordered
    # In an output with several questions about each row, the columns of each, under its `name`; `labels` and `measure`
    # are those of the first then.
    questions: tuple[OutputSchema, ...] = ()
    name: str = ""
    type: str = ""  # of a question: predicate, choice or score
    options: tuple[str | bool, ...] = ()  # what each of its answers says
    responses: Responses | None = None  # of a job whose rows are requests that are answered in the form of their API
    # For a question, the numbers of the rows it is asked about, by the answers to earlier ones; None: all.
    when: Callable[[ResultRows], Set[int]] | None = None
    # For a question with the group `orders`, the numbers of its prompts in other orders, after those of all questions.
    others: tuple[int, ...] = ()
    # Whether the labels are classes of a head, so that their mass says nothing of the prompt.
    classes: bool = False
    # For the column `review`, the floor of each label; none where answers are not reviewed.
    floors: tuple[float | None, ...] = ()

    def with_floors(self, floors: Mapping[str, tuple[float | None, ...]]) -> OutputSchema:
        """Return it with the floors of the questions of these names."""
        questions = tuple(each.with_floors(floors) for each in self.questions)
        return replace(self, floors=floors.get(self.name or ANSWER, ()), questions=questions)

    @property
    def asked(self) -> tuple[OutputSchema, ...]:
        """The columns of the answer to each prompt of a row."""
        return (*self.questions, *(each for each in self.questions for _ in each.others)) or (self,)

    def answered(self, scored: ScoredRow) -> Iterable[tuple[OutputSchema, ScoredRow]]:
        """Return the answers of a row, each with its columns."""
        if self.lines is not None:  # as many as its line has pairs of texts, or questions
            return ((self, each) for each in scored.answers)
        return zip(self.asked, scored.answers if self.questions else (scored,), strict=True)

    def require_distinct(self, truths: Collection[str] = ()) -> None:
        """Raise UsageError if a carried column has the name of another column of the output. `truths` are those with
        right answers."""
        row = [ROW_COLUMN] if self.id_name is None else []
        told = (f"{prefix}{name}" for own in self.questions for prefix in ("", f"{own.name}.") for name in _TOLD)
        taken = [*row, *self.results.names, ROW, *told]
        for name in self.carried.names:
            if name in taken:
                options = dict.fromkeys((self.truth, *truths), "--truth") | {self.id_name: "--id-column"}
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
        """The columns that scoring adds; of some there is one for each label."""
        found = [
            column
            for column in COLUMNS
            if (column.group is None or column.group in self.groups)
            and len(self.labels) >= column.least_labels
            and self.measure in column.measures
        ]
        if self.type:  # the answers to one of several questions
            own = [column for column in found if column.part == "answer"]
            return [*(each._replace(part="label") for each in typed_answer(self)), *own]
        if not self.questions:
            return found
        answers = [
            of_question(column, number, own.name)
            for number, own in enumerate(self.questions)
            for column in own.columns
        ]
        return [*answers, *(column for column in found if column.part == "row")]

    @property
    def answers(self) -> list[AnswerColumns]:
        """The columns with the answers to each of several questions, and what they say of each label."""
        return [AnswerColumns(own.name, own.type, own.labels, own.values) for own in self.questions]

    @property
    def results(self) -> pa.Schema:
        """Names and types of all columns that scoring adds."""
        scales = {own.name: own for own in self.questions if own.type == "score"}
        return pa.schema(
            pa.field(name, column.type, metadata=_scale(scales[name]) if name in scales else None)
            for column in self.columns
            for name in column.names(self.labels)
        )

    @property
    def conditional(self) -> pa.Schema:
        """Names and types of the columns that a `RowCondition` may use."""
        columns = [column for column in self.columns if column.conditional]
        return pa.schema([(name, column.type) for column in columns for name in column.names(self.labels)])

    @property
    def predictions(self) -> dict[str, Sequence[str]]:
        """The labels that each column with a prediction may have, by its name."""
        if self.questions:
            return {each.name: each.labels for each in self.questions if each.type == "choice"}
        known = self.measure is not Measure.CHOICES and len(self.labels) > 1
        return dict.fromkeys(_PREDICTIONS, self.labels) if known else {}

    @property
    def means(self) -> list[str]:
        """The columns with the means of ordered labels."""
        names = {"mean", *(own.name for own in self.questions if own.type == "score")}
        return [column.name for column in self.columns if column.name in names]

    @property
    def lines(self) -> Responses | None:
        """How its rows are written where these are lines with responses."""
        return self.responses if self.responses is not None and self.responses.lines else None

    @property
    def _typed(self) -> bool:
        return self.json_carried and not self.json_text

    @property
    def _has_shares(self) -> bool:
        several = len(self.labels) > 1 and self.lines is None
        return self.measure is Measure.SHARES and not self.questions and several

    def _label_shares(self, rows: pa.Table) -> Float64Array:
        # The probability of each label in a job of labels [rows, labels]; at a temperature of 1 where only
        # log-probabilities tell it.
        if len(self.labels) == 2:
            score = rows["score"].to_numpy()
            return np.stack([score, 1 - score], axis=1)
        told = "score" if "label_scores" in self.groups else "logprob"
        found = np.stack([rows[f"{told}_{label}"].to_numpy() for label in self.labels], axis=1)
        return found if told == "score" else label_scores(found)

    def count(self, counts: Counts, rows: pa.Table) -> Counts:
        """Add rows of parts to `counts`."""
        first = f"{self.questions[0].name}." if self.questions else ""
        shares = {ANSWER: self._label_shares(rows)} if self._has_shares else {}
        for own in self.answers:
            told = rows[own.column(own.source("score"))]
            shares[own.name] = own.shares(told.to_pylist())
            rows = rows.append_column(f"{own.name}.score", own.values_of("score", told))
            rows = rows.append_column(f"{own.name}.prediction", own.values_of("prediction", told))
        for name, told_shares in shares.items():
            asked = next((own for own in self.questions if own.name == name), self)
            mass = None if self.classes else f"{name}.label_mass" if self.questions else "label_mass"
            tally = AnswerTally.of_rows(rows, told_shares, asked.labels, mass, self.id_name, self.json_carried)
            counts.tallies.answers = summed(counts.tallies.answers, {name: tally})
        if first:
            rows = rows.append_column("score", rows[f"{first}score"])
        json_carried, means = self.json_carried, self.means
        counts.add_rows(rows, self.truth, id_name=self.id_name, json_carried=json_carried, means=means, first=first)
        for each in self.questions:
            if "audit" in each.groups:
                counts.audits = summed(counts.audits, {each.name: audited_of(rows, f"{each.name}.")})
            if "exits" in each.groups:
                answered = rows.filter(pc.is_valid(rows[f"{each.name}.score"]))
                layers = exit_layers_of(answered, f"{each.name}.")
                counts.tallies.exit_layers = summed(counts.tallies.exit_layers, {each.name: layers})
            if {"exits", "audit"} <= each.groups:
                audited = audited_exits_of(rows, f"{each.name}.")
                counts.audited_exits = summed(counts.audited_exits, {each.name: audited})
            if "orders" in each.groups:
                decided = rows[f"{each.name}.order_decided"].drop_null()
                found = OrderRows(len(decided), pc.sum(decided).as_py() or 0)
                counts.tallies.orders = summed(counts.tallies.orders, {each.name: found})
        return counts
