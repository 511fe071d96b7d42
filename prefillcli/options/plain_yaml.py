"""YAML of plain values, by the core schema of YAML 1.2: recipes, mappings among options, question files."""

from __future__ import annotations

import re
from typing import Any

import yaml

# With each alias counted at the size of its anchor: a few short lines can stand for billions.
_MOST_VALUES = 100_000


class _Loader(yaml.SafeLoader):
    """YAML 1.2 by its core schema, and merge keys. Yes and No are text, as labels are, and so are dates and 1:10.

    PyYAML reads YAML 1.1. Raises ValueError for a mapping that has a key twice, for a number like 010, which is 8
    there, and for half a surrogate pair.
    """

    def compose_mapping_node(self, anchor: dict[Any, yaml.Node]) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise ValueError(f"line {key.start_mark.line + 1}: the key {key.value!r} is there twice")
                seen.add(key.value)
        return node

    def compose_scalar_node(self, anchor: dict[Any, yaml.Node]) -> yaml.ScalarNode:
        node = super().compose_scalar_node(anchor)
        node.value = _joined(node.value, node.start_mark.line + 1)
        return node

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        text = str(self.construct_scalar(node))
        if re.fullmatch("[-+]?0[0-9]+", text):
            raise ValueError(f"line {node.start_mark.line + 1}: {text}: leave out the first 0, or put it in quotes")
        return int(text, 0)


def _joined(text: str, line: int) -> str:
    # JSON writes a character above U+FFFF as two escapes, of which PyYAML makes two characters.
    try:
        return text.encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError:
        raise ValueError(
            f"line {line}: {text[:60]!a} has half a surrogate pair: a character above U+FFFF takes two"
        ) from None


_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("null", "~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", "true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", "[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
    ("merge", "<<", "<"),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"({_pattern})$"), list(_first))
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)


def parse_yaml(text: str) -> Any:
    """Parse a YAML text into a value, made of plain values only.

    Raises ValueError for a text that is not YAML, has a key twice, values that its tags or digits do not allow, bytes,
    dates or sets, is nested too deeply, refers to itself, or stands for far more values than it has.
    """
    try:
        loaded = yaml.load(text, _Loader)  # noqa: S506 - a SafeLoader
        if _values(loaded, {}) > _MOST_VALUES:
            raise ValueError(f"its aliases stand for more than {_MOST_VALUES:,} values")
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except yaml.MarkedYAMLError as error:
        if error.problem is not None and error.problem.endswith("but got '?'"):  # PyYAML ends a plain text there
            line = error.problem_mark.line + 1 if error.problem_mark else 0
            raise ValueError(f"line {line}: between {{ and }}, put a text with a question mark in quotes") from None
        raise ValueError(str(error)) from None
    except (yaml.YAMLError, TypeError, AttributeError, LookupError, OverflowError) as error:
        raise ValueError(str(error)) from None  # PyYAML's constructors raise what Python's own types do
    return loaded


def _values(value: Any, counted: dict[int, int]) -> int:
    # The number of values in a value, including itself. `counted` has those of the lists and mappings so far.
    if value is None or isinstance(value, str | int | float):
        return 1
    if not isinstance(value, list | dict):
        raise ValueError("a value is text, a number, true, false, null, a list or a mapping: use no tags")
    if id(value) not in counted:
        counted[id(value)] = _MOST_VALUES + 1  # found again inside itself
        inner = value if isinstance(value, list) else [*value, *value.values()]
        counted[id(value)] = 1 + sum(_values(each, counted) for each in inner)
    return counted[id(value)]
