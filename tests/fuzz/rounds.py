"""Rounds of examples in a process of their own, which may crash, hang or fill its memory."""

from __future__ import annotations

import faulthandler
import importlib
import multiprocessing
import os
import resource
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings

from prefillcli.runtime.memory import process_memory
from tests.fuzz.fuzzer import Fuzzer
from tests.fuzz.workplace import Workplace

MOST_SECONDS = 30.0
"""Of an example, of the processor: usual ones take a fraction of a second, however busy the machine is."""
_WAITING = 4
"""So many times as long may an example take on the clock: some wait for other processes."""
MOST_BYTES = 2 << 30
"""Of address space that examples may take beside the libraries."""
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["prefillcli.cli", "prefillcli.scoring.score", "prefillcli.engines.loader", "tests.fuzz.registry"]
)


@dataclass(slots=True)
class Ended:
    """What became of a round. `failures` are texts for the person who mends them."""

    examples: int = 0
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)


def run_round(
    registry: str, name: str, number: int, examples: int, *, seconds: float = MOST_SECONDS, memory: int = MOST_BYTES
) -> Ended:
    """Examples of the fuzzer of this name in the module `registry`, in a process of their own.

    They follow from the seed `number` alone. An example may take so many seconds, and all so many bytes of memory.
    """
    receiver, sender = _CONTEXT.Pipe(duplex=False)
    fast = "/dev/shm" if os.path.isdir("/dev/shm") else None  # noqa: S108 - disks take long to sync
    with tempfile.TemporaryDirectory(prefix="prefill-fuzz-", dir=fast) as folder:
        process = _CONTEXT.Process(
            target=_child, args=(registry, name, number, examples, folder, seconds, memory, sender)
        )
        process.start()
        sender.close()
        try:
            ended: Ended = receiver.recv()
        except EOFError:
            process.join()
            ended = Ended(failures=[_last_words(Path(folder), process.exitcode)])
        process.join()
    return ended


def _last_words(folder: Path, code: int | None) -> str:
    """What is known of a process that ended in the middle of an example."""
    example, trace = folder / "current", folder / "trace"
    what = f"the process ended with exit code {code}"
    if trace.exists() and trace.stat().st_size:
        what += f"\n{trace.read_text().partition('Extension modules')[0][:4000]}"  # the latest call is first
    return what + (f"\nexample: {example.read_text()[:4000]}" if example.exists() else "")


def _child(
    registry: str, name: str, number: int, examples: int, folder: str, seconds: float, memory: int, sender: Any
) -> None:
    fuzzer: Fuzzer = importlib.import_module(registry).FUZZERS[name]
    os.environ |= {"XDG_CACHE_HOME": f"{folder}/cache", "HOME": folder}
    trace = (Path(folder) / "trace").open("w")
    faulthandler.enable(trace)
    faulthandler.register(signal.SIGPROF, file=trace, chain=True)  # which then ends the process
    limit = process_memory("VmSize") + memory
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    def watch() -> None:
        faulthandler.dump_traceback_later(_WAITING * seconds, exit=True, file=trace)
        signal.setitimer(signal.ITIMER_PROF, seconds)

    ended = examine(fuzzer, number, examples, Path(folder), watch)
    faulthandler.cancel_dump_traceback_later()
    signal.setitimer(signal.ITIMER_PROF, 0)
    sender.send(ended)
    trace.close()


def examine(
    fuzzer: Fuzzer, number: int, examples: int, folder: Path, begin: Callable[[], None] = lambda: None
) -> Ended:
    """Run examples in this process; `begin` is called before each of them."""
    ended, place, started = Ended(), Workplace(folder), time.monotonic()
    current = folder / "current"

    @seed(number)
    @settings(
        max_examples=examples,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )
    @given(fuzzer.examples)
    def check(example: Any) -> None:
        ended.examples += 1
        current.write_text(repr(example), errors="backslashreplace")
        begin()
        with place.emptied():
            fuzzer.check(example, place)

    try:
        check()
    except BaseException as error:
        ended.failures += ["".join(traceback.format_exception(each)) for each in _each(error)]
    ended.seconds = time.monotonic() - started
    return ended


def _each(error: BaseException) -> Iterator[BaseException]:
    """The failures that Hypothesis has told apart."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _each(inner)
    else:
        yield error
