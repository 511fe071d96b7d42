"""Images from URLs: against servers on this machine, whose address has to be allowed here, and names that are made
up."""

from __future__ import annotations

import datetime
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from ipaddress import ip_address, ip_network
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from prefillcli.images import fetching
from prefillcli.images.fetching import Address, fetch, is_public
from prefillcli.images.image import ImageError
from prefillcli.images.reading import read_images
from tests.unit.images.files import noise, saved

CAT = saved(noise(9, 7), "PNG")
Answer = Callable[[str, socket.socket], None]


def loopback(address: Address) -> bool:
    return is_public(address) or address in ip_network("127.0.0.1/32")


def _not_found(_: str, sock: socket.socket) -> None:
    sock.sendall(b"HTTP/1.1 404 Not Found\r\n\r\n")


class Server:
    """Answers each request by the first word of its path."""

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.answers: dict[str, Answer] = {}
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self.tls: ssl.SSLContext | None = None
        threading.Thread(target=self._serve, daemon=True).start()

    def url(self, path: str, scheme: str = "http") -> str:
        return f"{scheme}://127.0.0.1:{self.port}/{path}"

    def says(self, name: str, status: str = "200 OK", body: bytes = b"", **headers: object) -> str:
        """Answer this name so from now on, and return its URL."""
        lines = [f"HTTP/1.1 {status}", *(f"{key.replace('_', '-')}: {value}" for key, value in headers.items())]
        data = ("\r\n".join(lines) + "\r\n\r\n").encode() + body
        self.answers[name] = lambda _, sock: sock.sendall(data)
        return self.url(name)

    def close(self) -> None:
        self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                plain, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=[plain], daemon=True).start()

    def _answer(self, plain: socket.socket) -> None:
        with plain:
            try:
                sock = self.tls.wrap_socket(plain, server_side=True) if self.tls else plain
                with sock:
                    asked = b""
                    while b"\r\n\r\n" not in asked:
                        asked += (got := sock.recv(65536))
                        if not got:
                            return
                    self.requests.append(asked.decode("latin-1"))
                    name = asked.split()[1].decode().strip("/").partition("?")[0]
                    self.answers.get(name, _not_found)(name, sock)
            except OSError:
                pass  # who asked has gone


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


def get(url: str, **options: Any) -> bytes:
    return fetch(url, **{"seconds": 5.0, "allowed": loopback, **options})


def error_of(url: str, **options: Any) -> str:
    with pytest.raises(ImageError) as caught:
        get(url, **options)
    return str(caught.value)


def test_an_image_is_fetched(server: Server) -> None:
    url = server.says("cat.png", body=CAT, Content_Length=len(CAT))
    assert get(url) == CAT
    assert get(f"{url}?a=b c&d=%20\u00e9#part") == CAT
    first, second = server.requests
    assert first.startswith("GET /cat.png HTTP/1.1\r\n")
    assert second.startswith("GET /cat.png?a=b%20c&d=%20%C3%A9 HTTP/1.1\r\n")
    assert f"Host: 127.0.0.1:{server.port}\r\n" in first
    assert not {"authorization", "cookie", "referer"} & {
        line.partition(":")[0].lower() for line in first.split("\r\n")
    }
    (found,) = read_images(url, root=None, max_pixels=100, fetch=get)
    assert found.data == CAT


def test_an_answer_may_come_in_chunks_or_until_the_end(server: Server) -> None:
    chunked = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (CAT[:50], CAT[50:])) + b"0\r\n\r\n"
    assert get(server.says("chunked", body=chunked, Transfer_Encoding="chunked")) == CAT
    assert get(server.says("open", body=CAT)) == CAT


NOT_PUBLIC = """
    127.0.0.1 127.9.9.9 0.0.0.0 10.1.2.3 172.16.0.1 192.168.1.1 169.254.169.254 100.64.0.1 192.0.2.1
    198.18.0.1 224.0.0.1 239.1.1.1 240.0.0.1 255.255.255.255 :: ::1 fe80::1 fc00::1 fd12::1 fec0::1
    ff02::1 ::ffff:127.0.0.1 ::ffff:10.0.0.1 ::127.0.0.1 2002:7f00:1:: 2002:a00:1:: 64:ff9b::127.0.0.1
    64:ff9b::a9fe:a9fe 64:ff9b:1::1 2001:0:53aa:64c:0:0:80ff:fffe 2001:db8::1 100::1
"""
PUBLIC = "8.8.8.8 1.1.1.1 93.184.216.34 2606:4700::1111 2a00:1450::1 ::ffff:8.8.8.8 64:ff9b::808:808"


