"""The settings of a command: recipe < environment < flag."""

from __future__ import annotations

import codecs
import inspect
import json
import os
import re
import reprlib
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import Any, Literal, TypeVar, get_type_hints

from pydantic import ValidationError

from prefillcli.errors import UsageError, brief, did_you_mean
from prefillcli.options.commands import COMMANDS, ScoreSettings
from prefillcli.options.groups import read_mapping
from prefillcli.options.keywords import FileOptions, ScorerOptions, StrPath
from prefillcli.options.option import Settings, as_typed, details_of, unescaped
from prefillcli.prompts.questions import Question
from prefillcli.rows.filesystems import read_given, utf8_text

AnySettings = TypeVar("AnySettings", bound=Settings)
_From = Literal["recipe", "environment", "flag"]

# Arguments given by position, by field: their name on the help page, and a description.
_PLACES = {
    "inputs": ("INPUT", "a Parquet, JSONL or CSV file, a directory or a glob"),
    "output": ("OUTPUT", "what prefill score was given"),
    "scores": ("SCORES", "what prefill score wrote"),
}
_MOST_REASON = 400  # characters, of why a value is refused
ENVIRONMENT_PREFIX = "PREFILL_"
RECIPE_VARIABLE = ENVIRONMENT_PREFIX + "RECIPE"
# Kubernetes sets these in every container when the name of a service begins with `prefill`.
_KUBERNETES_VARIABLE = re.compile(
    r"_SERVICE_HOST$|_SERVICE_PORT(_\w+)?$|_PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?$"
)


def load_settings(
    kind: type[AnySettings],
    flags: Mapping[str, Any],
    *,
    recipe: str | None = None,
    environment: Mapping[str, str] = os.environ,
) -> AnySettings:
    """Load settings of a `kind`: `flags` from the command line override the environment, which overrides the recipe
    file.

    `PREFILL_RECIPE` names the recipe where no flag does. A recipe and the environment may hold the options of all
    commands. An option that would be ignored is dropped if it comes from the environment, or if it comes from the
    recipe and a flag is the reason. Raises UsageError, which names the option: for any other that would be ignored,
    for a wrong value, and for an unknown name with the nearest known one.
    """
    given = _Merged()
    recipe = recipe or environment.get(RECIPE_VARIABLE) or None
    if recipe is not None:
        for key, value in read_recipe(recipe).items():
            name = "inputs" if key == "input" else key
            if name not in _known_options(kind):
                raise UsageError(f"{recipe}: unknown key {_shown(key)}{did_you_mean(key, _known_options(kind))}")
            given.set(name, value, f"{recipe}: {key}", "recipe")
    _refuse_unknown_variables(kind, environment)
    for name in kind.options():
        variable = ENVIRONMENT_PREFIX + name.upper()
        if name != "inputs" and environment.get(variable):
            given.set(name, unescaped(kind, name, environment[variable]), variable, "environment")
    for name, value in flags.items():
        given.set(name, value, as_typed(kind, name, value), "flag")
    if "adapter" in kind.options():
        given.take_base()
    for name, other in (("resume", "overwrite"), ("overwrite", "resume")):
        if flags.get(name) and other not in flags:  # the flag wins over a recipe with the other
            given.values.pop(other, None)
    place = kind.given_by_place()
    if place is not None and not given.values.get(place) and kind.options()[place].is_required():
        raise UsageError(f"no {_PLACES[place][0]} given: name {_PLACES[place][1]}")
    settings = given.settings(kind)
    settings.check()
    while ignored := settings.ignored():
        name, lacks = next(iter(ignored.items()))
        if given.is_mistake(name, kind, recipe_may_keep=lacks.recipe_may_keep):
            raise UsageError(lacks.message(given.origin[name]))
        del given.values[name]
        settings = given.settings(kind)
    return settings.with_origin(flags, recipe)


def _refuse_other_bytes(value: Any, origin: str) -> None:
    # Raise UsageError for bytes of the command line or the environment that were not decoded as UTF-8, and for half a
    # surrogate pair from Python.
    if isinstance(value, Question):
        value = value.to_json()
    if isinstance(value, Mapping):
        value = [*value, *value.values()]
    if isinstance(value, list | tuple):
        for each in value:
            _refuse_other_bytes(each, origin)
    if not isinstance(value, str):
        return
    try:
        value.encode()
    except UnicodeEncodeError as error:
        if not "\udc80" <= value[error.start] <= "\udcff":  # how Python keeps the bytes that it cannot decode
            raise UsageError(
                f"{origin} has half a surrogate pair: {_shown(value)}\nwrite the character itself"
            ) from None
        ascii_locale = codecs.lookup(sys.getfilesystemencoding()).name != "utf-8"
        advice = "set LC_ALL=C.UTF-8 or PYTHONUTF8=1" if ascii_locale else "write it in UTF-8, or rename the file"
        raise UsageError(f"{origin} is not UTF-8: {value!r}\n{advice}") from None


