"""Templates of any text, over rows and chat messages of any values."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from tests.fuzz.command import prefill
from tests.fuzz.fuzzer import Fuzzer
from tests.fuzz.outputs import require_all_rows
from tests.fuzz.texts import json_values, texts
from tests.fuzz.workplace import Workplace

_VALUES = st.sampled_from(
    [
        *("prompt", "x", "messages", "loop", "range(10**9)", "''", "1", "none", "x.y", "x[0]", "self", "namespace()"),
        *("x.__class__", "lipsum()", "cycler", "'%s' % x", "x * 10**9", "10 ** 10 ** 9", "[x] * 3", "{'a': x}", "-x"),
        *("x ~ prompt", "x in prompt", "1 / 0", "joiner()", "dict(a=1)", "messages[0].role", "raise_exception('no')"),
    ]
)
_FILTERS = st.sampled_from(
    [
        *(
            "upper",
            "length",
            "tojson",
            "join(', ')",
            "first",
            "replace('a', 'b' * 10)",
            "center(10**9)",
            "list",
            "safe",
        ),
        *(
            "sort",
            "map('upper')",
            "default('-')",
            "int",
            "float",
            "round(400)",
            "batch(2)",
            "slice(0)",
            "indent(10**8)",
        ),
        *("truncate(-1)", "format(1)", "xmlattr", "attr('__class__')", "groupby('a')", "sum", "unique", "wordwrap(0)"),
    ]
)
_EXPRESSIONS = st.builds(lambda value, filters: " | ".join([value, *filters]), _VALUES, st.lists(_FILTERS, max_size=2))
_PARTS = st.one_of(
    texts,
    _EXPRESSIONS.map(lambda text: "{{ " + text + " }}"),
    st.builds("{{% for m in {} %}}{}{{% endfor %}}".format, _EXPRESSIONS, texts),
    st.builds("{{% if {} %}}{}{{% endif %}}".format, _EXPRESSIONS, texts),
    st.builds("{{% set x = {} %}}".format, _EXPRESSIONS),
    st.sampled_from(
        [
            *("{% macro f(a) %}{{ f(a) }}{% endmacro %}{{ f(1) }}", "{% include 'x' %}", "{% import 'os' as os %}"),
            *("{% extends prompt %}", "{% raw %}", "{#", "{{", "{%", "}}", "{% generation %}", "{% break %}", "<s>"),
            *("{% block b %}{{ super() }}{% endblock %}", "{% filter upper %}x{% endfilter %}", "{{ (" * 60),
        ]
    ),
)
_TEMPLATES = st.lists(_PARTS, max_size=4).map("".join)
_MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.one_of(st.sampled_from(["user", "system", "assistant", "tool"]), texts)},
        optional={
            "content": st.one_of(texts, json_values),
            "tool_calls": json_values,
            "name": texts,
            "reasoning_content": json_values,
        },
    ),
    max_size=4,
)
_ROWS = st.lists(
    st.fixed_dictionaries({"prompt": texts, "x": json_values, "messages": st.one_of(_MESSAGES, json_values)}),
    min_size=1,
    max_size=3,
)


def _check_template(drawn: Any, place: Workplace) -> None:
    template, rows, chat = drawn
    Path("t.jinja").write_text(template)
    _score(rows, place.chat_model if chat else place.model, "--template", "t.jinja")


def _check_chat(drawn: Any, place: Workplace) -> None:
    template, rows, system = drawn
    model = place.chat_model
    if template is not None:
        model = str(shutil.copytree(model, "model"))
        Path(model, "chat_template.jinja").write_text(template)
    flags = () if system is None else ("--system", system)
    _score(rows, model, "--prompt-column", "messages", *flags)


def _score(rows: list[dict[str, Any]], model: str, *flags: str) -> None:
    Path("in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = prefill("score", "in.jsonl", "-m", model, "-o", "out.jsonl", "--quiet", *flags)
    require_all_rows(run, "in.jsonl", len(rows))


TEMPLATES = Fuzzer("templates", st.tuples(_TEMPLATES, _ROWS, st.booleans()), _check_template, per_round=30)
CHATS = Fuzzer("chats", st.tuples(st.none() | _TEMPLATES, _ROWS, st.none() | texts), _check_chat, per_round=30)
