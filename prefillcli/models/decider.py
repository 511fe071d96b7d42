"""The layout of decider models, whose folder has a `decider_config.json` (package decider-ai)."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prefillcli.errors import UsageError
from prefillcli.models.files import positive, quoted, read_object
from prefillcli.prompts.layouts import Layout, LayoutForm

CONFIG = "decider_config.json"
_TYPES = ("choice", "noul", "score")
_LEAST = 0.05  # the lowest temperature by the number of options, where the file does not set it
_NARROW = 10  # options that are one text; of more, each is cut from its code
_SENTINEL = "@@THE USER'S TEXT@@"
# Where the texts of a prompt are cut: each is tokenised by itself.
CUT = "\ue0fe"

_MACROS = (
    "{% macro text(value) %}{{ value if value is string else value | tojson }}{% endmacro %}"
    "{% macro whole(o) %}{% if type == 'score' %}{{ o.key }}: {{ text(o.description) }}{% else %}"
    "{{ o.key if type != 'noul' else 'yes' if o.key == 'true' else 'no' }}"
    "{% if o.description is not none and o.description != '' %}: {{ text(o.description) }}{% endif %}{% endif %}"
    "{% endmacro %}"
)
# An option that reads as an abstention is called otherwise: the model has learnt these words as a signal.
_NEUTRAL = (
    "{% macro option(o) %}{% set said = whole(o) %}{% set low = said | trim | lower %}"
    "{{ 'not listed here' if low.startswith('none of the above') or low in ('none', 'n/a', 'none of these') "
    "else said }}{% endmacro %}"
)
_AS_IT_IS = "{% macro option(o) %}{{ whole(o) }}{% endmacro %}"
_ASKED = (
    "Question: {% if instructions == '' %}Which answer fits the context?{% else %}{{ text(instructions) }}{% endif %}"
    "{{ '\\nOptions:' }}"
)
_OPTIONS = (
    f"{{% if options | length <= {_NARROW} %}}"
    "{% for o in options %}{{ '\\n(' }}{{ o.label }}) {{ option(o) }}{% endfor %}"
    "{% else %}{% for o in options %}"
    f"{CUT}{{{{ '\\n(' }}}}{CUT}{{{{ o.label }}}}{CUT}) {{{{ option(o) }}}}"
    f"{{% endfor %}}{CUT}{{% endif %}}"
)


def has_config(model: Path) -> bool:
    """Return whether the folder of a model, or of a GGUF file, says that it is a decider model."""
    return (_folder(model) / CONFIG).is_file()


def read_form(model: Path) -> LayoutForm:
    """Return what is known of a decider model's layout before it is opened. Raises UsageError for an unknown one."""
    found = read_object(_folder(model) / CONFIG)
    _layout(found, _folder(model) / CONFIG)
    return LayoutForm("decider", levels_apart=found.get("isolated_levels") is True)


def read_decider(model: Path, tokenizer: Any, codes: Mapping[str, tuple[int, ...]]) -> Layout:
    """Return the layout of a decider model, whose options have these codes. Raises UsageError for a wrong
    `decider_config.json`."""
    file = _folder(model) / CONFIG
    found = read_object(file)
    chat, schema_first = _layout(found, file) == "chat", found.get("schema_first") is True
    head, tail = _chat_around(tokenizer) if chat else ("", "")
    context = "Context:\n{{ text(state) }}"
    if schema_first:
        middle = f"{_ASKED}{CUT}{_OPTIONS}{CUT}{{{{ '\\n\\nContext:\\n' }}}}{CUT}{{{{ text(state) }}}}"
    else:
        apart = CUT if chat else ""
        middle = f"{context}{CUT}{{{{ '\\n\\n' }}}}{_ASKED}{apart}{_OPTIONS}"
    if chat:
        whole = f"{_literal(head)}{CUT}{middle}{CUT}{_literal(tail)}{CUT}Answer: ("
    elif schema_first:
        whole = f"{middle}{CUT}{{{{ '\\n\\nAnswer: (' }}}}"
    else:
        whole = f"{middle}{{{{ '\\nAnswer: (' }}}}"
    neutral = _NEUTRAL if found.get("neutralize_none", True) else _AS_IT_IS
    heats, curve = _temperatures(found, file, schema_first=schema_first)
    return Layout(
        read_form(model),
        _MACROS + neutral + whole,
        codes,
        heats,
        cut=CUT,
        numbers_lists=True,
        curve=curve,
    )


def _folder(model: Path) -> Path:
    return model if model.is_dir() else model.parent


def _layout(found: Mapping[str, Any], file: Path) -> str:
    chats = found.get("chat_template") is True
    layout = found.get("layout") or ("chat" if chats else "plain")
    if layout not in ("plain", "chat") or (layout == "plain" and chats):
        raise UsageError(
            f"{file}: layout is {quoted(layout)}, which is not read\n"
            "take another model; --layout generic asks it like any other, for answers that it was not trained to give"
        )
    return str(layout)


def _chat_around(tokenizer: Any) -> tuple[str, str]:
    # What the chat template writes before a user's text, and behind it up to the answer.
    from prefillcli.prompts.templates import ChatTemplate
    from prefillcli.prompts.thinking import AS_USUAL

    template = ChatTemplate(tokenizer, choices=AS_USUAL)
    try:
        (text,) = template.texts([[{"role": "user", "content": _SENTINEL}]])
    finally:
        template.close()
    if not isinstance(text, str) or text.count(_SENTINEL) != 1:
        raise UsageError("the model's chat template does not write a user's text as it is, as its layout needs")
    head, _, tail = text.partition(_SENTINEL)
    return head, tail


def _literal(text: str) -> str:
    # A text as an expression of Jinja.
    return "{{ " + json.dumps(text) + " }}"


def _temperatures(
    found: Mapping[str, Any], file: Path, *, schema_first: bool
) -> tuple[dict[str, float], tuple[float, float, float] | None]:
    # By the type of a question, or a + b log n at n options, at least the third number.
    usual = positive(found.get("temperature", 1.0), f"{file}: temperature")
    own = _by_type(found, file, "temperature_by_type")
    curve = found.get("temperature_by_options")
    if schema_first:
        usual = positive(found.get("temperature_schema_first", usual), f"{file}: temperature_schema_first")
        own = {} if "temperature_schema_first" in found else own
        own |= _by_type(found, file, "temperature_schema_first_by_type")
    elif curve is not None:
        key = "temperature_by_options"
        if own or not isinstance(curve, dict) or not {"a", "b"} <= curve.keys() <= {"a", "b", "min"}:
            raise UsageError(
                f"{file}: {key} is {quoted(curve)}, and must be a, b and min, without temperatures by type"
            )
        least = positive(curve.get("min", _LEAST), f"{file}: {key}")
        return {}, (_number(curve["a"], file, key), _number(curve["b"], file, key), least)
    return {each: own.get(each, usual) for each in _TYPES}, None


def _by_type(found: Mapping[str, Any], file: Path, key: str) -> dict[str, float]:
    given = found.get(key) or {}
    if not isinstance(given, dict) or not given.keys() <= set(_TYPES):
        raise UsageError(f"{file}: {key} is {quoted(given)}, and must be numbers by {', '.join(_TYPES)}")
    return {name: positive(value, f"{file}: {key}") for name, value in given.items()}


def _number(value: Any, file: Path, key: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UsageError(f"{file}: {key} is {quoted(value)}, and must be a number")
    return float(value)
