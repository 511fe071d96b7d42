"""An option: a field with a help text, a panel of the help page, the kind of thing it changes, and its needs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal, Self, cast

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, model_validator
from pydantic.fields import FieldInfo

from prefillcli.options.engines import Capability
from prefillcli.options.requirements import Requirement

ANSWERS = "Answers"
PROMPTS = "Prompts"
INPUT = "Input"
MODEL = "Model"
MEMORY = "Memory and speed"
WORKERS = "Several processes"
COMPRESSION = "Compression (SpecPrefill)"
EARLY_EXIT = "Early exit and flips"
RATIONALES = "Rationales"
OUTPUT = "Output"
EVALUATION = "Evaluation"
GATES = "Gates"
RUN = "Run"
BENCH = "What is compared"
PROFILE = "What is measured"
FIT = "Fit"

STEPS = {
    "What to do": (BENCH, PROFILE, FIT),
    "What is asked": (ANSWERS, RATIONALES),
    "Of what": (INPUT, PROMPTS),
    "By which model": (MODEL,),
    "How cheaply": (MEMORY, WORKERS, COMPRESSION, EARLY_EXIT),
    "Where to": (OUTPUT,),
    "How safely": (EVALUATION, GATES, RUN),
}
"""The panels of options by the step of a job that they are for. Help pages and the reference have this order."""
PANELS = tuple(panel for panels in STEPS.values() for panel in panels)

Change = Literal["scores", "columns", "rows", "speed", "report", "files"]
"""The thing that an option changes; of several, the first in this order.

- scores: the score of a row.
- columns: the other columns of a row, and the folder it goes to.
- rows: the choice of scored rows.
- speed: time and memory. Scores stay the same, but for rounding.
- report: the figures that are measured and reported, and the exit code.
- files: the files that are written, and whether existing ones are replaced.

The first three make the job: see `prefillcli.scoring.identity`.
"""


Level = Literal["first", "more", "rare"]
"""The users that an option is for.

- first: a first job needs it, and `--help` shows it.
- more: `--help-all` shows it.
- rare: few jobs need it. It has no flag: `--set NAME=VALUE` gives it, or a recipe.
"""


PathRole = str
"""The use that a run makes of the path that an option names (`prefillcli.scoring.path_table`). It reads the first
five.

- rows: files, folders, globs or URLs of rows.
- file: a small file.
- template: a small file, unless it is Jinja text itself.
- model: a folder or GGUF file, unless it is a name on the hub.
- scores: an output of `prefill score` with its work folder.
- images: a folder in which rows name files.
- output: the scores that are written, with their work folder.
- all others: a file of this kind that is written beside them, some with a page.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Details:
    """The properties of an option beside its name, type, default and help text. `option` explains each."""

    changes: Change
    panel: str = ""
    short: str = ""
    metavar: str = ""
    repeatable: bool = False
    negative: str = ""
    needs: Capability | None = None
    requires: tuple[Requirement, ...] = ()
    off: Any = None
    path: PathRole | None = None
    same_as: str = ""
    level: Level = "more"
    text: bool = False


def option(
    default: Any,
    help: str,
    panel: str,
    *,
    changes: Change,
    short: str = "",
    metavar: str = "",
    repeatable: bool = False,
    negative: str = "",
    needs: Capability | None = None,
    requires: Requirement | tuple[Requirement, ...] = (),
    off: Any = None,
    path: PathRole | None = None,
    same_as: str = "",
    level: Level = "more",
    text: bool = False,
    **field: Any,
) -> Any:
    """Return a field that is an option of the command line; `repeatable` ones may be given several times.

    `panel` is the part of the help page that shows it. `negative` is the flag that turns off an option that is on by
    default. `needs` names an ability that the engine must have if the option is given; options of compression need
    that. `requires` is a condition on the other options without which this one has no effect and is refused. The
    message names the first of several that is not met. `off` is the value that asks for nothing, besides None and the
    default of a switch. `path` is the use that a run makes of the path that the option names; a path that is read may
    be that of the written option `same_as`. `level` is the kind of reader that it is for. `text` is that of prompts:
    see `unescaped`. `field` goes to pydantic.
    """
    details = Details(
        changes=changes,
        panel=panel,
        short=short,
        metavar=metavar,
        repeatable=repeatable,
        negative=negative,
        needs=needs or ("compression" if panel == COMPRESSION else None),
        requires=requires if isinstance(requires, tuple) else (requires,),
        off=off,
        path=path,
        same_as=same_as,
        level=level,
        text=text,
    )
    return Field(default, description=help, json_schema_extra={"option": details}, **field)  # type: ignore[dict-item]


