"""Errors that a user can act on, each with the exit code of the command, and the form in which messages show paths and
URLs."""

from __future__ import annotations

import difflib
import errno
import re
import signal
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from pydantic import BaseModel

_EXHAUSTED = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EAGAIN)

# Exit code of a complete run with more error rows than `--max-error-rate` allows, or that a gate has stopped.
NOT_AS_EXPECTED = 3
NOTHING_TO_DO = 99  # exit code of `--skip-empty` on an input without rows


_MEMORY_WORDS = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "could not create a memory",
    "bad_alloc",
    "ALLOC_FAILED",
)


# Whether the job of this process can be resumed, so that advice about `--resume` is only given where it can be taken.

_resumable = False


@contextmanager
def resumable(possible: bool) -> Iterator[None]:
    """Give advice for a job that can be resumed, or that cannot, inside the block. Outside nothing can be resumed."""
    global _resumable
    before, _resumable = _resumable, possible
    try:
        yield
    finally:
        _resumable = before


def run_again(*, or_overwrite: bool = False) -> str:
    """Return how the job of this process is run again, for the end of a message: with `--resume` where that works."""
    if not _resumable:
        return "run again"
    return "continue with --resume" + (", or use --overwrite" if or_overwrite else "")


class PrefillError(Exception):
    """The run failed. The message is for the person who must act: what, where, what to do.

    Secrets in paths and URLs are removed from it, also where another library's message quotes them. Of a message of
    more than 3,000 characters, which quotes something very long, the middle is left out.
    """

    exit_code = 1

    def __init__(self, message: str) -> None:
        text = without_secrets(message)
        super().__init__(text if len(text) <= 3000 else f"{text[:2200]} ... {text[-700:]}")


class UsageError(PrefillError):
    """Wrong usage or configuration: an option, a recipe key, a column, a label."""

    exit_code = 2


class OutputExistsError(UsageError):
    """The job's own output is there already."""


class OutputConflictError(PrefillError):
    """The output exists and belongs to another job."""

    exit_code = 4


class OutputDamagedError(OutputConflictError):
    """The output is not as its job wrote it."""


class DamagedFileError(PrefillError):
    """A file is not as it was written. The message gives the reason; the caller adds the file."""


class ContentChangedError(PrefillError):
    """A file of the input or of the model differs from the job's fingerprint, or has changed since."""

    exit_code = 4


class FailedRowsError(PrefillError):
    """Rows have an error instead of a score, and the caller wants that to be an exception.

    `table` has all rows: the scores of the others are not lost.
    """

    exit_code = NOT_AS_EXPECTED

    def __init__(self, message: str, table: Any) -> None:
        super().__init__(message)
        self.table = table


class ResourceError(PrefillError):
    """Out of a resource: memory, disk, device or lock."""

    exit_code = 5


class EngineDiedError(ResourceError):
    """The processes of an engine have ended: it has to be loaded again."""


class OutputBusyError(ResourceError):
    """Another process is writing the output."""


