"""The user's `--template`: Jinja text rendered from the columns of a row."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prefillcli.data.prompts.rendering import Renderer, RenderLimits
from prefillcli.data.rows import ErrorCode, RowError
from prefillcli.errors import UsageError

_MARKS = ("{{", "{%", "{#")


def read_template(template: str) -> tuple[str, str]:
    """The Jinja text of `--template`, itself text or a file's path, and a name for messages.

    Raises UsageError if it is neither.
    """
    if any(mark in template for mark in _MARKS) or "\n" in template:
        return template, "--template"
    try:
        return Path(template).read_text(encoding="utf-8"), template
    except (OSError, UnicodeDecodeError) as error:
        shown = template if len(template) < 200 else f"{template[:100]}..."
        reason = getattr(error, "strerror", None) or error
        raise UsageError(
            f"--template {shown}: neither Jinja text (it has no {{{{ column }}}}) nor a readable file ({reason})"
        ) from None


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
