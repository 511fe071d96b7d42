"""Conditions on the columns of scored rows: which rows are written about, weighed or asked more."""

from __future__ import annotations

import datetime
import decimal
import json
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pyarrow as pa
from jinja2 import TemplateSyntaxError, nodes
from jinja2.parser import Parser

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
# The language has comparisons and arithmetic, but no calls, and only the filters of `_FILTERS`; `tone.score` is the
# column of that name. Jinja parses it; this module evaluates the rest of its tree. The values are those of a row that
# was scored and is not written yet.


_DEEPEST = 200  # levels of an expression: Python's stack has room for their evaluation
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
_CALCULATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "%": operator.mod,
}
_FILTERS: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "lower": (str.lower, ("text",)),
    "upper": (str.upper, ("text",)),
    "trim": (str.strip, ("text",)),
    "length": (len, ("text", "list")),
    "abs": (abs, ("number",)),
    "round": (round, ("number",)),
}
_TESTS = {"none": None, "true": True, "false": False}
_PLAIN_NODES = (
    *(nodes.And, nodes.Or, nodes.Not, nodes.Compare, nodes.Operand, nodes.Const, nodes.List, nodes.Tuple),
    *(nodes.Neg, nodes.Pos, nodes.Add, nodes.Sub, nodes.Mul, nodes.Div, nodes.FloorDiv, nodes.Mod),
)


class _Text(str):
    """A typical text of a column. Of a prediction, the `labels` are all that it can be."""

    labels: tuple[str, ...]

    def __new__(cls, text: str, labels: tuple[str, ...] = ()) -> _Text:
        made = super().__new__(cls, text)
        made.labels = labels
        return made


class _Unknown:
    """A value of a column of unknown kind: only its rows show that."""


_UNKNOWN = _Unknown()


class RowCondition:
    """A condition on the columns of a row. It can be pickled.

    A comparison with null, or of values that cannot be compared, is false, and null counts as false. Raises UsageError
    for a syntax error, and for constructs that the language lacks; `option` is for messages.
    """

    def __init__(self, text: str, option: str = "--rationale-when") -> None:
        self.text, self._option = text, option
        try:
            parser = Parser(BoundedEnvironment(), text, state="variable")
            self._tree = parser.parse_expression()
            if not parser.stream.eos:
                raise TemplateSyntaxError(f"unexpected {parser.stream.current.value!r}", 1)
            self.columns = frozenset(_columns(self._tree))  # those that it uses
        except (TemplateSyntaxError, RecursionError, MemoryError, SyntaxError, OverflowError) as error:
            what = error.message if isinstance(error, TemplateSyntaxError) else brief(error)
            raise UsageError(
                f"{option} {_short(text)!r}: {what}\nwrite a condition on columns, like 'score > 0.4 and score < 0.6'"
            ) from None

    def __reduce__(self) -> tuple[Any, ...]:
        return RowCondition, (self.text, self._option)

    def __call__(self, values: Mapping[str, Any]) -> bool:
        """Return whether it is true of a row with these values of `columns`: numbers, texts, true, false, None, lists
        or mappings."""
        return _Evaluation(values).of(self._tree) is True

    def check(
        self, schema: pa.Schema, untyped: Collection[str] = (), labels: Mapping[str, Sequence[str]] = {}
    ) -> None:
        """Raise UsageError for a column that `schema` does not have, for values that cannot be compared, and for a
        condition that is not true or false. Columns of unknown kind are `untyped`. Some columns have one of these
        `labels`, and nothing else is compared with them."""
        for name in sorted(self.columns - set(schema.names)):
            raise UsageError(f"{self._option} {_short(self.text)!r}: {_why_not(name, schema.names)}")
        typical = {name: _UNKNOWN if name in untyped else _typical(schema.field(name).type) for name in self.columns}
        for name in self.columns & labels.keys():
            typical[name] = _Text("text", tuple(labels[name]))
        try:
            result = _Check(typical).of(self._tree)
        except TypeError as error:
            raise UsageError(f"{self._option} {_short(self.text)!r}: {error}") from None
        if not isinstance(result, bool | _Unknown):
            raise UsageError(
                f"{self._option} {_short(self.text)!r}: it gives a {_kind(result)}, not true or false\n"
                "compare it with something, like 'score > 0.5'"
            )


def _columns(node: nodes.Node, depth: int = 0) -> Iterator[str]:
    # The columns of an expression. Raises TemplateSyntaxError for constructs that the language lacks.
    if depth > _DEEPEST:
        raise TemplateSyntaxError(f"it is nested more than {_DEEPEST} deep", 1)
    if isinstance(node, nodes.Name):
        yield node.name
    elif isinstance(node, nodes.Getattr) and isinstance(node.node, nodes.Name):
        yield _dotted(node)
    elif isinstance(node, nodes.Getitem):
        if not isinstance(node.node, nodes.Name) or node.node.name != _HOLDER or not isinstance(node.arg, nodes.Const):
            raise TemplateSyntaxError(f"only {_HOLDER}['name'] may have brackets", 1)
        yield str(node.arg.value)
    else:
        if isinstance(node, nodes.Filter):
            if node.node is None or node.name not in _FILTERS or node.args or node.kwargs or node.dyn_args:
                raise TemplateSyntaxError(f"there is no filter {node.name}; there are {', '.join(_FILTERS)}", 1)
        elif isinstance(node, nodes.Test):
            if node.name not in _TESTS or node.args or node.kwargs:
                raise TemplateSyntaxError(f"there is no test {node.name}; there are {', '.join(_TESTS)}", 1)
        elif not isinstance(node, _PLAIN_NODES):
            raise TemplateSyntaxError(f"a condition has no {type(node).__name__.lower()}", 1)
        for child in node.iter_child_nodes():
            yield from _columns(child, depth + 1)


