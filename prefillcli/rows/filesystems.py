"""Paths and URLs, their filesystems, and the failures of these."""

from __future__ import annotations

import codecs
import errno
import io
import os
import random
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from queue import Empty, SimpleQueue
from time import monotonic, sleep
from typing import IO, Any, NoReturn, TypeVar

from prefillcli.errors import PrefillError, ResourceError, UsageError, brief, run_again, without_secrets
from prefillcli.runtime import file_calls, log
from prefillcli.runtime.extras import require_extra

WORK_ENDING = ".prefill"  # ending of the work folder beside an output; never read as input

_SCHEME = re.compile(r"^[A-Za-z][A-Za-z0-9+.\-]+(?=://|::)")


def is_url(path: str) -> bool:
    """Return whether `path` names its filesystem (`s3://bucket/x`), as opposed to a plain local path."""
    return _SCHEME.match(path) is not None


def split_path(path: str) -> tuple[str, str]:
    """Split a local path or URL of a file into its folder and its name; the folder of a bare name is `.`."""
    folder, slash, name = path.rpartition("/")
    if folder.endswith(("/", ":")):  # the root of a URL, like memory://
        return f"{folder}/", name
    return folder or slash or ".", name


PATIENCE = 60.0  # seconds from the first try during which a failed request may be sent again
_FIRST_WAIT, _LONGEST_WAIT = 0.5, 10.0

_PASSING_STATUS = {408, 425, 429, 500, 502, 503, 504, 509}
_PASSING_CODES = {"SlowDown", "RequestTimeout", "InternalError", "ServiceUnavailable", "ConditionalRequestConflict"}
# Exceptions of botocore, aiohttp, httpx, requests, azure and Google: their common base classes show less than their
# names.
_PASSING_KINDS = {
    "HTTPClientError",
    "ResponseParserError",
    "ClientConnectionError",
    "ClientPayloadError",
    "TransportError",
    "ChunkedEncodingError",
    "IncompleteRead",
    "ServiceRequestError",
    "ServiceResponseError",
    "ChecksumError",
}
_REFUSED_STATUS = {401, 403}
_REFUSED_CODES = {"ExpiredToken", "InvalidToken", "TokenRefreshRequired", "InvalidAccessKeyId", "AuthenticationFailed"}
_REFUSED_KINDS = {
    "NoCredentialsError",
    "PartialCredentialsError",
    "CredentialRetrievalError",
    "TokenRetrievalError",
    "UnauthorizedSSOTokenError",
    "ClientAuthenticationError",
    "GoogleAuthError",
    "LocalTokenNotFoundError",
}

T = TypeVar("T")

_patience: ContextVar[float] = ContextVar("patience", default=PATIENCE)
_outage = threading.Event()


