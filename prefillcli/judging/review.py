"""Answers that a person should look at: their own probability is below the floor of their question."""

from __future__ import annotations

import codecs
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from prefillcli.core.roles import Judge
from prefillcli.errors import PrefillError, UsageError, counted
from prefillcli.judging.calibration import require_fitting
from prefillcli.judging.truth import REVIEW, RIGHT, Mistakes, is_blank, reason
from prefillcli.options.groups import split_names
from prefillcli.options.judging import ReviewOptions
from prefillcli.prompts.questions import Question
from prefillcli.report.finding import Finding
from prefillcli.report.section import Section
from prefillcli.rows.filesystems import split_path, written_path
from prefillcli.rows.input.source import Source
from prefillcli.rows.output import ANSWER, FILE_ENDINGS, format_of
from prefillcli.rows.output.answers import AnswerColumns
from prefillcli.rows.output.columns import ROW_COLUMN, added
from prefillcli.rows.output.destination import Destination, open_format
from prefillcli.rows.output.schema import kinds_of, type_for, typed_column
from prefillcli.rows.output.sink import Sink
from prefillcli.rows.output.store import open_store, read_sealed
from prefillcli.rows.proof import hash_value
from prefillcli.runtime import log
from prefillcli.stats.acceptance import RISK, Acceptance
from prefillcli.stats.arrays import BoolArray

if TYPE_CHECKING:
    from prefillcli.core.inputs import OpenRows
    from prefillcli.core.run import Run
    from prefillcli.prompts.labels import Labels
    from prefillcli.report.run import RunReport
    from prefillcli.rows.output.schema import OutputSchema

