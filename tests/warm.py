"""Python that has imported its libraries already, and forks a process for each program that it is asked to run.

One starts in milliseconds. This package is not among them: each program finds its own copy of it.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

#: Slow to import, and what nearly every job needs.
LIBRARIES = (
    "torch",
    "transformers.models.llama.modeling_llama",
    "tokenizers",
    "safetensors.torch",
    "pyarrow.parquet",
    "pydantic",
    "typer",
    "jinja2.sandbox",
    "fsspec",
    "s3fs",
)
#: transformers imports these wherever they are installed. They may still be imported afterwards.
UNUSED = ("sklearn", "scipy", "torchao", "boto3")


class Warm:
    """The process that forks the others."""

    def __init__(self, python: str = sys.executable, libraries: Sequence[str] = LIBRARIES) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
        self._process = subprocess.Popen(
            [python, __file__, *libraries], env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def run(
        self, root: Path, words: Sequence[str], *, folder: Path, environment: Mapping[str, str], seconds: float = 600.0
    ) -> tuple[int | None, str, str]:
        """`python -m WORDS` with the packages of `root`: its exit code and what it says on stdout and stderr.

        The exit code is None where it has not ended after so many seconds and was killed, with all it had started.
        """
        with tempfile.TemporaryDirectory(prefix="warm-") as made:
            said = [str(Path(made, name)) for name in ("stdout", "stderr")]
            asked = {
                "root": str(root), "words": list(words), "folder": str(folder), "environment": dict(environment),
                "said": said, "seconds": seconds,
            }  # fmt: skip
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            self._process.stdin.write(json.dumps(asked) + "\n")
            self._process.stdin.flush()
            code = json.loads(self._process.stdout.readline())
            out, error = (Path(name).read_text(errors="replace") for name in said)
            return code, out, error

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def _serve() -> dict[str, Any] | None:
    """Answer requests; in a process that was forked for one, return it."""
    os.dup2(2, 1)
    for line in sys.stdin:
        asked: dict[str, Any] = json.loads(line)
        child = os.fork()
        if not child:
            return asked
        print(json.dumps(_ended(child, asked["seconds"])), file=_REPLIES, flush=True)
    return None


def _ended(child: int, seconds: float) -> int | None:
    """The exit code of a process, negative for a signal; None where it was killed after so long."""
    end = time.monotonic() + seconds
    while True:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            with suppress(ProcessLookupError):  # it has not become the leader of its group yet
                os.killpg(child, signal.SIGKILL)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return None
        time.sleep(0.005)


def _become(asked: Mapping[str, Any]) -> None:
    """What a process would be that was started for this program."""
    os.setsid()
    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    for number, name in enumerate((os.devnull, *asked["said"])):
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT, 0o600), number)
    sys.stdin = open(0)  # noqa: SIM115
    sys.path[0] = asked["root"]
    sys.argv = asked["words"]


if __name__ == "__main__":
    _REPLIES = os.fdopen(os.dup(1), "w")
    sys.path[0] = os.sep  # nothing is there; no module of this folder is imported by the name of another
    sys.modules.update(dict.fromkeys(UNUSED))  # type: ignore[arg-type]
    for library in sys.argv[1:]:
        __import__(library)
    for library in UNUSED:
        del sys.modules[library]
    asked = _serve()
    if asked is not None:
        _REPLIES.close()
        _become(asked)
        runpy.run_module(asked["words"][0], run_name="__main__", alter_sys=True)
