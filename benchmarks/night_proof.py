"""What became of the rows of a night: none lost, none doubled, and scores as without any disturbance."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
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


def count_rows(night: Path, output: Path) -> RowCounts:
    """Every row of the input against the rows of the output."""
    wanted = pq.read_table(night, columns=["id", "wrong"])
    found = pq.read_table(output, columns=["id", "score", "error"])
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


def compare(
    night: Path, output: Path, folder: Path, *, model: Path, flags: list[str], profile: Path, short: int, long: int
) -> Comparison:
    """Score a sample of the rows again, with the exits of `profile` and without any."""
    table = pq.read_table(night)
    rng = np.random.default_rng(1)
    chosen: list[int] = []
    for is_long, most in ((False, short), (True, long)):
        able = np.flatnonzero(pc.and_(pc.equal(table["long"], is_long), pc.is_null(table["wrong"])).to_numpy())
        chosen += rng.permutation(able)[:most].tolist()
    sample = folder / "sample.parquet"
    pq.write_table(table.take(pa.array(sorted(chosen))), sample)
    clean = {
        name: _by_id(_clean_run(sample, folder / f"{name}.parquet", model, [*flags, *more]))
        for name, more in {"exits": ["--exit", "--exit-profile", str(profile)], "full": []}.items()
    }
    ids = pc.is_in(pq.read_table(output, columns=["id"])["id"], value_set=pq.read_table(sample)["id"].combine_chunks())
    found = _by_id(pq.read_table(output).filter(ids))
    differences: list[float] = []
    otherwise = 0
    for name, row in found.items():
        same = [each[name] for each in clean.values() if _way(each[name]) == _way(row)]
        if same:
            differences.append(max(abs(row[key] - same[0][key]) for key in ("score", "label_mass")))
        else:
            otherwise += 1
    missing = len(chosen) - len(found)
    wrong = missing + sum(not each <= TOLERANCE for each in differences)
    return Comparison(len(differences), wrong, max(differences, default=0.0), otherwise)


def _clean_run(sample: Path, output: Path, model: Path, flags: list[str]) -> pa.Table:
    score_file(sample, output, model, *flags, "--overwrite")
    return pq.read_table(output)


def _counts(ids: pa.ChunkedArray) -> dict[str | None, int]:
    return {entry["values"]: entry["counts"] for entry in pc.value_counts(ids).to_pylist()}


def _by_id(table: pa.Table) -> dict[str, dict[str, Any]]:
    return {row["id"]: row for row in table.to_pylist() if row["error"] is None}


def _way(row: dict[str, Any]) -> tuple[Any, ...]:
    """How far a row was read, and how much of it."""
    return row.get("exit_layer"), row["kept_tokens"]


def verified(output: Path, night: Path) -> bool:
    """Whether `prefill verify` finds nothing wrong with the output."""
    command = [sys.executable, "-m", "prefillcli", "verify", str(output), str(night)]
    return subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode == 0  # noqa: S603 - our own