class Failure(Enum):
    """Kinds of failures, by their remedy."""

    PASSING = "passing"  # the store is busy or out of reach: the same request may succeed later
    REFUSED = "refused"  # credentials are missing, wrong or expired, or do not allow the request
    MISSING = "missing"  # there is no such object or bucket
    EXISTS = "exists"  # a conditional write met an existing object
    OTHER = "other"

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Return the kind of an exception from fsspec or the client of a store."""
        for each in _causes(error):
            status, code = _answer(each)
            kinds = {kind.__name__ for kind in type(each).__mro__}
            if code in _REFUSED_CODES or status in _REFUSED_STATUS or kinds & _REFUSED_KINDS:
                return cls.REFUSED
            if code in _PASSING_CODES or status in _PASSING_STATUS or kinds & _PASSING_KINDS:
                return cls.PASSING
            if isinstance(each, FileExistsError) or status == 412:
                return cls.EXISTS
            if isinstance(each, FileNotFoundError) or status == 404:
                return cls.MISSING
            if isinstance(each, PermissionError):
                return cls.REFUSED
            if isinstance(each, TimeoutError | ConnectionError):
                return cls.PASSING
        return cls.OTHER


def patiently(request: Callable[[], T]) -> T:
    """Send a request, again as long as its failures are temporary, and return its result.

    No try begins later than `PATIENCE` seconds after the first one, so clients that retry by themselves add their
    waiting only once. After waiting for a store in vain, each request is sent only once until one succeeds: the steps
    after an outage, such as the report of a failed run, do not wait for it again. Raises the error of the last try.
    """
    patience = 0.0 if _outage.is_set() else _patience.get()
    began, wait = monotonic(), _FIRST_WAIT
    while True:
        pause = wait * random.uniform(0.5, 1)  # random, so that many runs do not retry at once
        try:
            result = request()
        except Exception as error:
            if Failure.of(error) is not Failure.PASSING:
                raise
            if monotonic() + pause - began > patience:
                if patience:
                    _outage.set()
                raise
            log.warning(f"{brief(error)}; tried again in {pause:.1f} seconds")
        else:
            _outage.clear()
            return result
        sleep(pause)
        wait = min(2 * wait, _LONGEST_WAIT)


@contextmanager
def impatiently() -> Iterator[None]:
    """Send each request of this thread once, inside the block: for requests whose failure does no harm."""
    before = _patience.set(0.0)
    try:
        yield
    finally:
        _patience.reset(before)


def explained(error: BaseException) -> str:
    """Return the cause of a failed request and a remedy, in one or two lines, without the path."""
    reason = brief(error)
    advice = _ADVICE.get(Failure.of(error))
    return reason if advice is None else f"{reason}\n{advice.format(again=run_again())}"


_ADVICE = {
    Failure.PASSING: "the object store is busy or cannot be reached: {again} when it answers",
    Failure.REFUSED: "the credentials have expired or do not allow this: renew them, then {again}",
    Failure.MISSING: "there is no such bucket or object: correct the URL, or create the bucket",
}


def _causes(error: BaseException) -> Iterator[BaseException]:
    # The original error comes first: clients translate it into errors that show less.
    chain = [error]
    while len(chain) < 10 and (inner := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(inner)
    return reversed(chain)


def _answer(error: BaseException) -> tuple[int | None, str | None]:
    # The HTTP status and the code of the store that an error of a client carries.
    response = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore
        said, code = (
            [response.get("ResponseMetadata", {}).get("HTTPStatusCode")],
            response.get("Error", {}).get("Code"),
        )
    else:
        names = ("status", "status_code", "code")
        said = [getattr(holder, name, None) for holder in (error, response) for name in names]
        code = getattr(error, "error_code", None)
    return next((each for each in said if isinstance(each, int)), None), None if code is None else str(code)


_FULL = (errno.ENOSPC, errno.EDQUOT)
_NO_HANDLES = (errno.EMFILE, errno.ENFILE)


# The extra of prefillcli that brings the packages that an object store needs beside fsspec, by protocol.
EXTRA_OF = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "abfs": "azure", "abfss": "azure", "az": "azure"}


def is_local(filesystem: Any) -> bool:
    protocol = filesystem.protocol
    return "file" in ((protocol,) if isinstance(protocol, str) else protocol)


def filesystem_of(path: str) -> tuple[Any, str]:
    """Return the fsspec filesystem of a path or URL, and the path inside it.

    Raises UsageError if no package for its protocol is installed. Protocols other than those of the object stores are
    then tried through pyarrow (hdfs).
    """
    import fsspec  # here, for options are checked by this module, and most commands end there

    if not is_url(path):
        return fsspec.filesystem("file"), _absolute(os.path.expanduser(path))
    try:
        filesystem, inner = fsspec.core.url_to_fs(path)
    except (ImportError, ValueError) as error:
        extra = EXTRA_OF.get(path.partition("://")[0].rpartition("::")[2])
        if isinstance(error, ImportError) and extra is not None:
            require_extra(extra, f"cannot open {path}")
            raise UsageError(f"cannot open {path}: {error}") from None
        from pyarrow import fs  # here, or a missing recipe would be noticed late

        try:
            arrow, inner = fs.FileSystem.from_uri(path)
        except Exception:  # Arrow does not know it either; fsspec's message is more precise
            raise UsageError(f"cannot open {path}: {error}") from None
        from fsspec.implementations.arrow import ArrowFSWrapper

        return ArrowFSWrapper(arrow), inner
    except Exception as error:  # clients of object stores raise anything
        raise UsageError(f"cannot open {path}: {error}") from None
    return filesystem, inner


def _absolute(path: str) -> str:
    # An absolute path; `..` after a symbolic link is resolved as the system does it, not along the name.
    whole = re.sub("^//+", "/", os.path.abspath(path))
    if ".." in path.split("/") and os.path.realpath(path) != os.path.realpath(whole):
        return os.path.realpath(path)
    return whole


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Turn errors while reading `path` into one that names it.

    Raises UsageError where reading a local file is not allowed, ResourceError where too many files are open, else
    PrefillError.
    """
    try:
        yield
    except PrefillError:
        raise
    except PermissionError as error:
        if is_url(path):
            raise PrefillError(f"cannot read {path}: {explained(error)}") from error
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error
    except Exception as error:  # Arrow, zlib and the clients of object stores raise anything
        if isinstance(error, OSError) and error.errno in _NO_HANDLES:
            raise _no_handles(path) from error
        if is_url(path) and Failure.of(error) in (Failure.PASSING, Failure.REFUSED):
            raise PrefillError(f"cannot read {path}: {explained(error)}") from error
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise PrefillError(
            f"cannot read {path}: {reason}\nthe file may be damaged or incomplete: check it, then {run_again()}"
        ) from error


