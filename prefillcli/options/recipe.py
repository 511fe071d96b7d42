"""A recipe: a YAML file with options by name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from prefillcli.errors import UsageError


class _RecipeLoader(yaml.SafeLoader):
    """YAML in which Yes and No are strings, as labels are. Only true and false are truth values."""


_RecipeLoader.yaml_implicit_resolvers = {
    first: [(tag, words) for tag, words in resolvers if tag != "tag:yaml.org,2002:bool"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_RecipeLoader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile("(true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)


def read_recipe(path: str) -> dict[str, Any]:
    """The options of a recipe, by name. Raises UsageError if it cannot be read, or is not a mapping."""
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