def _dotted(node: nodes.Getattr) -> str:
    # The column of a question's answer, whose name has a dot.
    return f"{cast(nodes.Name, node.node).name}.{node.attr}"


class _Evaluation:
    """Evaluates expressions for a row; a value that is not defined is null."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def of(self, node: Any) -> Any:
        if isinstance(node, nodes.Const):
            return node.value
        if isinstance(node, nodes.Name):
            return self._values[node.name]
        if isinstance(node, nodes.Getattr):
            return self._values[_dotted(node)]
        if isinstance(node, nodes.Getitem):
            return self._values[str(cast(nodes.Const, node.arg).value)]
        if isinstance(node, nodes.List | nodes.Tuple):
            return [self.of(each) for each in node.items]
        if isinstance(node, nodes.And | nodes.Or):
            return self.joined(node)
        if isinstance(node, nodes.Not):
            return self.negated(self.of(node.node))
        if isinstance(node, nodes.Compare):
            operands = [(each.op, self.of(each.expr)) for each in node.ops]
            lefts = [self.of(node.expr), *(value for _, value in operands)]
            return all(self.compared(name, left, right) for left, (name, right) in zip(lefts, operands, strict=False))
        if isinstance(node, nodes.Filter):
            return self.filtered(node.name, self.of(node.node))
        if isinstance(node, nodes.Test):
            return self.of(node.node) is _TESTS[node.name]
        if isinstance(node, nodes.UnaryExpr):
            return self.calculated(node.operator, 0, self.of(node.node))
        return self.calculated(node.operator, self.of(node.left), self.of(node.right))

    def joined(self, node: nodes.BinExpr) -> Any:
        left = self.of(node.left)
        return self.of(node.right) if bool(left) == isinstance(node, nodes.And) else left

    def negated(self, value: Any) -> Any:
        return not value

    def compared(self, name: str, left: Any, right: Any) -> Any:
        if left is None or right is None:
            return False
        try:
            return bool(_COMPARISONS[name](left, right))
        except TypeError:
            return False

    def filtered(self, name: str, value: Any) -> Any:
        function, kinds = _FILTERS[name]
        try:
            return function(value) if _kind(value) in kinds else None
        except (ArithmeticError, ValueError):  # no number is nearest to NaN
            return None

    def calculated(self, operator: str, left: Any, right: Any) -> Any:
        try:
            return _CALCULATIONS[operator](left, right) if _kind(left) == _kind(right) == "number" else None
        except (ArithmeticError, ValueError):
            return None


class _Check(_Evaluation):
    """The same with a typical value of each column. Raises TypeError for kinds of values that do not fit, even where
    one side of `and` or `or` decides."""

    def joined(self, node: nodes.BinExpr) -> Any:
        return all(self.negated(self.of(each)) for each in (node.left, node.right))

    def negated(self, value: Any) -> Any:
        if not isinstance(value, bool | _Unknown):
            raise TypeError(
                f"a {_kind(value)} stands where true or false is needed\ncompare it with something, like 'score > 0.5'"
            )
        return True

    def compared(self, name: str, left: Any, right: Any) -> Any:
        if left is None or right is None:
            raise TypeError("a comparison with none is always false\nwrite 'is none' or 'is not none'")
        if name in ("in", "notin"):
            if isinstance(right, list):
                return all(self.compared("eq", left, each) for each in right)
            name = "within" if _kind(right) in ("text", "unknown") else name
        kinds = _kind(left), _kind(right)
        if "unknown" not in kinds and (kinds[0] != kinds[1] or kinds[0] not in ("number", "text", "true or false")):
            raise TypeError(f"a {kinds[0]} is compared with a {kinds[1]}")
        if name in ("eq", "ne"):
            self._require_label(left, right)
            self._require_label(right, left)
        return True

    def _require_label(self, column: Any, value: Any) -> None:
        # Whether a text of the condition is one of the labels that a column has.
        labels = column.labels if isinstance(column, _Text) else ()
        if labels and type(value) is str and value not in labels:
            lower = next((each for each in labels if each.lower() == value.strip().lower()), None)
            near = did_you_mean(value, labels) if lower is None else f"; did you mean {lower!r}?"
            raise TypeError(f"the prediction is never {value!r}{near}\nthe labels are {', '.join(labels)}")

    def filtered(self, name: str, value: Any) -> Any:
        function, kinds = _FILTERS[name]
        if value is _UNKNOWN:
            return _UNKNOWN
        if _kind(value) not in kinds:
            raise TypeError(f"the filter {name} is for a {' or '.join(kinds)}, not for a {_kind(value)}")
        found = function(value)
        return _Text(found) if isinstance(found, str) else found

    def calculated(self, operator: str, left: Any, right: Any) -> Any:
        for value in (left, right):
            if _kind(value) not in ("number", "unknown"):
                raise TypeError(f"{operator} is for numbers, not for a {_kind(value)}")
        return _UNKNOWN if _UNKNOWN in (left, right) else 1.0


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
    """The values of the named columns, by name, for each of these rows of a window.

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
class RowChoice:
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
        """The numbers of the chosen rows, ascending; a row without a score is not chosen."""
        scored = {each.row for each in rows.scored}
        values = row_values(window, rows, self.schema, self.columns)
        pairs = zip(rows.numbers.tolist(), values, strict=True)
        return [row for row, each in pairs if row in scored and self.condition(each)]
