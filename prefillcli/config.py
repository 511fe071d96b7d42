"""Settings of a job: recipe < environment < flag."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError

from prefillcli.errors import UsageError
from prefillcli.settings import Settings

AnySettings = TypeVar("AnySettings", bound=Settings)

ENVIRONMENT_PREFIX = "PREFILL_"


def load_settings(
    kind: type[AnySettings],
    flags: Mapping[str, Any],
    *,
    recipe: str | None = None,
    environment: Mapping[str, str] = os.environ,
) -> AnySettings:
    """Settings of a `kind`: `flags` (what was given on the command line) over the environment over the recipe file.

    Raises UsageError naming the option, and for an unknown key the nearest known one.
    """
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    known = kind.model_fields
    if recipe is not None:
        for key, value in _read_recipe(recipe).items():
            name = "inputs" if key == "input" else key
            if name not in known:
                raise UsageError(f"{recipe}: unknown key {key!r}{nearest(key, known)}")
            values[name], origin[name] = value, f"{recipe}: {key}"
    for name in known:
        variable = ENVIRONMENT_PREFIX + name.upper()
        if name != "inputs" and environment.get(variable):
            values[name], origin[name] = environment[variable], variable
    for name, value in flags.items():
        values[name], origin[name] = value, "INPUT" if name == "inputs" else "--" + name.replace("_", "-")
    for name, other in (("resume", "overwrite"), ("overwrite", "resume")):
        if flags.get(name) and other not in flags:  # the one that is given stands, whatever the recipe says
            values.pop(other, None)
    if isinstance(values.get("inputs"), str):
        values["inputs"] = (values["inputs"],)
    if not values.get("inputs") and kind.model_fields["inputs"].is_required():
        raise UsageError("no INPUT given: name a Parquet or JSONL file, a directory or a glob")
    try:
        settings = kind.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        reason = first["msg"].removeprefix("Value error, ").removeprefix("Input ")
        raise UsageError(f"{origin.get(name, name)} {first['input']!r}: {reason}") from None
    settings.check()
    return settings


def nearest(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'labels'?`, or nothing where no known word is near."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


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
        raise UsageError(f"{path}: the recipe is not YAML: {' '.join(str(error).split())}") from None
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise UsageError(f"{path}: a recipe is a mapping of option names to values")
    return {str(key): value for key, value in loaded.items()}
