"""Jinja environments in which a template can neither reach Python nor run away.

Jinja's own sandbox closes the way to attributes and imports. It does not bound work: nested loops, recursive macros,
`"a" * 10**10` or `center(10**10)` would hang the job or fill the memory. Here each loop step and call counts towards
`MAX_STEPS`, and an operation that would make more text than `MAX_CHARS` is refused beforehand. The limits count and
read no clock: the same row fails on every machine or on none. Work that escapes them meets the limits of the process
(`prompts/templates.py`).

Chat templates have the environment in which `transformers.utils.chat_template_utils` compiles them. That module is not
imported, because it takes torch along; tests compare both.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import json
import math
import os
import pickle
import re
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import date, datetime
from typing import Any, BinaryIO

from jinja2 import (
    StrictUndefined,
    Template,
    TemplateError,
    TemplateRuntimeError,
    TemplateSyntaxError,
    UndefinedError,
    meta,
    nodes,
    pass_eval_context,
)
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import do_indent
from jinja2.lexer import Token, TokenStream
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from prefillcli.prompts.thinking import DATE, ChatChoices, Way, closing_of, find_way, opened_thought

MAX_STEPS = 1_000_000  # loop steps of one rendering; a call costs ten
_CALL_STEPS = 10
MAX_CHARS = 64 << 20  # characters of any text a template makes
_MAX_TOTAL_CHARS = 4 * MAX_CHARS  # of all texts that operators and filters make in one rendering

_SETUP_BYTES = 1 << 16
_SMALL = 10_000  # numbers and texts that set a width, an indent or a fill
_MAX_BITS = 1 << 16  # size of a number that a template may compute
_WIDTH = re.compile(r"\d{5,}|\*")  # in a % format
_REFUSED_METHODS = frozenset(
    {"center", "ljust", "rjust", "zfill", "expandtabs", "format", "format_map", "translate", "to_bytes"}
)


def compile_template(text: str, name: str) -> tuple[Callable[[dict[str, Any]], str], list[str]]:
    """A function that renders a row from its columns, and the names of the columns that the template needs.

    `name` is for messages. Raises TemplateSyntaxError, and the errors of Jinja and Python for a template that is
    nested too deeply.
    """
    environment = BoundedEnvironment()
    tree = environment.parse(text)
    for node in tree.find_all((nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)):
        raise TemplateSyntaxError("a template cannot load other templates", node.lineno, name)
    template = environment.from_string(text)
    return lambda values: environment.render(template, values), sorted(meta.find_undeclared_variables(tree))


class LimitError(TemplateRuntimeError):
    """A template asks for more work than a prompt can need."""


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox of user templates. It renders one template at a time."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self) -> None:
        super().__init__(undefined=_Missing, autoescape=False, finalize=_printable, keep_trailing_newline=True)
        self._steps = self._chars = 0
        self.concat = self._concat  # type: ignore[method-assign]  # joins the output of macros and blocks
        for name in ("lipsum", "cycler", "joiner"):
            del self.globals[name]
        del self.filters["random"]
        self.tests["none"] = _is_null
        self.policies["json.dumps_kwargs"] = {"sort_keys": True, "default": _null}
        for name in ("center", "batch", "slice", "wordwrap", "truncate", "tojson", "round"):
            self.filters[name] = _with_small_arguments(self.filters[name])
        self.filters["_counted"] = lambda values: _Counted(values, self._step)
        self.filters["_concat"] = lambda values: self._concat(str(_printable(value)) for value in values)
        self.filters["join"] = self._join
        self.filters["replace"] = self._replace
        self.filters["format"] = self._format
        self.filters["indent"] = self._indent

    def render(self, template: Template, values: dict[str, Any]) -> str:
        """The text of `template`; raises LimitError or whatever the template's expressions raise."""
        self._steps = self._chars = 0
        size = 0
        parts = []
        for part in template.root_render_func(template.new_context(values)):
            size += len(part)
            _bounded(size)
            parts.append(part)
        return "".join(parts)

    def _tokenize(
        self, source: str, name: str | None, filename: str | None = None, state: str | None = None
    ) -> TokenStream:
        raw = self.lexer.tokeniter(self.preprocess(source, name, filename), name, filename, state)
        return TokenStream(_with_sane_numbers(self.lexer.wrap(raw, name, filename), name), name, filename)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Bounding().visit(super()._parse(source, name, filename))
        tree.set_environment(self)
        return tree

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call `__obj` for a template, as one step."""
        __self._step(_CALL_STEPS)
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            if __obj.__name__ == "replace":
                return __self._replace(owner, *args, **kwargs)
            if __obj.__name__ == "join" and args:
                return __self._join(args[0], owner)
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute `left operator right` for a template, if the result has a sane size."""
        if operator == "%" and isinstance(left, str):
            return self._format(left, *right) if isinstance(right, tuple) else self._format(left, right)
        self._make(_result_size(operator, left, right))
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> None:
        """No `str.format`: it has widths and attribute access of its own. `%` and the format filter stay."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return `obj.attribute`, whose name ends in `_CALLED` where a template calls it.

        An object of the data has methods where they are called, and fields alone where they are read: one that it
        lacks is a null, also where a method has that name.
        """
        name = attribute.removesuffix(_CALLED)
        if name == attribute and isinstance(obj, Mapping):
            return obj[name] if name in obj else self.undefined(obj=obj, name=name)
        return super().getattr(obj, name)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Return whether a template may use `obj.attr`."""
        if isinstance(obj, str | bytes | int) and attr in _REFUSED_METHODS:
            return False
        return super().is_safe_attribute(obj, attr, value)

    def _step(self, steps: int = 1) -> None:
        self._steps += steps
        if self._steps > MAX_STEPS:
            raise LimitError(f"more than {MAX_STEPS:,} loop steps and calls")

    def _make(self, chars: int) -> None:
        # Allow for a text of `chars` characters, before it is made.
        self._chars += _bounded(chars)
        if self._chars > _MAX_TOTAL_CHARS:
            raise LimitError(f"texts of more than {_MAX_TOTAL_CHARS:,} characters in all")

    def _concat(self, parts: Iterable[str]) -> str:
        texts = list(parts)
        self._make(sum(map(len, texts)))
        return "".join(texts)

    def _join(self, values: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
        items = list(values)
        if attribute is not None:
            items = [item[attribute] for item in items]
        texts = [str(_printable(item)) for item in items]
        self._make(sum(map(len, texts)) + len(d) * len(texts))
        return d.join(texts)

    def _replace(self, value: Any, old: str, new: str, count: int | None = None) -> str:
        text = str(value)
        self._make(len(text) + text.count(old) * max(len(new) - len(old), 0))
        return text.replace(old, new, -1 if count is None else count)

    def _format(self, value: Any, *args: Any, **kwargs: Any) -> str:
        if args and kwargs:
            raise TemplateRuntimeError("format takes positional or keyword arguments, not both")
        text = str(value)
        if _WIDTH.search(text):
            raise LimitError(f"a width of more than {_SMALL:,} in a format")
        arguments: Any = kwargs or (args[0] if len(args) == 1 and isinstance(args[0], Mapping) else args)
        given = (*args, *kwargs.values())
        self._make(len(text) + _SMALL + sum(len(a) for a in given if isinstance(a, str)) * text.count("%"))
        return str(text % arguments)

    def _indent(self, s: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
        self._make(len(s) + (s.count("\n") + 1) * (len(width) if isinstance(width, str) else width))
        return do_indent(s, width, first, blank)


def _with_sane_numbers(tokens: Iterator[Token], name: str | None) -> Iterator[Token]:
    # The tokens. Raises TemplateSyntaxError for a number that is too large, or has more digits than Python reads.
    line = 1
    try:
        for token in tokens:
            line = token.lineno
            if token.type == "float" and math.isinf(float(token.value)):  # Jinja would make it the variable `inf`
                raise ValueError
            yield token
    except ValueError:
        raise TemplateSyntaxError("a number is too large", line, name) from None


_CALLED = "()"  # no name in a template ends so


class _Bounding(NodeTransformer):
    """Sends loops and `~` through filters that bound them, and marks the attributes that are called."""

    def visit_Call(self, node: nodes.Call) -> nodes.Node:
        self.generic_visit(node)
        if isinstance(node.node, nodes.Getattr):
            node.node.attr += _CALLED
        return node

    def visit_For(self, node: nodes.For) -> nodes.Node:
        node.iter = nodes.Filter(node.iter, "_counted", [], [], None, None, lineno=node.lineno)
        return self.generic_visit(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        parts = nodes.List(node.nodes, lineno=node.lineno)
        return nodes.Filter(parts, "_concat", [], [], None, None, lineno=node.lineno)


class _Counted:
    """The values of a loop; every step is counted."""

    def __init__(self, values: Any, step: Callable[[], None]) -> None:
        self._values = values
        self._step = step

    def __iter__(self) -> Iterator[Any]:
        for value in self._values:
            self._step()
            yield value

    def __len__(self) -> int:
        return len(self._values)  # raises TypeError for an iterator: Jinja then counts by itself


class _Missing(StrictUndefined):
    """A key that an object of the data lacks, which is the same as one with a null (`rows.without_nulls`): it is none
    and false, and an error where it is printed. Anything else that does not exist is an error wherever it is used."""

    __slots__ = ()

    def is_null(self) -> bool:
        """Return whether it is such a key."""
        return isinstance(self._undefined_obj, Mapping)

    def __bool__(self) -> bool:  # type: ignore[override]
        self._require_null()
        return False

    def __eq__(self, other: object) -> bool:  # type: ignore[override]
        self._require_null()
        return _is_null(other)

    def __hash__(self) -> int:  # type: ignore[override]
        self._require_null()
        return hash(None)

    def _require_null(self) -> None:
        if not self.is_null():
            self._fail_with_undefined_error()


def _is_null(value: object) -> bool:
    return value is None or (isinstance(value, _Missing) and value.is_null())


def _null(value: object) -> None:
    # In JSON, what JSON has no form for: nothing but a null that was left out.
    if not _is_null(value):
        raise TypeError(f"{type(value).__name__} has no form in JSON")


def _printable(value: Any) -> Any:
    # The text of `{{ value }}`. A null would become the word None in the prompt, so it is an error.
    if _is_null(value):
        what = "a null value" if value is None else f"{value._undefined_name}, which is null or missing,"
        raise TemplateRuntimeError(f"{what} is printed; write {{{{ column or '' }}}} if it may be null")
    if callable(value):
        name = getattr(value, "__name__", None) or type(value).__name__
        raise TemplateRuntimeError(f"{name} is a method: write {name}()")
    numbers = getattr(value, "tolist", None)  # a method of numpy's arrays; numpy itself takes long to import
    return value if numbers is None else numbers()


def _bounded(size: int) -> int:
    if size > MAX_CHARS:
        raise LimitError(f"a text of more than {MAX_CHARS:,} characters")
    return size


def _result_size(operator: str, left: Any, right: Any) -> int:
    # Characters or elements of `left operator right`. Raises LimitError for a huge number.
    bits = 0
    if operator == "+" and isinstance(left, Sequence) and isinstance(right, Sequence):
        return len(left) + len(right)
    if operator == "*":
        for sequence, times in ((left, right), (right, left)):
            if isinstance(sequence, Sequence) and isinstance(times, int):
                return len(sequence) * max(times, 0)
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() + right.bit_length()
    elif operator == "**" and isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * max(right, 0)
    if bits > _MAX_BITS:
        raise LimitError("a number is too large")
    return 0


def _with_small_arguments(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)  # keeps Jinja's mark that it takes the environment
    def checked(*args: Any, **kwargs: Any) -> Any:
        for argument in (*args[1:], *kwargs.values()):
            if isinstance(argument, int) and abs(argument) > _SMALL:
                raise LimitError(f"{argument} is too large here; the limit is {_SMALL:,}")
        fill = kwargs.get("fill_with", kwargs.get("wrapstring", args[-1] if len(args) > 2 else None))
        if isinstance(fill, str) and len(fill) > _SMALL:
            raise LimitError(f"a fill text has more than {_SMALL:,} characters")
        return function(*args, **kwargs)

    return checked


class _Generation(Extension):
    """`{% generation %}` marks what the assistant says, for training; the text is the same."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_said"), [], [], body).set_lineno(line)

    @pass_eval_context
    def _said(self, context: nodes.EvalContext, caller: Callable[[], str]) -> str:
        return caller()


