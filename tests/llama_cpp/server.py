"""llama-server, and the templates that its converter writes for decision models, from llama.cpp's source:
`make setup-llama-server`."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError

FOLDER = Path(__file__).parents[2] / "out" / "real" / "llama-server"
PROGRAM = FOLDER / "llama-server"
LARGE = ("--batch-size", "8192", "--ubatch-size", "8192")  # in which Kev's options must be together
SECONDS = 120.0  # until it is ready, or answers

_CONVERTERS = {
    "openjev": ("conversion.qwen", "OpenJevModel"),
    "lev": ("conversion.lev", "LevModel"),
    "nimble": ("conversion.lev", "NimbleModel"),
    "kev": ("conversion.lev", "KevModel"),
}
_PRINT = (
    "import importlib, json, sys\n"
    "found = {}\n"
    "for type_, (module, name) in json.loads(sys.argv[1]).items():\n"
    "    kind = getattr(importlib.import_module(module), name)\n"
    "    found[type_] = kind._systemone_template(object.__new__(kind))\n"
    "print(json.dumps(found))\n"
)


def templates() -> dict[str, str]:
    """The template of each type of model, as the converter writes it."""
    command = [sys.executable, "-W", "ignore", "-c", _PRINT, json.dumps(_CONVERTERS)]
    paths = os.pathsep.join([str(FOLDER), str(FOLDER / "gguf-py")])
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": paths}, check=True, capture_output=True, text=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


@contextmanager
def serving(file: Path) -> Iterator[Callable[[dict[str, Any]], dict[str, Any]]]:
    """What sends a body of System One's to a server of this model, and returns its answers. Everything is computed and
    kept in float32."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    exact = ["--cache-type-k", "f32", "--cache-type-v", "f32", "--flash-attn", "off", "--no-repack"]
    command = [PROGRAM, "--model", file, "--host", "127.0.0.1", "--port", str(port), "--threads", "2", *exact]
    log = file.with_suffix(".log")
    with log.open("wb") as said:
        server = subprocess.Popen(
            [*command, "--ctx-size", "16384", "--parallel", "1", *LARGE], stdout=said, stderr=said
        )
    url = f"http://127.0.0.1:{port}"

    def ask(body: dict[str, Any]) -> dict[str, Any]:
        sent = urllib.request.Request(  # noqa: S310 - our own server
            f"{url}/v1/systemone", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(sent, timeout=SECONDS) as found:  # noqa: S310
                return dict(json.load(found)["answers"])
        except HTTPError as error:
            raise AssertionError(f"{error.read().decode()}: {json.dumps(body)[:500]}") from None

    try:
        _wait(server, f"{url}/health", log)
        yield ask
    finally:
        server.terminate()
        server.wait()


def _wait(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        assert server.poll() is None, log.read_text(errors="replace")[-2000:]
        try:
            with urllib.request.urlopen(url, timeout=5):  # noqa: S310
                return
        except (HTTPError, URLError, OSError):
            time.sleep(0.2)
    raise AssertionError(f"not ready after {SECONDS:.0f} s: {log.read_text(errors='replace')[-2000:]}")
