"""How many rows were scored, and why the others were not."""

from __future__ import annotations

from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from prefillcli.data.rows import SKIPPED


@dataclass
class Counts:
    """Numbers of output rows: `total` = `scored` + `errors` + `skipped`."""

    total: int = 0
    scored: int = 0
    errors: int = 0
    skipped: int = 0
    """Rows left out for their length on the user's wish; no errors."""
    errors_by_code: dict[str, int] = field(default_factory=dict)
    score_sum: float = 0.0

    @property
    def mean_score(self) -> float | None:
        """Mean over the scored rows."""
        return self.score_sum / self.scored if self.scored else None

    def add_rows(self, rows: pa.Table) -> None:
        """Count output rows by their columns `error` and `score`."""
        self.total += len(rows)
        scored = len(rows) - rows["score"].null_count
        self.scored += scored
        self.score_sum += pc.sum(rows["score"]).as_py() or 0.0
        for entry in pc.value_counts(rows["error"].drop_null()).to_pylist():
            code, number = entry["values"], entry["counts"]
            if code == SKIPPED:
                self.skipped += number
            else:
                self.errors += number
                self.errors_by_code[code] = self.errors_by_code.get(code, 0) + number

    def add(self, other: Counts) -> None:
        """Add the rows that `other` counted."""
        self.total += other.total
        self.scored += other.scored
        self.errors += other.errors
        self.skipped += other.skipped
        self.score_sum += other.score_sum
        for code, number in other.errors_by_code.items():
            self.errors_by_code[code] = self.errors_by_code.get(code, 0) + number
