"""What may be shown of paths and URLs: everything but the secrets in them."""

from __future__ import annotations

import re
from typing import Any, TypeVar

from pydantic import BaseModel

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

Report = TypeVar("Report", bound=BaseModel)


def without_secrets(text: str) -> str:
    """A path, a URL or a message that names some, without what must not be seen.

    From URLs go user and password (`s3://key:secret@bucket`) and the values of the query, but for a few that are known
    to be harmless; and what looks like either where a library names a place without its protocol.
    """
    if "@" not in text and "=" not in text:
        return text
    text = _URL.sub(_shown_url, text)
    text = _SECRET_PARAMETER.sub(rf"\1={HIDDEN}", text)
    return _BARE_USER.sub(f"{HIDDEN}@", text)


def shown(value: Any) -> Any:
    """Settings, or a summary, as they may be stored and printed: every text in them `without_secrets`."""
    if isinstance(value, str):
        return without_secrets(value) if "://" in value else value
    if isinstance(value, list | tuple):
        return [shown(item) for item in value]
    if isinstance(value, dict):
        return {key: HIDDEN if _is_secret(key, item) else shown(item) for key, item in value.items()}
    return value


def shown_report(report: Report) -> Report:
    """A report whose paths and error may be stored and printed."""
    names = [name for name in ("output", "report", "page", "error") if getattr(report, name, None) is not None]
    return report.model_copy(update={name: without_secrets(getattr(report, name)) for name in names})


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
