"""`--rationale-when`: which rows are written about or weighed, once they are scored."""

from __future__ import annotations

import datetime
import decimal
import json
import operator
from collections.abc import Callable, Collection, Mapping, Set
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import numpy as np
import pyarrow as pa
from jinja2 import TemplateSyntaxError, nodes
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.visitor import NodeTransformer

from prefillcli.data.output.columns import (
    COLUMNS,
    ROW_COLUMN,
    OutputSchema,
    ResultRows,
)
from prefillcli.data.prompts.sandbox import BoundedEnvironment
from prefillcli.data.rows import Window, to_python
from prefillcli.errors import UsageError, brief, did_you_mean

# A condition on the columns of an output, like `score > 0.4 and score < 0.6`, in the language of Jinja's
# expressions.
#
# Of that language there is what compares values: no calls, no attributes, and no filters but those of `_FILTERS`.
# What is left runs in the sandbox of templates (`data/prompts/sandbox.py`). The values are those of a row that was
# scored and is not written yet.


_HOLDER = "columns"  # columns["a name with spaces"]
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
_FILTERS: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "lower": (str.lower, ("text",)),
    "upper": (str.upper, ("text",)),
    "trim": (str.strip, ("text",)),
    "length": (len, ("text", "list")),
    "abs": (abs, ("number",)),
    "round": (round, ("number",)),
}
_TESTS = ("none", "true", "false")
_PLAIN_NODES = (
    *(nodes.And, nodes.Or, nodes.Not, nodes.Operand, nodes.Const, nodes.List, nodes.Tuple, nodes.Neg, nodes.Pos),
    *(nodes.Add, nodes.Sub, nodes.Mul, nodes.Div, nodes.FloorDiv, nodes.Mod),
)


class _Unknown:
    """A value of a column whose kind is not known before its rows are read."""


_UNKNOWN = _Unknown()


class RowCondition:
    """A condition on the columns of a row. It can be pickled.

    A comparison with null, or of values that cannot be compared, is false, and where null stands for true or false it
    is false. Raises UsageError for a syntax error, and for what the language does not have; `option` is for messages.
    """

    def __init__(self, text: str, option: str = "--rationale-when") -> None:
        self.text, self._option = text, option
        self.columns: frozenset[str] = frozenset()
        """The columns that it uses."""
        environment = _Environment(_compared, _filtered)
        names: dict[str, str] = {}
        try:
            self._tree = _Rewriting(names).visit(_parsed(text, environment))
            self._run = environment.runner(self._tree)
        except (TemplateSyntaxError, RecursionError, MemoryError, SyntaxError, OverflowError) as error:
            what = error.message if isinstance(error, TemplateSyntaxError) else brief(error)
            raise UsageError(
                f"{option} {_short(text)!r}: {what}\nwrite a condition on columns, like 'score > 0.4 and score < 0.6'"
            ) from None
        self._names = {own: name for name, own in names.items()}
        self.columns = frozenset(names)

    def __reduce__(self) -> tuple[Any, ...]:
        return RowCondition, (self.text, self._option)

    def __call__(self, values: Mapping[str, Any]) -> bool:
        """Whether it is true of a row, whose values of `columns` are given: numbers, texts, true, false, None, lists
        or mappings."""
        return self._run({own: values[name] for own, name in self._names.items()}) is True

    def check(self, schema: pa.Schema, untyped: Collection[str] = ()) -> None:
        """Raise UsageError for a column that `schema` does not have, for values that are not compared with one
        another, and if it is not true or false. Columns of no known kind are `untyped`."""
        for name in sorted(self.columns - set(schema.names)):
            raise UsageError(f"{self._option} {_short(self.text)!r}: {_why_not(name, schema.names)}")
        strict = _Environment(_compared_strictly, _filtered_strictly, strict=True)
        typical = {
            own: _UNKNOWN if name in untyped else _typical(schema.field(name).type)
            for own, name in self._names.items()
        }
        try:
            result = strict.runner(_Strict().visit(self._tree))(typical)
        except TypeError as error:
            raise UsageError(f"{self._option} {_short(self.text)!r}: {error}") from None
        if not isinstance(result, bool | _Unknown):
            raise UsageError(
                f"{self._option} {_short(self.text)!r}: it gives a {_kind(result)}, not true or false\n"
                "compare it with something, like 'score > 0.5'"
            )


def _parsed(text: str, environment: BoundedEnvironment) -> nodes.Expr:
    parser = Parser(environment, text, state="variable")
    tree = parser.parse_expression()
    if not parser.stream.eos:
        raise TemplateSyntaxError(f"unexpected {parser.stream.current.value!r}", 1)
    return tree


