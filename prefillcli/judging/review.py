"""Answers that a person should look at: their own probability is below the floor of their question."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from prefillcli.core.roles import Judge
from prefillcli.errors import PrefillError, UsageError, counted
from prefillcli.judging.calibration import require_fitting
from prefillcli.options.groups import split_names
from prefillcli.report.section import Section
from prefillcli.rows.filesystems import split_path, written_path
from prefillcli.rows.input.source import Source
from prefillcli.rows.output import ANSWER, FILE_ENDINGS, format_of
from prefillcli.rows.output.columns import (
    COLUMN_TYPES,
    ROW_COLUMN,
    OutputSchema,
    kinds_of,
    type_for,
    typed_column,
)
from prefillcli.rows.output.sink import Sink
from prefillcli.rows.output.store import open_store, read_sealed
from prefillcli.rows.output.target import Target, open_format
from prefillcli.rows.proof import hash_value
from prefillcli.stats.acceptance import RISK, Acceptance

if TYPE_CHECKING:
    from prefillcli.core.inputs import Inputs
    from prefillcli.core.run import Run
    from prefillcli.report.run import RunReport

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


# The floors of a job, as `--review-below` gives them.


OPTION, FILE_OPTION, COLUMN = "--review-below", "--review", "review"
_AGAIN = "make it with prefill calibrate --accuracy"
_ALL = ""  # stands for every question
Floors = dict[str, dict[Value | None, float | None]]
"""By question and answer; None is any answer of the first, and no floor of the second: a person looks at all."""


def read_floors(text: str) -> tuple[Floors, dict[str, str] | None]:
    """Return the floors of an option's text, a number, pairs of names and numbers, or a file, and of a file the
    fingerprint of the job that its scores are of. Raises UsageError."""
    if (floor := _floor(text)) is not None:
        return {_ALL: {None: floor}}, None
    if "=" in text and not text.endswith(".json"):
        pairs = [[side.strip() for side in each.partition("=")] for each in split_names(text)]
        floors = {name: _floor(number) for name, _, number in pairs}
        if len(floors) < len(pairs) or not all(floors) or None in floors.values():
            raise UsageError(
                f"{OPTION} {text}: it names each question once, with a number from 0 to 1\n"
                "write it like relevant=0.9,tone=0.8"
            )
        return {name: {None: floor} for name, floor in floors.items()}, None
    content, _ = read_sealed(OPTION, text, f"{_AGAIN}, or give a number from 0 to 1")
    try:
        found = FloorFile.model_validate_json(content)
    except ValidationError:
        raise UsageError(f"{OPTION} {text}: neither a number from 0 to 1 nor a file of floors\n{_AGAIN}") from None
    named = {name: {own.answer: own.floor for own in each.floors} for name, each in found.questions.items()}
    return named, found.job


def _floor(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if 0 <= number <= 1 else None


def floors_of(floors: Floors, answers: Mapping[str, Sequence[Value]]) -> dict[str, tuple[float | None, ...]]:
    """Return the floor of each answer to each question, for questions with these `answers`. An answer without one is
    always looked at. Raises UsageError for floors of other questions or answers."""
    found = {}
    for name, own in (dict.fromkeys(answers, floors[_ALL]) if _ALL in floors else floors).items():
        if name not in answers:
            raise UsageError(
                f"{OPTION}: it has a floor for {name}, which this job does not ask\nit asks {', '.join(answers)}"
            )
        other = [str(each) for each in own if each is not None and each not in answers[name]]
        if other:
            raise UsageError(f"{OPTION}: {name} has no answer {other[0]!r}\nfind floors for its answers: {_AGAIN}")
        found[name] = tuple(own.get(each, own.get(None)) for each in answers[name])
    return found


def _answers(own: OutputSchema) -> Sequence[Value]:
    return (True, False) if own.type == "predicate" else own.labels


class ReviewUse(BaseModel):
    """The rows with answers in doubt."""

    rows: int
    questions: dict[str, int]  # of them, those in which the answer to each question is in doubt
    file: str | None  # that has them, with --review


class Reviewing(Judge):
    """Names the answers in doubt. Raises UsageError for floors or a path that are wrong whatever the input holds."""

    def __init__(self, settings: Any) -> None:
        self.settings = settings
        self._floors, self._job = read_floors(settings.review_below)
        if settings.review is not None and (format_of(settings.review) is None or settings.review.endswith("/")):
            raise UsageError(f"unknown ending of {FILE_OPTION} {settings.review}\nuse {', '.join(FILE_ENDINGS)}")

    def check(self, inputs: Inputs) -> None:
        schema = inputs.schema()
        inputs.floors = floors_of(
            self._floors, {own.name or ANSWER: _answers(own) for own in schema.questions or (schema,)}
        )

    def identity(self) -> Mapping[str, str]:
        """Return its part of the job's fingerprint."""
        return {
            "review": hash_value([[name, [*map(list, own.items())]] for name, own in sorted(self._floors.items())])
        }

    def require_fitting(self, fingerprint: Mapping[str, str]) -> None:
        """Raise UsageError for floors of another job."""
        if self._job is not None:
            require_fitting(OPTION, self.settings.review_below, self._job, fingerprint)

    def ended(self, run: Run) -> None:
        path = self.settings.review
        with run.clock.phase("write"), run.stop.at_once():
            rows, questions = 0, Counter[str]()
            for table in run.sink.tables([COLUMN]):
                doubt = table[COLUMN].drop_null()
                questions.update(pc.list_flatten(doubt).to_pylist())
                rows += pc.sum(pc.greater(pc.list_value_length(doubt), 0)).as_py() or 0
            if path is not None:
                write_review(path, run.sink, run.inputs.source.partition_keys if self.settings.partition else ())
        run.report.review = ReviewUse(rows=rows, questions=dict(sorted(questions.items())), file=path)


