"""Measurements in processes of their own: each loads the model, and what one leaves behind does not disturb the next.

A task is called in the child with `send` and its arguments; whatever it sends is yielded here.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from prefillcli.errors import PrefillError, ResourceError, brief, out_of_memory
from prefillcli.forecast.mode_results import Confirmation, MemoryPoint, TracePoint
from prefillcli.profile.budget import enforced, make_malloc_exact, peak_bytes, resident
from prefillcli.runtime.memory import trim_heap
from prefillcli.runtime.streams import survive_closed_streams

Send = Callable[[Any], None]

_PRELOADED = ["prefillcli.profile.completion", "prefillcli.profile.modes"]
_SAMPLE_SECONDS = 0.005
_WARM_UP_TOKENS = 64


class ChildEnded(PrefillError):
    """The process ended before its task was done, or was stopped because it took too long."""


class ChildFailed(Exception):
    """The task failed, and not for lack of memory: an error in the program. Its traceback is attached as a note."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What a child loads, and how it computes."""

    path: Path
    dtype: str
    device: str
    trust_remote_code: bool
    threads: int
    chunk_tokens: int = 0  # 0: not decided yet
    head: Literal["auto", "vocabulary", "probability", "value"] = "auto"


def in_child(task: Callable[..., None], *arguments: Any, timeout: float | None = None) -> Generator[Any, None, None]:
    """Yield what `task(send, *arguments)` sends, when it arrives.

    Raises ChildEnded, the PrefillError that ended the task, ResourceError where that was a lack of memory, or
    ChildFailed for any other error of the task.
    The process is gone when the iterator ends or is closed. `timeout` is in seconds, for the whole task.
    """
    # A fork of this process, with torch's threads, may hang. A fork of a server that has imported torch and computed
    # nothing does not, and it saves the seconds of the import.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(there, task, arguments), daemon=True)
    with _one_heap():
        process.start()
    there.close()
    end = None if timeout is None else time.monotonic() + timeout
    try:
        while True:
            if not here.poll(None if end is None else max(0.0, end - time.monotonic())):
                raise ChildEnded(f"it took more than {timeout:,.0f} seconds")
            try:
                kind, value = here.recv()
            except EOFError:
                process.join()
                raise ChildEnded(_why_ended(process.exitcode)) from None
            if kind == "end":
                return
            if kind == "error":
                raise value
            yield value
    finally:
        process.kill()
        process.join()
        here.close()


@contextmanager
def _one_heap() -> Iterator[None]:
    """Processes started within this context have one heap, not one of 64 MiB or more for each thread (glibc)."""
    before = os.environ.get("MALLOC_ARENA_MAX")
    os.environ["MALLOC_ARENA_MAX"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["MALLOC_ARENA_MAX"]
        else:
            os.environ["MALLOC_ARENA_MAX"] = before


def _run(pipe: Connection, task: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    survive_closed_streams()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that waits for this one ends it
    try:
        task(lambda value: pipe.send(("value", value)), *arguments)
        pipe.send(("end", None))
    except PrefillError as error:
        pipe.send(("error", error))
    except Exception as error:
        text = f"{type(error).__name__}: {brief(error)}"
        failure: Exception = ResourceError(text)
        if not out_of_memory(error):
            failure = ChildFailed(text)
            failure.add_note(f"in the child process:\n{traceback.format_exc()}")
        pipe.send(("error", failure))


def _why_ended(code: int | None) -> str:
    if code is not None and code < 0:
        return f"the process was ended by signal {-code} ({signal.Signals(-code).name})"
    return f"the process ended with exit code {code}"


def load_subject(subject: Subject) -> tuple[Any, Any]:
    """In a child: the model, and its files. Raises PrefillError."""
    import torch

    from prefillcli.models.find import read_model_files
    from prefillcli.models.load import load_model
    from prefillcli.runtime.device_key import choose_device

    torch.set_num_threads(subject.threads)
    files = read_model_files(
        subject.path,
        dtype=subject.dtype,
        device=subject.device,
        trust_remote_code=subject.trust_remote_code,
        head=subject.head,
    )
    device = choose_device(subject.device)
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    return load_model(files, device, trust_remote_code=subject.trust_remote_code), files


def prepare_prefill(subject: Subject, mode: str) -> tuple[Any, Callable[[int], Any]]:
    """The mode's prefill after a warm-up of two chunks, so that what is set up once does not count."""
    from prefillcli.profile.modes import Prefill
    from prefillcli.profile.prompts import random_prompt

    make_malloc_exact()
    model, files = load_subject(subject)
    for weight in model.parameters():
        weight.sum()  # weights may be mapped files: reading them for the first time is not part of a run
    prefill = Prefill(model, mode, subject.chunk_tokens)
    vocabulary = int(files.config.vocab_size)

    def prompt(tokens: int) -> Any:
        return random_prompt(tokens, vocabulary)

    short = Prefill(model, mode, _WARM_UP_TOKENS)
    short(prompt(_WARM_UP_TOKENS * 2 + 1))
    return prefill, prompt


def measure(send: Send, subject: Subject, mode: str, tokens: int) -> None:
    """Sends the MemoryPoint of one run."""
    prefill, prompt = prepare_prefill(subject, mode)
    ids = prompt(tokens)
    begun = time.perf_counter()
    peak = peak_bytes(partial(prefill, ids), subject.device)
    send(MemoryPoint(tokens=tokens, peak_bytes=peak, seconds=time.perf_counter() - begun))


def confirm(send: Send, subject: Subject, mode: str, tokens: int, budget: int) -> None:
    """Sends the Confirmation of one run that may use `budget` bytes above the loaded model, and no more."""
    prefill, prompt = prepare_prefill(subject, mode)
    ids = prompt(tokens)
    begun = time.perf_counter()
    with enforced(subject.device, budget) as enforcement:
        try:
            peak = peak_bytes(partial(prefill, ids), subject.device)
        except (MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            # While the error is handled, its frames still hold what the run allocated.
            excess, reason = enforcement.excess(error), brief(error)
        else:
            taken = time.perf_counter() - begun
            send(Confirmation(tokens=tokens, fits=True, peak_bytes=peak, seconds=taken))
            return
    send(Confirmation(tokens=tokens, fits=False, excess_bytes=excess, reason=reason))


def trace(send: Send, subject: Subject, mode: str, tokens: int) -> None:
    """Sends the TracePoints of one run as a list: memory in use over time, every 5 ms (figure 3 of PrefillOnly)."""
    prefill, prompt = prepare_prefill(subject, mode)
    ids = prompt(tokens)
    gc.collect()
    trim_heap()
    points: list[TracePoint] = []
    done = threading.Event()
    before, begun = resident(subject.device), time.perf_counter()

    def sample() -> None:
        while not done.is_set():
            used = max(0, resident(subject.device) - before)
            points.append(TracePoint(seconds=time.perf_counter() - begun, used_bytes=used))
            done.wait(_SAMPLE_SECONDS)

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        prefill(ids).tolist()  # waits for the device
    finally:
        done.set()
        sampler.join()
    send(points)