class _Rewriting(NodeTransformer):
    """Refuses what the language does not have. Comparisons become filters, columns get plain `names`."""

    def __init__(self, names: dict[str, str]) -> None:
        self._names = names

    def generic_visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        if not isinstance(node, _PLAIN_NODES):
            raise TemplateSyntaxError(f"a condition has no {type(node).__name__.lower()}", 1)
        return super().generic_visit(node, *args, **kwargs)

    def visit_Name(self, node: nodes.Name) -> nodes.Node:
        return self._column(node.name)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        holder, name = node.node, node.arg
        if not isinstance(holder, nodes.Name) or holder.name != _HOLDER or not isinstance(name, nodes.Const):
            raise TemplateSyntaxError(f"only {_HOLDER}['name'] may have brackets", 1)
        return self._column(str(name.value))

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        left = self.visit(node.expr)
        parts: list[nodes.Expr] = []
        for operand in node.ops:
            right = self.visit(operand.expr)
            parts.append(_filter(left, f"_{operand.op}", right))
            left = right
        return _all(parts)

    def visit_Filter(self, node: nodes.Filter) -> nodes.Node:
        if node.node is None or node.name not in _FILTERS or node.args or node.kwargs or node.dyn_args:
            raise TemplateSyntaxError(f"there is no filter {node.name}; there are {', '.join(_FILTERS)}", 1)
        return _filter(self.visit(node.node), node.name)

    def visit_Test(self, node: nodes.Test) -> nodes.Node:
        if node.name not in _TESTS or node.args or node.kwargs:
            raise TemplateSyntaxError(f"there is no test {node.name}; there are {', '.join(_TESTS)}", 1)
        return nodes.Test(self.visit(node.node), node.name, [], [], None, None, lineno=1)

    def _column(self, name: str) -> nodes.Node:
        return nodes.Name(self._names.setdefault(name, f"c{len(self._names)}"), "load", lineno=1)


class _Strict(NodeTransformer):
    """Has both sides of `and` and `or` checked, also where the first one decides."""

    def visit_And(self, node: nodes.BinExpr) -> nodes.Node:
        return _filter(self.visit(node.left), "_both", self.visit(node.right))

    visit_Or = visit_And

    def visit_Not(self, node: nodes.Not) -> nodes.Node:
        inner = self.visit(node.node)
        return _filter(inner, "_both", inner)


def _all(parts: list[nodes.Expr]) -> nodes.Expr:
    return reduce(lambda before, part: nodes.And(before, part, lineno=1), parts)


def _filter(node: nodes.Expr, name: str, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, list(args), [], None, None, lineno=1)


class _Environment(BoundedEnvironment):
    """The sandbox with nothing in it but the operators and filters of conditions."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%"})
    intercepted_unops = frozenset({"+", "-"})

    def __init__(self, compare: Callable[..., Any], apply: Callable[..., Any], *, strict: bool = False) -> None:
        super().__init__()
        self._is_strict = strict
        self.globals.clear()
        self.filters = {f"_{name}": partial(compare, name) for name in _COMPARISONS}
        self.filters |= {name: partial(apply, name) for name in _FILTERS}
        self.filters["_both"] = _both
        self.tests = {name: self.tests[name] for name in _TESTS}

    def runner(self, tree: nodes.Expr) -> Callable[[dict[str, Any]], Any]:
        """What gives the result of an expression, from its variables."""
        body: list[nodes.Node] = [nodes.Assign(nodes.Name("result", "store"), tree, lineno=1)]
        program = nodes.Template(body, lineno=1)
        program.set_environment(self)
        template = self.from_string(program)

        def run(values: dict[str, Any]) -> Any:
            context = template.new_context(values)
            for _ in template.root_render_func(context):
                pass
            return context.vars["result"]

        return run

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Arithmetic, of numbers alone; null where it is not defined."""
        if self._is_strict:
            return _calculated(operator, left, right)
        if _kind(left) != "number" or _kind(right) != "number":
            return None
        try:
            return super().call_binop(context, operator, left, right)
        except (ArithmeticError, ValueError):
            return None

    def call_unop(self, context: Context, operator: str, arg: Any) -> Any:
        """A sign before a number."""
        if self._is_strict:
            return _calculated(operator, arg, arg)
        return super().call_unop(context, operator, arg) if _kind(arg) == "number" else None


