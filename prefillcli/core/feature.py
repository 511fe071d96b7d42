"""The files that a run writes beside the scores: how one of an earlier run is known, which may be replaced."""

from __future__ import annotations

import json
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

if TYPE_CHECKING:
    from prefillcli.bench.contenders import Contender, Equipment
    from prefillcli.bench.material import Material
    from prefillcli.data.output.columns import Counts
    from prefillcli.data.output.target import Manifest
    from prefillcli.data.prompts.labels import Labels
    from prefillcli.data.rows import ScoredRow, Window
    from prefillcli.engines.base import Answer, LeavingRule, PlanEngine, Treatment
    from prefillcli.jobs.inputs import Opening
    from prefillcli.jobs.score import Job
    from prefillcli.models.open import Opened
    from prefillcli.plan.pack import Pack
    from prefillcli.prefill.walk import Arithmetic
    from prefillcli.report.run import RunReport
    from prefillcli.report.section import Section


@dataclass(frozen=True, slots=True)
class SideFile:
    """A kind of file."""

    meaning: str
    knows: Callable[[str, bytes], bool]
    """Whether the file at a path, with its first bytes, is of this kind."""


def json_with(*names: str) -> Callable[[str, bytes], bool]:
    """Knows reports: JSON objects with a schema version and these names."""

    def knows(path: str, start: bytes) -> bool:
        try:
            content = json.loads(start)
        except (ValueError, RecursionError):
            return False
        return isinstance(content, dict) and content.keys() >= {"schema_version", *names}

    return knows


class Objection(NamedTuple):
    """Why something cannot be combined with an option, and what to do besides leaving that option out."""

    reason: str
    remedy: str


class Command(NamedTuple):
    """A command that a feature brings."""

    settings: type[Any]
    run: Callable[[Any], dict[str, Any]]
    """Does it, and returns the summary for the last line on stdout. Its docstring is the help page."""


