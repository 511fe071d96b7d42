"""Images from URLs: of public addresses only, in bounded time and size."""

from __future__ import annotations

import io
import socket
import ssl
from collections.abc import Callable
from functools import cache
from http.client import HTTPConnection, HTTPException, HTTPResponse
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from time import monotonic
from typing import Any, cast
from urllib.parse import SplitResult, quote, urljoin, urlsplit

from prefillcli.errors import brief, out_of_resource, without_secrets
from prefillcli.images.image import ImageError

Address = IPv4Address | IPv6Address

SECONDS = 30.0  # for a whole image, with redirects; only a resolver of names that is slow may take longer
MOST = 32 << 20  # bytes of an image
MOST_REDIRECTS = 3
_REDIRECTS = (301, 302, 303, 307, 308)
_TRANSLATED = ip_network("64:ff9b::/96")  # RFC 6052: the last 32 bits are an address of IPv4, behind a gateway
_HEADERS = {"User-Agent": "prefillcli", "Accept": "image/*", "Accept-Encoding": "identity", "Connection": "close"}
_IN_URLS = "%/:?#[]@!$&'()*+,;=~"  # what RFC 3986 allows beside letters, digits and -._


def is_public(address: Address) -> bool:
    """Return whether an address belongs to the public internet: it is not of this machine, a private network, a link
    or a group, nor stands for an address of IPv4 that is."""
    if isinstance(address, IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour or (address.teredo or (None, None))[1]
        if inner is None and address in _TRANSLATED:
            inner = IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(inner)
        if address.is_site_local:
            return False
    return address.is_global and not (address.is_multicast or address.is_reserved or address.is_unspecified)


def fetch(
    url: str, *, seconds: float = SECONDS, most: int = MOST, allowed: Callable[[Address], bool] = is_public
) -> bytes:
    """Return what an http or https URL has, after at most `MOST_REDIRECTS` redirects.

    A host's name is resolved once. Every one of its addresses must be `allowed`, and the connection goes to one of
    these. No proxy is used, and no password or cookie is sent.

    Raises ImageError, whose message hides what a URL may hold of secrets. Failures for want of memory or file handles
    pass through.
    """
    deadline, shown = monotonic() + seconds, without_secrets(url)[:200]
    try:
        for _ in range(MOST_REDIRECTS + 1):
            found = _get(_parsed(url), deadline, most, allowed)
            if isinstance(found, bytes):
                return found
            target = urljoin(url, found)
            if url.lower().startswith("https:") and not target.lower().startswith("https:"):
                raise ImageError("redirected away from https")
            url = target
        raise ImageError(f"more than {MOST_REDIRECTS} redirects")
    except ImageError as error:
        raise ImageError(f"{shown}: {error}") from None
    except TimeoutError:
        raise ImageError(f"{shown}: no answer within {seconds:g} seconds") from None
    except (OSError, HTTPException, ValueError) as error:  # ValueError: a URL or a header that is none
        if out_of_resource(error):
            raise
        raise ImageError(f"{shown}: {without_secrets(brief(error))}") from None


def _parsed(url: str) -> SplitResult:
    parts = urlsplit(url)
    if parts.scheme.lower() not in ("http", "https") or not parts.hostname:
        raise ImageError("no URL of http or https")
    if parts.username is not None or parts.password is not None:
        raise ImageError("it has a name or a password, which is not sent")
    return parts._replace(path=quote(parts.path, safe=_IN_URLS), query=quote(parts.query, safe=_IN_URLS))


def _get(parts: SplitResult, deadline: float, most: int, allowed: Callable[[Address], bool]) -> bytes | str:
    """Return the body of an answer, or where it redirects to."""
    secure = parts.scheme.lower() == "https"
    host, port = str(parts.hostname), parts.port or (443 if secure else 80)
    connection = HTTPConnection(host, port)
    connection.default_port = 443 if secure else 80  # which the header Host leaves out
    with _connected(host, port, deadline, allowed) as plain:
        plain.settimeout(_left(deadline))
        with _tls().wrap_socket(plain, server_hostname=host) if secure else plain as sock:
            connection.sock = cast(Any, _Timed(sock, deadline))
            connection.request("GET", (parts.path or "/") + (f"?{parts.query}" if parts.query else ""), None, _HEADERS)
            with connection.getresponse() as answer:
                target = answer.headers.get("Location")
                if answer.status in _REDIRECTS and target:
                    return str(target)
                return _body(answer, most)


def _body(answer: HTTPResponse, most: int) -> bytes:
    if answer.status != 200:
        raise ImageError(f"the server answers {answer.status}")
    if answer.headers.get("Content-Encoding", "identity").strip().lower() != "identity":
        raise ImageError("the server compresses its answer unasked")
    if answer.length is not None and answer.length > most:
        raise ImageError(f"{answer.length:,} bytes, more than {most:,}")
    data = answer.read(most + 1)
    if len(data) > most:
        raise ImageError(f"more than {most:,} bytes")
    if answer.length:
        raise ImageError("the answer ends early")
    return data


def _connected(host: str, port: int, deadline: float, allowed: Callable[[Address], bool]) -> socket.socket:
    """Return a connection to the first address of a host that takes one. Raises ImageError unless all are allowed."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    if not all(allowed(ip_address(str(place[0]).partition("%")[0])) for *_, place in found):
        raise ImageError("its host has an address that is not public")
    failure: OSError = OSError("its host has no address")
    for number, (family, kind, protocol, _, place) in enumerate(found):
        sock = socket.socket(family, kind, protocol)
        try:
            sock.settimeout(_left(deadline) / (len(found) - number))
            sock.connect(place)
        except OSError as error:
            sock.close()
            failure = error
        else:
            return sock
    raise failure


def _left(deadline: float) -> float:
    left = deadline - monotonic()
    if left <= 0:
        raise TimeoutError
    return left


@cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()


class _Timed(io.RawIOBase):
    """A connection, as `http.client` uses one, that ends at a time: each of its own timeouts counts anew."""

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self._sock, self._deadline = sock, deadline

    def sendall(self, data: bytes) -> None:
        self._sock.settimeout(_left(self._deadline))
        self._sock.sendall(data)

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._sock.settimeout(_left(self._deadline))
        return self._sock.recv_into(buffer)

    def close(self) -> None:
        """Leave the connection open: `http.client` closes it where an answer begins that is the last one."""
