"""`run.sh` of the GPU kit: whether this machine's GPU computes right, and how fast, in ten minutes.

Each step is a process of its own, which is ended after its seconds. What it has found by then is in `results.json`, so
nothing is lost by a cut or a fault. On a machine without a GPU the same steps run on the CPU at tiny sizes; their
speeds say nothing. `make gpu-kit` builds the kit.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks import gpu, gpu_steps
from benchmarks.console import log
from benchmarks.gpu_steps import LEAST_ERROR, STEPS, TIMES_EAGER, Bench, work
from prefillcli.report.run import versions
from prefillcli.runtime.device_key import device_key
from prefillcli.runtime.memory import prepare_allocator

# The goals, and what was reached.


def goals(steps: dict[str, Any]) -> list[dict[str, Any]]:
    """What is wanted of an H100, beside what was reached; None where a step did not get so far."""
    speeds = steps.get("speed", {}).get("speeds", [])
    own = [each for each in speeds if each["mode"] == gpu.HYBRID and each["seconds"]]
    per_second = [each["tokens_per_second"] for each in own if not each["shared"]]
    fp8 = [each["tokens_per_second"] for each in steps.get("smaller", {}).get("speeds", []) if each["mode"] == "fp8"]
    cases = {each["case"] for each in own if each["shared"]}
    shared = {each["mode"]: each["rows_per_second"] for each in speeds if each["case"] in cases}
    loop, walk = shared.get(gpu.FULL), shared.get(gpu.HYBRID)
    errors = steps.get("parity", {}).get("errors", {}).values()
    counted = [each["times_eager"] for each in errors if each["bfloat16"] > LEAST_ERROR]
    lengths = [each["tokens"] for each in own if each["rows"] == 1]
    rows = [
        ("8B in bfloat16, tokens/s", 42_000, max(per_second, default=None)),
        ("8B in FP8, tokens/s", 58_000, max((each for each in fp8 if each), default=None)),
        ("shared prefixes, times transformers", 10, walk / loop if walk and loop else None),
        ("longest prompt of 8B, tokens", 131_072, max(lengths, default=None)),
        ("error of P in bfloat16, times the eager forward's, at most", TIMES_EAGER, max(counted, default=0.0)
         if errors else None),
    ]  # fmt: skip
    return [
        {"goal": goal, "wanted": wanted, "reached": reached, "met": _met(goal, wanted, reached)}
        for goal, wanted, reached in rows
    ]


def _met(goal: str, wanted: float, reached: float | None) -> bool | None:
    if reached is None:
        return None
    return reached <= wanted if goal.endswith("at most") else reached >= wanted


# The kit: one process a step.


def run_step(name: str, bench: Bench, seconds: float, journal: Path) -> dict[str, Any]:
    """Run a step in a process of its own, for at most `seconds`; return its findings, with `status` (`passed`,
    `failed`, `cut`) and `seconds`. What it prints goes to the end of `journal`."""
    begun = time.perf_counter()
    running = _forks().Process(target=work, args=(name, bench, journal))
    running.start()
    running.join(seconds)
    status = {0: "passed", None: "cut"}.get(running.exitcode, "failed")
    with suppress(ProcessLookupError):
        os.killpg(running.pid or 0, signal.SIGKILL)  # with the processes that it started
    running.kill()
    running.join()
    found = bench.found()
    bench.file.unlink(missing_ok=True)
    if status == "failed" and "error" not in found:
        found["error"] = f"exit code {running.exitcode}"
    return {"status": status, "seconds": round(time.perf_counter() - begun, 1), "limit": round(seconds, 1)} | found


@cache
def _forks() -> Any:
    # Forks of a server that has imported all this but computed nothing: imports take many seconds. It is ready.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([gpu_steps.__name__])
    first = context.Process(target=int)
    first.start()
    first.join()
    return context


def run_kit(output: Path, names: Sequence[str], device: str, seconds: float) -> dict[str, Any]:
    """Run steps one after the other, in so many seconds together; return the results, which are in `results.json`.

    What the running step has found is in a file of its name.
    """
    output.mkdir(parents=True, exist_ok=True)
    where = torch.device(device)
    results: dict[str, Any] = {"device": vars_of(where), "versions": versions(), "steps": {}}
    journal = output / "log.txt"
    journal.unlink(missing_ok=True)
    _forks()
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        for name in names:
            most = min(float(STEPS[name].seconds), seconds - (time.monotonic() - begun))
            bench = Bench(where, Path(scratch), output / f"{name}.json")
            found = {"status": "no time left"} if most < 1 else run_step(name, bench, most, journal)
            results["steps"][name] = found
            results["goals"] = goals(results["steps"]) if where.type == "cuda" else []
            results["seconds"] = round(time.monotonic() - begun, 1)
            whole = output / "results.part"
            whole.write_text(json.dumps(results, indent=2, allow_nan=True) + "\n")
            whole.replace(output / "results.json")
            told = f": {found['error']}" if "error" in found else ""
            print(f"{name}: {found['status']} in {found.get('seconds', 0):.0f} s{told}", flush=True)
    return results


def vars_of(device: torch.device) -> dict[str, Any]:
    """What the results say of a device."""
    key = device_key(device)
    return {"name": str(device), "model": key.device, "capability": key.capability, "driver": key.driver}


def main(
    only: Annotated[str, typer.Option(help=f"Steps, comma-separated: {', '.join(STEPS)}.")] = ",".join(STEPS),
    seconds: Annotated[float, typer.Option(help="For all steps together, after some ten for their imports.")] = 600.0,
    device: Annotated[str, typer.Option(help="cuda, cuda:1, ... or cpu. (default: a GPU, if there is one)")] = "",
    output: Annotated[Path, typer.Option(envvar="OUT", help="Folder of results.json.")] = Path("gpu-kit-results"),
) -> None:
    """Prove prefill on this machine's GPU and measure it. Exit code 1 if a step failed or was cut."""
    prepare_allocator()
    name = device or ("cuda" if torch.cuda.is_available() else "cpu")
    where = torch.device("cuda", torch.device(name).index or 0) if name.startswith("cuda") else torch.device(name)
    names = [each.strip() for each in only.split(",")]
    unknown = [each for each in names if each not in STEPS]
    if unknown:
        log(f"--only {only}: use {', '.join(STEPS)}")
        raise typer.Exit(2)
    if where.type == "cuda" and (where.index or 0) >= torch.cuda.device_count():
        log(f"--device {device}: torch {torch.__version__} finds {torch.cuda.device_count()} CUDA devices here")
        raise typer.Exit(5)
    results = run_kit(output.resolve(), names, str(where), seconds)
    for goal in results["goals"]:
        reached = "not reached yet" if goal["reached"] is None else f"{goal['reached']:,.3g}"
        print(f"{goal['goal']}: wanted {goal['wanted']:,}, {reached}")
    print(output.resolve() / "results.json")
    raise typer.Exit(int(any(each["status"] != "passed" for each in results["steps"].values())))


if __name__ == "__main__":
    typer.run(main)
