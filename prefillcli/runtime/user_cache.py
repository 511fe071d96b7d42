"""The user's cache, for data that can be made again: entries in JSON, and C++ compiled on this machine."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from prefillcli.errors import brief


def cache_folder() -> Path:
    """Return `$XDG_CACHE_HOME/prefillcli`, or `~/.cache/prefillcli`. It need not exist yet.

    For a user without a home it is a folder that cannot be made, so nothing is kept.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if os.path.isabs(base) else Path(os.path.expanduser("~/.cache"))
    if not root.is_absolute():  # `~` stays unexpanded, and would become a folder in the working directory
        root = Path(os.devnull)
    return root / "prefillcli"


# Entries that are remembered from run to run, in a JSON file of the user's cache.


class KeptEntries:
    """Entries by name, in `$XDG_CACHE_HOME/prefillcli/FILE`.

    The file is always replaced as a whole: if two processes write at once, the new entries of one may be lost.
    A file that is damaged, missing or cannot be written counts as empty.
    """

    def __init__(self, file: str) -> None:
        self._path = cache_folder() / file

    def read(self) -> dict[str, Any]:
        """Read all entries; none if the file has changed since it was written."""
        try:
            content = json.loads(self._path.read_bytes())
            entries: dict[str, Any] = content["entries"]
            return entries if isinstance(entries, dict) and content["check"] == _check(entries) else {}
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return {}

    def write(self, entries: dict[str, Any]) -> bool:
        """Replace all entries. Returns whether that succeeded; never raises for a folder that cannot be written."""
        text = json.dumps({"check": _check(entries), "entries": entries})
        with contextlib.suppress(OSError):
            _put(self._path, text.encode(), 0o600)
            return True
        return False


def _put(path: Path, data: bytes, mode: int) -> None:
    # Write a file of the cache, whole or not at all. Raises OSError.
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f"{path.stem}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(name, mode)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _check(entries: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()


# C++ of this project, compiled on the machine that it runs on and kept for the next start.


