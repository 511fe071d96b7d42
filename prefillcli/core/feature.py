"""A feature: its options, and the hooks that the core calls on the way from a job's settings to its report."""

from __future__ import annotations

import json
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from prefillcli.engines.registry import loader_of

if TYPE_CHECKING:  # the nouns of the hooks: features import them from here, for their annotations
    from pathlib import Path

    from prefillcli.core.further import Choice as Choice
    from prefillcli.core.further import Condition as Condition
    from prefillcli.core.further import Further as Further
    from prefillcli.core.further import WantedRow as WantedRow
    from prefillcli.core.question import Question as Question
    from prefillcli.core.question import Tick as Tick
    from prefillcli.data.output.columns import Counts as Counts
    from prefillcli.data.output.columns import Group as Group
    from prefillcli.data.output.columns import OutputSchema as OutputSchema
    from prefillcli.data.output.target import Manifest as Manifest
    from prefillcli.data.prompts.builder import PromptBuilder as PromptBuilder
    from prefillcli.data.prompts.builder import PromptSettings as PromptSettings
    from prefillcli.data.prompts.builder import RowColumns as RowColumns
    from prefillcli.data.prompts.labels import Labels as Labels
    from prefillcli.data.prompts.templates import RowTemplate as RowTemplate
    from prefillcli.data.rows import Prompt as Prompt
    from prefillcli.data.rows import ScoredRow as ScoredRow
    from prefillcli.data.rows import Window as Window
    from prefillcli.engines.base import Answer as Answer
    from prefillcli.engines.base import LeavingRule as LeavingRule
    from prefillcli.engines.base import Loader as Loader
    from prefillcli.engines.base import PlanEngine as PlanEngine
    from prefillcli.engines.base import Readings as Readings
    from prefillcli.engines.base import Treatment as Treatment
    from prefillcli.forecast.survey import Survey as Survey
    from prefillcli.jobs.identity import LocalModels as LocalModels
    from prefillcli.jobs.load import Models as Models
    from prefillcli.jobs.opening import Opening as Opening
    from prefillcli.jobs.score import Job as Job
    from prefillcli.jobs.scorer import Scorer as Scorer
    from prefillcli.models.law import TextsOf as TextsOf
    from prefillcli.models.open import Opened as Opened
    from prefillcli.models.weights import WeightsPlan as WeightsPlan
    from prefillcli.plan.pack import Pack as Pack
    from prefillcli.prefill.walk import Arithmetic as Arithmetic
    from prefillcli.prefill.walk import LayerWalk as LayerWalk
    from prefillcli.report.inspection import ReadPrompt as ReadPrompt
    from prefillcli.report.run import RunReport as RunReport
    from prefillcli.report.section import Section as Section
    from prefillcli.runtime.clock import StepLog as StepLog


@dataclass(frozen=True, slots=True)
class SideFile:
    """A kind of file."""

    meaning: str
    knows: Callable[[str, bytes], bool]  # whether the file at a path, with its first bytes, is of this kind


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
    """Why something cannot be combined with an option, and a remedy besides leaving that option out."""

    reason: str
    remedy: str


class Outlook(NamedTuple):
    """What a dry run says of a feature: under the `key` the numbers, a pydantic model, and lines of name and text."""

    key: str
    numbers: Any
    lines: Sequence[tuple[str, str]]


class Foresight(ABC):
    """A forecast of how prompts would be read at several rates, as far as it is known before models are loaded."""

    rates: Sequence[float]  # the shares of tokens for which a forecast is made
    chosen: float | None  # the one of the job among them; None where it is not known

    @abstractmethod
    def questions(self, prompts: Sequence[Prompt], rate: float) -> list[Question]:
        """Return how the model would read the prompts of a window."""

    def layers(self, questions: Sequence[Question]) -> float:
        """The share that is computed of all layers of all tokens of these questions."""
        return 1.0


class Command(NamedTuple):
    """A command that a feature brings."""

    settings: type[Any]
    # Does it, and returns the summary for the last line on stdout. Its docstring is the help page.
    run: Callable[[Any], dict[str, Any]]