class Interrupted(BaseException):
    """Stopped by a signal, after a clean shutdown.

    `signum` is the signal's number; the exit code is 128 + `signum`.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.signum = signum
        self.exit_code = 128 + signum


def counted(number: int, noun: str) -> str:
    """Return a count with its noun: `1 token`, `1,234 tokens`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def brief(error: BaseException) -> str:
    """Return the first sentence or two of another library's message, on one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:200].rsplit(" ", 1)[0] + " ..."


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean 'labels'?`, or an empty text where no known word is near."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def require_known(option: str, given: Iterable[str], known: Collection[str]) -> None:
    """Raise UsageError for the first name given to an option that is none of the `known` ones."""
    for name in given:
        if name not in known:
            raise UsageError(
                f"{option} {name!r} does not exist{did_you_mean(name, known)}\nthere are {', '.join(known)}"
            )


def out_of_resource(error: BaseException) -> bool:
    """Return whether the error is that memory or a disk is full, or that there are too few file handles or
    processes."""
    if isinstance(error, OSError):
        return error.errno in _EXHAUSTED
    return out_of_memory(error)


def out_of_memory(error: BaseException) -> bool:
    """Return whether the error is that memory of a device or of the host ran out."""
    if not isinstance(error, RuntimeError):
        return isinstance(error, MemoryError)
    # torch has an error for devices alone, and each library that it calls words it differently
    return type(error).__name__ == "OutOfMemoryError" or any(words in str(error) for words in _MEMORY_WORDS)


# Paths and URLs as they may be shown: without the secrets in them.

HIDDEN = "***"

_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.\-]*://)(?P<rest>[^\s\"'<>]*)")
_USER = re.compile(r"[^/?#\s]*@|[^/@:?#\s]+:(?!\d+/)[^@?#\s]*@")  # a secret may hold a slash, a port is digits
_CONTAINER = re.compile(r"[^:@/?#]*@")
_CONTAINER_SCHEMES = ("abfs://", "abfss://", "wasb://", "wasbs://", "adl://")  # container@account: no secret
_PARAMETER = re.compile(r"([?&;#][^\s=&;#?\"'<>]+)=[^\s&;#\"'<>]+")
_HARMLESS = frozenset({"region", "scheme", "endpoint_override", "versionid", "generation", "allow_bucket_creation"})
_BARE_USER = re.compile(r"(?<![\w/:@.*])[^\s/@:\"'<>()*]+:(?![/:])(?:(?!://)[^\s@\"'<>])+@(?=[\w/])")
_SECRET_PARAMETER = re.compile(
    r"([?&;][^\s=&;?\"'<>]*(?:sig|token|secret|password|passwd|credential|key|auth)[^\s=&;?\"'<>]*)=[^\s&;#\"'<>]+",
    re.IGNORECASE,
)
_SECRET_NAME = re.compile(r"(?:^|_)(?:token|secret|password|(?:api|access|secret)_key)$", re.IGNORECASE)

Report = TypeVar("Report", bound="BaseModel")


def without_secrets(text: str) -> str:
    """Return a path, a URL or a message that names some, without what must not be seen.

    From URLs go user and password (`s3://key:secret@bucket`) and the values of the query, but for a few that are known
    to be harmless; and what looks like either where a library names a place without its protocol.
    """
    if "@" not in text and "=" not in text:
        return text
    text = _URL.sub(_shown_url, text)
    text = _SECRET_PARAMETER.sub(rf"\1={HIDDEN}", text)
    return _BARE_USER.sub(f"{HIDDEN}@", text)


def shown(value: Any) -> Any:
    """Return settings, a summary or a report as they may be stored and printed: every text in them
    `without_secrets`. A report in which nothing is hidden is returned as it is."""
    if isinstance(value, str):
        return without_secrets(value) if "://" in value else value
    if value is None or isinstance(value, int | float):  # nearly everything in a report is a number
        return value
    if isinstance(value, list):
        found = [shown(item) for item in value]
        return found if any(own is not item for own, item in zip(found, value, strict=True)) else value
    if isinstance(value, tuple):
        return tuple.__new__(type(value), map(shown, value))  # a named one too
    if isinstance(value, dict):
        told = {key: HIDDEN if _is_secret(key, item) else shown(item) for key, item in value.items()}
        return told if any(told[key] is not item for key, item in value.items()) else value
    if hasattr(value, "model_copy"):  # of pydantic
        hidden = {name: own for name, item in value if (own := shown(item)) is not item}
        return value.model_copy(update=hidden) if hidden else value
    return value


def shown_report(report: Report) -> Report:
    """Return a report as it may be stored and printed, with what its judges have put into it."""
    found: Report = shown(report)
    error = getattr(found, "error", None)  # in which libraries name places without their protocol
    return found if error is None else found.model_copy(update={"error": without_secrets(error)})


def _shown_url(found: re.Match[str]) -> str:
    scheme, rest = found["scheme"], found["rest"]
    keep = _CONTAINER.match(rest) if scheme.lower() in _CONTAINER_SCHEMES else None
    if keep is None and (user := _USER.match(rest)) is not None:
        rest = f"{HIDDEN}@{rest[user.end() :]}"
    return scheme + _PARAMETER.sub(_shown_parameter, rest)


def _shown_parameter(found: re.Match[str]) -> str:
    return found[0] if found[1][1:].lower() in _HARMLESS else f"{found[1]}={HIDDEN}"


def _is_secret(key: object, value: object) -> bool:
    return isinstance(value, str) and isinstance(key, str) and _SECRET_NAME.search(key) is not None