def test_only_addresses_of_the_public_internet_are_public() -> None:
    assert [text for text in NOT_PUBLIC.split() if is_public(ip_address(text))] == []
    assert [text for text in PUBLIC.split() if not is_public(ip_address(text))] == []


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "localhost", "127.1", "2130706433", "0x7f000001", "0177.0.0.1", "[::1]", "[::ffff:127.0.0.1]", "0",
     "169.254.169.254", "[fe80::1%25lo]"],
)  # fmt: skip
def test_no_spelling_of_a_private_address_is_asked(server: Server, host: str) -> None:
    """Nothing on this machine has to listen there: no connection is tried."""
    with pytest.raises(
        ImageError, match=r"not public|Name or service|Address family|does not appear|[Ii]nvalid|resol"
    ):
        fetch(f"http://{host}:{server.port}/cat.png", seconds=5)
    assert server.requests == []


def answers(*addresses: str) -> Callable[..., list[Any]]:
    def resolve(host: str, port: int, *_: object, **__: object) -> list[Any]:
        return [
            (socket.AF_INET6 if ":" in each else socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, port))
            for each in addresses
        ]

    return resolve


def test_one_private_address_of_a_name_is_one_too_many(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.says("cat.png", body=CAT)
    for others in (["127.0.0.1", "10.0.0.1"], ["10.0.0.1", "127.0.0.1"], ["127.0.0.1", "::ffff:10.0.0.1"]):
        monkeypatch.setattr(socket, "getaddrinfo", answers(*others))
        assert "its host has an address that is not public" in error_of(f"http://images.example:{server.port}/cat.png")
    assert server.requests == []


def test_a_name_is_resolved_once(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second answer could be another one than that which was checked."""
    server.says("cat.png", body=CAT)
    asked: list[str] = []

    def resolve(host: str, *rest: Any, **options: Any) -> list[Any]:
        asked.append(host)
        return answers("127.0.0.1" if len(asked) == 1 else "10.0.0.1")(host, *rest, **options)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert get(f"http://images.example:{server.port}/cat.png") == CAT
    assert asked == ["images.example"]
    assert f"Host: images.example:{server.port}\r\n" in server.requests[0]


def test_another_address_is_tried_where_one_refuses(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.says("cat.png", body=CAT)
    monkeypatch.setattr(socket, "getaddrinfo", answers("127.0.0.2", "127.0.0.1"))
    allowed = ip_network("127.0.0.0/8").__contains__
    assert get(f"http://images.example:{server.port}/cat.png", allowed=allowed) == CAT


def test_redirects_are_followed_a_few_times(server: Server) -> None:
    server.says("cat.png", body=CAT)
    server.says("one", "302 Found", Location="/cat.png")
    server.says("two", "301 Moved", Location=server.url("one"))
    three = server.says("three", "307 Temporary", Location="two", Content_Length=0)
    assert get(three) == CAT
    four = server.says("four", "308 Permanent", Location="three")
    assert error_of(four).endswith("more than 3 redirects")
    assert error_of(server.says("loop", "303 See", Location="loop")).endswith("more than 3 redirects")


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("http://10.0.0.1/cat.png", "its host has an address that is not public"),
        ("http://169.254.169.254/latest/meta-data", "its host has an address that is not public"),
        ("//[::1]/cat.png", "its host has an address that is not public"),
        ("file:///etc/passwd", "no URL of http or https"),
        ("ftp://8.8.8.8/cat.png", "no URL of http or https"),
        ("http://me:hidden@8.8.8.8/", "a name or a password"),
    ],
)
def test_a_redirect_is_checked_like_a_url(server: Server, target: str, said: str) -> None:
    error = error_of(server.says("out", "302 Found", Location=target) + "?sig=hidden")
    assert said in error
    assert "hidden" not in error


def test_a_slow_server_ends_in_time(server: Server) -> None:
    def drip(head: bytes) -> Answer:
        def answer(_: str, sock: socket.socket) -> None:
            sock.sendall(head)
            while True:
                sock.sendall(b"x")
                time.sleep(0.05)

        return answer

    server.answers["head"] = drip(b"HTTP/1.1 200 OK\r\nX-Slow: ")
    server.answers["body"] = drip(b"HTTP/1.1 200 OK\r\n\r\n")
    server.answers["nothing"] = lambda _, sock: time.sleep(20)
    for name in ("head", "body", "nothing"):
        began = time.monotonic()
        assert error_of(server.url(name), seconds=0.4).endswith("no answer within 0.4 seconds")
        assert time.monotonic() - began < 5


def test_a_large_answer_is_not_read_whole(server: Server) -> None:
    url = server.says("large", body=b"", Content_Length=10**12)
    assert error_of(url).endswith("1,000,000,000,000 bytes, more than 33,554,432")
    sent = []

    def endless(_: str, sock: socket.socket) -> None:
        sock.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            sent.append(sock.send(bytes(65536)))

    server.answers["endless"] = endless
    assert error_of(server.url("endless"), most=100_000).endswith("more than 100,000 bytes")
    assert sum(sent) < 50_000_000  # what sockets hold besides


@pytest.mark.parametrize(
    ("status", "headers", "body", "said"),
    [
        ("404 Not Found", {}, b"", "the server answers 404"),
        ("206 Partial", {}, CAT, "the server answers 206"),
        ("302 Found", {}, b"", "the server answers 302"),
        ("200 OK", {"Content_Length": 5000}, CAT, "the answer ends early"),
        ("200 OK", {"Transfer_Encoding": "chunked"}, b"50\r\nabc", "IncompleteRead"),
        ("200 OK", {"Content_Encoding": "gzip"}, CAT, "the server compresses its answer unasked"),
        ("no status", {}, b"", "no status"),
    ],
)
def test_an_answer_that_is_no_file_is_an_error(
    server: Server, status: str, headers: dict[str, object], body: bytes, said: str
) -> None:
    error = error_of(server.says("cat.png", status, body, **headers) + "?token=hidden")
    assert said in error
    assert error.startswith(f"http://127.0.0.1:{server.port}/cat.png?token=***: ")


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://", "no URL of http or https"),
        ("http:///cat.png", "no URL of http or https"),
        ("file:///etc/passwd", "no URL of http or https"),
        ("gopher://8.8.8.8/", "no URL of http or https"),
        ("http://me:hidden@8.8.8.8/cat.png", "a name or a password"),
        ("http://hidden@8.8.8.8/cat.png", "a name or a password"),
        ("http://8.8.8.8:port/", "Port could not be cast"),
        ("http://8.8.8.8:99999/", "Port out of range"),
        ("http://[::1/", "Invalid IPv6 URL"),
        ("http://a..b/", "label"),
        ("http://" + "a" * 300 + "/", "label"),
        ("http://no.such.host.invalid/cat.png?sig=hidden", ""),
    ],
)
def test_a_url_that_leads_nowhere_is_an_error(url: str, said: str) -> None:
    error = error_of(url)
    assert said in error
    assert "hidden" not in error
    assert len(error) < 500


def test_a_header_cannot_be_put_into_a_url(server: Server) -> None:
    url = server.says("cat.png", body=CAT)
    for evil in (" HTTP/1.1\r\nX-Evil: 1\r\n\r\n", "?\r\nX-Evil: 1", "?a\0b\x7f"):
        try:
            get(url + evil)
        except ImageError:
            continue
    assert not any("X-Evil: 1" in line for text in server.requests for line in text.splitlines()[1:])


@pytest.fixture
def certified(server: Server, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Server:
    """The server with TLS, and a client that trusts its certificate for images.example."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "images.example")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("images.example")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem, own = tmp_path / "cert.pem", tmp_path / "key.pem"
    pem.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    own.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    server.tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.tls.load_cert_chain(pem, own)
    context = ssl.create_default_context(cafile=str(pem))
    monkeypatch.setattr(fetching, "_tls", lambda: context)
    monkeypatch.setattr(socket, "getaddrinfo", answers("127.0.0.1"))
    return server


def test_https_is_checked_against_the_name(certified: Server) -> None:
    certified.says("cat.png", body=CAT)
    assert get(f"https://images.example:{certified.port}/cat.png") == CAT
    assert f"Host: images.example:{certified.port}\r\n" in certified.requests[0]
    error = error_of(f"https://other.example:{certified.port}/cat.png?sig=hidden")
    assert "certificate verify failed" in error.lower()
    assert "hidden" not in error
    assert len(certified.requests) == 1
    certified.says("down", "302 Found", Location=f"http://images.example:{certified.port}/cat.png")
    assert error_of(f"https://images.example:{certified.port}/down").endswith("redirected away from https")


def test_a_slow_handshake_ends_in_time(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    began = time.monotonic()
    assert "no answer within 0.4 seconds" in error_of(server.url("cat.png", "https"), seconds=0.4)
    assert time.monotonic() - began < 5


def test_proxies_of_the_environment_are_not_used(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they connect to could not be checked."""
    url = server.says("cat.png", body=CAT)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.setenv("all_proxy", "http://127.0.0.1:1")
    assert get(url) == CAT
