"""What was made of GGUF files, kept for the next start: folders in `$XDG_CACHE_HOME/prefillcli/gguf`.

A folder is made beside its place, written to the disk and renamed, under a lock: it is there as a whole or not at all.
It carries digests of its files, so that one that was damaged is made again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from prefillcli.data.proof.fingerprints import ModelContents
from prefillcli.errors import PrefillError
from prefillcli.runtime import log
from prefillcli.runtime.user_cache import cache_folder

_PROOF = "prefillcli.digest"
_SPARE = 64 << 20  # bytes of the disk that stay free

_kept: list[tempfile.TemporaryDirectory[str]] = []  # until this process ends


def find_cached(name: str) -> Path | None:
    """The folder of this name, if it is whole."""
    folder = _place(name)
    try:
        proof = (folder / _PROOF).read_text()
        return folder if proof == _digest(folder) else None
    except (OSError, PrefillError, ValueError):
        return None


def make_cached(name: str, make: Callable[[Path], None], *, size: int) -> Path | None:
    """The folder of this name, filled by `make` with about `size` bytes if it is not there.

    None, with a warning, if the cache has no room for it or cannot be written. Raises what `make` raises otherwise.
    """
    place = _place(name)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with _locked(place):
            found = find_cached(name)
            if found is not None:
                return found
            _remove_left_over(place)
            free = shutil.disk_usage(place.parent).free
            if free < size + _SPARE:
                raise OSError(errno.ENOSPC, f"{size / 2**30:.1f} GiB wanted, {free / 2**30:.1f} GiB free")
            folder = Path(tempfile.mkdtemp(dir=place.parent, prefix=f"{name}.", suffix=".tmp"))
            try:
                make(folder)
                _seal(folder)
                if place.exists():  # damaged
                    shutil.rmtree(place)
                os.rename(folder, place)
                _sync(place.parent)
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
    except OSError as error:
        log.warning(f"{place.parent}: nothing is cached: {error.strerror or error}")
        return None
    return place


def make_once(make: Callable[[Path], None]) -> Path:
    """A folder filled by `make`, which goes when this process ends."""
    folder = tempfile.TemporaryDirectory(prefix="prefill-gguf-", ignore_cleanup_errors=True)
    make(Path(folder.name))
    _kept.append(folder)
    return Path(folder.name)


def _place(name: str) -> Path:
    return cache_folder() / "gguf" / name


def _digest(folder: Path) -> str:
    contents = ModelContents(folder)
    return f"{contents.model()} {contents.tokenizer()}\n"


def _seal(folder: Path) -> None:
    """Write all to the disk, and what proves it."""
    (folder / _PROOF).write_text(_digest(folder))
    for file in folder.iterdir():
        file.chmod(0o644)
        _sync(file)
    folder.chmod(0o755)
    _sync(folder)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def _locked(place: Path) -> Iterator[None]:
    """Of several processes that want the same folder, one makes it and the others wait."""
    with place.with_name(f"{place.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _remove_left_over(place: Path) -> None:
    """What processes that were killed have left. Called under the lock, so nobody is writing it."""
    for folder in place.parent.glob(f"{place.name}.*.tmp"):
        shutil.rmtree(folder, ignore_errors=True)
