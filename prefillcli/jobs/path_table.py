"""The table of all paths that a run reads and writes: what it writes has a path of its own, and replaces its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from prefillcli.data.filesystems import Place, written_path
from prefillcli.data.output.shard_folders import shards_beside
from prefillcli.data.output.target import Target
from prefillcli.data.paths import WORK_ENDING
from prefillcli.data.prompts.templates import names_template
from prefillcli.data.proof.fingerprints import ModelContents, is_model_file
from prefillcli.data.reading.discovery import discover, would_find
from prefillcli.data.shard import Shard
from prefillcli.errors import PrefillError, UsageError
from prefillcli.jobs.paths import default_output, dry_run_report, exits_path, report_path
from prefillcli.jobs.side_files import require_ours
from prefillcli.options.merge import MergeSettings
from prefillcli.options.option import PathRole, Settings, details_of
from prefillcli.options.score import ScoreSettings
from prefillcli.report.html import page_of

_FIRST_PART = "part-00000.parquet"


@dataclass(frozen=True, slots=True)
class PathUse:
    """A path of a run: a file, or a folder in which some names are read or written."""

    option: str
    """Name of the option that it follows from."""
    called: str
    """For messages: `--report out.run.json`."""
    path: str
    place: Place
    writes: bool = False
    side: str = ""
    """The kind of file, where a file is written beside the scores: see `prefillcli.jobs.side_files`."""
    uses: Callable[[str], bool] = lambda inner: True
    """Whether a path below a folder is read or written with it."""
    holds: str = ""
    """The path below a folder of a file that it has."""
    output: bool = False
    """Whether it is the scores themselves, a file or a folder of parts."""

    def meets(self, other: PathUse) -> bool:
        """Whether both use one file, or one of them lies where the other has its files."""
        return self.place.is_same(other.place) or self._has(other) or other._has(self)

    def _has(self, other: PathUse) -> bool:
        inner = other.place.below(self.place)
        return inner is not None and self.uses(f"{inner}/{other.holds}" if other.holds else inner)


def require_apart(settings: Settings) -> None:
    """Raise UsageError unless everything that a run writes has a path of its own, and replaces what it may.

    Nothing is written before. An output that is there, its job decides on; another file that is written is replaced if
    it is of the same kind, or with `--overwrite`.
    """
    writes = list(_writes(settings))
    reads = list(_reads(settings, {use.place.system for use in writes}))
    same_as = {name: details_of(type(settings), name).same_as for name in type(settings).model_fields}
    for number, use in enumerate(writes):
        for other in (*reads, *writes[:number]):
            replaced = not other.writes and same_as.get(other.option) == use.option
            if use.meets(other) and not replaced:
                raise _refusal(use, other)
        _require_not_read_next(use, settings)
        if use.side:
            overwrite = getattr(settings, "overwrite", None)
            require_ours(use.path, use.side, use.called, overwrite=overwrite)


def _refusal(use: PathUse, other: PathUse) -> UsageError:
    if not use.place.is_same(other.place):
        below = use.place.below(other.place) is not None
        inner, outer = (use, other) if below else (other, use)
        return UsageError(f"{inner.called} lies where {outer.called} has its files; choose another path")
    if other.writes:
        return UsageError(f"{other.called} and {use.called} would be one file; choose another path for one of them")
    return UsageError(f"{use.called} would be written over {other.called}; choose another path")


def _require_not_read_next(use: PathUse, settings: Settings) -> None:
    """Raise UsageError if the next run over a folder or glob would read what is written as its input."""
    for given in getattr(settings, "inputs", ()):
        if (use.output or use.side) and would_find(given, use.path, folder=bool(use.holds)):
            raise UsageError(
                f"{use.called} lies among the inputs: the next run over {given} would read it as input\n"
                f"write it elsewhere, for example into a folder beside {given}"
            )


def _named(settings: Settings) -> Iterator[tuple[str, PathRole, tuple[str, ...]]]:
    """The options that name paths, what is done with them, and which they name."""
    for name in type(settings).model_fields:
        role, value = details_of(type(settings), name).path, getattr(settings, name)
        if role is not None:
            values = value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else (value,)
            yield name, role, tuple(each for each in values if each is not None)


def _reads(settings: Settings, systems: Set[str]) -> Iterator[PathUse]:
    """What is read; rows only from filesystems of these `systems`, since a listing takes time."""
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
        paths = [given]  # who reads it tells what is wrong with it
    for path in paths:
        called = f"the input {path}" if name == "inputs" else f"{_flag(name)} {path}"
        yield PathUse(name, called, path, Place.of(path))


def _scores(name: str, given: str) -> Iterator[PathUse]:
    with suppress(PrefillError):
        target, called = Target.parse(given), f"{_flag(name)} {given}"
        yield PathUse(name, called, given, Place.of(target.path), uses=_uses(target), holds=_holds(target))
        yield PathUse(name, f"the work folder of {called}", given, Place.of(target.path + WORK_ENDING))


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
        elif role in ("metrics", "rejects", "calibration", "page"):
            for path in paths:
                yield _side(name, path, role, _flag(name))


def output_of(settings: ScoreSettings | MergeSettings) -> str:
    """Where the scores go, as it was given or else beside the first input."""
    if isinstance(settings, MergeSettings) or settings.output is not None:
        return settings.output or ""
    return default_output(settings.inputs[0], partition=settings.partition)


def _output(settings: ScoreSettings | MergeSettings, name: str) -> Iterator[PathUse]:
    """The scores and their work folder, and those of the shards that a merge removes."""
    output, merges = output_of(settings), isinstance(settings, MergeSettings)
    target, called = Target.parse(output, _shard_of(settings)), f"--output {output}"
    place = Place.of(target.path)
    yield PathUse(name, called, output, place, True, uses=_uses(target), holds=_holds(target), output=True)
    shards = shards_beside(target) if merges else []
    folders = [target.work, *(each.work for each in shards)]
    for location in dict.fromkeys(folder.location for folder in folders):
        yield PathUse(name, f"the work folder {location} of {called}", location, Place.of(location), True)


def _reports(settings: ScoreSettings | MergeSettings, name: str) -> Iterator[PathUse]:
    """The report of a run, its page, and what it has learnt of exits; or the report of a dry run."""
    called = "the report" if settings.report is None else _flag(name)
    place = output_of(settings), settings.report, _shard_of(settings)
    if isinstance(settings, ScoreSettings) and settings.dry_run:
        yield _side(name, dry_run_report(*place), "dry run", called)
        return
    path = report_path(*place)
    yield _side(name, path, "report", called)
    yield _side(name, page_of(path), "page", f"the page of {called},")
    if isinstance(settings, ScoreSettings) and settings.exit and settings.exit_profile is None:
        yield _side(name, exits_path(path), "exits", "what is learnt of exits,")


def _shard_of(settings: ScoreSettings | MergeSettings) -> Shard | None:
    return settings.shard_of if isinstance(settings, ScoreSettings) else None


def _side(name: str, path: str, side: str, called: str) -> PathUse:
    named = written_path(path, called)
    return PathUse(name, f"{called} {path}", named, Place.of(named), True, side)


def _uses(target: Target) -> Callable[[str], bool]:
    return target.is_ours if target.directory else lambda inner: True


def _holds(target: Target) -> str:
    return _FIRST_PART if target.directory else ""


def _flag(name: str) -> str:
    return "INPUT" if name == "inputs" else "SCORES" if name == "scores" else "--" + name.replace("_", "-")
