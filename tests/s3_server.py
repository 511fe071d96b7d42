"""A real S3 server on this machine (moto's), with faults in front of it, and a client that has none."""

from __future__ import annotations

import os
import re
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from urllib.parse import parse_qs

import boto3
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

_OBSERVER = "observer"  # the access key of a client that sees what is really there
_CHANGING = ("PUT", "POST", "DELETE")


@dataclass(frozen=True)
class Request:
    """A request of S3, as far as faults look at it."""

    method: str
    bucket: str
    key: str
    query: dict[str, list[str]]
    access_key: str
    conditional: bool

    @property
    def lists(self) -> bool:
        return self.method == "GET" and "list-type" in self.query

    @property
    def kind(self) -> str:
        """`LIST`, or the method."""
        return "LIST" if self.lists else self.method


@dataclass(frozen=True)
class Refusal:
    """An answer that does not come from the store behind."""

    status: str
    code: str


@dataclass(frozen=True)
class LostAnswer:
    """The store does what was asked for, but its answer does not come within so many seconds."""

    seconds: float


SLOW_DOWN = Refusal("503 Slow Down", "SlowDown")
EXPIRED = Refusal("403 Forbidden", "ExpiredToken")

#: What a fault does to a request; None for nothing.
Fault = Callable[[Request], Refusal | LostAnswer | None]


@dataclass
class S3Server:
    """The server. Requests are noted in order, and go through all faults."""

    url: str = ""
    requests: list[Request] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._moto = DomainDispatcherApplication(create_backend_app)
        self._lock = threading.Lock()

    @property
    def environment(self) -> dict[str, str]:
        """For a process that is to use the server."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "first-key",
            "AWS_SECRET_ACCESS_KEY": "first-secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        }

    def new_bucket(self) -> Bucket:
        name = f"bucket-{uuid.uuid4().hex}"
        self.client.create_bucket(Bucket=name)
        return Bucket(self, name)

    @cached_property
    def client(self) -> Any:
        """A client that no fault touches."""
        keys = {"aws_access_key_id": _OBSERVER, "aws_secret_access_key": "x", "region_name": "us-east-1"}
        return boto3.client("s3", endpoint_url=self.url, **keys)

    def reset(self) -> None:
        """Take all faults away, and forget the requests."""
        self.faults.clear()
        self.requests.clear()

    def counts(self) -> Counter[str]:
        """Requests by their kind."""
        return Counter(request.kind for request in self.requests)

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        request = _request(environ)
        if request.access_key == _OBSERVER:
            return self._moto(environ, start_response)
        with self._lock:
            self.requests.append(request)
            found = next(filter(None, (fault(request) for fault in self.faults)), None)
        if isinstance(found, Refusal):
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            return _refuse(request, found, start_response)
        answer = self._serve(request, environ, start_response)
        if isinstance(found, LostAnswer):
            time.sleep(found.seconds)
        return answer

    def _serve(self, request: Request, environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        if request.method not in _CHANGING:
            return self._moto(environ, start_response)
        with self._lock:  # moto looks whether an object is there and writes then; S3 does both in one step
            return list(self._moto(environ, start_response))


@dataclass(frozen=True)
class Bucket:
    """A bucket of the server, seen without faults."""

    server: S3Server
    name: str

    @property
    def url(self) -> str:
        return f"s3://{self.name}"

    def put(self, key: str, data: bytes) -> None:
        self.server.client.put_object(Bucket=self.name, Key=key, Body=data)

    def get(self, key: str) -> bytes:
        answer = self.server.client.get_object(Bucket=self.name, Key=key)
        with answer["Body"] as body:
            data: bytes = body.read()
        return data

    def keys(self, prefix: str = "") -> list[str]:
        answer = self.server.client.list_objects_v2(Bucket=self.name, Prefix=prefix)
        return [each["Key"] for each in answer.get("Contents", [])]

    def delete(self, key: str) -> None:
        self.server.client.delete_object(Bucket=self.name, Key=key)

    def uploads(self) -> list[str]:
        """Keys of the uploads in several parts that were begun and not ended."""
        return [each["Key"] for each in self.server.client.list_multipart_uploads(Bucket=self.name).get("Uploads", [])]

    def begin_upload(self, key: str) -> None:
        self.server.client.create_multipart_upload(Bucket=self.name, Key=key)


@contextmanager
def serving() -> Iterator[S3Server]:
    """A server in a thread of this process."""
    server = S3Server()
    http = make_server("127.0.0.1", 0, server, threaded=True, request_handler=_Quiet)
    http.daemon_threads = True
    server.url = f"http://127.0.0.1:{http.server_port}"
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.client.close()
        http.shutdown()
        thread.join()
        http.server_close()


def every(number: int, what: Refusal) -> Fault:
    """Each `number`th request is refused."""
    seen = 0

    def fault(_request: Request) -> Refusal | None:
        nonlocal seen
        seen += 1
        return what if seen % number == 0 else None

    return fault


def once(method: str, pattern: str, what: Refusal | LostAnswer, *, after: int = 0) -> Fault:
    """The first request of this method whose key fits the pattern, after so many others of them."""
    seen = 0

    def fault(request: Request) -> Refusal | LostAnswer | None:
        nonlocal seen
        fits = request.method == method and re.search(pattern, request.key) is not None
        seen += fits
        return what if fits and seen == after + 1 else None

    return fault


def expired(access_key: str, *, after_puts: int, pattern: str) -> Fault:
    """An access key is refused as soon as it has put so many objects whose keys fit the pattern."""
    puts = 0

    def fault(request: Request) -> Refusal | None:
        nonlocal puts
        if request.access_key != access_key:
            return None
        puts += request.method == "PUT" and re.search(pattern, request.key) is not None
        return EXPIRED if puts > after_puts else None

    return fault


class _Quiet(WSGIRequestHandler):
    def log(self, *_arguments: Any) -> None:
        """Nothing: requests are noted by the server."""


def _request(environ: dict[str, Any]) -> Request:
    bucket, _, key = environ["PATH_INFO"].lstrip("/").partition("/")
    credential = re.search(r"Credential=([^/]+)/", environ.get("HTTP_AUTHORIZATION", ""))
    return Request(
        method=environ["REQUEST_METHOD"],
        bucket=bucket,
        key=key,
        query=parse_qs(environ.get("QUERY_STRING", ""), keep_blank_values=True),
        access_key=credential[1] if credential else "",
        conditional="HTTP_IF_NONE_MATCH" in environ,
    )


def _answer(status: str, body: bytes, start_response: Callable[..., Any]) -> list[bytes]:
    start_response(status, [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
    return [body]


def _refuse(request: Request, what: Refusal, start_response: Callable[..., Any]) -> list[bytes]:
    message = "The provided token has expired." if what is EXPIRED else "Please reduce your request rate."
    body = f"<?xml version='1.0'?><Error><Code>{what.code}</Code><Message>{message}</Message></Error>".encode()
    return _answer(what.status, b"" if request.method == "HEAD" else body, start_response)
