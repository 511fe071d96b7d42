"""Other projects' packages: the extras of prefillcli that bring them, and how torch and transformers are imported."""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, partial, wraps
from importlib import import_module, metadata
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from prefillcli.errors import UsageError
from prefillcli.runtime.cores import choose_waiting
from prefillcli.runtime.user_cache import KeptEntries

# The extras of `pyproject.toml`, and the packages that they bring, by the names that Python imports them by.
EXTRAS = {
    "s3": ("s3fs",),
    "gcs": ("gcsfs",),
    "azure": ("adlfs",),
    "ray": ("ray",),
    "vllm": ("vllm",),
    "gguf": ("gguf", "accelerate"),
    "bm25": ("bm25s",),
    "fp8": ("accelerate",),
    "bitsandbytes": ("bitsandbytes", "accelerate"),
    "compressed-tensors": ("compressed_tensors", "accelerate"),
    "torchao": ("torchao", "accelerate"),
    "peft": ("peft",),
    "lm-eval": ("lm_eval",),
}

# Packages that are used if they are installed, by the names that Python imports them by, and their purpose.
OPTIONAL = {
    "accelerate": "GGUF and quantised models",
    "gguf": "models in GGUF format",
    "bitsandbytes": "its weights",
    "compressed_tensors": "its weights",
    "torchao": "its weights",
    "gptqmodel": "GPTQ and AWQ weights",
    "peft": "adapters",
    "lm_eval": "lm-evaluation-harness",
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
    """The version of a package, None where it is not installed. Imports nothing."""
    if find_spec(package) is None:
        return None
    try:
        return metadata.version(package)
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
    """The line to type for an extra: with the wheel or the folder that this program was installed from, if it is
    still there."""
    source, edits = "prefillcli", False
    with suppress(metadata.PackageNotFoundError, ValueError, AttributeError):
        origin = json.loads(metadata.distribution("prefillcli").read_text("direct_url.json") or "{}")
        path = url2pathname(urlsplit(origin.get("url", "")).path)
        if origin.get("url", "").startswith("file:") and os.path.exists(path):
            source, edits = path, bool(origin.get("dir_info", {}).get("editable"))
    return f"pip install {'-e ' if edits else ''}'{source}[{extra}]'"


# Actions of other libraries during their import that are of no use to the user of a command.
#
# They log, they look for code to fetch, and they import one another. A run loads nothing from a hub but the given
# model and adapters.


#: torchao logs which of its kernels this machine cannot load, torch which of torchao's types it knows already, and
#: bitsandbytes that it has fetched no kernels.
_TALKATIVE = ("torchao", "torch.utils._pytree", "bitsandbytes.backends.cpu.ops")

# The package by which transformers, bitsandbytes and others fetch compiled code from a hub and load it.
FETCHES = "kernels"
# transformers' own environment variable that allows this: here only if somebody has set it.
ALLOWED = "USE_HUB_KERNELS"
#: transformers imports these wherever they are installed: for metrics, losses on images and quantised weights, and by
#: way of accelerate for Amazon's training service. That takes longer than the rest of transformers.
_UNUSED = ("sklearn", "scipy", "torchao", "boto3")
_COMPILER = "torch._dynamo"  # torch's own
_own = False  # whether this process belongs to this program
_ABSENT: Any = object()
_found: Any = _ABSENT  # the module that was imported under that name before the first thread came inside
_inside = 0
_lock = threading.Lock()


def quiet_imports() -> None:
    """From now on these libraries log only errors, and none of them fetches code.

    To be called before they are imported, in processes that are this program's own.
    """
    global _own
    _own = True
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(logging.ERROR)
    if not _allowed():
        sys.modules.setdefault(FETCHES, None)  # type: ignore[arg-type]  # who imports it is told that it is not there


@contextmanager
def light_imports(*, compiler: bool = False) -> Iterator[None]:
    """Inside the block, torch and transformers are imported without parts that no causal language model needs; for the
    main thread.

    These are packages, and unless the engine of the process needs a `compiler` of its own, torch's compiler, which
    comes when it is asked for, and tensors that are spread over processes.

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
        leave_out_pandas()
        with ExitStack() as stack:
            if not compiler:
                stack.enter_context(_compiler_later())
                stack.enter_context(_transformers_of_one_process())
            yield
    finally:
        gc.freeze()
        gc.enable()
        for name in hidden:
            del sys.modules[name]
        if found := sys.modules.get("transformers.utils.import_utils"):
            found.is_torchao_available.cache_clear()  # for a model whose weights are torchao's


class _NoPandas:
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == "pandas":
            raise ModuleNotFoundError(name=name)


@cache
def leave_out_pandas() -> None:
    """From now on pyarrow imports pandas for a data frame only, in a process that is this program's own.

    It would import it to ask whether a Python value is one of pandas'. Where it has not found it, it asks no more.
    """
    if not _own:
        return
    import pyarrow

    finder: Any = _NoPandas()
    sys.meta_path.insert(0, finder)
    try:
        pyarrow.scalar(0)
    finally:
        sys.meta_path.remove(finder)


class _LaterCompiler(ModuleType):
    # Stands for torch's compiler while others put marks on their functions for it: these are made without it, and all
    # else imports it.

    def disable(self, function: Any = None, recursive: bool = True, **how: Any) -> Any:
        return (lambda marked: marked) if function is None else function

    def assume_constant_result(self, function: Any) -> Any:
        function._dynamo_marked_constant = True  # as torch does
        return function

    def allow_in_graph(self, function: Any) -> Any:
        return function

    disallow_in_graph = allow_in_graph

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        _forget(self)
        return getattr(import_module(self.__name__), name)


def _forget(module: ModuleType) -> None:
    # The next import of this module is that of the real one.
    if sys.modules.get(module.__name__) is module:
        del sys.modules[module.__name__]
        parent, _, name = module.__name__.rpartition(".")
        delattr(sys.modules[parent], name)


@contextmanager
def _compiler_later() -> Iterator[None]:
    # transformers marks some functions for torch's compiler, whose import takes as long as that of torch. Without the
    # marks these functions would be compiled with --compile: none of them is in a layer.
    with _changed("torch._compile", _not_before_the_compiler):
        import torch
    spec = find_spec(_COMPILER)
    if _COMPILER in sys.modules or spec is None:
        yield
        return
    later = _LaterCompiler(_COMPILER)
    later.__spec__, later.__path__ = spec, spec.submodule_search_locations or []
    sys.modules[_COMPILER] = torch._dynamo = later
    try:
        yield
    finally:
        _forget(later)


def _not_before_the_compiler(module: Any) -> None:
    # Functions that torch's compiler must not trace import it when they are called: here, only once it is there.
    disable = module._disable_dynamo

    def later(function: Any = None, recursive: bool = True) -> Any:
        if function is None:
            return partial(later, recursive=recursive)
        disabled = disable(function, recursive)

        @wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            return (disabled if _COMPILER in sys.modules else function)(*args, **kwargs)

        return called

    module._disable_dynamo = later


class _Distributions(dict[str, list[str]]):
    # The distributions by the package that they bring. Nearly all are called as their package is, and a list of all
    # of them takes reading the files of each.

    def get(self, name: str, default: Any = None) -> Any:
        try:
            return [metadata.distribution(name.replace("_", "-")).metadata["Name"]]
        except metadata.PackageNotFoundError:
            return _all_distributions().get(name, default)


_all_distributions = cache(metadata.packages_distributions)


def _knows_one_process(module: Any) -> None:
    # transformers' list of what there is: no tensors that are spread over processes. And it reads the names in the
    # files of its families once.
    module.is_torch_distributed_available = lambda: False
    if not hasattr(module, "create_import_structure_from_path"):  # in another release
        return
    read = cache(module.create_import_structure_from_path)
    families = os.path.join(os.path.dirname(os.path.dirname(module.__file__)), "models")
    module.create_import_structure_from_path = partial(_structure, read, families)


class _Changes:
    # Finds a module, and changes it once it is imported.

    def __init__(self, name: str, change: Callable[[Any], None]) -> None:
        self._name, self._change = name, change

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name == self._name else None
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def executed(module: Any) -> None:
                execute(module)
                self._change(module)

            spec.loader.exec_module = executed  # type: ignore[method-assign]
        return spec


@contextmanager
def _changed(name: str, change: Callable[[Any], None]) -> Iterator[None]:
    finder: Any = _Changes(name, change)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


@contextmanager
def _transformers_of_one_process() -> Iterator[None]:
    every = metadata.packages_distributions
    metadata.packages_distributions = lambda: _Distributions()
    try:
        with _changed("transformers.utils.import_utils", _knows_one_process):
            yield
    finally:
        metadata.packages_distributions = every


def _structure(read: Callable[[str], dict[Any, Any]], families: str, path: Any) -> dict[Any, Any]:
    # The public names of transformers' families, by file. Reading two thousand files for them takes as long as all
    # the rest of its import, so they are kept in the user's cache: those of one release at one place.
    folder = os.path.dirname(path) if os.path.isfile(path) else str(path)
    if folder != families:  # one family, read for all of them
        return read(folder)
    version = metadata.version("transformers")
    key = f"{version} {folder} {os.stat(folder).st_mtime_ns}"
    kept = KeptEntries("transformers.json")
    found = kept.read().get(key)
    if found is None:
        names = read(folder)
        if "dev" not in version:  # whose files change
            kept.write({key: _pairs(names)})
        return names
    return _mapping(found)


def _pairs(names: Mapping[Any, Any]) -> list[Any]:
    return [
        [
            sorted(key) if isinstance(key, frozenset) else key,
            _pairs(inner) if isinstance(inner, dict) else sorted(inner),
        ]
        for key, inner in names.items()
    ]


def _mapping(pairs: list[Any]) -> dict[Any, Any]:
    # What `_pairs` were made of: within them, names are texts and all else is a pair.
    return {
        frozenset(key) if isinstance(key, list) else key: _mapping(inner)
        if not inner or isinstance(inner[0], list)
        else set(inner)
        for key, inner in pairs
    }


def _allowed() -> bool:
    return os.environ.get(ALLOWED, "").upper() in ("1", "ON", "YES", "TRUE")


@contextmanager
def without_fetched_code() -> Iterator[None]:
    """For a library: inside the block that package seems to be missing; afterwards all is as before.

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
