"""Failures of requests to object stores: which of them pass, how long that is waited for, and what the others need."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum
from time import monotonic, sleep
from typing import TypeVar

from prefillcli.errors import brief
from prefillcli.runtime import log

PATIENCE = 60.0
"""Seconds after its first try in which a request that fails may be sent again."""
_FIRST_WAIT, _LONGEST_WAIT = 0.5, 10.0

_PASSING_STATUS = {408, 425, 429, 500, 502, 503, 504, 509}
_PASSING_CODES = {"SlowDown", "RequestTimeout", "InternalError", "ServiceUnavailable", "ConditionalRequestConflict"}
# Of botocore, aiohttp, httpx, requests, azure and Google: their common base classes say less than their names.
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
    """Kinds of failures, by what can be done about them."""

    PASSING = "passing"
    """The store is busy or cannot be reached: the same request may succeed later."""
    REFUSED = "refused"
    """Credentials are missing, wrong or expired, or do not allow it."""
    MISSING = "missing"
    """There is no such object or bucket."""
    EXISTS = "exists"
    """A conditional write met an object that is there already."""
    OTHER = "other"

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """The kind of what fsspec or the client of a store raised."""
        for each in _causes(error):
            status, code = _status(each), _code(each)
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
    """The result of a request that may be sent more than once; it is sent again while its failures are passing.

    No try begins later than `PATIENCE` seconds after the first one, so the waiting of clients that try again by
    themselves adds to it once. After a store was waited for in vain, requests are sent once until one succeeds: what
    follows an outage, such as the report of a failed run, does not wait for it again. Raises what the last try raised.
    """
    patience = 0.0 if _outage.is_set() else _patience.get()
    began = monotonic()
    for wait in _waits():
        try:
            result = request()
        except Exception as error:
            if Failure.of(error) is not Failure.PASSING:
                raise
            if monotonic() + wait - began > patience:
                if patience:
                    _outage.set()
                raise
            log.warning(f"{brief(error)}; tried again in {wait:.1f} seconds")
        else:
            _outage.clear()
            return result
        sleep(wait)
    raise AssertionError("the waits have no end")


@contextmanager
def impatiently() -> Iterator[None]:
    """For requests of this thread that may as well fail: they are sent once."""
    before = _patience.set(0.0)
    try:
        yield
    finally:
        _patience.reset(before)


def explained(error: BaseException) -> str:
    """What went wrong in a request and what to do about it, in one to two lines, without the path."""
    reason = brief(error)
    advice = _ADVICE.get(Failure.of(error))
    return reason if advice is None else f"{reason}\n{advice}"


_ADVICE = {
    Failure.PASSING: "the object store is busy or cannot be reached: go on with --resume when it answers again",
    Failure.REFUSED: "the credentials have expired or do not allow this: renew them, then go on with --resume",
    Failure.MISSING: "there is no such bucket or object: correct the URL, or create the bucket",
}


def _waits() -> Iterator[float]:
    """Seconds between tries: twice as long each time, half of it at random, so that many runs do not come at once."""
    wait = _FIRST_WAIT
    while True:
        yield wait * random.uniform(0.5, 1)
        wait = min(2 * wait, _LONGEST_WAIT)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """What was raised first comes first: clients translate it into errors that say less."""
    chain = [error]
    while len(chain) < 10 and (inner := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(inner)
    return reversed(chain)


def _status(error: BaseException) -> int | None:
    """The HTTP status that an error of a client carries."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore
        found = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        return found if isinstance(found, int) else None
    for holder in (error, response):
        for name in ("status", "status_code", "code"):
            found = getattr(holder, name, None)
            if isinstance(found, int):
                return found
    return None


def _code(error: BaseException) -> str | None:
    """The store's own name for an error."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        return str(response.get("Error", {}).get("Code"))
    found = getattr(error, "error_code", None)
    return None if found is None else str(found)
