"""Further questions about scored rows: the choice of the rows, and the parts that ask."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from prefillcli.core.request import Request
from prefillcli.engines.base import Answer, Continuations
from prefillcli.plan.pack import Limits
from prefillcli.rows.output.columns import ROW_COLUMN, Probabilities, ResultRows
from prefillcli.rows.output.destination import Destination
from prefillcli.rows.output.schema import OutputSchema
from prefillcli.rows.records import ScoredRow, Window
from prefillcli.rows.values import id_texts
from prefillcli.walk.continuations import Beginning, Writing

if TYPE_CHECKING:
    from prefillcli.core.inputs import Inputs
    from prefillcli.core.roles import FollowUp


class Condition(Protocol):
    """Chooses rows by their columns. It can be pickled."""

    @property
    def columns(self) -> frozenset[str]:
        """The columns that it reads."""

    @property
    def limit(self) -> int | None:
        """The most rows of the input that are chosen, the first ones; None: all."""

    def chosen(self, window: Window, rows: ResultRows) -> Collection[int]:
        """Return the numbers of the chosen ones among these rows of a window."""


@dataclass(frozen=True, slots=True)
class RowSelection:
    """The choice of scored rows to ask about, and their predicted labels. It can be pickled.

    Without a `condition` all are. The scores of the output are made with `temperature` and `probabilities`.
    """

    schema: OutputSchema
    condition: Condition | None = None
    temperature: float = 1.0
    probabilities: Mapping[str, Probabilities] = field(default_factory=dict)

    @property
    def columns(self) -> frozenset[str]:
        """The columns that it reads."""
        return frozenset() if self.condition is None else self.condition.columns

    def wanted(self, window: Window, scored: Sequence[ScoredRow]) -> dict[int, dict[int, int]]:
        """Return the wanted ones of these rows of a window. By row, it has the numbers of the prompts that were asked,
        each with the number of the label it was given.

        A row whose score is not a finite number is not wanted.
        """
        done = ResultRows.of(window, scored, {}, self.schema, self.temperature, self.probabilities)
        best: dict[int, dict[int, int]] = {}
        for part, own in enumerate(done.questions):
            for each, scores in zip(own.scored, own.scores, strict=True):
                best.setdefault(each.row, {})[part] = int(scores.argmax())
        if self.condition is None:
            return best
        return {row: best[row] for row in self.condition.chosen(window, done) if row in best}


@dataclass(frozen=True, slots=True)
class WantedRow:
    """A scored row with further questions. `label` is the number of its predicted label.

    A row with several prompts has the same for each that was asked, as `parts`; itself, it is about the first.
    """

    request: Request
    scored: ScoredRow
    label: int
    parts: tuple[WantedRow, ...] = ()

    @property
    def prompt_tokens(self) -> int:
        """The tokens of its prompts."""
        return sum(len(each.request.prompt.tokens) for each in self.parts or (self,))


class Further:
    """The questions of a follow-up about wanted rows. Their answers go into the `ScoredRow`."""

    most = 1
    """Questions about one row, at most."""

    def later(self, window: Window, requests: Sequence[Request]) -> Collection[int]:
        """Return the numbers of the window's questions that it asks itself, once their rows are scored."""
        return ()

    def continuations(self, window: Window, requests: Mapping[int, Request]) -> Continuations | None:
        """Return which of these questions of a window get a text as soon as they are scored; None if none does."""
        return None

    def scored(self, row: WantedRow, answer: Answer) -> None:
        """Take the answer that scored a wanted row."""

    def lacks(self, row: ScoredRow) -> bool:
        """Return whether a wanted row needs more than `scored` gave it."""
        return True

    def requests(self, window: Window, row: WantedRow, limits: Limits) -> Sequence[Request]:
        """Return the next questions about a wanted row; none once everything is known."""
        return ()

    def close(self) -> None:
        """Ask no more questions."""


@dataclass(frozen=True, slots=True)
class FurtherQuestions:
    """The questions of a job about scored rows, and the choice of these rows. `chosen` counts the chosen rows that are
    already written."""

    choice: RowSelection
    askers: Sequence[Further]
    chosen: Callable[[], int] = lambda: 0

    @classmethod
    def of(
        cls,
        inputs: Inputs,
        condition: Condition | None,
        follow_ups: Sequence[FollowUp],
        probabilities: Mapping[str, Probabilities],
        chosen: Callable[[], int] = lambda: 0,
    ) -> FurtherQuestions | None:
        """Return the questions of these follow-ups about the chosen rows of an output with these calibrated
        `probabilities`; None if there are none."""
        choice = RowSelection(inputs.schema, condition, inputs.settings.answers.temperature, probabilities)
        askers = [asker for each in follow_ups if (asker := each.further(inputs, choice)) is not None]
        return cls(choice, askers, chosen) if askers else None

    @property
    def limit(self) -> int | None:
        """The most rows that are asked about."""
        return None if self.choice.condition is None else self.choice.condition.limit

    def has_room(self, rows: int) -> bool:
        """Return whether the limit has room for this many more rows."""
        return self.limit is None or self.chosen() + rows <= self.limit

    def close(self) -> None:
        """Ask no more questions."""
        for each in self.askers:
            each.close()


@dataclass(frozen=True, slots=True)
class GivenContinuations:
    """`Continuations` of prompts that are known to be wanted."""

    writing: Writing
    beginnings: Mapping[int, Beginning]
    again: bool = True

    def wanted(self, answers: Sequence[Answer]) -> Mapping[int, Beginning]:
        found = (answer.prompt for answer in answers)
        return {prompt: self.beginnings[prompt] for prompt in found if prompt in self.beginnings}

    def of(self, prompts: Collection[int]) -> GivenContinuations:
        own = {prompt: each for prompt, each in self.beginnings.items() if prompt in prompts}
        return replace(self, beginnings=own)


MOST_ROWS = 10


def first_rows(output: str, names: Sequence[str], id_name: str | None) -> list[dict[str, Any]]:
    """Return the first rows of an output with a value in one of these columns, at most `MOST_ROWS`: their `row` or
    `id`, `score`, `prediction` and these columns."""
    destination = Destination.parse(output)
    found: list[dict[str, Any]] = []
    for table in destination.tables([id_name or ROW_COLUMN, "score", "prediction", *names]):
        rows = table.select([name for name in table.column_names if name != id_name]).to_pylist()
        chosen = [at for at, row in enumerate(rows) if any(row[name] is not None for name in names)]
        chosen = chosen[: MOST_ROWS - len(found)]
        ids: Sequence[str | None] = [None] * len(chosen)
        if id_name is not None:
            ids = id_texts(table[id_name].take(chosen), json_text=destination.file_format.json_text)
        for at, own in zip(chosen, ids, strict=True):
            shown = {name: rows[at][name] for name in ("score", "prediction", *names)}
            if isinstance(shown["prediction"], int):
                shown["prediction"] = f"choice {shown['prediction']}"
            found.append({**shown, "row": rows[at].get(ROW_COLUMN) if own is None else None, "id": own})
        if len(found) == MOST_ROWS:
            break
    return found