@contextmanager
def writing(path: str) -> Iterator[None]:
    """Turn errors of a disk or an object store into one that names `path`."""
    try:
        yield
    except PrefillError:
        raise
    except OSError as error:
        if error.errno in _FULL:
            raise ResourceError(f"no space left on the device for {path}\nmake room, then {run_again()}") from error
        if error.errno in _NO_HANDLES:
            raise _no_handles(path) from error
        raise PrefillError(f"cannot use {path}: {error.strerror or error}") from error


def _no_handles(path: str) -> ResourceError:
    return ResourceError(f"cannot open {path}: too many open files\nallow more with `ulimit -n`, then {run_again()}")


def require_reachable(path: str) -> os.stat_result:
    """Return what the file system says of an entry of a local folder.

    Raises UsageError, which names it, for a broken link and whatever else cannot be looked at: left out of a listing,
    its rows would be missing without a word.
    """
    try:
        return os.stat(path)
    except OSError as error:
        reason = error.strerror or str(error)
        if os.path.islink(path):
            raise UsageError(
                f"{path}: a link to {os.readlink(path)}, which cannot be reached: {reason}\n"
                "mount or restore what it leads to, or remove the link"
            ) from None
        raise UsageError(f"cannot read {path}: {reason}") from None


def unreadable_folder(error: OSError) -> NoReturn:
    """Raise UsageError for a folder that cannot be listed: the `onerror` of `os.walk`."""
    raise UsageError(f"cannot read {error.filename}: {error.strerror or error}") from None


_POINTER = b"version https://git-lfs.github.com/spec/"


def refuse_pointer(file: Path) -> None:
    """Raise UsageError for the text that Git LFS leaves instead of a large file."""
    with suppress(OSError), file.open("rb") as stream:
        if stream.read(len(_POINTER)) == _POINTER:
            raise UsageError(f"{file}: a Git LFS pointer instead of the file\nfetch it with: git lfs pull")


_DRIVE = re.compile(r"[A-Za-z]:[\\/]")
_HALF_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]+:/(?!/)")