def argument(default: Any, help: str, *, changes: Change, path: PathRole, **field: Any) -> Any:
    """Return a field that is given on the command line by position, without a flag. With a `default` of ... it must be
    given."""
    details = Details(changes=changes, path=path)
    return Field(default, description=help, json_schema_extra={"option": details}, **field)  # type: ignore[dict-item]


class Options(BaseModel):
    """A group of options. Each field is made by `option` or `argument`, and has the name of its option."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)  # help pages validate nothing

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        for name, field in cls.model_fields.items():
            extra: Any = field.json_schema_extra or {}
            if "option" not in extra:
                raise TypeError(f"{cls.__name__}.{name}: make it with `option`, which states what it changes")

    def is_given(self, name: str) -> bool:
        """Return whether the option was given, even if with the value of its default."""
        return name in self.model_fields_set

    def check(self) -> None:
        """Raise UsageError for options of this group that contradict one another."""


_ABSENT: dict[str, Any] = {"absent": True}


def absent(kind: type[Options], **values: Any) -> Any:
    """Return a field for a group that a command lacks unless it declares the field itself: with these `values`, and
    defaults for the others."""
    return Field(default_factory=partial(kind, **values), json_schema_extra=_ABSENT)


class Settings(BaseModel):
    """All options of a command, in groups: each field is a group of `Options`.

    They are made of options by name, and told by name, as flags, recipes and reports have them: names are unique. Only
    the command line and what tells of options asks for one by its name; a part of a job takes its group.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)
    _flags: frozenset[str] = PrivateAttr(frozenset())
    _recipe: str | None = PrivateAttr(None)

    @classmethod
    @cache
    def groups(cls) -> Mapping[str, type[Options]]:
        """Return the groups whose options the command has, by field."""
        offered = {place: field for place, field in cls.model_fields.items() if field.json_schema_extra != _ABSENT}
        return {place: cast("type[Options]", field.annotation) for place, field in offered.items()}

    @classmethod
    @cache
    def options(cls) -> Mapping[str, FieldInfo]:
        """Return the options of all groups by name."""
        return {name: field for kind in cls.groups().values() for name, field in kind.model_fields.items()}

    @classmethod
    @cache
    def places(cls) -> Mapping[str, str]:
        """Return the field that holds the group of each option, by the option's name."""
        return {name: place for place, kind in cls.groups().items() for name in kind.model_fields}

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Self:
        """Return the settings with these options, by name. Raises ValidationError, whose places are a group and the
        name."""
        return cls.model_validate(dict(options))

    @classmethod
    def implied(cls, options: dict[str, Any]) -> dict[str, Any]:
        """Return the options with those that follow from them."""
        return options

    @model_validator(mode="before")
    @classmethod
    def _in_groups(cls, values: Any) -> Any:
        # Options by name into their groups. What is no option stays, to be refused.
        if not isinstance(values, Mapping):
            return values
        found: dict[str, Any] = {place: {} for place in cls.groups()}
        places = cls.places()
        for name, value in cls.implied(dict(values)).items():
            if isinstance(value, Options) or name not in places:
                found[name] = value
            else:
                found[places[name]][name] = value
        return found

    @property
    def given(self) -> frozenset[str]:
        """The names of the options that were given, even if with the value of their default."""
        return frozenset(name for place in self.groups() for name in getattr(self, place).model_fields_set)

    def value(self, name: str) -> Any:
        """Return the value of the option of this name."""
        return getattr(getattr(self, self.places()[name]), name)

    def values(self) -> dict[str, Any]:
        """Return the values of all options by name."""
        return {name: self.value(name) for name in self.options()}

    def to_json(self) -> dict[str, Any]:
        """Return the values of all options by name, as JSON has them."""
        groups = [getattr(self, place).model_dump(mode="json") for place in self.groups()]
        return {name: value for group in groups for name, value in group.items()}

    def with_options(self, changes: Mapping[str, Any]) -> Self:
        """Return these settings with other values for the options of these names, which count as given."""
        by_place: dict[str, dict[str, Any]] = {}
        for name, value in changes.items():
            by_place.setdefault(self.places()[name], {})[name] = value
        groups = {place: getattr(self, place).model_copy(update=own) for place, own in by_place.items()}
        return self.model_copy(update=groups)

    def with_origin(self, flags: Iterable[str], recipe: str | None) -> Self:
        """Return these settings, which remember that the options of these names were flags, and the recipe's path."""
        self._flags, self._recipe = frozenset(flags), recipe
        return self

    @property
    def interval(self) -> float:
        """The seconds between lines about what is being done."""
        return float(self.value("progress_interval")) if "progress_interval" in self.options() else 30.0

    @property
    def quiet(self) -> bool:
        """True if the command says nothing but warnings and errors."""
        return bool(self.value("quiet"))

    @property
    def recipe(self) -> str | None:
        """The path of the recipe that some of them are from."""
        return self._recipe

    def is_flag(self, name: str) -> bool:
        """Return whether the option was given on the command line of this run."""
        return name in self._flags

    @classmethod
    def given_by_place(cls) -> str | None:
        """Return the option that the command line takes without a flag, if there is one."""
        names = [name for name in cls.options() if not details_of(cls, name).panel]
        return names[0] if names else None

    @classmethod
    def of_level(cls, *levels: Level) -> list[str]:
        """Return the names of the options of these levels."""
        by_place = cls.given_by_place()
        named = [name for name in cls.options() if name != by_place]
        return [name for name in named if details_of(cls, name).level in levels]

    def check(self) -> None:
        """Raise UsageError for options that contradict one another."""
        for place in self.groups():
            getattr(self, place).check()

    @classmethod
    def changing(cls, *what: Change) -> list[str]:
        """Return the names of the options that change one of these things."""
        return [name for name in cls.options() if details_of(cls, name).changes in what]

    @classmethod
    def required(cls) -> dict[str, list[Requirement]]:
        """Return, by name, the conditions under which each option has an effect. Options that always have one are left
        out."""
        found = {name: list(details_of(cls, name).requires) for name in cls.options()}
        return {name: required for name, required in found.items() if required}

    def ignored(self) -> dict[str, Requirement]:
        """Return the options that were given but would be ignored, each with the first requirement that is not met."""
        found, given = {}, self.given
        for name, required in self.required().items():
            field, value = self.options()[name], self.value(name)
            off = field.default if field.annotation is bool else details_of(type(self), name).off
            if name in given and value is not None and value != off:
                missing = [each for each in required if not each.met(self)]
                if missing:
                    found[name] = missing[0]
        return found


