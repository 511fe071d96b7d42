"""Conditions on the columns of scored rows: which rows are written about, weighed or asked more."""

from __future__ import annotations

import datetime
import decimal
import json
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from jinja2 import TemplateSyntaxError, nodes
from jinja2.environment import TemplateExpression
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import SandboxedEnvironment
from jinja2.visitor import NodeTransformer

from prefillcli.errors import UsageError, did_you_mean
from prefillcli.prompts.sandbox import BoundedEnvironment
from prefillcli.rows.output.columns import COLUMNS, ROW_COLUMN, ResultRows
from prefillcli.rows.output.schema import OutputSchema
from prefillcli.rows.records import Window
from prefillcli.rows.values import to_python

# A condition on the columns of an output, like `score > 0.4 and score < 0.6`, in the language of Jinja's expressions.
#
# The language has comparisons and arithmetic of numbers, but no calls, and only the filters of `_FILTERS`.
# `tone.score` is the column of that name. Jinja compiles it in its sandbox. As no text is multiplied and there is no
# power of a number, the work is bounded by the length of the expression. The values are those of a row that was scored
# and is not written yet.


_HOLDER = "columns"  # columns["a name with spaces"]; inside, every column is reached so
_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "lteq": operator.le,
    "gt": operator.gt,
    "gteq": operator.ge,
    "in": lambda left, right: left in right,
    "notin": lambda left, right: left not in right,
}
# Jinja's filters give the text "none" of a null, and a float of every number.
_FILTERS: dict[str, tuple[Callable[[Any], Any], tuple[str, ...]]] = {
    "lower": (str.lower, ("text",)),
    "upper": (str.upper, ("text",)),
    "trim": (str.strip, ("text",)),
    "length": (len, ("text", "list")),
    "abs": (abs, ("number",)),
    "round": (round, ("number",)),
}


class _Text(str):
    """A typical text of a column. For a prediction, `labels` are all its possible values."""

    labels: tuple[str, ...]

    def __new__(cls, text: str, labels: tuple[str, ...] = ()) -> _Text:
        made = super().__new__(cls, text)
        made.labels = labels
        return made


class _Unknown:
    """A value of a column whose kind only its rows show."""


_UNKNOWN = _Unknown()
_COMPARED = ("number", "text", "true or false")


class RowCondition:
    """A condition on the columns of a row. It can be pickled.

    A comparison with null, or of values that cannot be compared, is false, and null counts as false. Raises UsageError
    for a syntax error, and for constructs that the language lacks; `option` is for messages.
    """

    def __init__(self, text: str, option: str = "--rationale-when") -> None:
        self.text, self._option = text, option
        environment = _Expressions()
        try:
            tree, self.columns = environment.parsed(text)  # it may name only columns that it uses
            self._holds = environment.compiled(tree)
        except (TemplateSyntaxError, RecursionError, MemoryError, SyntaxError, OverflowError) as error:
            what = error.message if isinstance(error, TemplateSyntaxError) else "nested too deeply"
            raise UsageError(
                f"{option} {_short(text)!r}: {what}\nwrite a condition on columns, like 'score > 0.4 and score < 0.6'"
            ) from None

    def __reduce__(self) -> tuple[Any, ...]:
        return RowCondition, (self.text, self._option)

    def __call__(self, values: Mapping[str, Any]) -> bool:
        """Return whether it holds for a row with these values of `columns`: numbers, texts, true, false, None, lists
        or mappings."""
        return self._holds(columns=values) is True

    def check(
        self, schema: pa.Schema, untyped: Collection[str] = (), labels: Mapping[str, Sequence[str]] = {}
    ) -> None:
        """Raise UsageError for a column that `schema` does not have, for values that cannot be compared, and for a
        condition that is not true or false. Columns of unknown kind are `untyped`. `labels` has, for some columns, the
        only values that may be compared with them."""
        for name in sorted(self.columns - set(schema.names)):
            raise UsageError(f"{self._option} {_short(self.text)!r}: {_why_not(name, schema.names)}")
        typical = {name: _UNKNOWN if name in untyped else _typical(schema.field(name).type) for name in self.columns}
        for name in self.columns & labels.keys():
            typical[name] = _Text("text", tuple(labels[name]))
        environment = _Expressions(strict=True)
        tree, _ = environment.parsed(self.text)
        try:
            for side in _sides(tree):
                result = environment.compiled(side)(columns=typical)
                if not isinstance(result, bool | _Unknown):
                    raise TypeError(
                        f"it gives a {_kind(result)}, not true or false\ncompare it with something, like 'score > 0.5'"
                    )
        except TypeError as error:
            raise UsageError(f"{self._option} {_short(self.text)!r}: {error}") from None


