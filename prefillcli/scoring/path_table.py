"""The table of all paths that a run reads and writes: each written file has its own path, and replaces only its own
kind."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from prefillcli.errors import PrefillError, UsageError, without_secrets
from prefillcli.judging.rejects import is_rejects
from prefillcli.judging.review import is_review
from prefillcli.options.commands import MergeSettings, ScoreSettings
from prefillcli.options.option import PathRole, Settings, details_of
from prefillcli.options.requirements import leaves_early
from prefillcli.options.settings import JobSettings
from prefillcli.prompts.templates import names_template
from prefillcli.reading.exits.policy import exits_path
from prefillcli.report.section import page_of
from prefillcli.rows.filesystems import (
    MOST_BYTES,
    WORK_ENDING,
    Place,
    answered,
    filesystem_of,
    is_local,
    is_url,
    read_start,
    reading,
    split_path,
    writing,
    written_path,
)
from prefillcli.rows.input.discovery import CODECS, KINDS, discover, would_find
from prefillcli.rows.output import FILE_ENDINGS, Shard
from prefillcli.rows.output.destination import Destination
from prefillcli.rows.output.shards import shards_beside
from prefillcli.rows.proof import ModelContents, is_model_file

# The files that a run writes beside the scores, and the marks of an earlier run's files, which may be replaced.


@dataclass(frozen=True, slots=True)
class SideFile:
    """A kind of file."""

    meaning: str
    knows: Callable[[str, bytes], bool]  # whether the file at a path, with its first bytes, is of this kind


def json_with(*names: str) -> Callable[[str, bytes], bool]:
    """Return a test for reports: JSON objects with a schema version and these names."""

    def knows(path: str, start: bytes) -> bool:
        try:
            content = json.loads(start)
        except (ValueError, RecursionError):
            return False
        return isinstance(content, dict) and content.keys() >= {"schema_version", *names}

    return knows


_PAGE = re.compile(rb"\s*<!doctype html>.*?<title>[^<]*\bprefill (score|bench|profile|inspect)\b", re.DOTALL)
_PAGE_POLICY = b"default-src 'none'; style-src 'unsafe-inline'"


def _is_page(path: str, start: bytes) -> bool:
    return _PAGE.match(start) is not None and _PAGE_POLICY in start


_CALIBRATIONS = (json_with("labels", "scaling"), json_with("calibrations"), json_with("accuracy", "questions"))

SIDE_FILES = {
    "report": SideFile("the report of a run", json_with("status", "exit_code", "rows", "fingerprint")),
    "dry run": SideFile("the report of a dry run", json_with("status", "exit_code", "survey")),
    "page": SideFile("a page of prefill", _is_page),
    "metrics": SideFile("metrics of prefill", lambda path, start: start.startswith(b"# HELP prefill_")),
    "bench": SideFile("written by prefill bench", json_with("status", "workloads", "machine")),
    "profile": SideFile("written by prefill profile", json_with("machine", "budget_bytes")),
    "calibration": SideFile(
        "written by prefill calibrate",
        lambda path, start: any(knows(path, start) for knows in _CALIBRATIONS),
    ),
    "head": SideFile("written by prefill fit", lambda path, start: b'"prefill head"' in start),
    "exits": SideFile("an exit profile", json_with("flips_of", "questions")),
    "rejects": SideFile("rejects of an earlier run", is_rejects),
    "review": SideFile("an earlier run's rows to review without anybody's right answers", is_review),
}


def require_ours(path: str, kind: str, called: str, *, overwrite: bool | None) -> None:
    """Raise UsageError unless a file of this kind may be written at `path`, in the form of `written_path`.

    There must be nothing, an empty file or one of the same kind; with `overwrite` any file. None: there is no such
    option.
    """
    if path.endswith("/"):
        raise UsageError(f"{called}: this names a folder, and a file is written; leave the slash out")
    filesystem, inner = filesystem_of(path)
    if is_local(filesystem):
        parent = next(each for each in map(str, Path(inner).parents) if os.path.lexists(each))
        if not os.path.isdir(parent):
            raise UsageError(f"{called}: {parent} is not a folder, so nothing can be written in it")
        if os.path.exists(inner) and not os.path.isfile(inner):
            what = "a folder" if os.path.isdir(inner) else "a device or a pipe"
            raise UsageError(f"{called}: this is {what}, and a file is written; choose another path")
    try:
        with reading(path):
            start = read_start(path, MOST_BYTES)
    except PrefillError as error:
        cause = error.__cause__
        if isinstance(cause, FileNotFoundError):
            return
        if is_local(filesystem) and isinstance(cause, OSError):
            raise UsageError(f"{called}: {cause.strerror or cause}; choose another path") from None
        raise
    if not start or overwrite or SIDE_FILES[kind].knows(path, start):
        return
    advice = "" if overwrite is None else ", or replace it with --overwrite"
    raise UsageError(
        f"{called}: a file is there that is not {SIDE_FILES[kind].meaning}\nchoose another path, or remove it{advice}"
    )


# The default paths of output and report.


_QUERY = re.compile(r"\?[^/]*=.*$")


def default_output(first: str, *, partition: bool = False) -> str:
    """Return the default path of the scores: `data.parquet` -> `data.scores.parquet`, beside it. For a directory or a
    glob it is beside the folder, outside the input of the next run; for a URL, in the current folder. A partitioned
    output is a folder: `data.scores/`."""
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
    """Return the default path of the report: `data.scores.parquet` -> `data.scores.run.json`, beside it.

    Where that is the report of another local output that is there, it has the whole name: `data.scores.csv.run.json`.
    """
    whole = written_path(output, follow=False).rstrip("/")
    path = f"{_without_ending(whole)}.run.json"
    return f"{whole}.run.json" if _is_of_another(path, whole) else path


def _without_ending(output: str) -> str:
    for ending in FILE_ENDINGS:
        output = output.removesuffix(ending)
    return output


def _is_of_another(report: str, output: str) -> bool:
    # Whether a report belongs to an output of the same folder that is not this one, and both would have this name.
    if is_url(report):
        return False
    with suppress(OSError, ValueError, RecursionError):
        content = json.loads(Path(report).read_bytes())
        named = content.get("output") if isinstance(content, dict) else None
        if isinstance(named, str):
            other = os.path.join(os.path.dirname(report), os.path.basename(named.rstrip("/")))
            return other != output and f"{_without_ending(other)}.run.json" == report and os.path.exists(other)
    return False


def report_path(output: str, report: str | None, shard: Shard | None) -> str:
    """Return the path of run.json; a `shard` has its own: `data.scores.shard-2-of-4.run.json`."""
    path = default_report(output) if report is None else report
    if shard is None:
        return path
    ending = ".run.json" if path.endswith(".run.json") else ".json" if path.endswith(".json") else ""
    return path.removesuffix(ending) + shard.ending + ending


def dry_run_report(output: str, report: str | None, shard: Shard | None = None) -> str:
    """Return the path of a dry run's report: `data.scores.run.json` -> `data.scores.dry-run.json`, so that a run's
    report is not replaced."""
    path = report_path(output, report, shard)
    return path.removesuffix(".json").removesuffix(".run") + ".dry-run.json"


def require_json(output: str) -> None:
    """Raise UsageError for a name that is not of a JSON file: a recipe or the environment may name the scores by
    mistake."""
    if not output.endswith(".json"):
        raise UsageError(f"--output {output}: this names the JSON file, so end it in .json; the page goes beside it")


_FIRST_PART = "part-00000.parquet"


@dataclass(frozen=True, slots=True)
class PathUse:
    """A path of a run: a file, or a folder in which some names are read or written."""

    option: str
    """Name of the option that sets it."""
    called: str
    """For messages: `--report out.run.json`."""
    path: str
    place: Place
    writes: bool = False
    side: str = ""
    """The kind of file, where a file is written beside the scores: a name in `SIDE_FILES`."""
    uses: Callable[[str], bool] = lambda inner: True
    """Whether a path below a folder is read or written with it."""
    holds: str = ""
    """For a folder: the path inside it of a file that it contains."""
    output: bool = False
    """Whether it is that of the scores themselves, a file or a folder of parts."""

    def meets(self, other: PathUse) -> bool:
        """Return whether both use one file, or one of them lies where the other has its files."""
        return self.place.is_same(other.place) or self._has(other) or other._has(self)

    def _has(self, other: PathUse) -> bool:
        inner = other.place.below(self.place)
        return inner is not None and self.uses(f"{inner}/{other.holds}" if other.holds else inner)


def require_apart(settings: Settings) -> None:
    """Raise UsageError unless everything that a run writes has its own path, and replaces only files that it may.

    Nothing is written before. The job decides about an existing output. Any other written file replaces one of the
    same kind, or any with `--overwrite`.
    """
    writes = list(_writes(settings))
    reads = list(_reads(settings, {use.place.system for use in writes}))
    same_as = {name: details_of(type(settings), name).same_as for name in settings.options()}
    for number, use in enumerate(writes):
        for other in (*reads, *writes[:number]):
            replaced = not other.writes and same_as.get(other.option) == use.option
            if use.meets(other) and not replaced:
                raise _refusal(use, other)
        _require_not_read_next(use, settings)
        if use.side or (use.output and not (isinstance(settings, JobSettings) and settings.prediction.dry_run)):
            _require_writable(use.path)
        if use.side:
            overwrite = settings.value("overwrite") if "overwrite" in settings.options() else None
            require_ours(use.path, use.side, use.called, overwrite=overwrite)


def _require_writable(path: str) -> None:
    """Raise PrefillError if no file can be made where this local one would lie. It leaves none."""
    filesystem, inner = filesystem_of(written_path(path))
    if not is_local(filesystem):
        return
    parent = next(each for each in map(str, Path(inner).parents) if os.path.lexists(each))
    if os.path.isdir(parent):
        with writing(path), tempfile.TemporaryFile(dir=parent):
            pass


def _refusal(use: PathUse, other: PathUse) -> UsageError:
    if not use.place.is_same(other.place):
        below = use.place.below(other.place) is not None
        inner, outer = (use, other) if below else (other, use)
        return UsageError(f"{inner.called} lies where {outer.called} has its files; choose another path")
    if other.writes:
        return UsageError(f"{other.called} and {use.called} would be one file; choose another path for one of them")
    return UsageError(f"{use.called} would be written over {other.called}; choose another path")


def _require_not_read_next(use: PathUse, settings: Settings) -> None:
    """Raise UsageError if the next run over a folder or glob would read a written file as its input."""
    for given in settings.input.inputs if isinstance(settings, JobSettings) else ():
        if (use.output or use.side) and would_find(given, use.path, folder=bool(use.holds)):
            raise UsageError(
                f"{use.called} lies among the inputs: the next run over {given} would read it as input\n"
                f"write it elsewhere, for example into a folder beside {given}"
            )


def _named(settings: Settings) -> Iterator[tuple[str, PathRole, tuple[str, ...]]]:
    """Yield the options that name paths, each with its use and the path."""
    for name in settings.options():
        role, value = details_of(type(settings), name).path, settings.value(name)
        if role is not None:
            values = value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else (value,)
            yield name, role, tuple(each for each in values if each is not None)


def _reads(settings: Settings, systems: Set[str]) -> Iterator[PathUse]:
    """Yield the paths that are read; rows only from filesystems of these `systems`, since a listing takes time."""
    if settings.recipe is not None:
        yield _read("recipe", settings.recipe)
    for name, role, paths in _named(settings):
        for path in paths:
            if role == "rows" and Place.of(path).system in systems:
                yield from _rows(name, path)
            elif role == "scores":
                yield from _scores(name, path)
            elif role == "model":
                yield from _model(name, path)
            elif role == "file" or (role == "template" and names_template(path)):
                yield _read(name, path)


def _read(name: str, path: str) -> PathUse:
    return PathUse(name, f"{_flag(name)} {path}", path, Place.of(path))


def _rows(name: str, given: str) -> Iterator[PathUse]:
    try:
        paths = [file.path for file in discover([given])[0]]
    except PrefillError:
        paths = [given]  # the reader will report the error
    for path in paths:
        called = f"the input {path}" if name == "inputs" else f"{_flag(name)} {path}"
        yield PathUse(name, called, path, Place.of(path))


def _scores(name: str, given: str) -> Iterator[PathUse]:
    called = f"{_flag(name)} {given}"
    try:
        destination = answered(lambda: Destination.parse(given)) if is_url(given) else Destination.parse(given)
    except TimeoutError as error:
        raise PrefillError(f"{called}: {error}\ncheck the URL and the network") from None
    except PrefillError:
        return  # the reader will report the error
    yield PathUse(name, called, given, Place.of(destination.path), uses=_uses(destination), holds=_holds(destination))
    yield PathUse(name, f"the work folder of {called}", given, Place.of(destination.path + WORK_ENDING))


def _model(name: str, given: str) -> Iterator[PathUse]:
    path, called = Path(given).expanduser(), f"{_flag(name)} {given}"
    if not path.exists():
        return  # a name on the hub
    uses = is_model_file if path.is_dir() else (lambda inner: True)
    yield PathUse(name, called, given, Place.of(str(path)), uses=uses, holds="config.json" if path.is_dir() else "")
    with suppress(PrefillError):  # the files of a folder may be links that lead elsewhere
        for file in ModelContents(path).paths:
            yield PathUse(name, called, given, Place.of(file))


def _writes(settings: Settings) -> Iterator[PathUse]:
    for name, role, paths in _named(settings):
        if isinstance(settings, ScoreSettings | MergeSettings) and role == "output":
            yield from _output(settings, name)
        elif isinstance(settings, ScoreSettings | MergeSettings) and role == "report":
            yield from _reports(settings, name)
        elif role in ("bench", "profile"):
            yield _side(name, paths[0], role, _flag(name))
            yield _side(name, page_of(paths[0]), "page", f"the page of {_flag(name)},")
        elif role in SIDE_FILES and role != "report":
            for path in paths:
                yield _side(name, path, role, _flag(name))


def output_of(settings: JobSettings | MergeSettings) -> str:
    """Return the path of the scores: the given one, or else one beside the first input."""
    if isinstance(settings, MergeSettings) or settings.files.output is not None:
        return settings.files.output or ""
    return default_output(settings.input.inputs[0], partition=settings.files.partition)


def _output(settings: ScoreSettings | MergeSettings, name: str) -> Iterator[PathUse]:
    """Yield the scores and their work folder, and those of the shards that a merge removes."""
    output, merges = output_of(settings), isinstance(settings, MergeSettings)
    destination, called = Destination.parse(output, _shard_of(settings)), f"--output {output}"
    place = Place.of(destination.path)
    yield PathUse(name, called, output, place, True, uses=_uses(destination), holds=_holds(destination), output=True)
    shards = shards_beside(destination) if merges else []
    folders = [destination.work, *(each.work for each in shards)]
    for location in dict.fromkeys(folder.location for folder in folders):
        yield PathUse(name, f"the work folder {location} of {called}", location, Place.of(location), True)


def _reports(settings: ScoreSettings | MergeSettings, name: str) -> Iterator[PathUse]:
    """Yield the report of a run, its page, and its exit profile; or the report of a dry run."""
    called = "the report" if settings.files.report is None else _flag(name)
    place = output_of(settings), settings.files.report, _shard_of(settings)
    if isinstance(settings, ScoreSettings) and settings.prediction.dry_run:
        yield _side(name, dry_run_report(*place), "dry run", called)
        return
    path = report_path(*place)
    yield _side(name, path, "report", called)
    yield _side(name, page_of(path), "page", f"the page of {called},")
    if not isinstance(settings, ScoreSettings) or not leaves_early(settings):
        return
    if settings.exits.exit_profile is None and settings.exits.rare_option is None:
        yield _side(name, exits_path(path), "exits", "what is learnt of exits,")


def _shard_of(settings: ScoreSettings | MergeSettings) -> Shard | None:
    return settings.files.shard_of if isinstance(settings, ScoreSettings) else None


def _side(name: str, path: str, side: str, called: str) -> PathUse:
    named = written_path(path, called)
    return PathUse(name, f"{called} {path}", named, Place.of(named), True, side)


def _uses(destination: Destination) -> Callable[[str], bool]:
    return destination.is_ours if destination.directory else lambda inner: True


def _holds(destination: Destination) -> str:
    return _FIRST_PART if destination.directory else ""


def _flag(name: str) -> str:
    return "INPUT" if name == "inputs" else "SCORES" if name == "scores" else "--" + name.replace("_", "-")


def refuse_unlike_partitions(settings: JobSettings, keys: Sequence[str]) -> None:
    """Raise UsageError if --partition is given and the output cannot have folders like the input's, named by these
    `keys`."""
    if not settings.files.partition:
        return
    if not keys:
        raise UsageError("--partition: no folder of the input is named like day=2026-01-01\nleave --partition out")
    output = output_of(settings)
    if not Destination.parse(output).directory:
        raise UsageError(f"--partition: --output {output} is one file\nend it in / for a folder")
    truths = [("--truth", column) for column in settings.truth.columns.values()]
    for option, column in [("--id-column", settings.ids.id_column), *truths]:
        if column in keys:
            raise UsageError(f"{option} {column}: with --partition it names folders\nchoose another column")
