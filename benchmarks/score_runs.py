"""Whole runs of `prefill score`, as a user starts them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

SAMPLES = Path(__file__).resolve().parent.parent / "samples"
WORDS = [
    "the",
    "parcel",
    "came",
    "late",
    "and",
    "nobody",
    "answered",
    "my",
    "letter",
    "about",
    "the",
    "broken",
    "lamp",
    "again",
]


def score_file(data: Path, output: Path, model: str | Path, *options: str) -> dict[str, Any]:
    """Score `data` in a new process with a sample model ("target" or "draft") or that of a folder; return its
    `run.json`."""
    folder = SAMPLES / "models" / model  # a whole path stays one
    command = [sys.executable, "-m", "prefillcli", "score", str(data), "-m", str(folder)]
    command += ["-o", str(output), "--report", f"{output}.json", "--quiet", *options]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)  # noqa: S603 - our own command line
    report: dict[str, Any] = json.loads(Path(f"{output}.json").read_text())
    return report


def outside_share(report: dict[str, Any]) -> float:
    """Part of the run's wall time that was spent neither in the model nor on loading it."""
    seconds = report["seconds"]
    return float(1 - (seconds["model"] + seconds["load"]) / seconds["total"])


def write_short_rows(path: Path, rows: int) -> None:
    """JSON lines with seeded prompts of about a dozen words."""
    rng = np.random.default_rng(0)
    with path.open("w", encoding="utf-8") as file:
        for number in range(rows):
            words = " ".join(rng.choice(WORDS, int(rng.integers(6, 12))))
            file.write(
                json.dumps({"id": number, "prompt": f"Ticket {number}: {words}.\nIs it about a lamp? Answer:"}) + "\n"
            )
