"""Optional packages: which extra of prefillcli brings which, and what to type where one is missing."""

from __future__ import annotations

from importlib import metadata
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
    "fp8": ("accelerate",),
    "bitsandbytes": ("bitsandbytes", "accelerate"),
    "compressed-tensors": ("compressed_tensors", "accelerate"),
    "torchao": ("torchao", "accelerate"),
    "peft": ("peft",),
}
"""The extras of `pyproject.toml`, and the packages that they bring, by the names that Python imports them by."""

OPTIONAL = {
    "accelerate": "GGUF and quantised models",
    "gguf": "models in GGUF format",
    "bitsandbytes": "its weights",
    "compressed_tensors": "its weights",
    "torchao": "its weights",
    "gptqmodel": "GPTQ and AWQ weights",
    "peft": "adapters",
    "triton": "kernels on GPUs",
    "kernels": "recurrent layers on GPUs",
    "ray": "--runner ray",
    "vllm": "--engine vllm",
    "sklearn": "prefill calibrate",
    "s3fs": "s3://",
    "gcsfs": "gs://",
    "adlfs": "abfs://",
}
"""Packages that are used where they are installed, by the names that Python imports them by, and what for."""


def installed(package: str) -> str | None:
    """The version of a package, None where it is not installed. Imports nothing."""
    if find_spec(package) is None:
        return None
    try:
        return metadata.version("scikit-learn" if package == "sklearn" else package)
    except metadata.PackageNotFoundError:
        return "unknown"


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
