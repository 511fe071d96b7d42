"""The columns with the answers to a question, and what they say.

A predicate has the column `NAME`, its probability. A choice has `NAME`, the chosen value, and a score `NAME`, the
expected number of its level; both have `NAME.probabilities`, by the names of their answers, and `NAME.confidence`. A
question without a name is the only one of its job: it has `score`, and a log-probability for each label.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from prefillcli.rows.output import ANSWER
from prefillcli.rows.records import TokenText
from prefillcli.stats.arrays import Float64Array
from prefillcli.stats.labels import Measure, label_probabilities, log_shares_of

if TYPE_CHECKING:
    from prefillcli.rows.output.columns import Groups, ResultRows

LOGPROB = "logprob_"
PROBABILITIES = "probabilities"
CALIBRATED = "calibrated"


_IN_FINGERPRINT = ("name", "type", "labels", "values", "temperature")


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerColumns:
    """The columns of the answers to a question."""

    labels: tuple[str, ...]  # the names of its answers
    name: str = ""  # what its columns begin with; empty for the only question, asked by labels
    type: str = ""  # predicate, choice or score; empty for labels
    values: tuple[float, ...] = ()  # the number that each label stands for, if they are ordered
    temperature: float = 1.0  # that the probabilities are taken at
    options: tuple[str | bool, ...] = ()  # what each of its answers says
    measure: Measure = Measure.SHARES  # the meaning of the labels' numbers
    groups: Groups = frozenset()  # the groups of further columns, beside those of every question
    truth: str | None = None  # the carried column with the right answers
    # Whether the labels are classes of a head, so that their mass says nothing of the prompt.
    classes: bool = False
    # For the column `review`, the floor of each label; none where answers are not reviewed.
    floors: tuple[float | None, ...] = ()
    # The numbers of the rows that it is asked about, by the answers to earlier questions; None: all.
    when: Callable[[ResultRows], Set[int]] | None = None
    # The numbers of its other prompts, after those of all questions: in other orders with the group `orders`, else
    # `apart`, each about one answer alone.
    others: tuple[int, ...] = ()
    # In an output about the likeliest tokens, the text of each by its id.
    token_text: Callable[[int], TokenText] | None = None

    @property
    def key(self) -> str:
        """Its name in reports and files of floors."""
        return self.name or ANSWER

    @property
    def apart(self) -> bool:
        """Whether each of its prompts asks about one answer alone."""
        return bool(self.others) and "orders" not in self.groups

    @property
    def prefix(self) -> str:
        """What its columns begin with."""
        return self.name and f"{self.name}."

    def to_json(self) -> dict[str, Any]:
        """Return what `of_json` reads back, for a file that belongs to the job."""
        plain = {name: getattr(self, name) for name in (*_IN_FINGERPRINT, "options", "truth", "classes")}
        return plain | {"measure": self.measure.value, "groups": sorted(self.groups)}

    @classmethod
    def of_json(cls, content: Mapping[str, Any]) -> AnswerColumns:
        """Return the columns of `to_json`. Raises KeyError, TypeError or ValueError for anything else."""
        plain = {name: tuple(value) if isinstance(value, list) else value for name, value in content.items()}
        groups, measure = frozenset(content.get("groups", ())), Measure(content.get("measure", Measure.SHARES))
        return cls(**plain | {"groups": groups, "measure": measure})

    @classmethod
    def found_in(cls, available: Sequence[str]) -> dict[str, AnswerColumns]:
        """Return those of each question in an output with these columns, by its name: a copy does not name its job.

        The answers to a choice or a score are `named` by its values.
        """
        labels = tuple(name.removeprefix(LOGPROB) for name in available if name.startswith(LOGPROB))
        divided = len(labels) > 2 and all(f"score_{label}" in available for label in labels)
        groups: Groups = frozenset({"label_scores"}) if divided else frozenset()
        found = {ANSWER: cls(labels=labels, groups=groups)} if len(labels) > 1 and "score" in available else {}
        for name in (column.removesuffix(".label_mass") for column in available if column.endswith(".label_mass")):
            if f"{name}.{PROBABILITIES}" in available:
                found[name] = cls(name=name, type="choice", labels=())
            elif name in available:
                found[name] = cls(name=name, type="predicate", labels=("Yes", "No"))
        return found

    def named(self, given: Iterable[Any], told: Iterable[Any]) -> AnswerColumns:
        """Return it with the names of its answers, if these are not known, by values of the answer and of all
        probabilities."""
        both = zip(given, told, strict=True)
        value, shares = next((each for each in both if isinstance(each[1], dict)), (None, {}))
        if self.labels or not shares:
            return self
        scored = isinstance(value, int | float) and not isinstance(value, bool)
        values = tuple(map(float, range(len(shares)))) if scored else ()  # the levels count from 0
        return replace(self, type="score" if scored else "choice", labels=tuple(shares), values=values)

    def column(self, name: str) -> str:
        """Return the column of an output that has this meaning; without one the answer itself."""
        return f"{self.prefix}{name}" if name else self.name or "prediction"

    @property
    def has_shares(self) -> bool:
        """Whether the answers have probabilities that add up to 1."""
        return self.measure is Measure.SHARES and len(self.labels) > 1

    @property
    def told(self) -> list[str]:
        """The columns that tell the scores of all answers."""
        if self.name:
            return [self.column("" if self.type == "predicate" else PROBABILITIES)]
        if len(self.labels) < 3 or self.measure is Measure.VALUES:
            return ["score"]
        return [f"score_{label}" for label in self.labels] if "label_scores" in self.groups else self.logs

    def shares_in(self, rows: pa.Table) -> Float64Array:
        """Return the probability of each answer [rows, answers] in an output's rows, by the columns `told`; NaN where
        there is none."""
        if self.name:
            return self.shares(rows[self.told[0]].to_pylist())
        if self.told == self.logs:
            return label_probabilities(self.logs_in(rows), self.temperature)
        return _with_other(_numbers(rows, self.told))

    @property
    def calibrated(self) -> list[str]:
        """The columns that tell the calibrated probabilities of all answers; none without any."""
        if "calibrated" not in self.groups:
            return []
        if self.name:
            return [self.column(CALIBRATED)]
        return [f"probability_{label}" for label in self.labels] if len(self.labels) > 2 else ["probability"]

    def calibrated_in(self, rows: pa.Table) -> Float64Array:
        """Return the calibrated probability of each answer [rows, answers], by the columns `calibrated`."""
        if self.name:
            return self.shares(rows[self.calibrated[0]].to_pylist())
        return _with_other(_numbers(rows, self.calibrated))

    @property
    def logs(self) -> list[str]:
        """The columns that tell the log-probabilities of all answers at a temperature of 1."""
        return self.told if self.name else [LOGPROB + label for label in self.labels]

    def logs_in(self, rows: pa.Table) -> Float64Array:
        """Return the log-probabilities [rows, answers] by the columns `logs`, among the answers where they follow from
        probabilities; NaN where there are none."""
        if self.name:
            return self.log_shares(self.shares_in(rows))
        numbers = _numbers(rows, self.logs)
        none = np.isnan(numbers)  # JSON has no infinity: it is null there
        return np.where(none & ~none.all(axis=1, keepdims=True), -np.inf, numbers)

    def with_answer(self, rows: pa.Table) -> pa.Table:
        """Return rows of an output with the columns of a score and a prediction, as labels have them."""
        if not self.name:
            return rows
        shares = self.shares_in(rows)
        none = np.isnan(shares[:, 0])
        best = np.array(self.labels, object)[np.nan_to_num(shares).argmax(axis=-1)]
        rows = rows.append_column(self.column("score"), pa.array(shares[:, 0], pa.float64(), mask=none))
        return rows.append_column(self.column("prediction"), pa.array(best, pa.string(), mask=none))

    def shares(self, told: Sequence[Any]) -> Float64Array:
        """Return the probability of each answer [rows, answers], by the values that tell all of them, as text or not;
        NaN where there is none."""
        found = np.full((len(told), len(self.labels)), np.nan)
        for at, value in enumerate(told):
            row = json.loads(value) if isinstance(value, str) else value  # in JSON Lines
            if isinstance(row, dict):
                found[at] = [row[label] for label in self.labels]
            elif row is not None:
                found[at] = (row, 1 - row)
        return found

    def log_shares(self, shares: Float64Array) -> Float64Array:
        """Return the logarithms [rows, answers] of these probabilities at a temperature of 1."""
        with np.errstate(divide="ignore"):
            return log_shares_of(np.log(shares) * self.temperature)


def _numbers(rows: pa.Table, names: Sequence[str]) -> Float64Array:
    return np.stack([rows[name].cast(pa.float64()).to_numpy() for name in names], axis=1)


def _with_other(numbers: Float64Array) -> Float64Array:
    # Those of two answers follow from the first one's.
    return numbers if numbers.shape[1] > 1 else np.concatenate([numbers, 1 - numbers], axis=1)


def answers_of(text: str) -> list[AnswerColumns]:
    """Return the answers that a job's fingerprint describes in this text."""
    return [AnswerColumns.of_json(each) for each in json.loads(text)] if text else []


def described(answers: Sequence[AnswerColumns]) -> str:
    """Return a description of these answers for a job's fingerprint."""
    return json.dumps([{name: getattr(each, name) for name in _IN_FINGERPRINT} for each in answers])
