"""How many rows were scored, and why the others were not."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from prefillcli.data.output.tallies import TAKEN_OVER, Tallies
from prefillcli.data.rows import SKIPPED_CODES
from prefillcli.data.values import to_python

Audited = tuple[float, float, bool, str | int | float | bool | None]
"""The row's score, its score in full, whether the prediction differs, and the right answer as the input has it."""
_PLAIN = (str, int, float, bool)


class AuditedExits(NamedTuple):
    """Rows of the audit that have the same label in full: how many there are, have left early, and flipped by that."""

    rows: int
    left: int
    flips: int


@dataclass
class Counts:
    """Numbers of output rows: `total` = `scored` + `errors` + `skipped`."""

    total: int = 0
    scored: int = 0
    errors: int = 0
    skipped: int = 0
    """Rows left out for their length, as the user asked; not errors."""
    errors_by_code: dict[str, int] = field(default_factory=dict)
    score_sum: float = 0.0
    taken_over: int = 0
    """Rows of `scored` whose results are those of an earlier output, as far as that is known."""
    audited: list[Audited] = field(default_factory=list)
    """Compressed rows that were read in full as well; in a job with exits every row of the audit."""
    audited_exits: dict[str, AuditedExits] = field(default_factory=dict)
    """Rows of the audit by the label that they have in full; empty for an output without exits."""
    tallies: Tallies = field(default_factory=Tallies)

    @classmethod
    def of_json(cls, content: dict[str, Any]) -> Counts:
        """The counts that `dataclasses.asdict` and JSON wrote. Raises TypeError for anything else."""
        exits = {label: AuditedExits(*found) for label, found in content.get("audited_exits", {}).items()}
        tallies = Tallies.of_json(content.get("tallies", {}))
        return cls(**content | {"audited_exits": exits, "tallies": tallies})

    @property
    def mean_score(self) -> float | None:
        """Mean over the scored rows."""
        return self.score_sum / self.scored if self.scored else None

    def add_rows(
        self, rows: pa.Table, truth: str | None = None, *, id_name: str | None = None, json_carried: bool = False
    ) -> None:
        """Count output rows by their columns `error` and `score`, tally them, and collect those of the audit.

        `truth` and `id_name` are the carried columns with the right answer and the id, `json_carried` whether they
        hold JSON.
        """
        self.total += len(rows)
        scored = len(rows) - rows["score"].null_count
        self.scored += scored
        self.score_sum += pc.sum(rows["score"]).as_py() or 0.0
        if TAKEN_OVER in rows.column_names:
            self.taken_over += pc.sum(rows[TAKEN_OVER]).as_py() or 0
        for entry in pc.value_counts(rows["error"].drop_null()).to_pylist():
            code, number = entry["values"], entry["counts"]
            if code in SKIPPED_CODES:
                self.skipped += number
            else:
                self.errors += number
                self.errors_by_code[code] = self.errors_by_code.get(code, 0) + number

        self.tallies.add_rows(rows, id_name, json_id=json_carried)
        if "audit_score" in rows.column_names:
            audited = rows.filter(pc.is_valid(rows["audit_score"]))
            answers = to_python(audited[truth]) if truth is not None else [None] * len(audited)
            flips = pc.not_equal(audited["prediction"], audited["audit_prediction"]).to_pylist()
            if "exit_layer" in rows.column_names:
                left = pc.is_valid(audited["exit_layer"]).to_pylist()
                for label, gone, flipped in zip(audited["audit_prediction"].to_pylist(), left, flips, strict=True):
                    self._add_audited(label, AuditedExits(1, gone, gone and flipped))
            scores = zip(audited["score"].to_pylist(), audited["audit_score"].to_pylist(), flips, strict=True)
            for (score, full, flipped), answer in zip(scores, answers, strict=True):
                known = json.loads(answer) if json_carried and answer is not None else answer
                self.audited.append((score, full, flipped, known if isinstance(known, _PLAIN) else None))

    def add(self, other: Counts) -> None:
        """Add the rows that `other` counted."""
        self.total += other.total
        self.scored += other.scored
        self.errors += other.errors
        self.skipped += other.skipped
        self.score_sum += other.score_sum
        self.taken_over += other.taken_over
        self.audited += other.audited
        for label, found in other.audited_exits.items():
            self._add_audited(label, found)
        for code, number in other.errors_by_code.items():
            self.errors_by_code[code] = self.errors_by_code.get(code, 0) + number
        self.tallies.add(other.tallies)

    def _add_audited(self, label: str, found: AuditedExits) -> None:
        before = self.audited_exits.get(label, AuditedExits(0, 0, 0))
        self.audited_exits[label] = AuditedExits(*(a + b for a, b in zip(before, found, strict=True)))