class Feature:
    """A feature in a job with these settings. Every hook may be left out."""

    order: ClassVar[int] = 50  # features take part in this order, and their options and sections stand in it
    # By command, the class of its options. The classes of all features make the settings of a command.
    options: ClassVar[Mapping[str, type[Any]]] = {}
    commands: ClassVar[Mapping[str, Command]] = {}  # by name, the commands that it brings
    flips: ClassVar[bool] = False  # whether it may flip answers: an audit reads some rows in full as well
    # Whether it decides how the model reads prompts: see `questions`. Windows then hand no prefixes on.
    rewrites: ClassVar[bool] = False
    # The groups of columns (`data.output.columns.Group`) in the output of a job that asks for it.
    columns: Sequence[Group] = ()
    # Whether it makes prompts anew from parts of their rows: prompts then keep the values that they were made from.
    takes_prompts_apart: ClassVar[bool] = False
    draft_advice: ClassVar[str] = ""  # the option with which it uses a draft model; empty if it never does
    # Parts of the job's plan that stay when its models are loaded again.
    plan_keys: ClassVar[Sequence[str]] = ()
    # Keys of `run.json`, with their values in a run that has nothing to report there.
    keys: ClassVar[Mapping[str, Any]] = {}
    # Kinds of files that it writes beside the scores, by the `path` of their options.
    side_files: ClassVar[Mapping[str, SideFile]] = {}

    def __init__(self, settings: Any) -> None:
        self.settings = settings

    @classmethod
    def asked(cls, settings: Any) -> bool:
        """Return whether these settings of one of its commands ask for the feature."""
        return True

    def check(self) -> None:
        """Raise UsageError for options that contradict one another or those of the core."""

    def joint(self, option: str) -> Objection | None:
        """Return why rows cannot be scored apart from the others of the job, as `option` asks; None where they can."""

    def uneven(self) -> Objection | None:
        """Return why a score may have different bits beside other rows; None where its bits stay the same."""

    def learns(self) -> str | None:
        """The option with which it learns from answers of the model; None if it does not."""
        return None

    def bounds_flips(self) -> bool:
        """Return whether `--max-flips` says how many answers it may flip."""
        return self.flips

    def between_layers(self) -> bool:
        """Return whether it acts between layers. Prompts are then read once more before texts are written behind
        them."""
        return False

    def read_as(self) -> Sequence[Any]:
        """Return how it lets prompts be read, as a value to hash: other features learn from the answers and use that
        in later jobs."""
        return ()

    def meaningless(self, labels: Labels) -> Sequence[str]:
        """Given options that have no meaning for numbers of these labels' kind."""
        return ()

    def row_columns(self) -> RowColumns | None:
        """The columns by which rows change how their own prompts are read; None: there are none."""

    def carried(self) -> Sequence[str | None]:
        """Columns of the input that go to the output."""
        return ()

    def writes(self, report: str) -> Sequence[tuple[str, str, str]]:
        """The files that it writes beside the report that goes to this path: kind in `side_files`, path, name for
        messages."""
        return ()

    def reopens(self) -> bool:
        """Return whether the job goes on with its output though that is complete."""
        return False

    def folders(self) -> Sequence[Path]:
        """Folders on this machine that it reads beside those of the models. Raises UsageError where one is missing."""
        return ()

    def check_columns(self, available: Sequence[str]) -> None:
        """Raise UsageError if the input lacks a column that an option names."""

    def change_model(self, opened: Opened) -> Opened:
        """The models as the feature needs them. Their folders are open, no weights are loaded. Raises UsageError."""
        return opened

    def begin(self, report: RunReport) -> None:
        """A run begins. Its report knows the path where it will replace that of an earlier run."""

    def id_column(self, available: Sequence[str]) -> str | None:
        """The column with the ids of rows with the `available` columns, where the options name none; None: rows go by
        their number."""
        return None

    def columns_known(self, columns: Collection[str]) -> None:
        """The columns of the input are known. Raise UsageError if the feature can have no effect on such rows."""

    def starting(self) -> None:
        """Before anything is opened: raise UsageError for options that are wrong whatever the input holds."""

    def own_labels(self, model: Path) -> bool:
        """Return whether `labels` may give other labels for a model in this folder or file than the job's options
        do."""
        return False

    def labels_named(self, opening: Opening) -> None:
        """The names of the labels are known: where the options have them, before torch is imported. Raise UsageError
        if they do not fit; the input is open."""

    def labels(self, opened: Opened) -> Labels | None:
        """Return what is asked behind each prompt; None: the labels of the job's options."""
        return None

    def prompt_builder(
        self, opening: Opening, settings: PromptSettings, available: Sequence[str]
    ) -> PromptBuilder | None:
        """The builder of prompts for rows with the `available` columns, which may make several of a row; None: the
        usual one."""
        return None

    def prompt_columns(self, available: Sequence[str]) -> Sequence[str] | None:
        """The columns that prompts of rows with the `available` ones are made of; None: those of the job's template or
        prompt column."""
        return None

    def answers(self, opening: Opening) -> Sequence[OutputSchema]:
        """The columns of the answers to each of several questions about a row; none: there is one question."""
        return ()

    def source_opened(self, opening: Opening) -> None:
        """The input is open. Torch is not imported yet: raise UsageError for every mistake that shows already."""

    def models_opened(self, opening: Opening) -> None:
        """The models' folders are open and the labels are known. No weights are loaded."""

    def rows_opened(self, opening: Opening) -> None:
        """Prompts can be made of the rows."""

    def identity(self, opening: Opening, values: dict[str, Any], models: LocalModels) -> Mapping[str, str]:
        """Its parts of the job's fingerprint. `values` are those of options that change the output. Values that it
        takes out for a part of its own are not in the part `settings`. `models` are the contents of the models'
        files."""
        return {}

    def foresee(self, opened: Opened, budget: int) -> Foresight | None:
        """Its forecast of how prompts would be read; None where it does not decide that. A pack may take `budget`
        bytes."""

    def surveyed(self, opening: Opening, survey: Survey) -> Outlook | None:
        """Return what a dry run says of it, by all rows of the input; None: nothing. Raises UsageError."""
        return None

    def identified(self, job: Job) -> None:
        """The job's fingerprint is known. The output is not open."""

    def first_window(self, job: Job, window: Window) -> None:
        """The first window of the input is there, before the models are loaded."""

    def load(self, models: Models[Any]) -> Any:
        """The models are loaded, here or in this worker. Returns an object that is kept beside them and closed with
        them, or None. Raises UsageError where they cannot serve the feature."""
        return None

    @classmethod
    def work(cls, beside: Any, asked: Any, tick: Tick) -> Any:
        """Do a task that the feature has sent to this worker (`Pool.ask_feature`); `beside` is the result of `load`
        here. Task and result can be pickled."""
        raise NotImplementedError

    def learn(
        self, opening: Opening, engine: PlanEngine, plan: Mapping[str, Any], tick: Callable[[float], None]
    ) -> Mapping[str, Any]:
        """The models are loaded. Returns the part of the job's plan that all attempts at the job must share.

        The `plan` has the part that an earlier attempt returned. `tick` is called with tokens; it may raise.
        """
        return {}

    def left_to_score(self, job: Job, windows: Iterator[Window]) -> Iterator[Window]:
        """The windows without the rows that need no model."""
        return windows

    def questions(
        self, scorer: Scorer, prompts: Sequence[Prompt], tick: Tick, window: Window | None, done: Collection[int]
    ) -> tuple[list[Question], int]:
        """Return how the model reads prompts that are planned together, in their order, and the tokens that another
        model has computed to decide that. The prompts may be those of a `window`, of which some rows are `done`.
        Called if it `rewrites`."""
        raise NotImplementedError

    def ahead(self, questions: Sequence[Question], tick: Tick) -> tuple[dict[int, ScoredRow], int]:
        """The answers, by the places of these questions, that the model need not be asked for, and the tokens that
        another model has computed to find them."""
        return {}, 0

    def glance(self, scorer: Scorer, prompts: Sequence[Prompt], tick: Tick) -> Sequence[Readings]:
        """Readings of these prompts by each reader that is cheaper than the model; NaN where it cannot read one."""
        return ()

    def known(self) -> Mapping[int, ScoredRow]:
        """Rows by number that have been scored before the first window."""
        return {}

    def asks(self) -> bool:
        """Return whether it asks more about rows that are scored: see `further`."""
        return False

    def needs_draft(self) -> bool:
        """Return whether it uses the draft model, also where nothing is compressed."""
        return False

    def text_room(self, opened: Opened, names: Sequence[str]) -> tuple[int, TextsOf] | None:
        """The most tokens of a text behind a prompt, and the prompts that get one, for labels with these names; None:
        no texts."""
        return None

    def loaded(self, models: Models[Any]) -> None:
        """The models are loaded, and all that features load beside them."""

    def condition(self, schema: OutputSchema) -> Condition | None:
        """Which scored rows of an output with this schema get further questions; None: all. Raises UsageError."""
        return None

    def further(self, opening: Opening, choice: Choice) -> Further | None:
        """Its questions about the chosen ones of the scored rows; None: it has none."""
        return None

    def answers_shown(self, row: WantedRow, labels: Sequence[str]) -> Section | None:
        """The section of `prefill inspect` on the answers about a row of a job with these labels; None: there is
        none."""
        return None

    def arithmetic(self) -> Arithmetic | None:
        """Return how a walk through the layers computes; None where it takes the fastest way of the device."""
        return None

    def keep_weights(self, opened: Opened, *, draft: bool, share: float) -> WeightsPlan | None:
        """Return how the weights of the layer walk's model are kept; None: all on the device. With `draft` those of
        the draft must fit beside them; else the draft's are loaded already. This worker has a `share` of the memory;
        others take the rest. Raises UsageError, and ResourceError where they certainly do not fit."""
        return None

    def treatment(self, in_full: frozenset[int]) -> Treatment | None:
        """Its work between the layers on the prompts of a pack, except those `in_full`; None: it does none."""
        return None

    def answered(self, pack: Pack, answers: Sequence[Answer]) -> None:
        """All prompts of a pack are answered."""

    def window_written(self, job: Job, window: int) -> None:
        """All rows of the window with this index are written."""

    def shard_ended(self, job: Job) -> Mapping[str, Any]:
        """Additions to the plan of a shard, for `merged` to read."""
        return {}

    def names_rows(self) -> bool:
        """Return whether the report names rows of the input."""
        return False

    def truth_column(self) -> str | None:
        """The carried column with the right answers."""
        return None

    def finished(self, job: Job) -> None:
        """All rows of the job, or of its shard, are written."""

    def ended(self, job: Job) -> None:
        """The output is finished: evaluate it, write the files beside it."""

    def reported(self, job: Job, counts: Counts | None) -> None:
        """The run is over, however it ended. `counts` are the output's; None where it was not opened."""

    @classmethod
    def failure(cls, counts: Counts) -> str | None:
        """Return why a finished output counts as failed, or None."""

    @classmethod
    def merged(cls, report: RunReport, output: str, manifest: Manifest) -> None:
        """`prefill merge` has made an output of shards."""

    def judge(self, report: RunReport) -> Sequence[str]:
        """Sentences on how a finished output differs from the expected one; any of them makes the exit code 3."""
        return ()

    def inspected(
        self, models: Models[Any], prompts: Sequence[Prompt], number: int, shared: Sequence[int], tick: Tick
    ) -> ReadPrompt | None:
        """Return how the model reads the prompt of this number in a window, for `prefill inspect`. `shared` has the
        number of tokens that each prompt of the window shares with it. None where the feature does not decide that."""

    def leaving_rule(self, opened: Opened, labels: Labels) -> LeavingRule | None:
        """The exits by which `prefill inspect` judges a row."""
        return None

    @classmethod
    def section(cls, report: RunReport) -> Section | Sequence[Section] | None:
        """The section on a run, or several, for terminal, page and metrics; None: there is nothing to report."""


