"""Jinja text rendered from a row: the user's `--template`, the model's chat template, the beginning of a rationale."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError

from prefillcli.data.given_file import read_given
from prefillcli.data.prompts.rendering import Renderer, RenderLimits
from prefillcli.data.prompts.sandbox import compile_template
from prefillcli.data.rows import ErrorCode, RowError
from prefillcli.errors import UsageError, brief, did_you_mean

_MARKS = ("{{", "{%", "{#")


def read_template(template: str) -> tuple[str, str]:
    """The Jinja text of `--template`, itself text or a file's path, and a name for messages.

    Raises UsageError if it is neither.
    """
    if not names_template(template):
        return template, "--template"
    shown = template if len(template) < 200 else f"{template[:100]}..."
    try:
        return read_given("--template", template).decode(), template
    except (UsageError, UnicodeDecodeError) as error:
        reason = str(error).removeprefix(f"--template {template}: ")
        raise UsageError(
            f"--template {shown}: neither Jinja text (it has no {{{{ column }}}}) nor a readable file ({reason})"
        ) from None


def names_template(template: str) -> bool:
    """Whether a `--template` is the path of a file, not Jinja text itself."""
    return not any(mark in template for mark in (*_MARKS, "\n"))


class RowTemplate:
    """A compiled template.

    Raises UsageError with the line of a syntax error, or if the template cannot be compiled within the limits.
    """

    def __init__(self, template: str, limits: RenderLimits | None = None) -> None:
        self.text, name = read_template(template)
        spec = {"kind": "template", "text": self.text, "name": name}
        self._renderer = Renderer(spec, code=ErrorCode.TEMPLATE_ERROR, limits=limits)
        self.columns = self._renderer.columns
        """The columns it needs."""

    def render(self, rows: Sequence[dict[str, Any]], most: int | None = None) -> list[str | RowError]:
        """The text of each row of column values, or why there is none; with `most`, of the first rows only.

        It stops after the text that makes them more than `most` characters.
        """
        return self._renderer.render(rows, most)

    def close(self) -> None:
        """Stop rendering, in whatever thread it goes on, for good."""
        self._renderer.close()


Message = dict[str, Any]


def messages_of(value: Sequence[Any], system: str | None) -> list[Message] | RowError:
    """The messages of a row, with the `system` message before them unless the row has its own.

    Keys with a null are left out: Parquet gives every message the keys of all others.
    """
    messages: list[Message] = []
    for number, item in enumerate(value, 1):
        if not isinstance(item, dict) or not isinstance(item.get("role"), str):
            return RowError(ErrorCode.WRONG_TYPE, f"message {number} is not an object with a role and a content")
        message = {key: part for key, part in item.items() if part is not None}
        if "content" not in message and "tool_calls" not in message:
            return RowError(ErrorCode.CHAT_ERROR, f"message {number} has no content")
        messages.append(message)
    if system is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    return messages


class ChatTemplate:
    """The chat template of a tokenizer. Where a model `answers`, chats end where the assistant begins to.

    Raises UsageError if there is none, or if it cannot be compiled within the limits.
    """

    def __init__(self, tokenizer: Any, limits: RenderLimits | None = None, *, answers: bool = True) -> None:
        from transformers import PreTrainedTokenizerBase  # takes long to import; the tokenizer has done so

        if type(tokenizer).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template:
            raise UsageError(
                f"{type(tokenizer).__name__} turns chats into text by code of its own, which is not run\n"
                "write the messages as text with --template, and give --no-chat"
            )
        try:
            text = tokenizer.get_chat_template()
        except ValueError as error:
            raise UsageError(f"the model's chat template: {error}") from None
        spec = {
            "kind": "chat",
            "text": text,
            "answers": answers,
            "variables": dict(tokenizer.special_tokens_map),
            "name": "the model's chat template",
        }
        self._renderer = Renderer(spec, code=ErrorCode.CHAT_ERROR, limits=limits)

    def render(self, chats: Sequence[list[Message]]) -> list[str | RowError]:
        """Every chat as text, or why there is none."""
        return self._renderer.render(chats)

    def close(self) -> None:
        """Stop rendering, in whatever thread it goes on, for good."""
        self._renderer.close()


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
