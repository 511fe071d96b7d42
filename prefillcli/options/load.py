"""Settings of a job: recipe < environment < flag."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml
from pydantic import ValidationError

from prefillcli.errors import UsageError, nearest
from prefillcli.options.commands import COMMANDS
from prefillcli.options.option import Settings, details_of

AnySettings = TypeVar("AnySettings", bound=Settings)

ENVIRONMENT_PREFIX = "PREFILL_"
RECIPE_VARIABLE = ENVIRONMENT_PREFIX + "RECIPE"
_OF_KUBERNETES = re.compile(r"_SERVICE_HOST$|_SERVICE_PORT(_\w+)?$|_PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?$")
"""What it puts into the environment of every container for a service whose name begins with `prefill`."""


def load_settings(
    kind: type[AnySettings],
    flags: Mapping[str, Any],
    *,
    recipe: str | None = None,
    environment: Mapping[str, str] = os.environ,
) -> AnySettings:
    """Settings of a `kind`: `flags` (what was given on the command line) over the environment over the recipe file.

    `PREFILL_RECIPE` names the recipe where no flag does. A recipe and the environment may hold the options of all
    commands. Values of the environment that would be ignored are left out, and so are those of a recipe where flags
    have made them so. Raises UsageError naming the option, for an unknown key with the nearest known one, and for any
    other option that would be ignored.
    """
    given = _Given()
    recipe = recipe or environment.get(RECIPE_VARIABLE) or None
    if recipe is not None:
        for key, value in _read_recipe(recipe).items():
            name = "inputs" if key == "input" else key
            if name not in _options(kind):
                raise UsageError(f"{recipe}: unknown key {key!r}{nearest(key, _options(kind))}")
            given.put(name, value, f"{recipe}: {key}", "recipe")
    _refuse_unknown_variables(kind, environment)
    for name in kind.model_fields:
        variable = ENVIRONMENT_PREFIX + name.upper()
        if name != "inputs" and environment.get(variable):
            given.put(name, environment[variable], variable, "environment")
    for name, value in flags.items():
        given.put(name, value, _flag(kind, name, value), "flag")
    for name, other in (("resume", "overwrite"), ("overwrite", "resume")):
        if flags.get(name) and other not in flags:  # the one that is given stands, whatever the recipe says
            given.values.pop(other, None)
    if not given.values.get("inputs") and kind.model_fields["inputs"].is_required():
        raise UsageError("no INPUT given: name a Parquet or JSONL file, a directory or a glob")
    settings = given.settings(kind)
    settings.check()
    while idle := settings.idle():
        name, lacks = next(iter(idle.items()))
        if given.must_have_effect(name, kind, standing=lacks.standing):
            raise UsageError(lacks.refusal(given.origin[name]))
        del given.values[name]
        settings = given.settings(kind)
    return settings.from_flags(flags)


class _Given:
    """Values by option, and where each comes from."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.origin: dict[str, str] = {}  # as a user knows it: `--labels`, `PREFILL_LABELS`, `job.yaml: labels`
        self._source: dict[str, Literal["recipe", "environment", "flag"]] = {}
        self._recipe: dict[str, Any] = {}

    def put(self, name: str, value: Any, origin: str, source: Literal["recipe", "environment", "flag"]) -> None:
        """Take a value, over what came before."""
        value = (value,) if name == "inputs" and isinstance(value, str) else value
        self.values[name], self.origin[name], self._source[name] = value, origin, source
        if source == "recipe":
            self._recipe[name] = value

    def settings(self, kind: type[AnySettings]) -> AnySettings:
        """Raises UsageError for the first value that is none."""
        known = {name: value for name, value in self.values.items() if name in kind.model_fields}
        try:
            return kind.model_validate(known)
        except ValidationError as error:
            first = error.errors()[0]
            name = str(first["loc"][0])
            reason = first["msg"].removeprefix("Value error, ").removeprefix("Input ")
            raise UsageError(f"{self.origin.get(name, name)} {first['input']!r}: {reason}") from None

    def must_have_effect(self, name: str, kind: type[Settings], *, standing: bool) -> bool:
        """Whether it is a mistake that the option `name` has none. The environment is there for all commands and runs;
        a recipe is for one job, whose options a flag may make idle."""
        if self._source[name] != "recipe":
            return self._source[name] == "flag"
        if standing:
            return False
        alone = {key: value for key, value in self._recipe.items() if key in kind.model_fields}
        try:
            return name in kind.model_validate({"inputs": ("INPUT",)} | alone).idle()
        except ValidationError:
            return False  # another option of the recipe is wrong by itself, and was replaced


def _flag(kind: type[Settings], name: str, value: Any) -> str:
    """What a user has written on the command line for this value."""
    word = name.replace("_", "-")
    if value is False:
        word = details_of(kind, name).negative or f"no-{word}"
    return "INPUT" if name == "inputs" else f"--{word}"


def _options(kind: type[Settings]) -> set[str]:
    """Names of the options of all commands."""
    return set(kind.model_fields).union(*(command.model_fields for command in COMMANDS.values()))


def _refuse_unknown_variables(kind: type[Settings], environment: Mapping[str, str]) -> None:
    known = {RECIPE_VARIABLE, *(ENVIRONMENT_PREFIX + name.upper() for name in _options(kind) - {"inputs"})}
    for variable in sorted(environment):
        if variable.startswith(ENVIRONMENT_PREFIX) and environment[variable] and variable not in known:
            if variable in ("PREFILL_INPUT", "PREFILL_INPUTS"):
                raise UsageError(
                    f"{variable}: INPUT comes from the command line or a recipe, not from the environment"
                )
            if not _OF_KUBERNETES.search(variable):
                raise UsageError(
                    f"{variable}: no option has this name{nearest(variable, known)}\n"
                    "unset it, or take a name that does not begin with PREFILL_"
                )


class _RecipeLoader(yaml.SafeLoader):
    """YAML in which Yes and No are the labels they look like: of the words for a truth value, only true and false."""


_RecipeLoader.yaml_implicit_resolvers = {
    first: [(tag, words) for tag, words in resolvers if tag != "tag:yaml.org,2002:bool"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_RecipeLoader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile("(true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)


def _read_recipe(path: str) -> dict[str, Any]:
    try:
        loaded = yaml.load(Path(path).read_text(encoding="utf-8"), _RecipeLoader)  # noqa: S506 - a SafeLoader
    except OSError as error:
        raise UsageError(f"{path}: cannot read the recipe: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: the recipe is not valid YAML: {' '.join(str(error).split())}") from None
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise UsageError(f"{path}: a recipe must be a mapping of option names to values")
    return {str(key): value for key, value in loaded.items()}
