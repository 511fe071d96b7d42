"""A recipe: a YAML file with options by name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from prefillcli.errors import UsageError, brief


class _RecipeLoader(yaml.SafeLoader):
    """YAML in which Yes and No are strings, as labels are. Only true and false are truth values."""


_RecipeLoader.yaml_implicit_resolvers = {
    first: [(tag, words) for tag, words in resolvers if tag != "tag:yaml.org,2002:bool"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_RecipeLoader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile("(true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)


_MOST_VALUES = 100_000
"""In a recipe, with each alias counted as what it stands for: a few short lines can stand for billions."""


def read_recipe(path: str) -> dict[str, Any]:
    """The options of a recipe, by name. Raises UsageError if it cannot be read, or is not a mapping."""
    try:
        loaded = parse_yaml(Path(path).read_text(encoding="utf-8"), _RecipeLoader)
    except OSError as error:
        raise UsageError(f"{path}: cannot read the recipe: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"{path}: the recipe is not valid YAML: {brief(error)}") from None
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise UsageError(f"{path}: a recipe must be a mapping of option names to values")
    return {str(key): value for key, value in loaded.items()}


def parse_yaml(text: str, loader: type[yaml.SafeLoader] = yaml.SafeLoader) -> Any:
    """The value that a YAML text stands for, made of plain values only.

    Raises ValueError for a text that is no YAML, has values that its tags or digits do not allow, or bytes or sets, is
    nested too deeply, refers to itself, or stands for far more values than it has.
    """
    try:
        loaded = yaml.load(text, loader)  # noqa: S506 - a SafeLoader
        if _values(loaded, {}) > _MOST_VALUES:
            raise ValueError(f"its aliases stand for more than {_MOST_VALUES:,} values")
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except (yaml.YAMLError, TypeError, AttributeError, LookupError, OverflowError) as error:
        raise ValueError(str(error)) from None  # PyYAML's constructors raise what Python's own types do
    return loaded


def _values(value: Any, counted: dict[int, int]) -> int:
    """How many values there are in a value, itself included. `counted` has those of the lists and mappings so far."""
    if isinstance(value, bytes | set | tuple):
        raise ValueError("a value is text, a number, a date, true, false, null, a list or a mapping: use no tags")
    if not isinstance(value, list | dict):
        return 1
    if id(value) not in counted:
        counted[id(value)] = _MOST_VALUES + 1  # found again inside itself
        inner = value if isinstance(value, list) else [*value, *value.values()]
        counted[id(value)] = 1 + sum(_values(each, counted) for each in inner)
    return counted[id(value)]
