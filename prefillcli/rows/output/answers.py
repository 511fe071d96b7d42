"""The columns with the answers to one of several questions, read back as what a job of labels has.

A predicate has the column `NAME`, its probability. A choice has `NAME`, the chosen value, and a score `NAME`, the
expected number of its level; both have `NAME.probabilities`, by the names of their answers, and `NAME.confidence`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from prefillcli.rows.output import ANSWER
from prefillcli.stats.labels import log_shares_of

LOGPROB = "logprob_"
PROBABILITIES = "probabilities"
CALIBRATED = "calibrated"


@dataclass(frozen=True, slots=True)
class AnswerColumns:
    """The columns of a question's answers: its name and type, the names of its answers, and their numbers."""

    name: str
    type: str  # predicate, choice or score; empty for labels without a question
    labels: tuple[str, ...]
    values: tuple[float, ...] = ()
    temperature: float = 1.0  # that the probabilities were taken at

    def to_json(self) -> dict[str, Any]:
        """Return its content for a file that belongs to the job."""
        return asdict(self)

    @classmethod
    def of_json(cls, content: dict[str, Any]) -> AnswerColumns:
        """Return the columns of `to_json`. Raises KeyError or TypeError for anything else."""
        return cls(**content | {"labels": tuple(content["labels"]), "values": tuple(content["values"])})

    @classmethod
    def found_in(cls, available: Sequence[str]) -> dict[str, AnswerColumns]:
        """Return those of each question in an output with these columns, by its name: a copy does not name its job.

        The answers to a choice or a score are `named` by its values.
        """
        labels = tuple(name.removeprefix(LOGPROB) for name in available if name.startswith(LOGPROB))
        found = {ANSWER: cls("", "", labels)} if len(labels) > 1 and "score" in available else {}
        for name in (column.removesuffix(".label_mass") for column in available if column.endswith(".label_mass")):
            if f"{name}.{PROBABILITIES}" in available:
                found[name] = cls(name, "choice", ())
            elif name in available:
                found[name] = cls(name, "predicate", ("Yes", "No"))
        return found

    def named(self, given: Iterable[Any], told: Iterable[Any]) -> AnswerColumns:
        """Return it with the names of its answers, if these are not known, by values of the answer and of all
        probabilities."""
        both = zip(given, told, strict=True)
        value, shares = next((each for each in both if isinstance(each[1], dict)), (None, {}))
        if self.labels or not shares:
            return self
        scored = isinstance(value, int | float) and not isinstance(value, bool)
        return replace(self, type="score" if scored else "choice", labels=tuple(shares))

    def column(self, name: str) -> str:
        """Return the column of an output that has this meaning; without a name the answer itself."""
        return f"{self.name}.{name}" if name else self.name

    def source(self, meaning: str) -> str:
        """Return the part of the column's name that holds what a job of labels calls `meaning`, as `logprob_Yes`."""
        if meaning.partition("_")[0] == "probability":
            return CALIBRATED
        if meaning in ("score", "prediction", "mean") or meaning.startswith((LOGPROB, "score_")):
            return "" if self.type == "predicate" else PROBABILITIES
        return meaning

    def values_of(self, meaning: str, column: pa.ChunkedArray) -> pa.ChunkedArray | pa.Array:
        """Return the values [rows] of `meaning` by those of its `source`: null where the question was not asked."""
        several = meaning in (PROBABILITIES, CALIBRATED) and not pa.types.is_struct(column.type)
        if self.source(meaning) == meaning and not several:
            return column
        shares = self.shares(column.to_pylist())
        known = ~np.isnan(shares[:, 0])
        if meaning == "prediction":
            chosen = np.array(self.labels, object)[np.nan_to_num(shares).argmax(axis=-1)]
            return pa.array(chosen, pa.string(), mask=~known)
        if several and self.type != "predicate":
            kind = pa.struct([(label, pa.float64()) for label in self.labels])
            return pa.array([dict(zip(self.labels, each, strict=True)) for each in shares.tolist()], kind, mask=~known)
        if meaning == "mean":
            found = shares @ np.array(self.values)
        elif meaning in ("score", "probability", CALIBRATED):
            found = shares[:, 0]
        else:
            kind, _, label = meaning.partition("_")
            found = shares[:, self.labels.index(label)]
            if kind == "logprob":
                found = self.log_shares(shares)[:, self.labels.index(label)]
        return pa.array(found, pa.float64(), mask=~known)

    def shares(self, told: Sequence[Any]) -> npt.NDArray[np.float64]:
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

    def log_shares(self, shares: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return the logarithms [rows, answers] of these probabilities at a temperature of 1."""
        with np.errstate(divide="ignore"):
            return log_shares_of(np.log(shares) * self.temperature)


def answers_of(text: str) -> list[AnswerColumns]:
    """Return the answers that a job's fingerprint describes in this text."""
    return [AnswerColumns.of_json(each) for each in json.loads(text)] if text else []


def described(answers: Sequence[AnswerColumns]) -> str:
    """Return a description of these answers for a job's fingerprint."""
    return json.dumps([each.to_json() for each in answers])
