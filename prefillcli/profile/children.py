"""Measurements in processes of their own: each loads the model, and what one leaves behind disturbs no other.

A task is called in the child with `send` and its arguments; whatever it sends is yielded here.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import re
import resource
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from prefillcli.errors import PrefillError, ResourceError, brief
from prefillcli.profile.store import Confirmation, MemoryPoint, TracePoint

Send = Callable[[Any], None]

#: Blocks from this size on go back to the system as soon as they are freed. glibc raises its own limit to the largest
#: block freed so far, up to 32 MiB, and keeps smaller ones in a heap with holes: short prompts would seem to need up
#: to twice the memory for each token that long ones do.
_MAPPED_BYTES = 128 << 10  # where that limit starts
_M_MMAP_THRESHOLD = -3
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

    _return_blocks_at_once()
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
    """Sends a MemoryPoint for each of the `lengths`, ascending, or for the first three that take long.

    `work` is what each length has to compute, in any unit: a run that would take more than `patience` seconds by it is
    left out.
    """
    from prefillcli.bench.measure import with_peak

    prefill, prompt = prepare(subject, mode)
    rate = 0.0
    for number, (tokens, own) in enumerate(zip(lengths, work, strict=True)):
        if number >= 3 and own * rate > patience:
            return
        ids = prompt(tokens)
        begun = time.perf_counter()
        _, peak = with_peak(lambda ids=ids: _finish(prefill(ids), subject), cuda=_on_cuda(subject))  # type: ignore[misc]
        taken = time.perf_counter() - begun
        rate = taken / own
        if peak is None:
            raise PrefillError("this system does not tell how much memory a process uses; Linux does")
        send(MemoryPoint(tokens=tokens, peak_bytes=peak, seconds=taken))


def confirm(send: Send, subject: Subject, mode: str, tokens: int, budget: int) -> None:
    """Sends the Confirmation of one run that gets `budget` bytes above the loaded model, and not one more."""
    from prefillcli.bench.measure import with_peak

    prefill, prompt = prepare(subject, mode)
    ids = prompt(tokens)
    begun = time.perf_counter()
    with enforced(subject.device, budget) as enforcement:
        try:
            _, peak = with_peak(lambda: _finish(prefill(ids), subject), cuda=_on_cuda(subject))
        except (MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            # While the error is handled its frames hold what the run had allocated.
            excess, reason = enforcement.excess(error), brief(error)
        else:
            taken = time.perf_counter() - begun
            send(Confirmation(tokens=tokens, fits=True, peak_bytes=peak, seconds=taken))
            return
    send(Confirmation(tokens=tokens, fits=False, excess_bytes=excess, reason=reason))


def trace(send: Send, subject: Subject, mode: str, tokens: int) -> None:
    """Sends the TracePoints of one run as a list: memory in use over time, every 5 ms (figure 3 of PrefillOnly)."""
    prefill, prompt = prepare(subject, mode)
    ids = prompt(tokens)
    gc.collect()
    _trim()
    points: list[TracePoint] = []
    done = threading.Event()
    before, begun = used_bytes(subject.device), time.perf_counter()

    def sample() -> None:
        while not done.is_set():
            used = max(0, used_bytes(subject.device) - before)
            points.append(TracePoint(seconds=time.perf_counter() - begun, used_bytes=used))
            done.wait(_SAMPLE_SECONDS)

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        _finish(prefill(ids), subject)
    finally:
        done.set()
        sampler.join()
    send(points)


def _finish(logits: Any, subject: Subject) -> Any:
    if _on_cuda(subject):
        import torch

        torch.cuda.synchronize()
    return logits


def _on_cuda(subject: Subject) -> bool:
    return subject.device.startswith("cuda")


# The budget.


@dataclass(slots=True)
class Enforcement:
    """A limit on what the process may allocate, in bytes: all private memory of the host, or the device's tensors."""

    device: str
    limit: int

    def excess(self, error: BaseException) -> int | None:
        """Bytes beyond the limit that the failed allocation would have taken; None where it does not say its size."""
        asked = re.search(r"tried to allocate (\d+) bytes|Tried to allocate ([\d.]+) ([KMG])iB", str(error))
        if asked is None:
            return None
        size = int(asked[1]) if asked[1] else int(float(asked[2]) * 1024 ** ("KMG".index(asked[3]) + 1))
        return max(0, _allocated(self.device) + size - self.limit)


@contextmanager
def enforced(device: str, budget: int) -> Iterator[Enforcement]:
    """Inside, allocating more than `budget` bytes above what is allocated now fails.

    On the CPU by RLIMIT_DATA, which counts heap and anonymous mappings when they are made, touched or not. On CUDA
    torch's allocator refuses.
    """
    gc.collect()
    if device.startswith("cuda"):
        import torch

        torch.cuda.empty_cache()
        limit = torch.cuda.memory_reserved() + budget
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / torch.cuda.mem_get_info()[1]))
        try:
            yield Enforcement(device, limit)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        return
    _trim()
    limit = _allocated(device) - _free_in_heap() + budget  # room that the heap has kept is not the run's for nothing
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, before[1]))
    try:
        yield Enforcement(device, limit)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory could not be had."""
    words = ("not enough memory", "can't allocate memory", "could not create a memory", "bad_alloc", "out of memory")
    return isinstance(error, MemoryError) or any(word in str(error) for word in words)


def used_bytes(device: str) -> int:
    """Memory in use: of tensors on the device, or resident in this process."""
    if device.startswith("cuda"):
        import torch

        return int(torch.cuda.memory_allocated())
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _allocated(device: str) -> int:
    """What the limit counts."""
    if device.startswith("cuda"):
        import torch

        return int(torch.cuda.memory_reserved())
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    raise PrefillError("this system does not tell how much memory a process has; Linux does")


class _MallInfo(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"
        )
    )  # fmt: skip


def _free_in_heap() -> int:
    """Bytes that the process has and could use without asking the system; 0 where the C library does not tell."""
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        return 0
    mallinfo.restype = _MallInfo
    return int(mallinfo().fordblks)


def _return_blocks_at_once() -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)


def _trim() -> None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
