"""What became of the rows of a night: none lost, none doubled, and scores as without any disturbance."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from benchmarks.score_runs import score_file

TOLERANCE = 1e-5
"""Of scores in float32 that were computed in other packs."""


@dataclass(frozen=True, slots=True)
class RowCounts:
    """`misplaced` rows are there, but not where they are in the input; `unexplained` ones have the wrong error, or
    neither a score nor an error."""

    rows: int
    scored: int
    errors: int
    lost: int
    doubled: int
    misplaced: int
    unexplained: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """A sample of rows against clean runs: those with other scores, and the largest difference.

    Early exits give other numbers than all layers. So each row is compared with a clean run that read it as far, where
    there is one.
    """

    compared: int
    wrong: int
    largest_difference: float
    read_otherwise: int


@dataclass(frozen=True, slots=True)
class Proof:
    """The rows of a `night` against its `output`, which a `model` has written with these `flags`, beside `--exit`.

    What has to be scored again goes to `folder`.
    """

    night: Path
    output: Path
    folder: Path
    model: Path
    flags: list[str]

    def report(self, *, short: int, long: int) -> dict[str, Any]:
        """All that is proven, with samples of so many short and long rows; `sound` if nothing is wrong."""
        counts, sample, verified = self.counts(), self.compare(short=short, long=long), self.verified()
        wrong = counts.lost + counts.doubled + counts.misplaced + counts.unexplained + sample.wrong
        return {
            "counts": asdict(counts),
            "sample": asdict(sample),
            "verified": verified,
            "sound": verified and not wrong and sample.compared > 0,
        }

    def counts(self) -> RowCounts:
        """Every row of the input is looked for."""
        wanted = pq.read_table(self.night, columns=["id", "wrong"])
        found = pq.read_table(self.output, columns=["id", "score", "error"])
        before, after = _counts(wanted["id"]), _counts(found["id"])
        lost = sum(max(count - after.get(name, 0), 0) for name, count in before.items())
        doubled = sum(max(count - before.get(name, 0), 0) for name, count in after.items())
        misplaced = unexplained = 0
        if len(wanted) == len(found):
            misplaced = pc.sum(pc.not_equal(wanted["id"], found["id"])).as_py()
            right = pc.equal(pc.fill_null(wanted["wrong"], ""), pc.fill_null(found["error"], ""))
            told = pc.not_equal(pc.is_null(found["score"]), pc.is_null(found["error"]))
            unexplained = len(found) - pc.sum(pc.and_(right, told)).as_py()
        scored = len(found) - found["score"].null_count
        errors = len(found) - found["error"].null_count
        return RowCounts(len(found), scored, errors, lost, doubled, misplaced, unexplained)

    def compare(self, *, short: int, long: int) -> Comparison:
        """Score a sample of the rows again, with the exits that the job has learnt and without any."""
        sample, chosen = self.folder / "sample.parquet", self._sample(short, long)
        pq.write_table(chosen, sample)
        profile = f"{self.output.with_suffix('')}.exit.json"
        clean = [
            self._clean_run(sample, "exits", "--exit", "--exit-profile", profile),
            self._clean_run(sample, "full"),
        ]
        table = pq.read_table(self.output)
        found = _by_id(table.filter(pc.is_in(table["id"], value_set=chosen["id"].combine_chunks())))
        differences: list[float] = []
        otherwise = 0
        for name, row in found.items():
            same = [each[name] for each in clean if name in each and _way(each[name]) == _way(row)]
            if same:
                differences.append(abs(row["score"] - same[0]["score"]))
            else:
                otherwise += 1
        wrong = len(chosen) - len(found) + sum(not each <= TOLERANCE for each in differences)
        return Comparison(len(differences), wrong, max(differences, default=0.0), otherwise)

    def verified(self) -> bool:
        """Whether `prefill verify` finds nothing wrong with the output."""
        command = [sys.executable, "-m", "prefillcli", "verify", str(self.output), str(self.night)]
        return subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode == 0

    def _sample(self, short: int, long: int) -> pa.Table:
        """Random rows that have a score, in the order of the night."""
        table = pq.read_table(self.night)
        rng = np.random.default_rng(1)
        chosen: list[int] = []
        for is_long, most in ((False, short), (True, long)):
            able = np.flatnonzero(pc.and_(pc.equal(table["long"], is_long), pc.is_null(table["wrong"])).to_numpy())
            chosen += rng.permutation(able)[:most].tolist()
        return table.take(pa.array(sorted(chosen)))

    def _clean_run(self, sample: Path, name: str, *flags: str) -> dict[str, dict[str, Any]]:
        output = self.folder / f"{name}.parquet"
        score_file(sample, output, self.model, *self.flags, *flags, "--overwrite")
        return _by_id(pq.read_table(output))


def _counts(ids: pa.ChunkedArray) -> dict[str | None, int]:
    return {entry["values"]: entry["counts"] for entry in pc.value_counts(ids).to_pylist()}


def _by_id(table: pa.Table) -> dict[str, dict[str, Any]]:
    return {row["id"]: row for row in table.to_pylist() if row["error"] is None}


def _way(row: dict[str, Any]) -> tuple[Any, ...]:
    """How far a row was read, and how much of it."""
    return row.get("exit_layer"), row["kept_tokens"]
