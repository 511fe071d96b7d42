"""The beginning of a rationale: Jinja text that names the row's answer."""

from __future__ import annotations

from collections.abc import Sequence

from jinja2 import TemplateError, TemplateSyntaxError

from prefillcli.data.prompts.sandbox import compile_template
from prefillcli.errors import UsageError, brief, did_you_mean

_VARIABLES = ("label", "labels")


def rationale_texts(template: str, labels: Sequence[str]) -> dict[str, str]:
    """What follows the prompt of a row with each of these answers, before the model goes on, by label.

    Raises UsageError for a template with a syntax error or another variable, and for one that gives no text.
    """
    try:
        render, names = compile_template(template, "--rationale-template")
    except TemplateSyntaxError as error:
        raise UsageError(
            f"--rationale-template: line {error.lineno}: {error.message}\nwrite Jinja text, like "
            "'{{ label }} because'"
        ) from None
    except (TemplateError, RecursionError, MemoryError, SyntaxError) as error:
        raise UsageError(f"--rationale-template: cannot be compiled: {brief(error)}") from None
    for name in names:
        if name not in _VARIABLES:
            raise UsageError(
                f"--rationale-template: there is no variable {name}{did_you_mean(name, _VARIABLES)}\n"
                "it may use label, the row's answer, and labels, all of them"
            )
    texts = {}
    for label in labels:
        try:
            texts[label] = render({"label": label, "labels": list(labels)})
        except Exception as error:  # whatever an expression raises
            raise UsageError(f"--rationale-template: cannot be rendered for {label!r}: {brief(error)}") from None
        if not texts[label].strip():
            raise UsageError(
                f"--rationale-template: it gives no text for the answer {label!r}\n"
                "write what a rationale begins with, like '{{ label }} because'"
            )
    return texts
