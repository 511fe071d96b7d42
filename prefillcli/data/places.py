"""Where a path or URL leads: one form for what is to be written, and one place for all ways to name it."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from prefillcli.data.filesystems import filesystem_of, is_local
from prefillcli.data.paths import is_url
from prefillcli.errors import UsageError

_DRIVE = re.compile(r"[A-Za-z]:[\\/]")
_HALF_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]+:/(?!/)")


def written_path(path: str, option: str = "--output", *, follow: bool = True) -> str:
    """The path or URL of a file or folder that `option` names to be written, in the form in which it is used.

    A trailing slash stays. `~`, `file://`, doubled slashes and names like `.` are resolved, and with `follow` a local
    symbolic link is followed to its end, also where nothing is there yet. Raises UsageError for what names no file or
    folder of its own: nothing, the root of a filesystem or store, or a name that another system or a typing error has
    made.
    """
    if not path.strip() or "\0" in path:
        raise UsageError(f"{option} {path!r}: this names nothing; give a file or folder")
    local = path
    if is_url(path):
        filesystem, inner = filesystem_of(path)
        if not is_local(filesystem):
            if not inner.strip("/") or not (inner.startswith("/") or "/" in inner.rstrip("/")):
                raise _root(option, path)
            return path
        local = path.partition("://")[2]
        if not local.startswith("/"):
            raise UsageError(f"{option} {path}: file:// is followed by a whole path, as in file:///data/{local}")
    elif _DRIVE.match(path) or _HALF_URL.match(path):
        kind = "a Windows drive" if _DRIVE.match(path) else "a URL with one slash too few"
        raise UsageError(f"{option} {path}: this looks like {kind}\nwrite ./{path} for a local folder of that name")
    local = re.sub("^//+", "/", os.path.expanduser(local))
    if local.startswith("~") and ("/" in local or local == "~"):
        raise UsageError(f"{option} {path}: there is no such user\nwrite ./{path} for a folder of that name")
    bare, folder = local.rstrip("/"), local.endswith("/")
    if os.path.basename(bare) in ("", ".", ".."):
        bare, folder = os.path.realpath(bare or "/"), True
    elif follow and os.path.islink(bare):
        bare = os.path.realpath(bare)
    if bare == "/":
        raise _root(option, path)
    return bare + "/" if folder else bare


def _root(option: str, path: str) -> UsageError:
    return UsageError(f"{option} {path}: this is the root of a filesystem or store; name a file or folder in it")


@dataclass(frozen=True, slots=True)
class Place:
    """What a path or URL leads to, whatever it is called."""

    system: str
    """Which filesystem it is on: `local`, or the class of a remote one."""
    path: str
    """On it; of a local one with all symbolic links followed, those that lead nowhere too."""
    inode: tuple[int, int] | None
    """Device and inode of what is there: hard links and names in another case share them. None if nothing is."""

    @classmethod
    def of(cls, path: str) -> Place:
        """Raises UsageError if no package for the protocol is installed."""
        filesystem, inner = filesystem_of(path)
        if not is_local(filesystem):
            return cls(type(filesystem).__name__, inner.rstrip("/"), None)
        real = os.path.realpath(inner)
        try:
            found = os.stat(real)
        except (OSError, ValueError):
            return cls("local", real, None)
        return cls("local", real, (found.st_dev, found.st_ino))

    def is_same(self, other: Place) -> bool:
        """Whether both are one file or folder, or would be: names that differ in case alone may be, where nothing is
        there that tells."""
        if self.system != other.system or self.path == other.path:
            return self.system == other.system
        if self.inode is None and other.inode is None:
            return self.system == "local" and self.path.casefold() == other.path.casefold()
        return self.inode == other.inode

    def below(self, other: Place) -> str | None:
        """The path of this place inside `other`; None if it is not inside."""
        root = other.path.rstrip("/") + "/"
        return self.path.removeprefix(root) if self.system == other.system and self.path.startswith(root) else None
