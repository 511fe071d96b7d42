"""The ways to prefill one prompt whose memory use is compared."""

from __future__ import annotations

import gc
import mmap
import multiprocessing
import os
import re
import resource
import signal
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from prefillcli.errors import PrefillError, ResourceError, brief, out_of_memory
from prefillcli.forecast.profile import OF_TRANSFORMERS, Confirmation, MemoryPoint, TracePoint
from prefillcli.models.law import memory_law
from prefillcli.models.shape import Shape
from prefillcli.plan.pack import Limits
from prefillcli.plan.plan import make_plan
from prefillcli.prefill.forest import ATTENTION
from prefillcli.prefill.layout import split_evenly
from prefillcli.prefill.model_ends import embedding_device, last_row
from prefillcli.prefill.walk import LayerWalk
from prefillcli.runtime.log import survive_closed_streams
from prefillcli.runtime.memory import (
    process_memory,
    reserved_at_peak,
    reserved_memory,
    resident_memory,
    set_malloc,
    trim_heap,
)

Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Prefill:
    """One prompt through the model in one mode; returns its last logits, float32 [vocabulary]."""

    model: PreTrainedModel
    mode: str
    chunk_tokens: int

    def __call__(self, prompt: Tokens) -> Tensor:
        return self._forward(prompt) if self.mode in OF_TRANSFORMERS else self._walk(prompt)

    @torch.inference_mode()
    def _forward(self, prompt: Tokens) -> Tensor:
        self.model.set_attn_implementation("sdpa")
        chunk = len(prompt) if self.mode == "full" else self.chunk_tokens
        ids = torch.as_tensor(prompt, dtype=torch.long)[None].to(embedding_device(self.model))
        cache = DynamicCache()
        logits: Tensor | None = None
        for start, end in split_evenly(len(prompt), chunk):
            logits = self.model(
                input_ids=ids[:, start:end], past_key_values=cache, use_cache=True, logits_to_keep=1
            ).logits
        if logits is None:
            raise ValueError("a prompt has at least one token")
        return last_row(logits)

    def _walk(self, prompt: Tokens) -> Tensor:
        self.model.set_attn_implementation(ATTENTION)
        walk = LayerWalk(self.model, chunk_tokens=self.chunk_tokens)
        try:
            (pack,) = make_plan([prompt], Limits(len(prompt), len(prompt))).packs
            return torch.cat(list(walk.read_logits(pack)))[0]
        finally:
            walk.close()


# How much memory a prompt takes in each mode, as a formula of the text configuration.
#
# The memory law of the layer walk is in `prefillcli.models.law`. This adds a layer's temporaries for each token
# (figure 4 of PrefillOnly), and the modes that keep or chunk other things.


_IDS = 8  # token id, int64; the position is in the law


@dataclass(frozen=True, slots=True)
class Law:
    """Bytes of one prompt in one mode: `base + token * tokens`. `terms` name the use of the bytes for each token."""

    base: float
    terms: Mapping[str, float]

    @property
    def token(self) -> float:
        """Bytes for each token."""
        return sum(self.terms.values())

    def bytes(self, tokens: int) -> float:
        return self.base + self.token * tokens

    def longest(self, budget: float) -> int:
        """Tokens of the longest prompt in `budget` bytes; 0 if none fits."""
        return max(0, int((budget - self.base) / self.token))


def mode_law(mode: str, config: Any, dtype: torch.dtype, chunk_tokens: int) -> Law:
    """The law of one of `prefillcli.forecast.profile.MODES`.

    The walk has a row of the residual stream, one layer's K,V and the position encoding for each token. transformers'
    own forward has all layers' K,V, the layer's input, and the embedding that its caller still holds. A mode that is
    not chunked has a layer's temporaries for each token, a chunked one for each token of a chunk. Chunked prefill in
    transformers also repeats the K,V that a chunk sees for all query heads, and makes a mask over them, bool and then
    in the dtype.
    """
    law = memory_law(config, dtype)
    layer = layer_bytes(config, dtype)
    walk = {"residual": law.residual, "K,V of one layer": law.key_value, "positions": law.rotary + _IDS}
    chunk = float(layer * chunk_tokens)
    if mode == "hybrid":
        return Law(_logits(config) + chunk, walk)
    all_layers = law.key_value * law.layers
    if mode == "full":
        return Law(
            _logits(config),
            {
                "embedding and residual": 2 * law.residual,
                "K,V of all layers": all_layers,
                "positions": law.rotary + _IDS,
                "a layer's temporaries": layer,
            },
        )
    if mode == "chunked":
        shape = Shape(config)
        groups = shape.heads / shape.kv_heads
        repeated = law.key_value * groups if groups > 1 else 0
        return Law(
            _logits(config) + chunk + chunk_tokens * 2 * law.residual,
            {
                "K,V of all layers": all_layers,
                "repeated K,V of one layer": repeated,
                "mask": chunk_tokens * (1 + dtype.itemsize),
            },
        )
    raise ValueError(f"no mode {mode!r}")


