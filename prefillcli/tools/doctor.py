"""`prefill doctor`: this machine's equipment, the parts that a run would use and why, and whether it computes
right."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from prefillcli.engines.memory_plan import budget_of, plan_packs
from prefillcli.errors import ResourceError, shown
from prefillcli.models.dtype import MARGIN, times_as_long
from prefillcli.models.gguf import cache_use
from prefillcli.models.law import FREE_SHARE, memory_law
from prefillcli.models.newest_flash import settle_flash
from prefillcli.models.open import Opened, open_model
from prefillcli.models.rehearsal import DeviceRecord
from prefillcli.models.shape import UNWALKED, VERIFIED, NoCostModel
from prefillcli.options.commands import DoctorSettings
from prefillcli.options.groups import BudgetOptions, LayerOptions, MemoryOptions
from prefillcli.report.run import versions
from prefillcli.report.section import TableRows, byte_size, numbers_table, pairs_table, stderr_console
from prefillcli.runtime import clock, cores, device_key, extras, log, memory, signals, user_cache
from prefillcli.scoring.loading import plan_weights
from prefillcli.scoring.shell import Ended, shell
from prefillcli.walk import attention, attention_checks, fusion, narrow

# The findings of `prefill doctor`: its JSON line, and its tables.


DTYPES = ("float32", "bfloat16", "float16")
USUAL_WIDTH = 128  # of a head
CAPTION = "The largest error of an output around 1, for usual scores and for scores near 200."


@dataclass
class Diagnosis(Ended):
    """The content of the last line on stdout. Sizes are bytes; values unknown on this system are null."""

    # The one that will be used: `name`, `kind`, `model`, `capability`, `driver`, `memory_bytes`, `free_bytes`.
    device: dict[str, Any] = field(default_factory=dict)
    why_device: str = ""
    others: list[str] = field(default_factory=list)  # further devices of this machine
    # `model`, `cores` of the affinity, `quota` in cores, `instructions`, `compiler`, `kernel`: its form.
    cpu: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    # Optional packages and their versions, null for one that is not installed.
    packages: dict[str, str | None] = field(default_factory=dict)
    uses: dict[str, str] = field(default_factory=dict)  # the purpose of each of these
    threads: int = 0
    why_threads: str = ""
    # `budget_bytes` for activations and K,V before weights are there, and `why`.
    memory: dict[str, Any] = field(default_factory=dict)
    dtype: dict[str, str] = field(default_factory=dict)  # `advice`, and `why`
    # For each low precision in which the device multiplies: `by` which way, and the `error` of a product.
    compute: dict[str, dict[str, Any]] = field(default_factory=dict)
    # The paths that agree, by dtype, in the order in which they are tried.
    attention: dict[str, list[str]] = field(default_factory=dict)
    # Each path in each dtype: `path`, `dtype`, `status`, `why`, `error`, `large_error`, `lse_error`.
    checks: list[dict[str, Any]] = field(default_factory=list)
    # `error` and `large_error` of eager attention in the same cases, by dtype.
    eager_errors: dict[str, tuple[float, float]] = field(default_factory=dict)
    # What can take the place of torch's flash attention, newest first, and why one does not: null for one that does.
    flash: dict[str, str | None] = field(default_factory=dict)
    passes: dict[str, str] = field(default_factory=dict)  # between a layer's products: `agrees`, ... by dtype
    notes: list[str] = field(default_factory=list)
    # `folder`, whether the outcome is `remembered` there, and the `gguf_bytes` of models made of GGUF files in
    # `gguf_folder`.
    cache: dict[str, Any] = field(default_factory=dict)
    # With --model: `path`, `family`, `dtype`, `walk`, `weight_bytes`, `token_bytes`, `chunk_tokens`, `longest_prompt`,
    # `limited_by`.
    model: dict[str, Any] | None = None


def _print_diagnosis(found: Diagnosis) -> None:
    # The tables, on stderr.
    console = stderr_console()
    console.print(pairs_table(_machine_lines(found)))
    console.print()
    console.print(pairs_table(_use_lines(found)))
    console.print()
    console.print(numbers_table(_check_rows(found), caption=CAPTION))
    for line in _missing_lines(found):
        console.print(f"  {line}", style="dim")
    if found.model is not None:
        console.print()
        console.print(pairs_table(_model_lines(found.model)))
    for note in found.notes:
        console.print(f"note: {note}")


def _machine_lines(found: Diagnosis) -> Iterator[tuple[str, str]]:
    # This machine's equipment: a name and a text each.
    device, cpu = found.device, found.cpu
    if device["kind"] != "cpu":
        capability = f", compute capability {device['capability']}" if device["capability"] else ""
        driver = f", driver {device['driver']}" if device["driver"] else ""
        yield "device", f"{device['name']}: {device['model']}{capability}{driver}"
    quota = "" if cpu["quota"] is None else f", quota of {cpu['quota']:g}"
    yield "processor", f"{cpu['model']}, {cpu['cores']} cores{quota}"
    yield "instructions", ", ".join(cpu["instructions"]) or "not told"
    free, total = device["free_bytes"], device["memory_bytes"]
    if total is not None:
        yield "memory", f"{byte_size(free)} of {byte_size(total)} free" if free is not None else byte_size(total)
    yield "software", ", ".join(f"{name} {version}" for name, version in found.versions.items())
    there = [f"{name} {version}" for name, version in found.packages.items() if version is not None]
    yield "packages", ", ".join(there) or "none of the optional ones"
    lacking = [f"{name} ({found.uses[name]})" for name, version in found.packages.items() if version is None]
    yield "not here", ", ".join(lacking) or "no optional package"
    yield "compiler", cpu["compiler"] or "none"
    yield "kernel", f"attention by {cpu['kernel']}" if cpu["kernel"] else "none"


def _use_lines(found: Diagnosis) -> Iterator[tuple[str, str]]:
    # The parts that will be used, and why.
    others = f"; also here: {', '.join(found.others)}" if found.others else ""
    yield "--device", f"{found.device['name']} ({found.why_device}{others})"
    yield "--dtype", f"{found.dtype['advice']} ({found.dtype['why']})"
    for dtype in DTYPES:
        yield f"in {dtype}", ", ".join(found.attention[dtype]) or "nothing: attention is wrong"
    if found.flash:
        taken = [f"{name} (torch.nn.attention)" for name, why in found.flash.items() if why is None] or ["torch's own"]
        yield "flash", "; ".join(taken + [f"{name}: {why}" for name, why in found.flash.items() if why is not None])
    ways = [f"{kind} by {way['by']} (error {way['error']:.1%})" for kind, way in found.compute.items()]
    yield "--compute", ", ".join(ways)
    if found.passes:
        statuses = set(found.passes.values())
        lacking = "C++ compiler" if found.device["kind"] == "cpu" else "Triton"
        why = f"there is no {lacking}" if "not here" in statuses else "they are wrong"
        why = "they do not run" if "fails" in statuses else why
        yield "layers", "compiled passes" if statuses == {"agrees"} else f"without compiled passes: {why}"
    yield "--threads", f"{found.threads} ({found.why_threads})"
    budget = found.memory["budget_bytes"]
    yield "--memory", (f"{byte_size(budget)} " if budget is not None else "") + f"({found.memory['why']})"
    kept = "" if found.cache["remembered"] else " (cannot be written: every run checks anew)"
    yield "cache", f"{found.cache['folder']}{kept}"
    if found.cache["gguf_bytes"]:
        yield "GGUF models", f"{byte_size(found.cache['gguf_bytes'])} in {found.cache['gguf_folder']}"


def _check_rows(found: Diagnosis) -> TableRows:
    # The largest errors of each path by dtype, for usual scores and near 200, below those of eager attention.
    rows = [["attention path", *DTYPES], ["eager, to compare", *(_errors(*found.eager_errors[d]) for d in DTYPES)]]
    by_path: dict[str, dict[str, dict[str, Any]]] = {}
    for check in found.checks:
        by_path.setdefault(check["path"], {})[check["dtype"]] = check
    for path, checks in by_path.items():
        if any(check["status"] != "not here" for check in checks.values()):
            rows.append([path, *(_cell(checks[dtype]) for dtype in DTYPES)])
    return rows


def _cell(check: dict[str, Any]) -> str:
    bad = {"not here": "", "fails": "FAILS", "differs": "WRONG"}.get(check["status"])
    return _errors(check["error"], check["large_error"]) if bad is None else bad


def _errors(usual: float, large: float | None) -> str:
    return f"{usual:.0e}" + ("" if large is None else f", {large:.0e}")


def _missing_lines(found: Diagnosis) -> Iterator[str]:
    # The faults, and why paths for this kind of device cannot be taken.
    for check in found.checks:
        if check["status"] in ("differs", "fails"):
            yield f"{check['path']} in {check['dtype']} is not used: {check['why']}"
    told = set()
    for check in found.checks:
        why = check["why"]
        if check["status"] == "not here" and not why.startswith("for ") and check["path"] not in told:
            told.add(check["path"])
            yield f"{check['path']}: {why}"


def _model_lines(model: dict[str, Any]) -> Iterator[tuple[str, str]]:
    # The expected run of a model.
    yield "model", f"{model['path']} ({model['family']}, {model['dtype']})"
    yield "walk", model["walk"]
    if model["weight_bytes"] is not None:
        yield "weights", f"{byte_size(model['weight_bytes'])}, {model['weights']}"
    if model["token_bytes"] is not None:
        yield (
            "a token",
            f"{model['token_bytes']:,} bytes, {model['chunk_tokens']:,} of them in a call of a layer",
        )
    if model["longest_prompt"] is not None:
        yield "longest", f"{model['longest_prompt']:,} tokens ({model['limited_by']})"


#: Paths in the order in which attention tries them.
_ORDER = ("kernel", "products", "varlen-flash", "flash-cuda", "flex", "flash-cpu", "blocks")
#: Compute capabilities of CUDA devices on which torch computes a layer's experts as one product.
FAST_GROUPED_PRODUCTS = {(9, 0), (10, 0)}
#: Instruction sets that matter for speed, as processors call them, and as people do.
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
    """Check, remember the findings, and show them on stderr; return the summary for the last line on stdout.

    The exit code in the summary is 1 where a path of attention is wrong here, as runs have to go around it.
    """
    found = Diagnosis("complete", 0)
    with shell(found, debug=settings.run.debug) as stop:
        _examine(settings, found, stop)
    clock.step("")
    if found.status != "interrupted" and found.checks and not settings.run.quiet:
        _print_diagnosis(found)
    summary: dict[str, Any] = shown(asdict(found))
    return summary


def _examine(settings: DoctorSettings, found: Diagnosis, stop: signals.Stop) -> None:
    found.versions, found.packages = versions(), {name: extras.installed(name) for name in extras.OPTIONAL}
    found.uses = dict(extras.OPTIONAL)
    threads = cores.Threads(settings.lm.threads)
    found.threads, found.why_threads = threads.most, _why_threads(settings)
    found.cpu = _processor()
    device = device_key.choose_device(settings.lm.device)
    found.device, found.others = _described(device), device_key.other_devices(device)
    first = "the first CUDA device" if device.type == "cuda" else "no CUDA device is here"
    found.why_device = first if settings.lm.device == "auto" else "as asked for"
    found.dtype = _dtype_advice(device)
    found.memory = _budget(settings, device)
    found.notes = list(_notes(device))
    clock.step("checking each way to compute attention against explicit scores")
    with stop.at_once():
        _check(device, found)
    wrong = [check for check in found.checks if check["status"] in ("differs", "fails")]
    for check in wrong:
        around = "nothing can take its place" if check["path"] == "blocks" else "runs on this machine go without it"
        log.error(f"{check['path']} is wrong in {check['dtype']}: {check['why']}; {around}")
    differ = [dtype for dtype, status in found.passes.items() if status == "differs"]
    for dtype in differ:
        log.error(f"compiled passes are wrong in {dtype}; runs on this machine go without them")
    if settings.lm.model is not None:
        clock.step("opening the model")
        with stop.at_once():
            found.model = _with_model(settings, device, found)
    if wrong:
        found.status, found.exit_code = "failed", 1
        found.error = f"{wrong[0]['path']} is wrong in {wrong[0]['dtype']}: {wrong[0]['why']}"
    elif differ:
        found.status, found.exit_code = "failed", 1
        found.error = f"compiled passes are wrong in {differ[0]}"


def _check(device: torch.device, found: Diagnosis) -> None:
    # Compare each path with explicit scores, remember the outcome, and rule out paths that differ.

    attention.allow_all()
    record = DeviceRecord(device)
    checks = []
    for name in DTYPES:
        dtype = getattr(torch, name)
        found.eager_errors[name] = attention_checks.eager_errors(dtype)
        checks += attention_checks.check_paths(attention_checks.CHECKED, device, dtype)
    record.note(checks)
    models, taken = cache_use()
    found.cache = {"folder": str(user_cache.cache_folder()), "remembered": record.save()}
    found.cache |= {"gguf_folder": str(models), "gguf_bytes": taken}
    found.checks = [asdict(check) for check in checks]
    found.flash = settle_flash(device, getattr(torch, found.dtype["advice"]), [USUAL_WIDTH], anew=True)
    clock.step("checking the products in int8 and fp8")
    found.compute = narrow.narrow_ways(device)
    clock.step("checking the compiled passes between products")
    found.passes = fusion.check_passes(device) if device.type in ("cpu", "cuda") else {}
    for name in DTYPES:
        agree = {check.path for check in checks if check.dtype == name and check.status == "agrees"}
        found.attention[name] = [path for path in _ORDER if path in agree]
    for check in checks:
        if check.status in ("differs", "fails"):
            attention.rule_out(check.path, device, str(check.why))


def processor_instructions() -> list[str]:
    """Return the names of this processor's instructions that matter for speed."""
    flags = set(cores.cpu_flags())
    return [name for flag, name in _INSTRUCTIONS.items() if flag in flags]