Value = bool | int | str
"""An answer: the name of a label or an option, true or false, or the number of a level."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class AnswerFloor(_Frozen):
    """The floor of the answers to a question, or of one of them, and the labelled rows that prove it."""

    answer: Value | None  # None: any
    floor: float | None  # None: none is proven, and a person looks at all
    rows: int  # with this answer
    right: int = 0  # of them, those with the right one
    accepted: int  # of them, those at or above the floor
    errors: int  # of these, wrong ones
    bound: float | None  # the accuracy that the accepted ones prove
    share: float  # of the rows that is accepted
    needed: int | None  # rows that would probably prove one; None: there is one, or no number would

    @classmethod
    def of(cls, answer: Value | None, found: Acceptance, right: BoolArray) -> AnswerFloor:
        """Return the entry of an answer, for rows of which these are `right`."""
        names = ("floor", "rows", "accepted", "errors", "bound", "share", "needed")
        return cls(answer=answer, right=int(right.sum()), **{name: getattr(found, name) for name in names})


class QuestionFloors(_Frozen):
    """The floors of a question."""

    truth: str  # the column with the right answers
    floors: tuple[AnswerFloor, ...] = Field(min_length=1)
    left_out: dict[str, int] = {}  # rows that were not used, by reason
    mistakes: Mistakes | None = None  # right answers that are none of the options


class FloorFile(_Frozen):
    """The content of `floors.json`."""

    schema_version: Literal[1] = 1
    accuracy: float = Field(gt=0, lt=1)
    confidence: float = 1 - RISK
    questions: dict[str, QuestionFloors]  # by name
    unknown_ids: Mistakes | None = None  # ids in the file with the right answers that are of no row
    scores: str = ""  # the output of `prefill score`, as the user named it
    job: dict[str, str] = {}  # the fingerprint of the scoring job; empty where it is unknown


# The floors of a job, as `--review-below` gives them.


OPTION, FILE_OPTION, COLUMN = "--review-below", "--review", REVIEW
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
        try:
            pairs = [[side.strip() for side in each.partition("=")] for each in split_names(text)]
        except ValueError as error:
            raise UsageError(f"{OPTION} {text}: {error}") from None
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


def _answers(own: AnswerColumns) -> Sequence[Value]:
    return (True, False) if own.type == "predicate" else own.labels


class ReviewUse(Finding):
    """The rows with answers in doubt."""

    key: ClassVar[str] = "review"
    place: ClassVar[int] = 12

    rows: int
    questions: dict[str, int]  # of them, those in which the answer to each question is in doubt
    file: str | None  # that has them, with --review
    unanswered: int = 0  # rows with an error or left out, which a person should look at too

    def sections(self, report: RunReport) -> Iterable[Section]:
        """Return the section on the answers in doubt."""
        each = ", ".join(f"{count:,} {name}" for name, count in self.questions.items() if name != ANSWER)
        none = f", and {counted(self.unanswered, 'row')} without an answer" if self.unanswered else ""
        found = Section(first=True, tiles=[("to review", f"{self.rows + self.unanswered:,}")])
        found.lines = [("to review", f"{counted(self.rows, 'row')}{f' ({each})' if each else ''}{none}")]
        found.metric("review_rows", "Rows with an answer whose probability is below its floor.", float(self.rows))
        return [found]


class Reviewing(Judge):
    """Names the answers in doubt. Raises UsageError for floors or a path that are wrong whatever the input holds."""

    def __init__(self, options: ReviewOptions, floors: str) -> None:
        self.groups = added({"review": True})
        self._told, self._given = False, floors
        self._floors, self._job = read_floors(floors)
        self._file = file = options.review
        if file is not None and (format_of(file) is None or file.endswith("/")):
            raise UsageError(f"unknown ending of {FILE_OPTION} {file}\nuse {', '.join(FILE_ENDINGS)}")

    def floors(self, schema: OutputSchema) -> Mapping[str, tuple[float | None, ...]]:
        """Return the floors of the labels of each question, below which answers are reviewed. Raises UsageError."""
        return floors_of(self._floors, {own.key: _answers(own) for own in schema.questions})

    def check(self, rows: OpenRows, labels: Labels, schema: OutputSchema) -> None:
        self.floors(schema)
        if self._file is not None:
            self._tell(rows)
            own = {name for each in _reviewed(labels, schema) for name in each.names}
            for name in rows.carried:
                if name in own:
                    raise UsageError(f"{FILE_OPTION}: its file has a column {name} already\nrename it in the input")

    def _tell(self, rows: OpenRows) -> None:
        # Warn once of a file that has no texts to read.
        if not self._told and not set(rows.carried) - {rows.settings.ids.id_column, *rows.source.partition_keys}:
            self._told = True
            log.warning(
                f"{FILE_OPTION} {self._file}: it will not have what the rows are about, only their "
                "ids\n"
                "name the columns that a person reads with --keep-columns"
            )

    def identity(self) -> Mapping[str, str]:
        """Return its part of the job's fingerprint."""
        return {
            "review": hash_value([[name, [*map(list, own.items())]] for name, own in sorted(self._floors.items())])
        }

    def require_fitting(self, fingerprint: Mapping[str, str]) -> None:
        """Raise UsageError for floors of another job."""
        if self._job is not None:
            require_fitting(OPTION, self._given, self._job, fingerprint)

    def ended(self, run: Run) -> None:
        path = self._file
        with run.clock.phase("write"), run.stop.at_once():
            rows, questions, unanswered = 0, Counter[str](), 0
            for table in run.sink.tables([COLUMN, "error"]):
                doubt = table[COLUMN].drop_null()
                questions.update(pc.list_flatten(doubt).to_pylist())
                rows += pc.sum(pc.greater(pc.list_value_length(doubt), 0)).as_py() or 0
                unanswered += len(table) - table["error"].null_count
            if path is not None:
                folders = run.inputs.source.partition_keys if run.settings.files.partition else ()
                write_review(path, run.sink, _reviewed(run.inputs.labels, run.inputs.schema), folders)
        doubts = dict(sorted(questions.items()))
        run.report.add(ReviewUse(rows=rows, questions=doubts, file=path, unanswered=unanswered))


@dataclass(frozen=True, slots=True)
class _Reviewed:
    """A question in a review file: what is asked, the answer in words and how sure it is, and an empty column for the
    right one."""

    own: AnswerColumns
    asked: str

    @property
    def names(self) -> list[str]:
        """Its columns."""
        key = self.own.key
        return [f"{key}.question", self.own.column(""), f"{key}.sure", f"{key}.{RIGHT}"]

    def columns(self, rows: pa.Table) -> tuple[list[pa.Array], list[str | None]]:
        """Return the values of its columns for rows of the output, and why a person should look at the answer of
        each: None where nobody needs to."""
        shares = self.own.shares_in(rows)
        known = ~np.isnan(shares).any(axis=1)
        best = np.where(known, np.nan_to_num(shares).argmax(axis=1), 0)
        words = pa.array(np.array(self.own.labels, object)[best], pa.string(), mask=~known)
        # Cut off, never rounded up: an answer below a floor does not look as if it reached it.
        sure = pa.array(np.floor(shares.max(axis=1, initial=0.0) * 1e4) / 1e4, pa.float64(), mask=~known)
        asked = pa.array([self.asked] * len(rows), pa.string())
        doubts = rows[COLUMN].to_pylist()
        whys = [
            self._why(self.own.floors[at]) if self.own.key in (doubt or ()) else None
            for doubt, at in zip(doubts, best.tolist(), strict=True)
        ]
        return [asked, words, sure, pa.nulls(len(rows), pa.string())], whys

    def _why(self, floor: float | None) -> str:
        return reason(self.own.key, "no floor is proven" if floor is None else f"below {floor:g}")


