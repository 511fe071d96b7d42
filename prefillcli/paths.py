"""Where output and report go if nobody says."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from prefillcli.errors import UsageError


def refuse_to_replace_input(output: str, inputs: Iterable[str]) -> None:
    """Raise UsageError if the output would be written over an input file, or among them."""
    target = os.path.realpath(output)
    for path in inputs:
        if target in (os.path.realpath(path), os.path.dirname(os.path.realpath(path))):
            raise UsageError(f"--output {output} would be written over the input {path}; choose another one")


def default_output(first: str) -> str:
    """`data.parquet` -> `data.scores.parquet`, beside it; for a directory or a glob beside the folder; for a URL
    in the current folder."""
    if "://" in first:
        first = first.rstrip("/").rsplit("/", 1)[-1] or "input"
    path = Path(first.rstrip("/") or ".")
    while any(c in path.name for c in "*?[") and path.name != str(path):
        path = path.parent
    name = path.resolve().name if path.name in ("", ".", "..") else path.name
    for ending in (".gz", ".zst", ".parquet", ".pq", ".jsonl", ".ndjson", ".json"):
        name = name.removesuffix(ending)
    return str(path.parent / f"{name}.scores.parquet")


def default_report(output: str) -> str:
    """`data.scores.parquet` -> `data.scores.run.json`, beside it."""
    base = output.rstrip("/")
    for ending in (".gz", ".zst", ".parquet", ".jsonl"):
        base = base.removesuffix(ending)
    return f"{base}.run.json"


def dry_run_report(output: str, report: str | None) -> str:
    """`data.scores.run.json` -> `data.scores.dry-run.json`, so that the report of a run stays."""
    path = report or default_report(output)
    return path.removesuffix(".json").removesuffix(".run") + ".dry-run.json"
