"""Where output and report go if nobody says."""

from __future__ import annotations

import re
from pathlib import Path

from prefillcli.data.filesystems import written_path
from prefillcli.data.output.formats import FILE_ENDINGS
from prefillcli.data.paths import split_path
from prefillcli.data.reading.discovery import CODECS, KINDS
from prefillcli.data.shard import Shard
from prefillcli.errors import UsageError
from prefillcli.redaction import without_secrets

_QUERY = re.compile(r"\?[^/]*=.*$")


def default_output(first: str, *, partition: bool = False) -> str:
    """`data.parquet` -> `data.scores.parquet`, beside it; for a directory or a glob beside the folder, where the
    next run does not look; for a URL in the current folder. A partitioned output is a folder: `data.scores/`."""
    if "://" in first:
        first = _QUERY.sub("", without_secrets(first)).rstrip("/")
        first = split_path(first)[1] or "input"
    path = Path(first.rstrip("/") or ".")
    while any(c in path.name for c in "*?["):
        path = path.parent
    if path.name in ("", ".", ".."):
        path = path.resolve()
    name = path.name
    for ending in (*CODECS, *KINDS):
        name = name.removesuffix(ending)
    return str(path.parent / f"{name}.scores") + ("/" if partition else ".parquet")


def default_report(output: str) -> str:
    """`data.scores.parquet` -> `data.scores.run.json`, beside it."""
    base = written_path(output, follow=False).rstrip("/")
    for ending in FILE_ENDINGS:
        base = base.removesuffix(ending)
    return f"{base}.run.json"


def report_path(output: str, report: str | None, shard: Shard | None) -> str:
    """Where run.json goes; with a `shard` under a name of its own: `data.scores.shard-2-of-4.run.json`."""
    path = default_report(output) if report is None else report
    if shard is None:
        return path
    ending = ".run.json" if path.endswith(".run.json") else ".json" if path.endswith(".json") else ""
    return path.removesuffix(ending) + shard.ending + ending


def dry_run_report(output: str, report: str | None, shard: Shard | None = None) -> str:
    """`data.scores.run.json` -> `data.scores.dry-run.json`, so that the report of a run stays."""
    path = report_path(output, report, shard)
    return path.removesuffix(".json").removesuffix(".run") + ".dry-run.json"


def exits_path(report: str) -> str:
    """Where what a job has learnt of exits goes: `data.scores.run.json` -> `data.scores.exit.json`."""
    return report.removesuffix(".json").removesuffix(".run") + ".exit.json"


def require_json(output: str) -> None:
    """Raise UsageError for a name that is not of a JSON file: a recipe or the environment may name the scores so."""
    if not output.endswith(".json"):
        raise UsageError(f"--output {output}: this names the JSON file, so end it in .json; the page goes beside it")