def _reviewed(labels: Labels, schema: OutputSchema) -> list[_Reviewed]:
    # The questions of a job, as a review file has them.
    pairs = zip(schema.questions, labels.asked, strict=False)
    return [_Reviewed(own, _asked(each.question)) for own, each in pairs]


def _asked(question: Question) -> str:
    # A question with its answers: Is it late? (Yes or No)
    words = [answer.name for answer in question.answers]
    listed = f"{', '.join(words[:-1])} or {words[-1]}"
    return f"{question.instructions} ({listed})" if question.instructions else listed


def write_review(path: str, sink: Sink, questions: Sequence[_Reviewed], folders: Sequence[str] = ()) -> None:
    """Write the rows of a finished output that a person should look at to a file, which appears whole: those with
    answers in doubt, and those without an answer. They have their id or number, kept columns, questions, answers in
    words, empty columns for the right ones, and why they are here.

    Columns that name `folders` are not in the output's files, and are left out. Raises PrefillError.
    """
    found = format_of(path)
    if found is None:
        raise UsageError(f"unknown ending of {FILE_OPTION} {path}")
    file_format, schema = open_format(found), sink.schema
    kept = [name for name in schema.carried.names if name not in folders]
    carried = [
        *([ROW_COLUMN] if schema.id_name is None else []),
        *sorted(kept, key=lambda name: name != schema.id_name),
    ]
    told = [name for each in questions for name in each.own.told]
    names = list(dict.fromkeys([*carried, *told, COLUMN, *_ERRORS]))

    def to_look_at() -> Iterator[pa.Table]:
        for table in sink.tables(names):
            doubt = pc.fill_null(pc.greater(pc.list_value_length(table[COLUMN]), 0), False)
            yield table.filter(pc.or_(doubt, pc.is_valid(table["error"]))).select(names)

    json_output = Destination.parse(sink.location).file_format.json_text
    first = next(to_look_at(), None)
    kinds = {name: pa.string() if first is None else first.schema.field(name).type for name in carried}
    # From an output in JSON Lines, kept columns come as JSON texts.
    texts = [name for name in kept if json_output and pa.types.is_string(kinds[name])]
    typed = {} if file_format.json_text else _types(to_look_at(), texts, schema.id_name)
    columns = [(name, pa.float64() if name.endswith(".sure") else pa.string()) for e in questions for name in e.names]
    out = pa.schema([*((name, typed.get(name, kinds[name])) for name in carried), *columns, (COLUMN, pa.string())])

    def tables() -> Iterator[pa.Table]:
        for table in to_look_at():
            own = [
                typed_column(table[name], typed[name]) if name in typed else table[name].cast(kinds[name])
                for name in carried
            ]
            whys = []
            for each in questions:
                found, why = each.columns(table)
                own += found
                whys.append(why)
            own.append(pa.array(_reasons(table, whys), pa.string()))
            yield pa.Table.from_arrays(own, schema=out)

    folder, name = split_path(written_path(path, FILE_OPTION))
    store = open_store(folder)
    store.clean(lambda left: left == name)
    with store.create(name) as file:
        if found.delimiter:
            file.write(codecs.BOM_UTF8)  # or Excel takes another encoding
        file_format.write(file, out, tables(), texts if file_format.json_text else ())


_ERRORS = ("error", "error_detail")


def _reasons(rows: pa.Table, whys: Sequence[Sequence[str | None]]) -> Iterator[str]:
    # Why each row is there: it has no answer, or questions are in doubt, of which there are `whys` [questions, rows].
    for code, detail, *doubts in zip(*(rows[name].to_pylist() for name in _ERRORS), *whys, strict=True):
        yield "; ".join(filter(None, doubts)) if code is None else f"no answer: {code}: {detail or ''}"


def _types(tables: Iterator[pa.Table], texts: Sequence[str], id_name: str | None) -> dict[str, pa.DataType]:
    # The types for columns of JSON texts.
    kinds: dict[str, set[str]] = defaultdict(set)
    for table in tables:
        for name in texts:
            kinds[name].update(kinds_of(table[name]))
    return {name: type_for(kinds[name], ids=name == id_name) for name in texts}


def is_review(path: str, start: bytes) -> bool:
    """Return whether the file at a path has the rows to review of an earlier run, and nobody's right answers."""
    try:
        source = Source.open([path])
        names = source.available
        if names[-1:] != (COLUMN,) or "computed_tokens" in names:
            return False
        filled = [name for name in names if name.endswith(f".{RIGHT}")]
        batches = source.select(columns=filled, carried=()).batches()
        return all(is_blank(answer) for batch in batches for name in filled for answer in batch.columns[name])
    except PrefillError:
        return False