def _processor() -> dict[str, Any]:
    quota = min((each.cores for each in cores.quotas()), default=None)
    compiler, kernel = user_cache.compiler_file(), attention.compiled_kernel()
    return {
        "model": cores.cpu_name(),
        "cores": len(cores.affinity()),
        "quota": quota,
        "instructions": processor_instructions(),
        "compiler": None if compiler is None else compiler.rsplit(" ", 2)[0],
        "kernel": None if kernel is None else kernel.form,
    }


def _described(device: torch.device) -> dict[str, Any]:
    key = device_key.device_key(device)
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


def _why_threads(settings: DoctorSettings) -> str:
    if settings.lm.threads != "auto":
        return "as asked for"
    if given := cores.given_numbers(os.environ):
        return ", ".join(f"{name}={os.environ[name]}" for name in given) + " in the environment"
    limits = cores.quotas()
    if limits and min(each.cores for each in limits) < len(cores.affinity()):
        return "what the control group's quota allows; fewer while other programs are busy"
    return "one for each core that this process may use; fewer while other programs are busy"


def _dtype_advice(device: torch.device) -> dict[str, str]:
    # The dtype that `--dtype auto` gives a model that is saved in bfloat16, except where float16 is the fast one.
    if device.type == "cuda":
        if torch.version.hip or attention.compute_capability(device) >= (8, 0):
            return {"advice": "bfloat16", "why": "it is fast here, and has flash attention"}
        return {"advice": "float16", "why": "bfloat16 needs compute capability 8.0"}
    if device.type == "cpu":
        slower = times_as_long("bfloat16", "float32", device)
        if slower < MARGIN:
            return {"advice": "bfloat16", "why": f"products take {slower:.2g} times as long as in float32"}
        return {"advice": "float32", "why": f"products in bfloat16 take {slower:.1f} times as long here"}
    return {"advice": "float16", "why": "half precision is fast there; prefill was never measured on such a device"}


