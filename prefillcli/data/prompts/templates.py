"""The user's `--template`: Jinja text rendered from the columns of a row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prefillcli.data.given_file import read_given
from prefillcli.data.prompts.rendering import Renderer, RenderLimits
from prefillcli.data.rows import ErrorCode, RowError
from prefillcli.errors import UsageError

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