def variables_read(tree: nodes.Template) -> dict[str, list[Any]]:
    """The variables that a template reads before it sets them, in order, each with the constants that it is compared
    with."""
    undeclared = meta.find_undeclared_variables(tree)
    first: dict[str, bool] = {}
    for name, stored in _uses(tree):
        first.setdefault(name, stored)
    found: dict[str, list[Any]] = {name: [] for name, stored in first.items() if not stored and name in undeclared}
    for comparison in tree.find_all(nodes.Compare):
        names = {node.name for node in comparison.find_all(nodes.Name)} & found.keys()
        for name in names if len(names) == 1 else ():
            found[name] += [node.value for node in comparison.find_all(nodes.Const)]
    return found


def _uses(node: nodes.Node) -> Iterator[tuple[str, bool]]:
    # The names below a node and whether each is stored there, in the order in which Jinja comes to them.
    if isinstance(node, nodes.Name):
        if node.ctx != "param":
            yield node.name, node.ctx == "store"
        return
    children = list(node.iter_child_nodes())
    if isinstance(node, nodes.Assign | nodes.AssignBlock):
        children.reverse()  # the value comes first
    elif isinstance(node, nodes.For):
        children.sort(key=lambda child: child is not node.iter)
    for child in children:
        yield from _uses(child)


