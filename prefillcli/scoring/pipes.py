"""Rows from stdin and scores to stdout, which are files in a temporary folder while the job runs."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from prefillcli.options.commands import ScoreSettings
from prefillcli.rows.filesystems import writing
from prefillcli.rows.input.discovery import Kind, discover

_START = 1 << 16  # bytes that show a format


@dataclass(frozen=True, slots=True)
class Piped:
    """A job with files instead of its pipes. Without any, its `settings` are those that were given."""

    settings: ScoreSettings
    output: Path | None = None
    """The file whose content goes to stdout."""

    def write_out(self) -> None:
        """Copy the finished output to stdout, if it goes there. A reader that has gone is no error."""
        if self.output is None or not self.output.exists():
            return
        with (
            writing("stdout"),
            suppress(BrokenPipeError),
            self.output.open("rb") as file,
            open(1, "wb", closefd=False) as stdout,
        ):
            shutil.copyfileobj(file, stdout)


@contextmanager
def piped(settings: ScoreSettings) -> Iterator[Piped]:
    """Give a job files instead of its pipes, inside the block: rows of stdin are stored first.

    Raises ResourceError where they do not fit the disk, and UsageError as `discover`.
    """
    if settings.can_resume:
        yield Piped(settings)
        return
    with tempfile.TemporaryDirectory(prefix="prefill-") as folder:
        inputs, output = settings.input.inputs, None
        if settings.reads_stdin:
            inputs = (str(_stored(Path(folder))),)
        if settings.writes_stdout:
            (first, *_), _ = discover(inputs)
            output = Path(folder) / ("stdout.csv" if first.kind in ("csv", "tsv") else "stdout.jsonl")
        paths = {"inputs": inputs, "output": settings.files.output if output is None else str(output)}
        yield Piped(settings.with_options(paths), output)


def _stored(folder: Path) -> Path:
    # The rows of stdin in a file, whose ending says what they are.
    with writing(str(folder)), open(0, "rb", closefd=False) as stdin:
        start = stdin.read(_START)
        path = folder / f"stdin.{kind_of(start)}"
        with path.open("wb") as file:
            file.write(start)
            shutil.copyfileobj(stdin, file)
    return path


def kind_of(start: bytes) -> Kind:
    """Return the format of a file that begins so: Parquet, objects of JSON, or else CSV."""
    if start.startswith(b"PAR1"):
        return "parquet"
    return "jsonl" if start.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"{") else "csv"