def _budget(settings: DoctorSettings, device: torch.device) -> dict[str, Any]:
    if settings.packs.memory:
        return {"budget_bytes": budget_of(settings.packs, None), "why": "as asked for"}
    try:
        budget = budget_of(BudgetOptions(), memory.available_memory(device))
    except ResourceError as error:
        return {"budget_bytes": None, "why": str(error)}
    return {"budget_bytes": budget, "why": f"{FREE_SHARE:.0%} of what is free, less what weights take"}


def _notes(device: torch.device) -> list[str]:

    notes = []
    if torch.__spec__ is not None and not os.path.exists(torch.__spec__.cached or torch.__file__):
        folder = os.path.dirname(os.path.dirname(torch.__file__))
        notes.append(
            "Python compiles torch and other packages anew at every start, which more than doubles its time: run "
            f"python -m compileall -q {folder} once, as a user who may write there"
        )
    if device.type == "cpu" and device_key.driver_version() is not None and torch.version.cuda is None:
        notes.append("an NVIDIA driver is here, but this torch is built for CPUs: install a CUDA build of it")
    if device.type == "cuda" and attention.compute_capability(device) not in FAST_GROUPED_PRODUCTS:
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
    # The plan of a run with the model of `--model`.
    files, device = open_model(settings.lm)
    facts: dict[str, Any] = {
        "path": str(files.origin),
        "family": files.family,
        "dtype": str(files.dtype).removeprefix("torch."),
        **dict.fromkeys(("weight_bytes", "weights", "token_bytes", "chunk_tokens", "longest_prompt", "limited_by")),
    }
    if files.encoder:
        longest = {"longest_prompt": files.max_length, "limited_by": "what the model reads"}
        return facts | longest | {"walk": "none: an encoder, read in padded batches by transformers"}
    if why := UNWALKED.get(files.family):
        return facts | {"walk": f"cannot be walked layer by layer: it {why}; take --engine hf"}
    walk = "is compared with its own forward when it is loaded"
    if files.family in VERIFIED and device.type == "cpu":
        walk = "layer by layer; the tests compare this family with its own forward"
    opened = Opened(files, device, None, (), files.max_length_apart)
    weights = plan_weights(LayerOptions(), opened)  # as by the defaults of `prefill score`
    budget = found.memory["budget_bytes"]
    if not settings.packs.memory and budget is not None:
        budget = budget_of(BudgetOptions(), max(memory.available_memory(device) - weights.taken, 0))
    facts |= {
        "walk": walk,
        "weight_bytes": weights.bytes,
        "weights": weights.place,
    }
    with suppress(NoCostModel):
        if budget is not None:
            plan = plan_packs(opened, MemoryOptions(memory=settings.packs.memory), budget)
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
    # transformers multiplies all experts in one grouped product on few devices alone.

    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    if not experts or device.type != "cuda":
        return []
    if dtype == torch.bfloat16 and attention.compute_capability(device)[0] >= 9:
        return []
    return [
        "transformers multiplies experts one by one here, with a synchronisation for each: its grouped products are "
        "fast in bfloat16 on compute capability 9.0 and above alone"
    ]