# Some templates print today's date. A score must not depend on the day, nor a resume on midnight, so it is always the
# same day, unless the user names another one.
_DAY = date(2024, 7, 26)


class ChatRenderer:
    """A compiled chat template; `answers` and `choices` as of `compile_chat_template`.

    Raises whatever Jinja raises.
    """

    def __init__(self, text: str, variables: Mapping[str, Any], answers: bool, choices: ChatChoices | None) -> None:
        environment = _environment_of_models()
        tree = environment.parse(text)
        self.read = variables_read(tree)  # the variables that it reads
        self._template = environment.from_string(tree)
        self._source = text
        self._answers = answers
        self._choices = choices or ChatChoices(thinking="on")
        options = dict(self._choices.options)
        day = date.fromisoformat(options.pop(DATE)) if DATE in options else _DAY
        clock = datetime(day.year, day.month, day.day)
        self._given = {"tools": None, "documents": None, **variables, "strftime_now": clock.strftime, **options}
        way = find_way(self._rendered, self.read, self._choices) if answers and choices else Way()
        self._given |= way.variables
        self.way = replace(way, day=day.isoformat() if "strftime_now" in self.read else None)

    def __call__(self, messages: Any) -> str:
        """The text of messages; if a model answers, up to the beginning of its answer."""
        text = self._rendered(messages, self._answers, {})
        if not self._answers:
            return text
        return text + self._closing(text) + self._choices.answer_prefix

    def _rendered(self, messages: Any, answers: bool, variables: Mapping[str, Any]) -> str:
        return self._template.render(messages=messages, add_generation_prompt=answers, **self._given | dict(variables))

    def _closing(self, text: str) -> str:
        # What follows a text so that the answer comes next. Other messages than the probes may open thoughts, too.
        for end, closing in self.way.closings.items():
            if text.endswith(end):
                return closing
        opened = "" if self._choices.thinking == "on" else opened_thought(text)
        return closing_of(opened) if opened and opened.rstrip() in self._source else ""


