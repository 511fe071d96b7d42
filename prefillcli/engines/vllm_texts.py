"""Texts behind prompts by vLLM: its batches, its prefix cache, and its own speculation where it is set up for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any

from prefillcli.decode.continuations import Beginning, Continuation, DecodingReport, DrafterCounts, Writing

COUNTERS = {
    "vllm:spec_decode_num_drafts": "rounds",
    "vllm:spec_decode_num_draft_tokens": "proposed",
    "vllm:spec_decode_num_accepted_tokens": "accepted",
}
"""vLLM's metrics, by the names of `DrafterCounts`."""


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
        """The texts behind these prompts. `tick` is called with 0 after each step, and may raise to stop."""
        begun, found = time.monotonic(), dict[int, Continuation]()
        for prompt, beginning in wanted.items():
            context = [*beginning.prompt.tolist(), *beginning.tokens]
            room = min(writing.tokens, self._longest - len(context))
            if room < 1:
                found[prompt] = Continuation((), "length", float("inf"))
                continue
            asked = _parameters(writing, room, beginning.key)
            self._engine.add_request(f"text {prompt}", {"prompt_token_ids": context}, asked)
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
        """What writing has taken so far; None if nothing was written. Reading prompts again is part of its seconds."""
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
        """What vLLM has counted of its guesses since it started."""
        counts = dict.fromkeys(COUNTERS.values(), 0)
        if self._drafter is not None:
            for metric in self._engine.get_metrics():
                if metric.name in COUNTERS:
                    counts[COUNTERS[metric.name]] += int(metric.value)
        return counts


def _parameters(writing: Writing, room: int, key: str) -> Any:
    """What is asked for a text. vLLM draws with its own noise, from a seed that follows from the text's key."""
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
    """The text of what vLLM has written. What it has compared for a drawn token is not known, so its gap is NaN."""
    tokens = tuple(completion.token_ids)
    stopped = completion.finish_reason == "stop"
    if stopped and tokens and tokens[-1] in writing.stop_tokens:
        tokens = tokens[:-1]
    gap = float("nan") if writing.temperature > 0 else min(map(_gap, completion.logprobs))
    return Continuation(tokens, "stop" if stopped else "length", gap)


def _gap(position: Mapping[int, Any]) -> float:
    """The difference between the two largest log-probabilities, which is that of the logits."""
    best: Sequence[float] = sorted((each.logprob for each in position.values()), reverse=True)
    return best[0] - best[1]