def layer_bytes(config: Any, dtype: torch.dtype) -> int:
    """Bytes of a layer's temporaries for one token at its peak, without its input.

    The peak is in the MLP: residual, normed input, and three rows of the inner width (gate after activation, up, their
    product). Or in attention: normed input, q, k, v, and three more rows in the width of q, for its rotation or
    attention's output. Or in a norm, which computes in float32: input, square and product.
    """
    shape, size = Shape(config), dtype.itemsize
    hidden, queries, keys = shape.hidden, shape.head_width * shape.heads, shape.head_width * shape.kv_heads
    mlp = size * (2 * hidden + 3 * shape.inner)
    attention = size * (hidden + 4 * queries + 2 * keys)
    norm = size * hidden + 4 * 3 * hidden
    return int(max(mlp, attention, norm))


def _logits(config: Any) -> float:
    # One prompt's logits in the dtype and in float32.
    return float(8 * config.vocab_size)


def attention_windows(config: Any) -> list[tuple[int | None, int]]:
    """Sliding windows (None: none) of the layers that attend for every token, and the number of layers of each.

    The walk leaves the last layer as soon as its K,V are stored.
    """
    counted = Counter(Shape(config).windows[:-1])
    return sorted(counted.items(), key=lambda each: each[0] or 0)


# Memory that a process allocates: its peak, and a limit on it.
#
# The same quantity is measured and limited. On the CPU that is private memory as the system maps it, touched or not
# (VmData, which RLIMIT_DATA bounds), on CUDA the memory that torch's allocator has reserved, including unusable holes.


#: Blocks of at least this size are mapped by themselves and return to the system as soon as they are freed. By default
#: glibc raises this limit to the largest block freed so far, up to 32 MiB, and keeps smaller ones in a heap with
#: holes. Short prompts would then seem to need up to twice as much memory for each token as long ones.
_MAPPED_BYTES = 32 << 10


def peak_bytes(step: Callable[[], object], device: str) -> int:
    """Bytes allocated at the peak of `step` above those allocated before. Raises PrefillError off Linux."""
    gc.collect()
    if device.startswith("cuda"):
        return reserved_at_peak(step, _cuda(device))[1]
    trim_heap()
    # The peak of the address space (VmPeak) cannot be reset. So the present size is raised to that peak by
    # inaccessible space, which the limit does not count: a later peak is then due to the step.
    below = _memory("VmPeak") - _memory("VmSize")
    room = mmap.mmap(-1, below, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=0) if below else nullcontext()
    with room:
        size = _memory("VmSize")
        step()
        return _memory("VmPeak") - size


def resident(device: str) -> int:
    """Bytes in use: reserved on the device, or resident in this process."""
    if device.startswith("cuda"):
        return reserved_memory(_cuda(device))
    return resident_memory()


@dataclass(slots=True)
class Enforcement:
    """A limit on the bytes that the process may allocate: the host's private memory, or the device's reserved
    memory."""

    device: str
    limit: int

    def excess(self, error: BaseException) -> int | None:
        """Bytes beyond the limit that the failed allocation would have taken.

        None if unknown: the error does not name the size, or raising it freed some memory.
        """
        asked = re.search(r"tried to allocate (\d+) bytes|Tried to allocate ([\d.]+) ([KMG])iB", str(error))
        if asked is None:
            return None
        size = int(asked[1]) if asked[1] else int(float(asked[2]) * 1024 ** ("KMG".index(asked[3]) + 1))
        beyond = _counted(self.device) + size - self.limit
        return beyond if beyond > 0 else None


@contextmanager
def enforced(device: str, budget: int) -> Iterator[Enforcement]:
    """Within this context, allocating more than `budget` bytes above the present allocation fails.

    On the CPU RLIMIT_DATA enforces it, which counts heap and anonymous mappings when they are made, touched or not. On
    CUDA torch's allocator does.
    """
    gc.collect()
    if device.startswith("cuda"):
        import torch

        torch.cuda.empty_cache()
        limit, own = _counted(device) + budget, _cuda(device)
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / torch.cuda.mem_get_info(own)[1]), own)
        try:
            yield Enforcement(device, limit)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, own)
        return
    trim_heap()
    limit = _counted(device) + budget
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, before[1]))
    try:
        yield Enforcement(device, limit)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def make_malloc_exact() -> None:
    """Make allocated memory follow used memory, without holes left by large blocks. glibc only."""
    set_malloc(_MAPPED_BYTES, _MAPPED_BYTES)