def _compared(name: str, left: Any, right: Any) -> bool:
    if left is None or right is None:
        return False
    try:
        return bool(_COMPARISONS[name](left, right))
    except TypeError:
        return False


def _filtered(name: str, value: Any) -> Any:
    function, kinds = _FILTERS[name]
    try:
        return function(value) if _kind(value) in kinds else None
    except (ArithmeticError, ValueError):  # no number is nearest to NaN
        return None


def _compared_strictly(name: str, left: Any, right: Any) -> Any:
    """As `_compared`. Raises TypeError for values of different kinds."""
    if left is None or right is None:
        raise TypeError("a comparison with none is always false\nwrite 'is none' or 'is not none'")
    if name in ("in", "notin"):
        if isinstance(right, list | tuple):
            for each in right:
                _compared_strictly("eq", left, each)
            return True
        name = "eq" if _kind(right) in ("text", "unknown") else name
    if "unknown" in (_kind(left), _kind(right)):
        return _UNKNOWN
    if _kind(left) != _kind(right) or _kind(left) not in ("number", "text", "true or false"):
        raise TypeError(f"a {_kind(left)} is compared with a {_kind(right)}")
    return True


def _filtered_strictly(name: str, value: Any) -> Any:
    """As `_filtered`. Raises TypeError for a value of another kind."""
    function, kinds = _FILTERS[name]
    if value is _UNKNOWN:
        return _UNKNOWN
    if _kind(value) not in kinds:
        raise TypeError(f"the filter {name} is for a {' or '.join(kinds)}, not for a {_kind(value)}")
    return function(value)


def _calculated(operator: str, left: Any, right: Any) -> Any:
    for value in (left, right):
        if _kind(value) not in ("number", "unknown"):
            raise TypeError(f"{operator} is for numbers, not for a {_kind(value)}")
    return _UNKNOWN if _UNKNOWN in (left, right) else 1.0


def _both(left: Any, right: Any) -> Any:
    for value in (left, right):
        if not isinstance(value, bool | _Unknown):
            raise TypeError(
                f"a {_kind(value)} stands where true or false is needed\ncompare it with something, like 'score > 0.5'"
            )
    return True


def _kind(value: Any) -> str:
    """What a value is, for a reader."""
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
    """A value of a column of this type, as a row gives it."""
    if pa.types.is_boolean(kind):
        return True
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        return 1
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return [_typical(kind.value_type)]
    if pa.types.is_null(kind):
        return _UNKNOWN
    return {} if pa.types.is_nested(kind) else "text"


def _why_not(name: str, known: Collection[str]) -> str:
    if name in {column.name for column in COLUMNS if not column.conditional}:
        return f"the column {name} is not known when a row is chosen, or differs from run to run"
    near = did_you_mean(name, known)
    return f"the output has no column {name}{near}\nname a column of the input with --keep-columns to use it"


def _short(text: str) -> str:
    return text if len(text) <= 80 else text[:79] + "…"


def known_columns(schema: OutputSchema) -> tuple[pa.Schema, frozenset[str]]:
    """The columns that a condition may use, and the names of those whose kind is not known: those that are JSON."""
    row = [pa.field(ROW_COLUMN, pa.int64())] if schema.id_name is None else []
    results = schema.conditional
    untyped = schema.carried.names if schema.json_carried else ()
    return pa.schema([*row, *schema.carried, *results]), frozenset(untyped)


def row_values(window: Window, rows: ResultRows, schema: OutputSchema, names: Set[str]) -> list[dict[str, Any]]:
    """The values of the named columns of `known_columns`, by name, for each of some rows of a window.

    Columns that are JSON text give the values that the text says, dates and times texts in ISO 8601.
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
class RowChoice:
    """Chooses rows of an output with this `schema`, at most `limit`, by `--rationale-when`. It can be pickled.

    Raises UsageError for a condition on columns that its rows do not have.
    """

    condition: RowCondition
    schema: OutputSchema
    limit: int | None = None

    def __post_init__(self) -> None:
        self.condition.check(*known_columns(self.schema))

    @property
    def columns(self) -> frozenset[str]:
        """The columns that the condition looks at."""
        return self.condition.columns

    def chosen(self, window: Window, rows: ResultRows) -> list[int]:
        """The numbers of the chosen rows, ascending; a row without a score is not chosen."""
        scored = {each.row for each in rows.scored}
        values = row_values(window, rows, self.schema, self.columns)
        pairs = zip(rows.numbers.tolist(), values, strict=True)
        return [row for row, each in pairs if row in scored and self.condition(each)]
