"""Measurements in processes of their own: each loads the model, and what one leaves behind disturbs no other.

A task is called in the child with `send` and its arguments; whatever it sends is yielded here.
"""

from __future__ import annotations

import gc
import multiprocessing
import signal
import threading
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from prefillcli.errors import PrefillError, ResourceError, brief
from prefillcli.profile.budget import enforced, make_malloc_exact, measured, out_of_memory, resident, trim
from prefillcli.profile.store import Confirmation, MemoryPoint, TracePoint

Send = Callable[[Any], None]

_SAMPLE_SECONDS = 0.005
_WARM_UP_TOKENS = 64


class ChildEnded(PrefillError):
    """The process ended before its task did, or was ended because it took too long."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What a child loads, and how it computes."""

    path: Path
    dtype: str
    device: str
    trust_remote_code: bool
    threads: int
    chunk_tokens: int = 0  # 0 where it is not decided yet


def in_child(task: Callable[..., None], *arguments: Any, timeout: float | None = None) -> Generator[Any, None, None]:
    """What `task(send, *arguments)` sends, as it comes. Raises ChildEnded, or the PrefillError that ended the task.

    The process is gone when the iterator ends or is closed. `timeout` is in seconds, for the whole task.
    """
    context = multiprocessing.get_context("spawn")  # a fork of a process with torch's threads may hang
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(there, task, arguments), daemon=True)
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


def _run(pipe: Connection, task: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that waits for this one ends it
    try:
        task(lambda value: pipe.send(("value", value)), *arguments)
        pipe.send(("end", None))
    except PrefillError as error:
        pipe.send(("error", error))
    except Exception as error:
        kind = ResourceError if out_of_memory(error) else ChildEnded
        pipe.send(("error", kind(f"{type(error).__name__}: {brief(error)}")))


def _why_ended(code: int | None) -> str:
    if code is not None and code < 0:
        return f"the process was ended by signal {-code} ({signal.Signals(-code).name})"
    return f"the process ended with exit code {code}"


def load_subject(subject: Subject) -> tuple[Any, Any]:
    """In a child: the model, and its files. Raises PrefillError."""
    import torch

    from prefillcli.prefill.model import choose_device, load_model, read_model_files

    torch.set_num_threads(subject.threads)
    files = read_model_files(
        subject.path, dtype=subject.dtype, device=subject.device, trust_remote_code=subject.trust_remote_code
    )
    device = choose_device(subject.device)
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    return load_model(files, device, trust_remote_code=subject.trust_remote_code), files


def prepare(subject: Subject, mode: str) -> tuple[Any, Callable[[int], Any]]:
    """The mode's prefill after a warm-up in which chunks have met: what is set up once is not the prompts'."""
    make_malloc_exact()
    from prefillcli.profile.modes import Prefill, dummy_prompt

    model, files = load_subject(subject)
    for weight in model.parameters():
        weight.sum()  # weights may be mapped files: what is read of them first during a run is not the run's
    prefill = Prefill(model, mode, subject.chunk_tokens)
    vocabulary = int(files.config.vocab_size)

    def prompt(tokens: int) -> Any:
        return dummy_prompt(tokens, vocabulary)

    short = Prefill(model, mode, _WARM_UP_TOKENS)
    short(prompt(_WARM_UP_TOKENS * 2 + 1))
    return prefill, prompt


def measure(
    send: Send, subject: Subject, mode: str, lengths: Sequence[int], work: Sequence[float], patience: float
) -> None:
    """Sends (MemoryPoint, kept) for each of the `lengths`, ascending, or for the first three that take long.

    `work` is what each length has to compute, in any unit: a run that would take more than `patience` seconds by it is
    left out. A point's peak is above what was there after its run, and `kept` the bytes by which that is more than
    before the first one: libraries keep buffers, which grow with the first runs.
    """
    prefill, prompt = prepare(subject, mode)
    rate, kept = 0.0, 0
    for number, (tokens, own) in enumerate(zip(lengths, work, strict=True)):
        if number >= 3 and own * rate > patience:
            return
        ids = prompt(tokens)
        begun = time.perf_counter()
        use = measured(partial(prefill, ids), subject.device)
        taken = time.perf_counter() - begun
        rate = taken / own
        kept += use.kept
        send((MemoryPoint(tokens=tokens, peak_bytes=use.peak - use.kept, seconds=taken), kept))


def confirm(send: Send, subject: Subject, mode: str, tokens: int, budget: int) -> None:
    """Sends the Confirmation of one run that gets `budget` bytes above the loaded model, and not one more."""
    prefill, prompt = prepare(subject, mode)
    ids = prompt(tokens)
    begun = time.perf_counter()
    with enforced(subject.device, budget) as enforcement:
        try:
            use = measured(partial(prefill, ids), subject.device)
        except (MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            # While the error is handled its frames hold what the run had allocated.
            excess, reason = enforcement.excess(error), brief(error)
        else:
            taken = time.perf_counter() - begun
            send(Confirmation(tokens=tokens, fits=True, peak_bytes=use.peak, seconds=taken))
            return
    send(Confirmation(tokens=tokens, fits=False, excess_bytes=excess, reason=reason))


def trace(send: Send, subject: Subject, mode: str, tokens: int) -> None:
    """Sends the TracePoints of one run as a list: memory in use over time, every 5 ms (figure 3 of PrefillOnly)."""
    prefill, prompt = prepare(subject, mode)
    ids = prompt(tokens)
    gc.collect()
    trim()
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
