"""What `prefill doctor` has found: its JSON line, and its tables."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from prefillcli.report.numbers import byte_size
from prefillcli.report.tables import TableRows, numbers_table, pairs_table, stderr_console

DTYPES = ("float32", "bfloat16", "float16")
CAPTION = "The largest error of an output around 1, for usual scores and for scores near 200."


@dataclass
class Diagnosis:
    """What the last line on stdout says. Sizes are bytes; what this system does not tell is null."""

    status: Literal["complete", "failed", "interrupted"] = "complete"
    exit_code: int = 0
    error: str | None = None
    device: dict[str, Any] = field(default_factory=dict)
    """The one that will be used: `name`, `kind`, `model`, `capability`, `driver`, `memory_bytes`, `free_bytes`."""
    why_device: str = ""
    others: list[str] = field(default_factory=list)
    """Further devices of this machine."""
    cpu: dict[str, Any] = field(default_factory=dict)
    """`model`, `cores` of the affinity, `quota` in cores, `instructions`, `compiler`."""
    versions: dict[str, str] = field(default_factory=dict)
    packages: dict[str, str | None] = field(default_factory=dict)
    """Optional packages and their versions, null for one that is not installed."""
    uses: dict[str, str] = field(default_factory=dict)
    """What each of these is for."""
    threads: int = 0
    why_threads: str = ""
    memory: dict[str, Any] = field(default_factory=dict)
    """`budget_bytes` for activations and K,V before weights are there, and `why`."""
    dtype: dict[str, str] = field(default_factory=dict)
    """`advice`, and `why`."""
    attention: dict[str, list[str]] = field(default_factory=dict)
    """The paths that agree, by dtype, in the order in which they are tried."""
    checks: list[dict[str, Any]] = field(default_factory=list)
    """Each path in each dtype: `path`, `dtype`, `status`, `why`, `error`, `large_error`, `lse_error`."""
    eager_errors: dict[str, tuple[float, float]] = field(default_factory=dict)
    """`error` and `large_error` of eager attention in the same cases, by dtype."""
    notes: list[str] = field(default_factory=list)
    cache: dict[str, Any] = field(default_factory=dict)
    """`folder`, and whether the outcome is `remembered` there."""
    model: dict[str, Any] | None = None
    """With --model: `path`, `family`, `dtype`, `walk`, `weight_bytes`, `token_bytes`, `chunk_tokens`,
    `longest_prompt`, `limited_by`."""


def print_diagnosis(found: Diagnosis) -> None:
    """The tables, on stderr."""
    console = stderr_console()
    console.print(pairs_table(machine_lines(found)))
    console.print()
    console.print(pairs_table(use_lines(found)))
    console.print()
    console.print(numbers_table(check_rows(found), caption=CAPTION))
    for line in missing_lines(found):
        console.print(f"  {line}", style="dim")
    if found.model is not None:
        console.print()
        console.print(pairs_table(model_lines(found.model)))
    for note in found.notes:
        console.print(f"note: {note}")


def machine_lines(found: Diagnosis) -> Iterator[tuple[str, str]]:
    """What this machine has: a name and a text each."""
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


def use_lines(found: Diagnosis) -> Iterator[tuple[str, str]]:
    """What will be used, and why."""
    others = f"; also here: {', '.join(found.others)}" if found.others else ""
    yield "--device", f"{found.device['name']} ({found.why_device}{others})"
    yield "--dtype", f"{found.dtype['advice']} ({found.dtype['why']})"
    for dtype in DTYPES:
        yield f"in {dtype}", ", ".join(found.attention[dtype]) or "nothing: attention is wrong"
    yield "--threads", f"{found.threads} ({found.why_threads})"
    budget = found.memory["budget_bytes"]
    yield "--memory", (f"{byte_size(budget)} " if budget is not None else "") + f"({found.memory['why']})"
    kept = "" if found.cache["remembered"] else " (cannot be written: every run checks anew)"
    yield "cache", f"{found.cache['folder']}{kept}"


def check_rows(found: Diagnosis) -> TableRows:
    """The largest errors of each path by dtype, for usual scores and near 200, below those of eager attention."""
    rows = [["attention path", *DTYPES], ["eager, to compare", *(_errors(*found.eager_errors[d]) for d in DTYPES)]]
    by_path: dict[str, dict[str, dict[str, Any]]] = {}
    for check in found.checks:
        by_path.setdefault(check["path"], {})[check["dtype"]] = check
    for path, checks in by_path.items():
        if any(check["status"] != "not here" for check in checks.values()):
            rows.append([path, *(_cell(checks[dtype]) for dtype in DTYPES)])
    return rows


def _cell(check: dict[str, Any]) -> str:
    if check["status"] == "not here":
        return ""
    if check["status"] == "fails":
        return "FAILS"
    return _errors(check["error"], check["large_error"]) if check["status"] == "agrees" else "WRONG"


def _errors(usual: float, large: float | None) -> str:
    return f"{usual:.0e}" + ("" if large is None else f", {large:.0e}")


def missing_lines(found: Diagnosis) -> Iterator[str]:
    """What is wrong, and why paths for this kind of device cannot be taken."""
    for check in found.checks:
        if check["status"] in ("differs", "fails"):
            yield f"{check['path']} in {check['dtype']} is not used: {check['why']}"
    told = set()
    for check in found.checks:
        why = check["why"]
        if check["status"] == "not here" and not why.startswith("for ") and check["path"] not in told:
            told.add(check["path"])
            yield f"{check['path']}: {why}"


def model_lines(model: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What would happen with a model."""
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
