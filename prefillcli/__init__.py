"""Offline, prefill-only LLM scoring, layer by layer over a forest of prompts.

From Python, `score` scores a table, a list or files, and `Scorer` keeps the model loaded between calls. What they
raise is a `PrefillError`. All of these are imported when they are first used, so `import prefillcli` takes no time.
"""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False  # importing it from typing would take longer than all of this
if TYPE_CHECKING:
    from prefillcli.errors import ContentChangedError, FailedRowsError, PrefillError, ResourceError, UsageError
    from prefillcli.library.session import Scorer, score
    from prefillcli.prompts.questions import Choice, Predicate, Score
    from prefillcli.runtime.version import __version__

__all__ = [
    "Choice",
    "ContentChangedError",
    "FailedRowsError",
    "Predicate",
    "PrefillError",
    "ResourceError",
    "Score",
    "Scorer",
    "UsageError",
    "__version__",
    "score",
]
_HOMES = {
    **dict.fromkeys(("Scorer", "score"), "library.session"),
    **dict.fromkeys(("Choice", "Predicate", "Score"), "prompts.questions"),
    "__version__": "runtime.version",
}


if not TYPE_CHECKING:  # else every name would be known

    def __getattr__(name):
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        home = import_module(f"prefillcli.{_HOMES.get(name, 'errors')}")
        value = globals()[name] = getattr(home, name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
