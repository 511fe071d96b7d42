"""Optional packages: which extra of prefillcli brings which, and what to type where one is missing."""

from __future__ import annotations

from importlib.util import find_spec

from prefillcli.errors import UsageError

EXTRAS = {
    "s3": ("s3fs",),
    "gcs": ("gcsfs",),
    "azure": ("adlfs",),
    "ray": ("ray",),
    "vllm": ("vllm",),
    "gguf": ("gguf", "accelerate"),
    "eval": ("sklearn",),
}
"""The extras of `pyproject.toml`, and the packages that they bring, by the names that Python imports them by."""


def require_extra(extra: str, wanted_by: str, *, advice: str = "") -> None:
    """Raise UsageError if a package of this extra is not installed. Imports none of them.

    The message begins with `wanted_by`, which says what needs it, and names the line to type. `advice` is added to
    that line.
    """
    for package in EXTRAS[extra]:
        if find_spec(package) is None:
            raise UsageError(
                f"{wanted_by}: the package {package} is not installed\npip install 'prefillcli[{extra}]'{advice}"
            )