class Feature:
    """A feature in a job with these settings. Every hook may be left out."""

    order: ClassVar[int] = 50
    """Features take part in this order, and their options and sections stand in it."""
    options: ClassVar[Mapping[str, type[Any]]] = {}
    """By command, the class of its options. The classes of all features make the settings of a command."""
    commands: ClassVar[Mapping[str, Command]] = {}
    """By name, the commands that it brings."""
    methods: ClassVar[Mapping[str, tuple[str, str]]] = {}
    """Methods of `prefill bench` by name: what each is, and what is done before a workload. See `contender`."""
    flips: ClassVar[bool] = False
    """Whether it may flip answers: an audit reads some rows in full as well."""
    columns: ClassVar[Sequence[str]] = ()
    """The groups of columns that the output of a job has that asks for it (`data.output.columns.ColumnGroups`)."""
    plan_keys: ClassVar[Sequence[str]] = ()
    """Parts of the job's plan that stay when its models are loaded again."""
    keys: ClassVar[Mapping[str, Any]] = {}
    """Keys of `run.json`, with their values in a run that has nothing to say there."""
    side_files: ClassVar[Mapping[str, SideFile]] = {}
    """Kinds of files that it writes beside the scores, by what its options call their path."""

    def __init__(self, settings: Any) -> None:
        self.settings = settings

    @classmethod
    def asked(cls, settings: Any) -> bool:
        """Whether these settings of one of its commands ask for the feature."""
        return True

    def check(self) -> None:
        """Raise UsageError for options that contradict one another or those of the core."""

    def joint(self, option: str) -> Objection | None:
        """Why rows cannot be scored apart from the others of the job, as `option` would do; None where they can."""

    def uneven(self) -> Objection | None:
        """Why a score may have other bits beside other rows; None where it has the same."""

    def learns(self) -> str | None:
        """The option with which it learns from answers of the model; None if it does not."""
        return None

    def meaningless(self, labels: Labels) -> Sequence[str]:
        """Options that are given, but have no meaning for what the numbers of these labels are."""
        return ()

    def carried(self) -> Sequence[str | None]:
        """Columns of the input that go to the output."""
        return ()

    def writes(self, report: str) -> Sequence[tuple[str, str, str]]:
        """What it writes beside the report that goes to this path: kind in `side_files`, path, name for messages."""
        return ()

    def reopens(self) -> bool:
        """Whether a complete output of the job is gone on with."""
        return False

    def begin(self, report: RunReport) -> None:
        """A run begins, whose report says where it will be written over that of an earlier one."""

    def source_opened(self, opening: Opening) -> None:
        """The input is open. Torch is not imported yet: raise UsageError for all that can be told now."""

    def models_opened(self, opening: Opening) -> None:
        """The models' folders are open and the labels are known. No weights are loaded."""

    def rows_opened(self, opening: Opening) -> None:
        """Prompts can be made of the rows."""

    def identity(self, opening: Opening) -> Mapping[str, str]:
        """Its parts of the job's fingerprint, beside the values of its options."""
        return {}

    def identified(self, job: Job) -> None:
        """The job's fingerprint is known. The output is not open."""

    def first_window(self, job: Job, window: Window) -> None:
        """The first window of the input is there, before the models are loaded."""

    def learn(
        self, opening: Opening, engine: PlanEngine, plan: Mapping[str, Any], tick: Callable[[float], None]
    ) -> Mapping[str, Any]:
        """The models are loaded. Returns the part of the job's plan that all attempts at the job are to share.

        The `plan` has the part that an earlier attempt has returned. `tick` is called with tokens; it may raise.
        """
        return {}

    def left_to_score(self, job: Job, windows: Iterator[Window]) -> Iterator[Window]:
        """The windows without the rows that need no model."""
        return windows

    def known(self) -> Mapping[int, ScoredRow]:
        """Rows by number that have been scored before the first window."""
        return {}

    def arithmetic(self) -> Arithmetic | None:
        """How a walk through the layers computes; None where it takes the fastest way of the device."""
        return None

    def treatment(self, in_full: frozenset[int]) -> Treatment | None:
        """What is done between the layers with the prompts of a pack, but for those `in_full`; None for nothing."""
        return None

    def answered(self, pack: Pack, answers: Sequence[Answer]) -> None:
        """All prompts of a pack are answered."""

    def window_written(self, job: Job, window: int) -> None:
        """All rows of the window with this index are written."""

    def shard_ended(self, job: Job) -> Mapping[str, Any]:
        """What the plan of a shard has to hold for `merged`."""
        return {}

    def names_rows(self) -> bool:
        """Whether the report names rows of the input."""
        return False

    def truth_column(self) -> str | None:
        """The carried column with the right answers."""
        return None

    def finished(self, job: Job) -> None:
        """All rows of the job, or of its shard, are written."""

    def ended(self, job: Job) -> None:
        """The output is finished: evaluate it, write what lies beside it."""

    def reported(self, job: Job, counts: Counts | None) -> None:
        """The run is over, however it ended. `counts` are the output's; None where it was not opened."""

    @classmethod
    def merged(cls, report: RunReport, output: str, manifest: Manifest) -> None:
        """`prefill merge` has made an output of shards."""

    def judge(self, report: RunReport) -> Sequence[str]:
        """What is not as expected of a finished output: it ends with exit code 3."""
        return ()

    def leaving_rule(self, opened: Opened, labels: Labels) -> LeavingRule | None:
        """The exits that `prefill inspect` holds a row against."""
        return None

    @classmethod
    def contender(cls, name: str, equipment: Equipment, material: Material) -> Contender | None:
        """One of its `methods` for a workload of `prefill bench`; None, with a note, where it cannot be compared."""
        raise NotImplementedError

    @classmethod
    def section(cls, report: RunReport) -> Section | None:
        """What terminal, page and metrics say of a run; None for nothing."""


@cache
def features() -> tuple[type[Feature], ...]:
    """The features that are there."""
    folder = import_module("prefillcli.features").__path__
    found = [import_module(f"prefillcli.features.{each.name}").FEATURE for each in pkgutil.iter_modules(folder)]
    return tuple(sorted(found, key=lambda each: each.order))


def option_groups(command: str) -> tuple[type[Any], ...]:
    """The classes of all features' options of a command: bases of its settings, of which the last one's come first."""
    return tuple(each.options[command] for each in reversed(features()) if command in each.options)


def features_of(settings: Any) -> tuple[Feature, ...]:
    """The features that these settings of a command ask for."""
    return tuple(
        each(settings)
        for each in features()
        if any(isinstance(settings, group) for group in each.options.values()) and each.asked(settings)
    )