def write_review(path: str, sink: Sink, folders: Sequence[str] = ()) -> None:
    """Write the rows of a finished output that have answers in doubt to a file, which appears whole: id or number,
    kept columns, answers, and the questions in doubt. Columns that name `folders` are not in the output's files, and
    are left out. Raises PrefillError."""
    found = format_of(path)
    if found is None:
        raise UsageError(f"unknown ending of {FILE_OPTION} {path}")
    file_format, schema = open_format(found), sink.schema
    kept = [name for name in schema.carried.names if name not in folders]
    carried = sorted(kept, key=lambda name: name != schema.id_name)
    answers = [name for each in schema.columns if each.part != "row" for name in each.names(schema.labels)]
    names = [*([ROW_COLUMN] if schema.id_name is None else []), *carried, *dict.fromkeys(answers), COLUMN]

    def in_doubt() -> Iterator[pa.Table]:
        for table in sink.tables(names):
            yield table.filter(pc.greater(pc.list_value_length(table[COLUMN]), 0)).select(names)

    json_output = Target.parse(sink.location).file_format.json_text
    first = next(in_doubt(), None)
    own = pa.schema([(name, pa.string()) for name in names]) if first is None else first.schema
    strings = [each.name for each in own if pa.types.is_string(each.type)]
    known = {*COLUMN_TYPES, *(name for name in answers if schema.questions)} - set(kept)  # read with their types
    texts = [name for name in strings if name not in known] if json_output else []
    typed = {} if file_format.json_text else _types(in_doubt(), texts, schema.id_name)
    fields = [each.with_type(typed.get(each.name, each.type)) for each in own]

    def tables() -> Iterator[pa.Table]:
        for table in in_doubt():
            columns = [
                typed_column(table[each.name], each.type) if each.name in typed else table[each.name].cast(each.type)
                for each in fields
            ]
            yield pa.Table.from_arrays(columns, schema=pa.schema(fields))

    folder, name = split_path(written_path(path, FILE_OPTION))
    store = open_store(folder)
    store.clean(lambda left: left == name)
    with store.create(name) as file:
        file_format.write(file, pa.schema(fields), tables(), texts if file_format.json_text else ())


def _types(tables: Iterator[pa.Table], texts: Sequence[str], id_name: str | None) -> dict[str, pa.DataType]:
    # The types for columns of JSON texts.
    kinds: dict[str, set[str]] = defaultdict(set)
    for table in tables:
        for name in texts:
            kinds[name].update(kinds_of(table[name]))
    return {name: type_for(kinds[name], ids=name == id_name) for name in texts}


def is_review(path: str, start: bytes) -> bool:
    """Return whether the file at a path has the rows to review of an earlier run."""
    try:
        names = Source.open([path]).available
    except PrefillError:
        return False
    return names[-1:] == (COLUMN,) and "computed_tokens" not in names


def section(report: RunReport) -> Section | None:
    """Return the section on the answers in doubt; None where none is looked for."""
    use: ReviewUse | None = report.review
    if use is None:
        return None
    each = ", ".join(f"{count:,} {name}" for name, count in use.questions.items() if name != ANSWER)
    found = Section(lines=[("to review", f"{counted(use.rows, 'row')}{f' ({each})' if each else ''}")])
    found.metric("review_rows", "Rows with an answer whose probability is below its floor.", float(use.rows))
    return found
