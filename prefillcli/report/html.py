"""Pages from templates."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined


def render_page(
    package: str, template: str, filters: dict[str, Callable[[Any], str]] | None = None, **values: Any
) -> str:
    """The page that a template in the folder of a package makes of `values`; texts among them are escaped.

    Templates need nothing else: no network, no script, inline CSS for light and dark screens. They may import macros
    from templates of the same folder.
    """
    environment = _environment(package)
    environment.filters.update(filters or {})
    return environment.get_template(template).render(**values)


@cache
def _environment(package: str) -> Environment:
    """Templates in the folder of a package; compiling one takes longer than most pages."""
    folder = files(package)
    return Environment(
        loader=FunctionLoader(lambda name: folder.joinpath(name).read_text(encoding="utf-8")),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def page_of(path: str) -> str:
    """Where the page of a JSON file goes: `run.json` -> `run.html`, beside it."""
    return path.removesuffix(".json") + ".html"


def shown_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings that say something: those that are given."""
    return {name: value for name, value in settings.items() if value not in (None, [], False)}