def _counted(device: str) -> int:
    # The bytes that the limit counts.
    if device.startswith("cuda"):
        return reserved_memory(_cuda(device))
    return _memory("VmData")


def _cuda(device: str) -> torch.device:
    # The device, whichever is the current one.
    import torch

    found = torch.device(device)
    return torch.device("cuda", torch.cuda.current_device()) if found.index is None else found


def _memory(field: str) -> int:
    try:
        return process_memory(field)
    except OSError:
        raise PrefillError("this system does not report the memory of a process; Linux does") from None


Send = Callable[[Any], None]

_PRELOADED = ["prefillcli.profile.measuring"]
_SAMPLE_SECONDS = 0.005
_WARM_UP_TOKENS = 64


class ChildEnded(PrefillError):
    """The process ended before it had finished its task, or was stopped because it took too long."""


class ChildFailed(Exception):
    """The task failed, and not for lack of memory: an error in the program. Its traceback is attached as a note."""


@dataclass(frozen=True, slots=True)
class Subject:
    """The model that a child loads, and its way of computing."""

    path: Path
    dtype: str
    device: str
    trust_remote_code: bool
    threads: int
    chunk_tokens: int = 0  # 0: not decided yet
    head: Literal["auto", "vocabulary", "probability", "value"] = "auto"


def in_child(task: Callable[..., None], *arguments: Any, timeout: float | None = None) -> Generator[Any, None, None]:
    """Yield the objects that `task(send, *arguments)` sends, as they arrive.

    Raises ChildEnded, the PrefillError that ended the task, ResourceError where that was a lack of memory, or
    ChildFailed for any other error of the task.
    The process is gone when the iterator ends or is closed. `timeout` is in seconds, for the whole task.
    """
    # A fork of this process, with torch's threads, may hang. A fork of a server that has imported torch but computed
    # nothing does not hang, and it saves the seconds of the import.
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
    # Processes started within this context have one heap, not one of 64 MiB or more for each thread (glibc).
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

    torch.set_num_threads(subject.threads)
    files = read_model_files(
        subject.path,
        dtype=subject.dtype,
        trust_remote_code=subject.trust_remote_code,
        head=subject.head,
    )
    device = torch.device(subject.device)
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    return load_model(files, device, trust_remote_code=subject.trust_remote_code), files


def prepare_prefill(subject: Subject, mode: str) -> tuple[Any, Callable[[int], Any]]:
    """The mode's prefill after a warm-up of two chunks, so that one-time set-up does not count."""

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
    """Sends the Confirmation of one run that may use at most `budget` bytes above the loaded model."""
    prefill, prompt = prepare_prefill(subject, mode)
    ids = prompt(tokens)
    begun = time.perf_counter()
    with enforced(subject.device, budget) as enforcement:
        try:
            peak = peak_bytes(partial(prefill, ids), subject.device)
        except (MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            # While the error is handled, its frames still hold the run's memory.
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


# Random prompts: the words of a prompt change neither the time nor the memory that it takes.


_FIRST_ID = 3  # below it tokenizers often have control tokens


def random_tokens(rng: np.random.Generator, count: int, vocabulary: int) -> Tokens:
    """int32 [count], drawn from a vocabulary of so many tokens."""
    return rng.integers(_FIRST_ID, vocabulary, count).astype(np.int32)


def random_prompt(tokens: int, vocabulary: int, seed: int = 0) -> Tokens:
    """One prompt, int32 [tokens]."""
    return random_tokens(np.random.default_rng(seed), tokens, vocabulary)


def prompts_with_histories(
    users: int, posts: int, history: int, post: int, vocabulary: int, seed: int = 0
) -> list[Tokens]:
    """`users` histories of `history` tokens, each followed by `posts` candidates of `post` tokens (as in
    PrefillOnly)."""
    rng = np.random.default_rng(seed)
    prompts = []
    for _ in range(users):
        shared = random_tokens(rng, history, vocabulary)
        prompts += [np.concatenate([shared, random_tokens(rng, post, vocabulary)]) for _ in range(posts)]
    return prompts