def _sides(tree: nodes.Node) -> Iterator[nodes.Node]:
    # The operands of `and`, `or` and `not`, each for itself: one may decide without the other.
    if isinstance(tree, nodes.And | nodes.Or | nodes.Not):
        for each in tree.iter_child_nodes():
            yield from _sides(each)
    else:
        yield tree


class _Rewriting(NodeTransformer):
    """Makes every column of an expression an item of `columns`, whose names `found` collects, and sends comparisons
    through a filter."""

    def __init__(self) -> None:
        self.found: set[str] = set()

    def visit_Name(self, node: nodes.Name) -> nodes.Node:
        return self._column(node.name)

    def visit_Getattr(self, node: nodes.Getattr) -> nodes.Node:
        # The column of a question's answer, whose name has a dot.
        return self._column(f"{node.node.name}.{node.attr}") if isinstance(node.node, nodes.Name) else self._none(node)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        named = isinstance(node.node, nodes.Name) and node.node.name == _HOLDER
        return self._column(str(node.arg.value)) if named and isinstance(node.arg, nodes.Const) else self._none(node)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        values = nodes.List([node.expr, *(each.expr for each in node.ops)], lineno=1)
        signs = nodes.Const([each.op for each in node.ops], lineno=1)
        return nodes.Filter(values, "_compared", [signs], [], None, None, lineno=1)

    def _none(self, node: nodes.Node) -> nodes.Node:
        raise TemplateSyntaxError(f"a condition has no {type(node).__name__.lower()}, but {_HOLDER}['name']", 1)

    visit_Call = visit_Pow = _none

    def _column(self, name: str) -> nodes.Node:
        self.found.add(name)
        return nodes.Getitem(nodes.Name(_HOLDER, "load", lineno=1), nodes.Const(name, lineno=1), "load", lineno=1)