def reason_of(error: Mapping[str, Any]) -> str:
    """Return what pydantic says of a wrong value, with the nearest of the words that it may be."""
    reason = str(error["msg"]).removeprefix("Value error, ").removeprefix("Input ")
    reason = re.sub("a valid (tuple|list)", "a list", reason).replace("a valid dictionary", "a mapping")
    words = re.findall("'([^']*)'", str(error.get("ctx", {}).get("expected", "")))
    return reason + did_you_mean(str(error["input"])[:60], words)


class _Merged:
    """The values given for each option: the last one wins, with its origin."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.origin: dict[str, str] = {}  # as the user wrote it: `--labels`, `PREFILL_LABELS` or `job.yaml: labels`
        self._from: dict[str, _From] = {}
        self._recipe: dict[str, Any] = {}

    def set(self, name: str, value: Any, origin: str, source: _From) -> None:
        """Set a value, over an earlier one. Raises UsageError for text that is not UTF-8."""
        _refuse_other_bytes(value, origin)
        value = (value,) if name == "inputs" and isinstance(value, str) else value
        self.values[name], self.origin[name], self._from[name] = value, origin, source
        if source == "recipe":
            self._recipe[name] = value

    def take_base(self) -> None:
        """Let the folder of an adapter that is given as the model stand for the adapter, and for the model that it
        names, if that is a folder."""
        name, found = self.values.get("model"), None
        folder = (
            Path(name).expanduser() if isinstance(name, str | PathLike) and not self.values.get("adapter") else None
        )
        if folder is None or (folder / "config.json").is_file():
            return
        with suppress(OSError, ValueError):  # no adapter, or one that is told apart when it is opened
            found = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        base = found.get("base_model_name_or_path") if isinstance(found, dict) else None
        if isinstance(base, str) and base and Path(base).expanduser().is_dir():
            source, origin = self._from["model"], self.origin["model"]
            self.set("adapter", {folder.resolve().name: str(name)}, origin, source)
            self.set("model", base, origin, source)

    def settings(self, kind: type[AnySettings]) -> AnySettings:
        """Return all values that this kind of settings has. Raises UsageError for the first wrong one."""
        known = {name: value for name, value in self.values.items() if name in kind.options()}
        try:
            settings = kind.of(known)
        except ValidationError as error:
            first = error.errors()[0]
            name = str(first["loc"][1 if len(first["loc"]) > 1 else 0])  # a group, then an option, then a place in it
            reason = reason_of(first)
            if len(reason) > _MOST_REASON:
                reason = f"{reason[:_MOST_REASON]} ..."
            raise UsageError(f"{self.origin.get(name, name)} {_shown(first['input'])}: {reason}") from None
        for name, value in known.items():
            own = value.values() if isinstance(value, Mapping) else value
            for each in (own,) if isinstance(own, str) or not isinstance(own, Iterable) else own:
                if "\0" in str(each) and details_of(kind, name).path is not None:
                    raise UsageError(f"{self.origin[name]} {_shown(each)}: it holds a null character")
        return settings

    def is_mistake(self, name: str, kind: type[Settings], *, recipe_may_keep: bool) -> bool:
        """Return whether it is the user's mistake that the option `name` has no effect.

        Not in the environment, which is for all commands and runs. In a recipe it is, unless a flag is the reason.
        """
        if self._from[name] != "recipe":
            return self._from[name] == "flag"
        if recipe_may_keep:
            return False
        alone = {key: value for key, value in self._recipe.items() if key in kind.options()}
        try:
            place = kind.given_by_place()
            least = {} if place is None else {place: ("INPUT",) if place == "inputs" else "x"}
            return name in kind.of(least | alone).ignored()
        except ValidationError:
            return False  # the recipe alone is wrong; a flag or the environment corrects it


def _shown(value: object) -> str:
    # The given value, cut where it is long.
    shortened = reprlib.Repr()
    shortened.maxstring = shortened.maxother = shortened.maxlong = 100
    return shortened.repr(value)


def rare_options(kind: type[Settings], given: Sequence[str]) -> dict[str, Any]:
    """Return the options that `--set NAME=VALUE` gives, by name. Raises UsageError for a name that is not for it."""
    try:
        found = {key.replace("-", "_"): value for key, value in read_mapping(given).items()}
    except ValueError as error:
        raise UsageError(f"--set {' '.join(' '.join(given).split())}: {error}") from None  # on one line
    names = kind.of_level("rare")
    for name in found:
        if name in kind.options() and name not in names:
            raise UsageError(f"--set {name}: this option has a flag\ngive {as_typed(kind, name)}")
        if name not in names:
            raise UsageError(
                f"--set {' '.join(name.split())}: no rare option has this name{did_you_mean(name, names)}"
            )
    return found


def _known_options(kind: type[Settings]) -> set[str]:
    # Names of the options of all commands.
    return set(kind.options()).union(*(command.options() for command in COMMANDS.values()))


def _refuse_unknown_variables(kind: type[Settings], environment: Mapping[str, str]) -> None:
    known = {RECIPE_VARIABLE, *(ENVIRONMENT_PREFIX + name.upper() for name in _known_options(kind) - {"inputs"})}
    for variable in sorted(environment):
        if variable.startswith(ENVIRONMENT_PREFIX) and environment[variable] and variable not in known:
            if variable in ("PREFILL_INPUT", "PREFILL_INPUTS"):
                raise UsageError(
                    f"{variable}: INPUT comes from the command line or a recipe, not from the environment"
                )
            if not _KUBERNETES_VARIABLE.search(variable):
                raise UsageError(
                    f"{variable}: no option has this name{did_you_mean(variable, known)}\n"
                    "unset it, or use a name that does not begin with PREFILL_"
                )


AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])


def lists_options(kind: type) -> Callable[[AnyFunction], AnyFunction]:
    """Return a decorator: `inspect.signature` lists the options of this kind instead of `**options`, with their
    defaults, and the docstring explains each with the help of the command line.

    So notebooks complete their names, and `help` shows them.
    """

    def decorate(function: AnyFunction) -> AnyFunction:
        signature, named = inspect.signature(function), inspect.Parameter.KEYWORD_ONLY
        own = [each for each in signature.parameters.values() if each.kind != inspect.Parameter.VAR_KEYWORD]
        own += [
            inspect.Parameter(name, named, default=ScoreSettings.options()[name].default, annotation=annotation)
            for name, annotation in get_type_hints(kind).items()
        ]
        function.__signature__ = signature.replace(parameters=own)  # type: ignore[attr-defined]
        function.__doc__ = (
            f"{inspect.getdoc(function) or ''}\n\nOptions:\n{_explained([*get_type_hints(kind)])}".lstrip()
        )
        return function

    return decorate


def _explained(names: Sequence[str]) -> str:
    # A paragraph for each option of `prefill score`.
    texts = [f"{name}: {' '.join((ScoreSettings.options()[name].description or '').split())}" for name in names]
    return "\n".join(
        textwrap.fill(text, 100, initial_indent="    ", subsequent_indent=" " * 8, break_on_hyphens=False)
        for text in texts
    )


def scorer_settings(
    model: StrPath | None, options: Mapping[str, Any], *, owner: str, paths: Sequence[str] = ()
) -> ScoreSettings:
    """Return the settings of `prefill score` with these options, without those of the environment.

    `paths` are the files to be read. `owner` is the function or class that takes the options, for messages. Raises
    UsageError; messages name options as the command does: `--max-length` is the keyword `max_length`.
    """
    known = {*ScorerOptions.__annotations__, *(FileOptions.__annotations__ if paths else ())}
    for name in options:
        if name in known:
            continue
        if name in FileOptions.__annotations__:
            raise UsageError(
                f"{owner} has no option {name!r}: it is for files, and belongs to score(path, {name}=...)"
            )
        if name in ScoreSettings.options():
            raise UsageError(f"{owner} has no option {name!r}: it is for jobs\ntake the command prefill score")
        raise UsageError(f"{owner} has no option {name!r}{did_you_mean(name, {*known, 'model'})}")
    if options.get("keep") == "auto":
        raise UsageError(
            "keep='auto' chooses one rate for a whole job\nchoose it with prefill score --keep auto, and give it here"
        )
    given = {"model": model, **options}
    flags = {name: _as_flag(name, value) for name, value in given.items() if value is not None}
    return load_settings(ScoreSettings, {"inputs": paths or ("rows",), "quiet": True, **flags}, environment={})


_SIZES = {name for name in ScoreSettings.options() if details_of(ScoreSettings, name).metavar == "SIZE"}


def _as_flag(name: str, value: Any) -> Any:
    if isinstance(value, PathLike) or (name in _SIZES and type(value) is int):
        return str(value)
    return value


_MOST_BYTES = 1 << 20


def read_recipe(path: str) -> dict[str, Any]:
    """Read the options of a recipe, by name. Raises UsageError if it cannot be read, or is not a mapping."""
    from prefillcli.options.plain_yaml import parse_yaml  # YAML takes a while to import

    content = utf8_text("--recipe", path, read_given("--recipe", path, most=_MOST_BYTES))
    try:
        loaded = parse_yaml(content)
    except ValueError as error:
        raise UsageError(f"{path}: the recipe is not valid YAML: {brief(error)}") from None
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise UsageError(f"{path}: a recipe must be a mapping of option names to values")
    if "questions" in loaded and set(loaded) <= {"document", "questions"} and not isinstance(loaded["questions"], str):
        raise UsageError(f"{path}: it is a file of questions, and no recipe\ngive it with --questions {path}")
    return {str(key): value for key, value in loaded.items()}
