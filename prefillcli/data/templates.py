"""The user's `--template`: Jinja text rendered from the columns of a row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import TemplateSyntaxError, UndefinedError, meta
from jinja2 import nodes as jinja_nodes

from prefillcli.data.rows import RowError
from prefillcli.data.sandbox import BoundedEnvironment
from prefillcli.errors import UsageError

_MARKS = ("{{", "{%", "{#")
_DETAIL_CHARS = 300


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
            f"--template {shown}: no Jinja text (it has no {{{{ column }}}}) and no file that can be read ({reason})"
        ) from None


class RowTemplate:
    """A compiled template.

    Raises UsageError with the line of a syntax error.
    """

    def __init__(self, template: str) -> None:
        self.text, name = read_template(template)
        self._environment = BoundedEnvironment()
        try:
            tree = self._environment.parse(self.text)
            self._template = self._environment.from_string(self.text)
        except TemplateSyntaxError as error:
            raise UsageError(f"{name}, line {error.lineno}: {error.message}") from None
        for node in tree.find_all(
            (jinja_nodes.Include, jinja_nodes.Import, jinja_nodes.FromImport, jinja_nodes.Extends)
        ):
            raise UsageError(f"{name}, line {node.lineno}: a template cannot load other templates")
        self.columns = tuple(sorted(meta.find_undeclared_variables(tree)))
        """The columns it needs."""

    def render(self, values: dict[str, Any]) -> str | RowError:
        """The text for a row, or why there is none."""
        try:
            return self._environment.render(self._template, values)
        except UndefinedError as error:
            return RowError("template_error", _short(error))
        except Exception as error:  # an expression of the template may raise anything
            return RowError("template_error", f"{type(error).__name__}: {_short(error)}")


def _short(error: Exception) -> str:
    return str(error)[:_DETAIL_CHARS]