def written_path(path: str, option: str = "--output", *, follow: bool = True) -> str:
    """Return the path or URL of a file or folder to write, which `option` names, in the form in which it is used.

    A trailing slash stays. `~`, `file://`, doubled slashes and names like `.` are resolved, and with `follow` a local
    symbolic link is followed to its end, even if nothing is there yet. Raises UsageError for a text that names no
    separate file or folder: an empty one, the root of a filesystem or store, or a name that comes from another system
    or a typing error.
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
    """The file or folder that a path or URL leads to, under whatever name."""

    system: str  # its filesystem: `local`, or the class of a remote one
    path: str  # on it; on a local one with all symbolic links followed, even those that lead nowhere
    # Device and inode of the file or folder: hard links and names in another case share them. None if it does not
    # exist.
    inode: tuple[int, int] | None

    @classmethod
    def of(cls, path: str) -> Place:
        """Return the place of a path or URL. Raises UsageError if no package for the protocol is installed."""
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
        """Return whether both are one file or folder, or would be. Names that differ in case alone count as one if
        neither exists."""
        if self.system != other.system or self.path == other.path:
            return self.system == other.system
        if self.inode is None and other.inode is None:
            return self.system == "local" and self.path.casefold() == other.path.casefold()
        return self.inode == other.inode

    def below(self, other: Place) -> str | None:
        """Return the path of this place inside `other`; None if it is not inside."""
        root = other.path.rstrip("/") + "/"
        return self.path.removeprefix(root) if self.system == other.system and self.path.startswith(root) else None


MOST_BYTES = 32 << 20


class MissingFileError(UsageError):
    """There is no such file."""


def read_given(option: str, path: str, again: str = "", *, most: int = MOST_BYTES) -> bytes:
    """Read the bytes, at most `most`, at a local path or URL that an option names.

    A pipe may stand for a file, as in `--recipe <(...)`. Raises MissingFileError if there is no file, and UsageError
    for a folder or a device, for more bytes, and if it cannot be read; `again` explains how such a file is made.
    """
    shown = without_secrets(path)
    try:
        with reading(path):
            found = read_start(path, most + 1)
    except UsageError:
        raise
    except Exception as error:
        cause = error.__cause__
        reason = str(error)
        if isinstance(cause, FileNotFoundError):
            raise MissingFileError(f"{option} {shown}: no such file\n{again}".rstrip()) from None
        if isinstance(cause, OSError) and cause.strerror:
            reason = f"cannot be read: {cause.strerror}"
        raise UsageError(f"{option} {shown}: {reason}") from None
    if len(found) > most:
        raise UsageError(f"{option} {shown}: it holds more than {most >> 20} MiB\n{again}".rstrip())
    return found


def utf8_text(option: str, path: str, data: bytes) -> str:
    """Return the text of a file that an option names, without its byte order mark. Raises UsageError, which explains
    how to convert it, where it is not UTF-8."""
    if b"\0" not in data:
        try:
            return data.decode("utf-8-sig")
        except UnicodeDecodeError:
            pass
    likely = "WINDOWS-1252"
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        likely = "UTF-16"
    elif b"\0" in data:
        likely = "UTF-16BE" if data.startswith(b"\0") else "UTF-16LE"
    shown = without_secrets(path)
    raise UsageError(
        f"{option} {shown}: not UTF-8\nsave it as UTF-8, or convert it, for example: "
        f"iconv -f {likely} -t UTF-8 {shown} > new{Path(shown).suffix}"
    )


def read_start(path: str, most: int) -> bytes:
    """Read the first `most` bytes of a file or pipe at a local path or URL.

    Raises OSError, also where a host does not answer within `ANSWER_SECONDS`, and errors of the clients of stores.
    """
    filesystem, inner = filesystem_of(path)
    file: IO[bytes]
    local = is_local(filesystem)
    if local:
        file = file_calls.open_to_read(inner, pipes=True)
    else:
        file = answered(lambda: patiently(lambda: filesystem.open(inner, "rb")))
    with file:
        found = io.BytesIO()

        def block() -> bytes:
            return file.read(min(1 << 20, most - found.tell()))

        while found.tell() < most and (read := block() if local else answered(block)):
            found.write(read)
        return found.getvalue()


ANSWER_SECONDS = 20.0  # that a host may take to open a small file, or to send a block of it


def answered(request: Callable[[], T]) -> T:
    """Return the result of a request at the start of a command. Clients wait for minutes for a host that is silent.

    Raises TimeoutError where it takes longer than `ANSWER_SECONDS`, and what the request raises. A request that is
    given up goes on in its thread, which ends with the process.
    """
    results: SimpleQueue[T | BaseException] = SimpleQueue()

    def answer() -> None:
        _patience.set(ANSWER_SECONDS / 2)  # so that a host that refuses is reported as such
        try:
            results.put(request())
        except BaseException as error:
            results.put(error)

    threading.Thread(target=copy_context().run, args=(answer,), daemon=True).start()
    try:
        result = results.get(timeout=ANSWER_SECONDS)
    except Empty:
        raise TimeoutError(f"no answer within {ANSWER_SECONDS:.0f} seconds") from None
    if isinstance(result, BaseException):
        raise result
    return result