@cache
def features() -> tuple[type[Feature], ...]:
    """All features."""
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


def text_room(settings: Any, opened: Opened, names: Sequence[str]) -> dict[str, Any]:
    """The texts for which a job needs memory, if its labels have these names: their length and their prompts,
    `text_tokens` and `texts_of` of a `LoadRequest`."""
    rooms = (each.text_room(opened, names) for each in features_of(settings))
    tokens, texts_of = next(filter(None, rooms), (0, "all"))
    return {"text_tokens": tokens, "texts_of": texts_of}


def open_models(settings: Any, dtypes: Sequence[str] = ()) -> Opened:
    """The models of these settings, as the features that are asked for need them. `dtypes` are those that are chosen
    already. Raises as `Loader`."""
    opened = loader_of(getattr(settings, "engine", "torch")).open_models(settings, dtypes)
    for each in features_of(settings):
        opened = each.change_model(opened)
    return opened


def plan_weights(settings: Any, opened: Opened, *, draft: bool = True, share: float = 1.0) -> WeightsPlan:
    """Return how the model's weights are kept, by the features that are asked for: see `Feature.keep_weights`."""
    from prefillcli.models.weights import plan_resident

    found = (each.keep_weights(opened, draft=draft, share=share) for each in features_of(settings))
    return next(filter(None, found), None) or plan_resident(opened, draft=draft)
