"""`prefill doctor`: what this machine has, what a run would use of it and why, and whether it computes right."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from prefillcli.errors import ResourceError
from prefillcli.jobs.shell import shell
from prefillcli.options.doctor import DoctorSettings
from prefillcli.redaction import shown
from prefillcli.report.diagnosis import DTYPES, Diagnosis, print_diagnosis
from prefillcli.report.run import versions
from prefillcli.runtime import log, memory
from prefillcli.runtime.compiled import compiler_file
from prefillcli.runtime.cores import affinity, cpu_flags, cpu_name, quotas
from prefillcli.runtime.device_key import device_key, driver_version
from prefillcli.runtime.extras import OPTIONAL, installed
from prefillcli.runtime.signals import Stop
from prefillcli.runtime.threads import Threads, given_numbers
from prefillcli.runtime.user_cache import cache_folder

if TYPE_CHECKING:
    import torch

#: Paths in the order in which attention takes them.
_ORDER = ("kernel", "products", "varlen-flash", "flash-cuda", "flex", "flash-cpu", "blocks")
#: Compute capabilities of CUDA devices on which torch computes a layer's experts as one product.
FAST_GROUPED_PRODUCTS = {(9, 0), (10, 0)}
#: Instruction sets that decide what is fast, as processors call them, and as people do.
_INSTRUCTIONS = {
    "avx2": "AVX2",
    "avx512f": "AVX-512",
    "avx512_vnni": "AVX512-VNNI",
    "avx512_bf16": "AVX512-BF16",
    "avx512_fp16": "AVX512-FP16",
    "amx_bf16": "AMX-BF16",
    "asimd": "NEON",
    "bf16": "BF16",
    "sve": "SVE",
}


def doctor_job(settings: DoctorSettings) -> dict[str, Any]:
    """Check, remember what was found, and show it on stderr; return the summary for the last line on stdout.

    The exit code in the summary is 1 where a path of attention is wrong here, as runs have to go around it.
    """
    found = Diagnosis()
    with shell(found, debug=settings.debug) as stop:
        _examine(settings, found, stop)
    if found.status != "interrupted" and found.checks and not settings.quiet:
        print_diagnosis(found)
    summary: dict[str, Any] = shown(asdict(found))
    return summary


def _examine(settings: DoctorSettings, found: Diagnosis, stop: Stop) -> None:
    from prefillcli.runtime.devices import choose_device, other_devices

    found.versions, found.packages = versions(), {name: installed(name) for name in OPTIONAL}
    found.uses = dict(OPTIONAL)
    threads = Threads(settings.threads)
    found.threads, found.why_threads = threads.most, _why_threads(settings)
    found.cpu = _processor()
    device = choose_device(settings.device)
    found.device, found.others = _described(device), other_devices(device)
    found.why_device = _why_device(settings, device)
    found.dtype = _dtype_advice(device)
    found.memory = _budget(settings, device)
    found.notes = list(_notes(device))
    with stop.at_once():
        _check(device, found)
    wrong = [check for check in found.checks if check["status"] in ("differs", "fails")]
    for check in wrong:
        around = "nothing can take its place" if check["path"] == "blocks" else "runs on this machine go without it"
        log.error(f"{check['path']} is wrong in {check['dtype']}: {check['why']}; {around}")
    if settings.model is not None:
        with stop.at_once():
            found.model = _with_model(settings, device, found)
    if wrong:
        found.status, found.exit_code = "failed", 1
        found.error = f"{wrong[0]['path']} is wrong in {wrong[0]['dtype']}: {wrong[0]['why']}"


def _check(device: torch.device, found: Diagnosis) -> None:
    """Compare each path with explicit scores, remember the outcome, and rule out what differs."""
    import torch

    from prefillcli.models.trust import DeviceRecord
    from prefillcli.prefill import attention_checks, attention_paths

    attention_paths.allow_all()
    record = DeviceRecord(device)
    checks = []
    for name in DTYPES:
        dtype = getattr(torch, name)
        found.eager_errors[name] = attention_checks.eager_errors(dtype)
        checks += attention_checks.check_paths(attention_checks.CHECKED, device, dtype)
    record.note(checks)
    found.cache = {"folder": str(cache_folder()), "remembered": record.save()}
    found.checks = [asdict(check) for check in checks]
    for name in DTYPES:
        agree = {check.path for check in checks if check.dtype == name and check.status == "agrees"}
        found.attention[name] = [path for path in _ORDER if path in agree]
    for check in checks:
        if check.status in ("differs", "fails"):
            attention_paths.rule_out(check.path, device, str(check.why))


def _processor() -> dict[str, Any]:
    quota = min((each.cores for each in quotas()), default=None)
    flags = set(cpu_flags())
    compiler = compiler_file()
    return {
        "model": cpu_name(),
        "cores": len(affinity()),
        "quota": quota,
        "instructions": [name for flag, name in _INSTRUCTIONS.items() if flag in flags],
        "compiler": None if compiler is None else compiler.rsplit(" ", 2)[0],
    }


def _described(device: torch.device) -> dict[str, Any]:
    key = device_key(device)
    free = total = None
    with suppress(ResourceError):
        free = memory.available_memory(device)
    with suppress(OSError, ValueError):
        total = memory.device_capacity(device)
    return {
        "name": str(device),
        "kind": device.type,
        "model": key.device,
        "capability": key.capability,
        "driver": key.driver,
        "memory_bytes": total,
        "free_bytes": free,
    }


def _why_device(settings: DoctorSettings, device: torch.device) -> str:
    if settings.device != "auto":
        return "as asked for"
    return "the first CUDA device" if device.type == "cuda" else "no CUDA device is here"


def _why_threads(settings: DoctorSettings) -> str:
    if settings.threads != "auto":
        return "as asked for"
    if given := given_numbers(os.environ):
        return ", ".join(f"{name}={os.environ[name]}" for name in given) + " in the environment"
    limits = quotas()
    cores = len(affinity())
    if limits and min(each.cores for each in limits) < cores:
        return "what the control group's quota allows; fewer while other programs are busy"
    return "one for each core that this process may use; fewer while other programs are busy"


def _dtype_advice(device: torch.device) -> dict[str, str]:
    import torch

    from prefillcli.prefill.attention import compute_capability
    from prefillcli.prefill.products import has_bfloat16_instructions

    if device.type == "cpu":
        if has_bfloat16_instructions():
            return {"advice": "bfloat16", "why": "the processor multiplies it by itself; float32 is the most exact"}
        return {"advice": "float32", "why": "the processor has no instructions for bfloat16"}
    if device.type == "cuda":
        if torch.version.hip or compute_capability(device) >= (8, 0):
            return {"advice": "bfloat16", "why": "it is fast here, and has flash attention"}
        return {"advice": "float16", "why": "bfloat16 needs compute capability 8.0"}
    return {"advice": "float16", "why": "half precision is fast there; prefill was never measured on such a device"}


def _budget(settings: DoctorSettings, device: torch.device) -> dict[str, Any]:
    from prefillcli.engines.memory_plan import budget_of
    from prefillcli.models.law import FREE_SHARE

    if settings.memory:
        return {"budget_bytes": budget_of(_Budget(settings.memory), None), "why": "as asked for"}
    try:
        budget = budget_of(_Budget(None), memory.available_memory(device))
    except ResourceError as error:
        return {"budget_bytes": None, "why": str(error)}
    return {"budget_bytes": budget, "why": f"{FREE_SHARE:.0%} of what is free, less what weights take"}


class _Budget:
    """A `MemoryChoice` with a budget alone."""

    pack_tokens = chunk_tokens = None
    prefix_kv = "auto"

    def __init__(self, memory: str | None) -> None:
        self.memory = memory


def _notes(device: torch.device) -> list[str]:
    import torch

    from prefillcli.prefill.attention import compute_capability

    notes = []
    if device.type == "cpu" and driver_version() is not None and torch.version.cuda is None:
        notes.append("a driver of NVIDIA is here, but this torch is built for CPUs: install a CUDA build of it")
    if device.type == "cuda" and compute_capability(device) not in FAST_GROUPED_PRODUCTS:
        notes.append(
            "models with experts wait for this device at each expert: torch's fast grouped products are for compute "
            "capability 9.0 and 10.0"
        )
    if device.type == "mps":
        notes.append("prefill never ran on an Apple GPU: each family is compared with its own forward when it loads")
    elif device.type == "cpu" and torch.backends.mps.is_available():
        notes.append("an Apple GPU is here, and --device mps takes it; prefill never ran on one")
    return notes


def _with_model(settings: DoctorSettings, device: torch.device, found: Diagnosis) -> dict[str, Any]:
    """What a run would do with the model of `--model`."""
    from prefillcli.engines.memory_plan import Placed, budget_of, plan_packs
    from prefillcli.models.families import UNWALKED, VERIFIED
    from prefillcli.models.law import memory_law
    from prefillcli.models.open import Opened, open_model
    from prefillcli.models.shape import NoCostModel
    from prefillcli.models.weights import plan_weights

    files, device = open_model(settings)
    facts: dict[str, Any] = {
        "path": str(files.origin),
        "family": files.family,
        "dtype": str(files.dtype).removeprefix("torch."),
        **dict.fromkeys(("weight_bytes", "weights", "token_bytes", "chunk_tokens", "longest_prompt", "limited_by")),
    }
    if why := UNWALKED.get(files.family):
        return facts | {"walk": f"cannot be walked layer by layer: it {why}; take --engine hf"}
    walk = "is compared with its own forward when it is loaded"
    if files.family in VERIFIED and device.type == "cpu":
        walk = "layer by layer; the tests compare this family with its own forward"
    opened = Opened(files, device, None, None, files.max_length_apart)
    weights = plan_weights(opened, Placed(weights="auto"))
    budget = found.memory["budget_bytes"]
    if not settings.memory and budget is not None:
        taken = weights.memory if device.type != "cpu" or weights.streamed else 0
        budget = budget_of(_Budget(None), max(memory.available_memory(device) - taken, 0))
    facts |= {
        "walk": walk,
        "weight_bytes": weights.bytes,
        "weights": "streamed from the files" if weights.streamed else "all in memory",
    }
    with suppress(NoCostModel):
        if budget is not None:
            plan = plan_packs(opened, _Budget(settings.memory), budget)
            room = plan["limits"]["max_tokens"]
            longest = min(room, files.max_length_apart)
            facts |= {
                "token_bytes": memory_law(files.config, files.dtype).token,
                "chunk_tokens": plan["chunk_tokens"],
                "longest_prompt": longest,
                "limited_by": "what the model reads" if longest < room else "what fits the memory",
            }
    found.notes += _experts_note(files.config, files.dtype, device)
    return facts


def _experts_note(config: Any, dtype: torch.dtype, device: torch.device) -> list[str]:
    """transformers multiplies all experts in one grouped product on few devices alone."""
    import torch

    from prefillcli.prefill.attention import compute_capability

    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    if not experts or device.type != "cuda":
        return []
    if dtype == torch.bfloat16 and compute_capability(device)[0] >= 9:
        return []
    return [
        "transformers multiplies experts one by one here, with a synchronisation for each: its grouped products are "
        "fast in bfloat16 on compute capability 9.0 and above alone"
    ]