COMPILERS = ("c++", "g++")
SECONDS = 120.0  # for one run of a compiler
_FLAGS = ("-O3", "-fPIC", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-std=c++17")
_DIGEST = 32  # bytes
_BESIDE = "compiled"  # the folder beside the C++ files for libraries that an image brings


def load_compiled(package: str, name: str, flags: Sequence[str]) -> ctypes.CDLL | None:
    """Load the library compiled from the C++ file `name` in a package, or return None if that is impossible.

    One that `compile_beside` has made is loaded as it is. `CXX` names the compiler; without it the first existing one
    of `COMPILERS` is used, and with an empty `CXX` nothing is compiled. The library is kept in the user's cache by its
    source, its flags and the compiler's version. Its OpenMP symbols must be in the process already, so that it shares
    the threads of the package that loaded them.
    """
    try:
        source = resources.files(package).joinpath(name).read_bytes()
        beside = resources.files(package).joinpath(_BESIDE).joinpath(_file_name(name, source, flags))
        if beside.is_file():
            return ctypes.CDLL(str(beside))
        compiler = _compiler()
        if compiler is None:
            return None
        version = subprocess.run([*compiler, "--version"], capture_output=True, timeout=SECONDS, check=True).stdout  # noqa: S603
        file = _file_name(name, source, flags, compiler, version)
        library = _kept(file)
        if library is not None:
            return library
        with tempfile.TemporaryDirectory() as folder:
            made = _compile(compiler, source, flags, Path(folder))
            _keep(made, file)
            return ctypes.CDLL(str(made))
    except subprocess.CalledProcessError as error:
        said = os.fsdecode(error.stderr or b"").strip().splitlines()
        _faults[name] = said[0] if said else str(error)
    except (OSError, subprocess.SubprocessError) as error:
        _faults[name] = brief(error)
    return None


_faults: dict[str, str] = {}  # by the C++ file, what its compiler or loader said last


def why_not_compiled(name: str) -> str:
    """Return why `load_compiled` did not load this C++ file, and a cure after a line break."""
    named = os.environ.get("CXX")
    if named == "":
        return "CXX is empty, and then nothing is compiled\nunset it"
    if _compiler() is None:
        there_is = "there is no C++ compiler" if named is None else f"CXX names {named}, which is not there"
        return f"{there_is}\ninstall g++" + ("" if named is None else ", and unset CXX")
    if name in _faults:
        return f"the C++ compiler failed: {_faults[name]}\nname another one in CXX"
    return "torch comes without GNU's OpenMP\ninstall torch from PyPI or pytorch.org"


def compile_beside(package: str, name: str, flags: Sequence[str]) -> Path:
    """Compile a C++ file into a folder beside it, for `load_compiled` on machines without a compiler.

    Raises OSError or SubprocessError.
    """
    file = Path(str(resources.files(package).joinpath(name)))
    source = file.read_bytes()
    path = file.parent / _BESIDE / _file_name(name, source, flags)
    path.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        shutil.copyfile(_compile(_compiler() or list(COMPILERS[:1]), source, flags, Path(folder)), path)
    return path


def _file_name(name: str, source: bytes, flags: Sequence[str], *compiler: object) -> str:
    # Another source, other flags or another compiler give the library another name.
    digest = hashlib.sha256(repr((*compiler, list(flags), _FLAGS)).encode() + source).hexdigest()
    return f"{name}.{digest[:32]}.so"


def compiler_file() -> str | None:
    """Return the compiler that would be used, with its size and time; None without one. It is not started."""
    compiler = _compiler()
    path = None if compiler is None else shutil.which(compiler[0])
    if compiler is None or path is None:
        return None
    try:
        status = os.stat(path)
    except OSError:
        return None
    return f"{shlex.join([path, *compiler[1:]])} {status.st_size} {status.st_mtime_ns}"


def share_openmp(package: str) -> bool:
    """Make the OpenMP that a package has loaded visible to libraries loaded from now on. False if it is not GNU's.

    Other packages may have loaded another one: scikit-learn does.
    """
    try:
        maps = os.fsdecode(Path("/proc/self/maps").read_bytes())
    except OSError:
        return False
    found = sorted(set(re.findall(r"/\S*/libgomp[^/\s]*\.so[^/\s]*", maps)))
    own = [path for path in found if f"/{package}/" in path] or found
    if len(own) != 1:
        return False
    ctypes.CDLL(own[0], mode=ctypes.RTLD_GLOBAL)
    return True


def _compiler() -> list[str] | None:
    named = os.environ.get("CXX")
    if named is not None:
        words = shlex.split(named)
        return words if words and shutil.which(words[0]) else None
    found = next((path for each in COMPILERS if (path := shutil.which(each))), None)
    return None if found is None else [found]


def _compile(compiler: list[str], source: bytes, flags: Sequence[str], folder: Path) -> Path:
    # Two steps, because a linker with an OpenMP flag would load a second one.
    (folder / "source.cpp").write_bytes(source)
    steps = (
        [*compiler, *_FLAGS, *flags, "-c", "source.cpp", "-o", "made.o"],
        [*compiler, "-shared", "made.o", "-o", "made.so"],
    )
    for step in steps:
        subprocess.run(step, cwd=folder, capture_output=True, timeout=SECONDS, check=True)  # noqa: S603 - our own words
    return folder / "made.so"


def _place() -> Path:
    return cache_folder() / "compiled"


def _kept(name: str) -> ctypes.CDLL | None:
    # The library of this name, if the cache has it undamaged and nobody else can have put it there.
    path = _place() / name
    with contextlib.suppress(OSError):
        for each in (path.parent, path):
            status = each.stat()
            if status.st_uid != os.getuid() or status.st_mode & 0o022:
                return None
        data = path.read_bytes()
        if data[-_DIGEST:] == hashlib.sha256(data[:-_DIGEST]).digest():
            return ctypes.CDLL(str(path))
    return None


def _keep(made: Path, name: str) -> None:
    # Put a library into the cache, whole or not at all. A cache that cannot be written stays as it is.
    with contextlib.suppress(OSError):
        data = made.read_bytes()
        _put(_place() / name, data + hashlib.sha256(data).digest(), 0o700)  # loaders stop at the library's end