def _environment_of_models() -> ImmutableSandboxedEnvironment:
    # That of templates which come with a model.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    return environment


def compile_layout(text: str) -> Callable[[dict[str, Any]], str]:
    """Return what renders the template of a model's layout from the values of a question. Raises whatever Jinja
    raises."""
    template = _environment_of_models().from_string(text)
    return lambda values: template.render(values)


def compile_chat_template(
    text: str, variables: Mapping[str, Any], *, answers: bool = True, choices: ChatChoices | None = None
) -> ChatRenderer:
    """Return what renders messages; if a model `answers`, up to the beginning of the assistant's turn, or, with
    `choices`, as these say. `variables` are the tokenizer's special tokens. Raises whatever Jinja raises."""
    return ChatRenderer(text, variables, answers, choices)


def _tojson(
    x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


# The process that renders templates; `prompts/templates.py` starts it and holds the other end of its pipes. It
# reads a template, then rows, each with its length before it, and answers every row at once. Rows come only from its
# parent, so they may be pickled; answers are bytes.


_DETAIL_CHARS = 300
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serve until the parent closes the pipe or ends."""
    _run(json.loads(sys.argv[1]))


def nurse() -> None:
    """Fork a process for each template that the parent asks for, until it ends: this one has Jinja imported, and
    nothing of any template. Stdin is the socket on which the parent sends a setup with the ends of two pipes, and gets
    the number of the process; or sends this number, when the process has ended, and gets its exit code."""
    asked, own = socket.socket(fileno=0), os.getpid()
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
    gc.freeze()
    while True:
        setup, handles, *_ = socket.recv_fds(asked, _SETUP_BYTES, 2)
        if not setup:
            return
        if not handles:
            _, status = os.waitpid(int(setup), 0)
            asked.send(b"%d" % os.waitstatus_to_exitcode(status))
            continue
        if (child := os.fork()) == 0:
            try:
                for number, handle in enumerate(handles):  # instead of the socket, which is the parent's alone
                    os.dup2(handle, number)
                    os.close(handle)
                _run(json.loads(setup) | {"parent": own})
            finally:
                os._exit(0)
        for handle in handles:
            os.close(handle)
        asked.send(b"%d" % child)


def _run(setup: dict[str, Any]) -> None:
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)  # a terminal or a scheduler signals all processes; the parent decides
    _end_with(setup["parent"])
    _limit(resource.RLIMIT_CORE, 0)
    if setup["limit_memory"]:
        _limit(resource.RLIMIT_AS, setup["memory_bytes"])
    rows, answers = sys.stdin.buffer, sys.stdout.buffer
    _answer(answers, b"R")
    try:
        _serve(rows, answers, setup["cpu_seconds"], setup["text_bytes"])
    except MemoryError:
        _answer(answers, b"M")


def _serve(rows: BinaryIO, answers: BinaryIO, cpu_seconds: int, text_bytes: int) -> None:
    # `kind` is `template` (a user's, rendered from a row's columns), `layout` (a model's, from a question's values) or
    # `chat` (a model's, from messages, with
    # `variables`, `answers` and `choices` as `compile_chat_template` takes them); `text` is that of the template, and
    # `name` is for messages.
    spec = pickle.loads(_read(rows))  # noqa: S301 - written by the parent
    renewed = _renewed(cpu_seconds, -1)
    render: Callable[[Any], str]
    compiled: dict[str, Any] = {}
    try:
        if spec["kind"] == "template":
            render, compiled["columns"] = compile_template(spec["text"], spec["name"])
        elif spec["kind"] == "layout":
            render, compiled["columns"] = compile_layout(spec["text"]), []
        else:
            chat = compile_chat_template(
                spec["text"], spec["variables"], answers=spec["answers"], choices=spec["choices"]
            )
            render, compiled = chat, {"columns": list(chat.read), "way": asdict(chat.way)}
    except MemoryError:
        raise
    except Exception as error:
        _answer(answers, b"C", json.dumps({"error": f"{spec['name']}{_why_not_compiled(error)}"}).encode())
        return
    _answer(answers, b"C", json.dumps(compiled).encode())
    while row := _read(rows):
        renewed = _renewed(cpu_seconds, renewed)
        try:
            text = render(pickle.loads(row)).encode("utf-8", "surrogatepass")  # noqa: S301 - written by the parent
        except MemoryError:
            raise
        except UndefinedError as error:
            _answer(answers, b"E", _short(error).encode("utf-8", "surrogatepass"))
        except Exception as error:  # an expression of the template may raise anything
            detail = f"{type(error).__name__}: {_short(error)}"
            _answer(answers, b"E", detail.encode("utf-8", "surrogatepass"))
        else:
            if len(text) > text_bytes:
                _answer(answers, b"E", f"a text of {len(text):,} bytes; the limit is {text_bytes:,}".encode())
            else:
                _answer(answers, b"T", text)


def _why_not_compiled(error: Exception) -> str:
    if isinstance(error, TemplateSyntaxError):
        return f", line {error.lineno}: {error.message}"
    if isinstance(error, TemplateError):
        return f": {error.message}"
    if isinstance(error, RecursionError | SyntaxError):  # Jinja compiles it to Python, which bounds nesting too
        return ": nested too deeply; make it simpler"
    return f": it cannot be compiled ({type(error).__name__}: {_short(error)})"


def _short(error: Exception) -> str:
    return str(error)[:_DETAIL_CHARS]


def _read(stream: BinaryIO) -> bytes:
    # A message that was sent after its length; nothing at the end.
    return stream.read(int.from_bytes(stream.read(8), "big"))


def _answer(stream: BinaryIO, kind: bytes, content: bytes = b"") -> None:
    stream.write(kind + len(content).to_bytes(8, "big"))
    stream.write(content)
    stream.flush()


def _renewed(seconds: int, before: int) -> int:
    # A row begins: the process ends, by SIGXCPU, when the row takes more than this many seconds of processor time. The
    # kernel's limit is for the whole process, so each row raises it. Returns the process's seconds at the row's
    # beginning; `before` are those of the row before.
    used = int(time.process_time())
    if used > before:
        _limit(resource.RLIMIT_CPU, used + 1 + seconds)
    return used


def _limit(what: int, value: int) -> None:
    most = resource.getrlimit(what)[1]
    resource.setrlimit(what, (value if most == resource.RLIM_INFINITY else min(value, most), most))


def _end_with(parent: int) -> None:
    # Be killed when the parent dies, even while a row is rendered; on other systems the limits end it.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            sys.exit(1)
