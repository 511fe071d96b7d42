"""The Jinja environment of transformers' chat templates, without transformers.

It is what `transformers.utils.chat_template_utils` compiles them with; importing that takes torch along. The tests
hold both against each other.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes, pass_eval_context
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

_DAY = datetime(2024, 7, 26)


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


def compile_chat_template(text: str, variables: dict[str, Any], *, answers: bool = True) -> Callable[[Any], str]:
    """What renders messages, if a model `answers` up to where the assistant begins to. `variables` are the tokenizer's
    special tokens.

    Some templates print today's date. A score must not depend on the day, nor a resume on midnight: it is always the
    same day. Raises whatever Jinja raises.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    template = environment.from_string(text)
    given = {**variables, "strftime_now": _DAY.strftime}

    def render(messages: Any) -> str:
        return template.render(messages=messages, tools=None, documents=None, add_generation_prompt=answers, **given)

    return render


def _tojson(
    x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)
