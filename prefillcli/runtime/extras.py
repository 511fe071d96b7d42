"""Other projects' packages: the extras of prefillcli that bring them, and how torch and transformers are imported."""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

from prefillcli.errors import UsageError
from prefillcli.runtime.cores import choose_waiting

# The extras of `pyproject.toml`, and the packages that they bring, by the names that Python imports them by.
EXTRAS = {
    "s3": ("s3fs",),
    "gcs": ("gcsfs",),
    "azure": ("adlfs",),
    "ray": ("ray",),
    "vllm": ("vllm",),
    "bm25": ("bm25s",),
    "fp8": ("accelerate",),
    "bitsandbytes": ("bitsandbytes", "accelerate"),
    "compressed-tensors": ("compressed_tensors", "accelerate"),
    "torchao": ("torchao", "accelerate"),
    "peft": ("peft",),
    "lm-eval": ("lm_eval",),
    "images": ("PIL",),
}

# Packages that are used if they are installed, by the names that Python imports them by, and their purpose.
OPTIONAL = {
    "accelerate": "quantised models",
    "bitsandbytes": "its weights",
    "compressed_tensors": "its weights",
    "torchao": "its weights",
    "gptqmodel": "GPTQ and AWQ weights",
    "peft": "adapters",
    "lm_eval": "lm-evaluation-harness",
    "PIL": "images in rows",
    "triton": "kernels on GPUs",
    "kernels": "recurrent layers on GPUs",
    "ray": "--runner ray",
    "vllm": "--engine vllm",
    "bm25s": "prefill bench --method bm25",
    "s3fs": "s3://",
    "gcsfs": "gs://",
    "adlfs": "abfs://",
}


def installed(package: str) -> str | None:
    """Return the version of a package, None where it is not installed. Imports nothing."""
    if find_spec(package) is None:
        return None
    from importlib import metadata

    try:
        return metadata.version("pillow" if package == "PIL" else package)
    except metadata.PackageNotFoundError:
        return "unknown"


def require_extra(extra: str, wanted_by: str, *, advice: str = "") -> None:
    """Raise UsageError if a package of this extra is not installed. Imports none of them.

    The message begins with `wanted_by`, the option or feature that needs it, and names the line to type. `advice` is
    added to that line.
    """
    for package in EXTRAS[extra]:
        if find_spec(package) is None:
            raise UsageError(f"{wanted_by}: the package {package} is not installed\n{installing(extra)}{advice}")


def installing(extra: str) -> str:
    """Return the line to type for an extra: with the wheel or the folder that this program was installed from, if it
    is still there."""
    from importlib import metadata  # this and the next take a while to import
    from urllib.request import url2pathname

    source, edits = "prefillcli", False
    with suppress(metadata.PackageNotFoundError, ValueError, AttributeError):
        origin = json.loads(metadata.distribution("prefillcli").read_text("direct_url.json") or "{}")
        path = url2pathname(urlsplit(origin.get("url", "")).path)
        if origin.get("url", "").startswith("file:") and os.path.exists(path):
            source, edits = path, bool(origin.get("dir_info", {}).get("editable"))
    return f"pip install {'-e ' if edits else ''}'{source}[{extra}]'"


# Actions of other libraries during their import that are useless to the user of a command.
#
# They log, they look for code to fetch, and they import one another. A run loads nothing from a hub but the given
# model and adapters.


#: torchao logs which of its kernels this machine cannot load, torch which of torchao's types it knows already, and
#: bitsandbytes that it has fetched no kernels.
_TALKATIVE = ("torchao", "torch.utils._pytree", "bitsandbytes.backends.cpu.ops")

# The package by which transformers, bitsandbytes and others fetch compiled code from a hub and load it.
FETCHES = "kernels"
# transformers' own environment variable that allows this: here only if the user has set it.
ALLOWED = "USE_HUB_KERNELS"
#: transformers imports these wherever they are installed: for metrics, losses on images and quantised weights, and by
#: way of accelerate for Amazon's training service. That takes longer than the rest of transformers.
_UNUSED = ("sklearn", "scipy", "torchao", "boto3")
_own = False  # whether this process belongs to this program
_ABSENT: Any = object()
_found: Any = _ABSENT  # the module that was imported under that name before the first thread came inside
_inside = 0
_lock = threading.Lock()


def quiet_imports() -> None:
    """Let these libraries log only errors from now on, and fetch no code.

    Call it before they are imported, in processes that are this program's own.
    """
    global _own
    _own = True
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(logging.ERROR)
    if not _allowed():
        sys.modules.setdefault(FETCHES, None)  # type: ignore[arg-type]  # an import of it fails


@contextmanager
def light_imports() -> Iterator[None]:
    """Import torch and transformers, inside the block, without packages that no causal language model needs; for the
    main thread.

    Nothing changes in a process that is not this program's own: there, others may need these parts of transformers.
    """
    if not _own or "transformers" in sys.modules:
        yield
        return
    choose_waiting()
    hidden = [name for name in _UNUSED if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    gc.disable()  # the import makes a million objects, and nearly all of them stay
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        for name in hidden:
            del sys.modules[name]
        if found := sys.modules.get("transformers.utils.import_utils"):
            found.is_torchao_available.cache_clear()  # for a model whose weights are torchao's


def _allowed() -> bool:
    return os.environ.get(ALLOWED, "").upper() in ("1", "ON", "YES", "TRUE")


@contextmanager
def without_fetched_code() -> Iterator[None]:
    """Hide that package inside the block; afterwards all is as before. For a library.

    Any number of threads may be inside.
    """
    global _inside, _found
    if _allowed():
        yield
        return
    with _lock:
        if not _inside:
            _found = sys.modules.get(FETCHES, _ABSENT)
            sys.modules[FETCHES] = None  # type: ignore[assignment]
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside and _found is _ABSENT:
                del sys.modules[FETCHES]
            elif not _inside:
                sys.modules[FETCHES] = _found