OptionKind = type[Options] | type[Settings]


def fields_of(kind: OptionKind) -> Mapping[str, FieldInfo]:
    """Return the options of a command, or of a group of its settings, by name."""
    return kind.options() if issubclass(kind, Settings) else kind.model_fields


def details_of(kind: OptionKind, name: str) -> Details:
    """Return the properties of an option beside its name, type, default and help text."""
    extra: Any = fields_of(kind)[name].json_schema_extra
    details: Details = extra["option"]
    return details


def as_typed(kind: OptionKind, name: str, value: Any = None) -> str:
    """Return the words of the command line that give an option, this value where there are several."""
    details = details_of(kind, name)
    if details.level == "rare":
        return f"--set {name}=false" if value is False else f"--set {name}"
    word = name.replace("_", "-")
    if value is False:
        word = details.negative or f"no-{word}"
    return "INPUT" if name == "inputs" else f"--{word}"


_IN_JINJA = re.compile(r"(\{\{.*?\}\}|\{%.*?%\}|\{#.*?#\})", re.DOTALL)
_ESCAPE = re.compile(r"(\\+)([nt])")


def unescaped(kind: OptionKind, name: str, value: Any) -> Any:
    """Return the value of an option as a shell or the environment gives it, where a new line is hard to write: in the
    text of prompts, backslash-n is a line break and backslash-t a tab.

    Two backslashes stand for one there. Jinja reads what is between its own braces.
    """
    if not details_of(kind, name).text:
        return value
    if not isinstance(value, str):
        return [unescaped(kind, name, each) for each in value]
    parts = _IN_JINJA.split(value)
    parts[::2] = [_ESCAPE.sub(_meant, part) for part in parts[::2]]
    return "".join(parts)


def _meant(found: re.Match[str]) -> str:
    pairs, single = divmod(len(found[1]), 2)
    return "\\" * pairs + ({"n": "\n", "t": "\t"}[found[2]] if single else found[2])


def require(found: dict[str, list[Requirement]], names: Iterable[str], required: Requirement) -> None:
    """Make this the first requirement of the options of these names."""
    for name in names:
        found[name] = [required, *found.get(name, ())]


def changed(kind: OptionKind, values: Mapping[str, Any]) -> list[list[Any]]:
    """Return the names and values of the options of a command, or of a group, that are not at their default, by name.
    So a job which does not use a new option is still the one that a version without it began."""
    fields = fields_of(kind)
    return [[name, values[name]] for name in sorted(values) if values[name] != fields[name].default]
