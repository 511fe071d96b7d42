"""The process that renders templates; `data/prompts/templates.py` starts it and holds the other end of its pipes.

It reads a template, then rows, each with its length before it, and answers every row at once. It imports little, so
that it starts in a moment. Rows come from its parent alone, which is why they may be pickled; answers are bytes.
"""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import resource
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, BinaryIO

from jinja2 import TemplateError, TemplateSyntaxError, UndefinedError

_DETAIL_CHARS = 300
_PR_SET_PDEATHSIG = 1

Render = Callable[[Any], str]


def main() -> None:
    """Serve until the parent closes the pipe or is gone."""
    setup = json.loads(sys.argv[1])
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)  # a terminal or a scheduler sends them to all; the parent decides
    _end_with(setup["parent"])
    _limit(resource.RLIMIT_CORE, 0)
    if setup["limit_memory"]:
        _limit(resource.RLIMIT_AS, setup["memory_bytes"])
    processor = _Processor(setup["cpu_seconds"])
    rows, answers = sys.stdin.buffer, sys.stdout.buffer
    _answer(answers, b"R")
    try:
        _serve(rows, answers, processor, setup["text_bytes"])
    except MemoryError:
        _answer(answers, b"M")


def compile_spec(spec: dict[str, Any]) -> tuple[Render, list[str]]:
    """What renders a row, and the variables it needs.

    `spec`: `kind` is `template` (a user's, rendered from a row's columns) or `chat` (a model's, from messages, with
    `variables`); `text`; `name` for messages.
    """
    if spec["kind"] == "template":
        from prefillcli.data.prompts.sandbox import compile_template

        return compile_template(spec["text"], spec["name"])
    from prefillcli.data.prompts.sandbox import compile_chat_template

    return compile_chat_template(spec["text"], spec["variables"], answers=spec["answers"]), []


def _serve(rows: BinaryIO, answers: BinaryIO, processor: _Processor, text_bytes: int) -> None:
    spec = pickle.loads(_read(rows))  # noqa: S301 - written by the parent
    processor.renew()
    try:
        render, columns = compile_spec(spec)
    except MemoryError:
        raise
    except Exception as error:
        _answer(answers, b"C", json.dumps({"error": f"{spec['name']}{_why_not_compiled(error)}"}).encode())
        return
    _answer(answers, b"C", json.dumps({"columns": columns}).encode())
    while row := _read(rows):
        processor.renew()
        try:
            text = render(pickle.loads(row)).encode("utf-8", "surrogatepass")  # noqa: S301 - written by the parent
        except MemoryError:
            raise
        except UndefinedError as error:
            _answer(answers, b"E", _short(error).encode("utf-8", "surrogatepass"))
        except Exception as error:  # an expression of the template may raise anything
            detail = f"{type(error).__name__}: {_short(error)}"
            _answer(answers, b"E", detail.encode("utf-8", "surrogatepass"))
        else:
            if len(text) > text_bytes:
                _answer(answers, b"E", f"a text of {len(text):,} bytes; the limit is {text_bytes:,}".encode())
            else:
                _answer(answers, b"T", text)


def _why_not_compiled(error: Exception) -> str:
    if isinstance(error, TemplateSyntaxError):
        return f", line {error.lineno}: {error.message}"
    if isinstance(error, TemplateError):
        return f": {error.message}"
    if isinstance(error, RecursionError | SyntaxError):  # Jinja makes Python of it, which bounds nesting too
        return ": nested too deeply; make it simpler"
    return f": it cannot be compiled ({type(error).__name__}: {_short(error)})"


def _short(error: Exception) -> str:
    return str(error)[:_DETAIL_CHARS]


def _read(stream: BinaryIO) -> bytes:
    """What was sent with its length before it; nothing at the end."""
    return stream.read(int.from_bytes(stream.read(8), "big"))


def _answer(stream: BinaryIO, kind: bytes, content: bytes = b"") -> None:
    stream.write(kind + len(content).to_bytes(8, "big"))
    stream.write(content)
    stream.flush()


class _Processor:
    """Processor time of this process: it ends, by SIGXCPU, when a row takes more than `seconds`."""

    def __init__(self, seconds: int) -> None:
        self._seconds = seconds
        self._renewed = -1

    def renew(self) -> None:
        """A row begins. The kernel's limit is of the whole process, in seconds."""
        used = int(time.process_time())
        if used > self._renewed:
            _limit(resource.RLIMIT_CPU, used + 1 + self._seconds)
            self._renewed = used


def _limit(what: int, value: int) -> None:
    most = resource.getrlimit(what)[1]
    resource.setrlimit(what, (value if most == resource.RLIM_INFINITY else min(value, most), most))


def _end_with(parent: int) -> None:
    """Be killed when the parent dies, even while a row is rendered; elsewhere than on Linux the limits see to it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            sys.exit(1)