class _Expressions(BoundedEnvironment):
    """Jinja's expressions for a row, in which what cannot be computed is null.

    A `strict` one is for typical values of the columns. It raises TypeError for kinds of values that do not fit.
    """

    intercepted_binops = frozenset(SandboxedEnvironment.default_binop_table) - {"**"}
    intercepted_unops = frozenset(SandboxedEnvironment.default_unop_table)

    def __init__(self, strict: bool = False) -> None:
        super().__init__()
        self._strict = strict
        self.optimized = False  # looking for constants takes longer the deeper an expression is nested
        self.filters = {name: lambda value, name=name: self._of(name, *_FILTERS[name], value) for name in _FILTERS}
        self.filters["_compared"] = self._compared
        self.tests = {name: self.tests[name] for name in ("none", "true", "false")}

    def parsed(self, text: str) -> tuple[nodes.Expr, frozenset[str]]:
        """Return the expression and its columns. Raises TemplateSyntaxError."""
        parser, rewriting = Parser(self, text, state="variable"), _Rewriting()
        tree = rewriting.visit(parser.parse_expression())
        if not parser.stream.eos:
            raise TemplateSyntaxError(f"unexpected {parser.stream.current.value!r}", 1)
        return tree.set_environment(self), frozenset(rewriting.found)

    def compiled(self, tree: nodes.Node) -> TemplateExpression:
        """Return a function that evaluates an expression, as `Environment.compile_expression` does for a text."""
        result = nodes.Assign(nodes.Name("result", "store"), tree, lineno=1)
        return TemplateExpression(self.from_string(nodes.Template([result], lineno=1)), undefined_to_none=False)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute `left operator right` of numbers."""
        return self._of(operator, self.binop_table[operator], ("number",), left, right)

    def call_unop(self, context: Context, operator: str, arg: Any) -> Any:
        """Compute `operator arg` of a number."""
        return self._of(operator, self.unop_table[operator], ("number",), arg)

    def _of(self, name: str, function: Callable[..., Any], kinds: Collection[str], *values: Any) -> Any:
        # The function's result for these values; null for values of a kind that it does not take.
        if _UNKNOWN in values:
            return _UNKNOWN
        wrong = [_kind(value) for value in values if _kind(value) not in kinds]
        if wrong and self._strict:
            raise TypeError(f"{name} is for a {' or '.join(kinds)}, not for a {wrong[0]}")
        try:
            found = None if wrong else function(*values)
        except (ArithmeticError, ValueError):  # there is no such number
            return _UNKNOWN if self._strict else None
        return _Text(found) if self._strict and isinstance(found, str) else found

    def _compared(self, values: Sequence[Any], signs: Sequence[str]) -> bool:
        holds = _fit if self._strict else _holds
        return all(holds(sign, *pair) for sign, pair in zip(signs, pairwise(values), strict=True))


def _holds(sign: str, left: Any, right: Any) -> bool:
    # No comparison with null holds, nor one of values that cannot be compared.
    try:
        return left is not None and right is not None and bool(_COMPARISONS[sign](left, right))
    except TypeError:
        return False


def _fit(sign: str, left: Any, right: Any) -> bool:
    # True. Raises TypeError if values of these kinds cannot be compared like that.
    if left is None or right is None:
        raise TypeError("a comparison with none is always false\nwrite 'is none' or 'is not none'")
    if sign in ("in", "notin") and isinstance(right, list | tuple):
        return all(_fit("eq", left, each) for each in right)
    kinds = _kind(left), _kind(right)
    alike = kinds[0] == kinds[1] and kinds[0] in (("text",) if sign in ("in", "notin") else _COMPARED)
    if "unknown" not in kinds and not alike:
        raise TypeError(f"a {kinds[0]} is compared with a {kinds[1]}")
    if sign in ("eq", "ne"):
        _require_label(left, right)
        _require_label(right, left)
    return True


def _require_label(column: Any, value: Any) -> None:
    # Whether a text of the condition is one of the labels that a column has.
    labels = column.labels if isinstance(column, _Text) else ()
    if labels and type(value) is str and value not in labels:
        lower = next((each for each in labels if each.lower() == value.strip().lower()), None)
        near = did_you_mean(value, labels) if lower is None else f"; did you mean {lower!r}?"
        raise TypeError(f"the prediction is never {value!r}{near}\nthe labels are {', '.join(labels)}")


def _kind(value: Any) -> str:
    # The name of a kind of value, for messages.
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, str):
        return "text"
    if isinstance(value, list | tuple):
        return "list"
    return {type(None): "null", _Unknown: "unknown"}.get(type(value), "nested value")


def _typical(kind: pa.DataType) -> Any:
    # A typical value of a column of this type, as rows give it.
    if pa.types.is_boolean(kind):
        return True
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        return 1
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return [_typical(kind.value_type)]
    if pa.types.is_null(kind):
        return _UNKNOWN
    return {} if pa.types.is_nested(kind) else _Text("text")


def _why_not(name: str, known: Collection[str]) -> str:
    if name in {column.name for column in COLUMNS if not column.conditional}:
        return f"the column {name} is not known when a row is chosen, or differs from run to run"
    near = did_you_mean(name, known)
    return f"the output has no column {name}{near}\nname a column of the input with --keep-columns to use it"


def _short(text: str) -> str:
    return text if len(text) <= 80 else text[:79] + "…"


def row_values(window: Window, rows: ResultRows, schema: OutputSchema, names: Set[str]) -> list[dict[str, Any]]:
    """Return the values of the named columns, by name, for each of these rows of a window.

    Columns of JSON text give the values in the text; dates and times give text in ISO 8601.
    """
    found = rows.values(names)
    places = pa.array(np.searchsorted(window.rows, rows.numbers))
    for name in names & set(schema.carried.names):
        values = to_python(window.carried[name].take(places))
        if schema.json_carried:
            found[name] = [None if text is None else json.loads(text) for text in values]
        else:
            found[name] = [_plain(value) for value in values]
    if ROW_COLUMN in names and schema.id_name is None:
        found[ROW_COLUMN] = rows.numbers.tolist()
    return [dict(zip(found, values, strict=True)) for values in zip(*found.values(), strict=True)] or [
        {} for _ in rows.numbers
    ]


def _plain(value: Any) -> Any:
    if isinstance(value, decimal.Decimal):
        return float(value)
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    return value


@dataclass(frozen=True, slots=True)
class LimitedCondition:
    """Chooses rows of an output with this `schema`, at most `limit`, by `--rationale-when`. It can be pickled.

    Raises UsageError for a condition on columns that its rows do not have.
    """

    condition: RowCondition
    schema: OutputSchema
    limit: int | None = None

    def __post_init__(self) -> None:
        # A condition may use these columns. The kinds of those that are JSON are not known.
        row = [pa.field(ROW_COLUMN, pa.int64())] if self.schema.id_name is None else []
        untyped = self.schema.carried.names if self.schema.json_carried else ()
        columns = pa.schema([*row, *self.schema.carried, *self.schema.conditional])
        self.condition.check(columns, untyped, self.schema.predictions)

    @property
    def columns(self) -> frozenset[str]:
        """The columns that the condition looks at."""
        return self.condition.columns

    def chosen(self, window: Window, rows: ResultRows) -> list[int]:
        """Return the numbers of the chosen rows, ascending. A row without a score is never chosen."""
        scored = {each.row for each in rows.scored}
        values = row_values(window, rows, self.schema, self.columns)
        pairs = zip(rows.numbers.tolist(), values, strict=True)
        return [row for row, each in pairs if row in scored and self.condition(each)]
