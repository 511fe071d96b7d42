"""The contenders of `python -m benchmarks.peers`, each in its own process, which waits for its turn."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.memory import tree_memory
from benchmarks.methods import plain_loop
from benchmarks.padded import padded_batches
from prefillcli.engines.base import Engine
from prefillcli.models.heads import label_numbers
from prefillcli.plan.behind import LabelSet
from prefillcli.plan.plan import make_plan
from prefillcli.plan.trie import TokenArray

#: Two labels of one token each. To random weights their meaning does not matter.
LABELS = LabelSet.of([[5], [7]])
CORES = os.environ.get("VLLM_CPU_OMP_THREADS_BIND") or f"0-{(os.cpu_count() or 1) - 1}"  # on which vLLM computes
SAMPLE_SECONDS = 0.02  # between two looks at a contender's memory
Scores = npt.NDArray[np.float64]
Method = Callable[[], Scores]
Settings = Mapping[str, Any]


class Runner:
    """A contender in its own process, ready to score `prompts`. Always close it.

    `seconds_to_start` counts from the start of the process until it can score: imports, weights, and the start of what
    it starts itself. `settings` depend on the contender. Raises RuntimeError if the process ends before it is ready;
    what it wrote to stderr says why.
    """

    def __init__(
        self, name: str, model: Path, dtype: str, prompts: Sequence[TokenArray], settings: Settings | None = None
    ) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, there = spawn.Pipe()
        begun = time.monotonic()
        self._process = spawn.Process(target=_serve, args=(there, name, model, dtype, prompts, settings or {}))
        self._process.start()
        there.close()
        try:
            self.about: dict[str, Any] = self._answer()
        except BaseException:
            self.close()
            raise
        self.seconds_to_start = time.monotonic() - begun

    def run(self) -> Scores:
        """P(first label) among the labels, float64 [prompts], computed anew."""
        self._pipe.send(True)
        scores: Scores = self._answer()
        return scores

    def run_watched(self) -> tuple[Scores, int, int]:
        """`run`, and bytes of the process and its children: before, and at the highest that was seen on the way.

        Proportional set size: what several processes share counts once. Linux only.
        """
        before = peak = tree_memory(self._process.pid)
        done = Event()

        def watch() -> None:
            nonlocal peak
            while not done.wait(SAMPLE_SECONDS):
                peak = max(peak, tree_memory(self._process.pid))

        thread = Thread(target=watch)
        thread.start()
        try:
            return self.run(), before, peak
        finally:
            done.set()
            thread.join()

    def _answer(self) -> Any:
        try:
            return self._pipe.recv()
        except EOFError:
            self._process.join()
            raise RuntimeError(f"the process ended with {self._process.exitcode}") from None

    def close(self) -> None:
        with suppress(OSError):
            self._pipe.send(False)
        self._process.join()


def _serve(
    pipe: Connection, name: str, model: Path, dtype: str, prompts: Sequence[TokenArray], settings: Settings
) -> None:
    """Open the contender, report that, then run it whenever asked."""
    with METHODS[name](model, dtype, prompts, **settings) as (method, about):
        pipe.send(about)
        with suppress(EOFError):  # the parent is gone
            while pipe.recv():
                pipe.send(method())


@contextmanager
def _walk(model: Path, dtype: str, prompts: Sequence[TokenArray]) -> Iterator[tuple[Method, Settings]]:
    """The engine of `prefill score`, with the packs and chunks that it chooses by itself."""
    from prefillcli.jobs.load import load_walk
    from prefillcli.models.find import read_model_files
    from prefillcli.models.open import Opened
    from prefillcli.options.groups import LoadingOptions

    files = read_model_files(model, dtype=dtype)
    loaded = load_walk(Opened(files, torch.device("cpu"), None, (), files.max_length), LoadingOptions())
    about = {"threads": torch.get_num_threads(), "chunk_tokens": loaded.plan["chunk_tokens"]}
    about |= {"pack_tokens": loaded.engine.limits.tokens}
    with ExitStack() as stack:
        stack.callback(loaded.close)
        yield lambda: _scores(loaded.engine, prompts)[0], about


@contextmanager
def _plain(model: Path, dtype: str, prompts: Sequence[TokenArray]) -> Iterator[tuple[Method, Settings]]:
    network = _transformers_model(model, dtype)
    yield lambda: _share(_logprobs(plain_loop(network, prompts))), {"threads": torch.get_num_threads()}


@contextmanager
def _padded(
    model: Path, dtype: str, prompts: Sequence[TokenArray], batch_tokens: int
) -> Iterator[tuple[Method, Settings]]:
    network = _transformers_model(model, dtype)
    about = {"threads": torch.get_num_threads(), "batch_tokens": batch_tokens}
    yield lambda: _share(_logprobs(padded_batches(network, prompts, batch_tokens))), about


@contextmanager
def _vllm(
    model: Path, dtype: str, prompts: Sequence[TokenArray], cores: str, libiomp: bool, **options: Any
) -> Iterator[tuple[Method, Settings]]:
    """The engine of `prefill score --engine vllm`. Each run begins with an empty prefix cache.

    `libiomp`: its processes load Intel's OpenMP first where it is installed, which vLLM recommends on CPUs.
    """
    from prefillcli.engines.vllm import VllmEngine

    libiomp = use_vllm_cores(cores, libiomp)
    engine = VllmEngine(model, dtype=dtype, max_length=max(map(len, prompts)), options=options)

    def run() -> Scores:
        engine.forget()
        scores, cached = _scores(engine, prompts)
        if cached:
            raise RuntimeError(f"the prefix cache was not empty: {cached} tokens of the first prompt came from it")
        return scores

    with ExitStack() as stack:
        stack.callback(engine.close)
        yield run, {"cores": cores, "libiomp": libiomp, **options}


def use_vllm_cores(cores: str, libiomp: bool) -> bool:
    """Have vLLM's processes compute on these cores, with Intel's OpenMP if asked and installed. Whether it is."""
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = cores
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    library = Path(sys.prefix, "lib", "libiomp5.so")
    if libiomp := libiomp and library.exists():
        os.environ["LD_PRELOAD"] = str(library)
    return libiomp


METHODS: dict[str, Any] = {"torch walk": _walk, "plain loop": _plain, "padded batches": _padded, "vLLM": _vllm}


def _scores(engine: Engine, prompts: Sequence[TokenArray]) -> tuple[Scores, int]:
    """Plan and answer. The scores, and the cached tokens of the first prompt's answer."""
    found: dict[int, Scores] = {}
    cached: dict[int, int] = {}
    plan = make_plan(prompts, engine.limits)
    for pack in plan.packs:
        for answers in engine.answer(pack, lambda _: LABELS, lambda _: None):
            found |= {each.prompt: each.logprobs for each in answers}
            cached |= {each.prompt: each.shared_tokens for each in answers}
    first = plan.packs[0].reads[0][1][0]
    return _share(np.stack([found[row] for row in range(len(prompts))])), cached[first]


def _transformers_model(model: Path, dtype: str) -> Any:
    from prefillcli.models.find import read_model_files
    from prefillcli.models.load import load_weights

    return load_weights(read_model_files(model, dtype=dtype), torch.device("cpu"), attention="sdpa")


def _logprobs(logits: torch.Tensor) -> Scores:
    return np.stack(label_numbers(logits, list(range(len(logits))), [LABELS.first] * len(logits)))


def _share(logprobs: Scores) -> Scores:
    """P(first label) among the labels [prompts], of log-probabilities [prompts, labels]."""
    share: Scores = np.exp(logprobs[:, 0] - np.logaddexp.reduce(logprobs, axis=1))
    return share
