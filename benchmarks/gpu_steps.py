"""The steps of the GPU kit, in the order of their worth."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._C._autograd import DeviceType
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from benchmarks import gpu
from prefillcli.errors import brief
from prefillcli.models.files import sample_model
from prefillcli.models.find import read_model_files
from prefillcli.models.load import load_model
from prefillcli.models.newest_flash import current_flash
from prefillcli.models.streamed_layers import load_streamed
from prefillcli.options.commands import DoctorSettings
from prefillcli.plan.pack import Limits
from prefillcli.tools.doctor import doctor_job
from prefillcli.tools.profile.measuring import one_pack
from prefillcli.walk import attention_checks
from prefillcli.walk.forest import ATTENTION, register
from prefillcli.walk.narrow import Narrow, TorchWeights, in_smaller_numbers, narrow_ways, quantised_by_torch
from prefillcli.walk.walk import Arithmetic, LayerWalk
from tests.unit.walk.families import FAMILIES, make_model
from tests.unit.walk.test_walk import eager, mixed, p_yes, walked

ROUNDS = 2
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: What a name among a path's kernels contains, for paths that call a kernel of their own.
KERNELS = {
    "flash-cuda": ("flash",),
    "varlen-flash": ("flash",),
    "flex": ("triton_tem", "flex"),
    "flash-cpu": ("flash_attention_for_cpu",),
}
PASSES = ("_gate", "_norm", "_rotary")  # Triton's kernels between the products of a Llama layer
TORCH_FLASH = "pytorch_flash"  # in the names of kernels of torch's own flash attention
COMPILED = ("flex",)  # paths whose first calls take many seconds: they come last
EXACT = 1e-4  # of P, in float32: between the walk and the eager forward
TIMES_EAGER = 2.0  # error of P in bfloat16, as a multiple of the eager forward's own
LEAST_ERROR = 1e-3  # of P in bfloat16, root mean square: below it no multiple counts
STREAMED_ERROR = 1e-3  # of logits
MOST_KERNELS = 8  # of a walk, those that take longest
#: A model of 1.2 billion parameters, which is saved and loaded in seconds.
BILLION = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128_256, "max_position_embeddings": 1 << 20,
}  # fmt: skip


class WrongResultError(Exception):
    """A step found something wrong; its findings say what."""


@dataclass(frozen=True)
class Bench:
    """What a step works with: the device, a folder for large files, and the file of its findings."""

    device: torch.device
    scratch: Path
    file: Path

    @property
    def real(self) -> bool:
        """Return whether sizes are those of a GPU."""
        return self.device.type == "cuda"

    @property
    def scale(self) -> gpu.Scale:
        return gpu.SCALES["8b" if self.real else "tiny"]

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(self.device) if self.real else "cpu"

    def add(self, **found: Any) -> None:
        """Write findings to the file, beside earlier ones. Those in lists and tables are added to them."""
        known = self.found()
        for name, each in found.items():
            if isinstance(each, list):
                each = known.get(name, []) + each
            elif isinstance(each, dict):
                each = known.get(name, {}) | each
            known[name] = each
        whole = self.file.with_suffix(".part")
        whole.write_text(json.dumps(known))
        whole.replace(self.file)

    def found(self) -> dict[str, Any]:
        """What was written so far."""
        known: dict[str, Any] = json.loads(self.file.read_text()) if self.file.exists() else {}
        return known

    def wait(self) -> None:
        """Wait until the device is done."""
        if self.real:
            torch.cuda.synchronize(self.device)


def doctor(bench: Bench) -> None:
    """Which paths of attention agree with explicit scores, and by which kernels; where a walk waits for the device."""
    wrong = _checked_paths(bench, [path for path in attention_checks.CHECKED if path not in COMPILED])
    _profiled_walks(bench, ["llama", "gpt_oss"])
    summary = doctor_job(DoctorSettings.of({"device": str(bench.device)}))
    bench.add(doctor=summary)
    wrong += _checked_paths(bench, COMPILED)
    _profiled_walks(bench, ["gemma2"])
    if current_flash() is not None:
        attend = attention_checks.longest_trial("varlen-flash", bench.device, torch.bfloat16)
        kernels = sorted(kernels_of(bench, attend))
        bench.add(flash_kernels=kernels)
        if not ran_its_own("varlen-flash", kernels) or any(TORCH_FLASH in kernel for kernel in kernels):
            wrong.append(f"{current_flash()} did not run: {', '.join(kernels)}")
    if bench.real and not set(PASSES) <= set(bench.found()["walks"]["llama"]["kernels"]):
        wrong.append("a walk ran without the kernels between products")
    if summary["exit_code"]:
        wrong.append(f"prefill doctor: {summary['error']}")
    if wrong:
        raise WrongResultError("; ".join(wrong))


def _checked_paths(bench: Bench, paths: Iterable[str]) -> list[str]:
    # Checks each path in each dtype, and looks at the kernels of those that agree. Returns what is wrong.
    wrong = []
    for path in paths:
        for dtype in DTYPES:
            check = attention_checks.check_path(path, bench.device, dtype)
            found: dict[str, Any] = {"path": path, "dtype": check.dtype, "status": check.status, "why": check.why}
            if check.status == "agrees":
                attend = attention_checks.longest_trial(path, bench.device, dtype)
                found["kernels"] = sorted(kernels_of(bench, attend))
                if not ran_its_own(path, found["kernels"]):
                    found["why"] = f"ran without a kernel of its own: {', '.join(found['kernels'])}"
            bench.add(paths=[found])
            if check.status in ("differs", "fails") or (check.status == "agrees" and found["why"]):
                wrong.append(f"{path} in {check.dtype}: {found['why']}")
    return wrong


def ran_its_own(path: str, kernels: Iterable[str]) -> bool:
    """Return whether the kernels of a path are its own, and not those of what took its place."""
    words = KERNELS.get(path)
    return words is None or any(word in kernel.lower() for kernel in kernels for word in words)


def kernels_of(bench: Bench, run: Callable[[], object]) -> dict[str, float]:
    """The kernels that a call runs on the device (on a CPU torch's operators), and microseconds of each."""
    run()  # compiles
    kinds = [torch.profiler.ProfilerActivity.CPU]
    kinds += [torch.profiler.ProfilerActivity.CUDA] if bench.real else []
    with torch.profiler.profile(activities=kinds) as seen:
        run()
        bench.wait()
    wanted = DeviceType.CUDA if bench.real else DeviceType.CPU
    took = "self_device_time_total" if bench.real else "self_cpu_time_total"
    events = [event for event in seen.key_averages() if event.device_type == wanted]
    return {event.key: float(getattr(event, took)) for event in events if bench.real or "::" in event.key}


def _profiled_walks(bench: Bench, families: Iterable[str]) -> None:
    # The kernels that a walk takes longest for, and where the host waits for the device.
    for family in families:
        register()
        model: Any = make_model(family, torch.bfloat16).to(bench.device)
        model.set_attn_implementation(ATTENTION)
        pack = one_pack(mixed())
        with closing(LayerWalk(model, chunk_tokens=4096)) as walk:
            run = partial(_read, walk, pack)
            kernels = kernels_of(bench, run)
            waits = _waits(run) if bench.real else []
        longest = sorted(kernels, key=kernels.__getitem__, reverse=True)
        words = "flash", "flex", *PASSES
        own = [name for name in longest[MOST_KERNELS:] if any(word in name.lower() for word in words)]
        walks = {"kernels": longest[:MOST_KERNELS] + own, "layers": len(walk.layers), "waits": len(waits)}
        bench.add(walks={family: walks | {"first_waits": waits[:3]}})


def _read(walk: LayerWalk, pack: Any) -> list[float]:
    return [float(each) for each in torch.cat([logits[:, 0] for logits in walk.read_logits(pack)]).tolist()]


def _waits(run: Callable[[], object]) -> list[str]:
    # What torch warns of: calls for which the host waits until the device is done.
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return [f"{each.filename}:{each.lineno}" for each in seen if "synchroniz" in str(each.message)]


def tests(bench: Bench) -> None:
    """The tests marked `cuda`; on a CPU the same ones, for one family."""
    files = [
        str(file) for file in sorted(Path("tests/unit/walk").glob("test_*.py")) if "each_device" in file.read_text()
    ]
    chosen = ["-m", "cuda"] if bench.real else ["-k", "any_device and cpu and (llama or products)"]
    code = pytest.main([*files, *chosen, "-q", "-p", "no:cacheprovider", "-W", "default"], plugins=[_Outcomes(bench)])
    if code:
        raise WrongResultError(f"pytest ended with {int(code)}")


class _Outcomes:
    """Notes the outcome of each test as it ends."""

    def __init__(self, bench: Bench) -> None:
        self._bench, self._counts = bench, dict.fromkeys(("passed", "failed", "skipped"), 0)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when != "call" and report.passed:
            return
        self._counts[report.outcome] += 1
        self._bench.add(counts=self._counts)
        if report.failed:
            self._bench.add(failures=[{"test": report.nodeid, "why": str(report.longrepr)[-2000:]}])


def parity(bench: Bench) -> None:
    """P of the walk and of transformers' eager forward on the device, in float32 and bfloat16."""
    models: dict[str, Callable[[torch.dtype], nn.Module]] = {}
    for family in FAMILIES if bench.real else ("llama", "gemma2"):
        models[family] = partial(make_model, family)
    if bench.real:
        models["1.2 billion parameters"] = partial(billion, bench.device)
    run_parts({name: partial(_parity_of, bench, name, make) for name, make in models.items()})


def _parity_of(bench: Bench, name: str, make: Callable[[torch.dtype], nn.Module]) -> None:
    found = errors_of_p(make, bench.device)
    bench.add(errors={name: found})
    allowed = max(TIMES_EAGER * found["bfloat16_eager"], LEAST_ERROR)
    if not (found["float32_most"] <= EXACT and found["bfloat16"] <= allowed):
        raise WrongResultError("P is off")


def run_parts(parts: dict[str, Callable[[], None]]) -> None:
    """Run the parts of a step, each whatever became of those before. Raises WrongResultError with all that failed."""
    failed = []
    for name, part in parts.items():
        try:
            part()
        except Exception as error:
            traceback.print_exc()
            failed.append(f"{name}: {brief(error)}")
    if failed:
        raise WrongResultError("; ".join(failed))


@torch.inference_mode()
def errors_of_p(make: Callable[[torch.dtype], nn.Module], device: torch.device) -> dict[str, float]:
    """Errors of P against the eager forward in float32, with weights that bfloat16 holds.

    `float32_most`: the largest of the walk. `bfloat16`, `bfloat16_eager`: the root mean square of the walk, and of the
    eager forward. `times_eager`: their ratio.
    """
    register()
    half = make(torch.bfloat16)
    whole: Any = make(torch.bfloat16)
    whole = whole.float().to(device)
    prompts, limits = mixed(), Limits(500, 10**6, held_tokens=10**6)
    exact = p_yes(eager(whole, prompts).cpu())
    found = p_yes(walked(whole, prompts, chunk=97, limits=limits))
    del whole
    half = half.to(device)
    own = float((p_yes(eager(half, prompts).cpu()) - exact).square().mean().sqrt())
    ours = float((p_yes(walked(half, prompts, chunk=97, limits=limits)) - exact).square().mean().sqrt())
    most = float((found - exact).abs().max())
    return {"float32_most": most, "bfloat16": ours, "bfloat16_eager": own, "times_eager": ours / max(own, 1e-12)}


def billion(device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """A model of the shape `BILLION`, whose logits spread over a few units."""
    with torch.device(device):
        model: PreTrainedModel = LlamaForCausalLM._from_config(
            LlamaConfig(**BILLION, tie_word_embeddings=True), attn_implementation="eager", dtype=dtype
        )
    generator = torch.Generator(device).manual_seed(7)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, weight.shape[-1] ** -0.5, generator=generator)
    return model.eval().requires_grad_(False)


def speed(bench: Bench) -> None:
    """Speeds with shapes of Llama-3.1-8B, beside transformers' in its best batch, by turns."""
    peak = gpu.peak_of(bench.name)
    subject = gpu.Subject(bench.scale, bench.device)
    bench.add(card=bench.name, peak=peak)
    longer = bench.scale.lengths[-2:]
    cases = {"rows": gpu.short_rows, "shared rows": gpu.shared_rows}
    cases |= {f"{tokens} tokens": partial(_prompt_of, tokens=tokens) for tokens in longer}
    run_parts({name: partial(_speeds_of, bench, case, subject, peak) for name, case in cases.items()})


def _speeds_of(bench: Bench, case: Callable[..., Iterator[dict[str, Any]]], subject: gpu.Subject, peak: Any) -> None:
    for line in case(subject, ROUNDS, peak):
        bench.add(speeds=[line])


def _prompt_of(subject: gpu.Subject, rounds: int, peak: float | None, *, tokens: int) -> Iterator[dict[str, Any]]:
    # A longest prompt runs twice: to see whether it fits, and once more.
    return gpu.single_prompt(subject, tokens, 1 if tokens > 1 << 16 else rounds, peak)


def smaller(bench: Bench) -> None:
    """FP8 and int8: errors of products and of P, speeds of products and of rows."""
    ways = narrow_ways(bench.device)
    bench.add(ways=ways)
    kinds: list[Narrow] = [kind for kind in ("fp8", "int8") if kind in ways]
    parts: dict[str, Callable[[], None]] = {"bfloat16": lambda: bench.add(products=[product_speed(bench, None)])}
    run_parts(parts | {kind: partial(_smaller, bench, kind) for kind in kinds})


def _smaller(bench: Bench, kind: Narrow) -> None:
    bench.add(products=[product_speed(bench, kind)])
    make = partial(billion, bench.device) if bench.real else partial(make_model, "llama", hidden_size=128)
    bench.add(errors={kind: _error_in(kind, make, bench.device)})
    subject = gpu.Subject(bench.scale, bench.device)
    arithmetic = in_smaller_numbers(subject.model, kind)
    bench.add(speeds=[_rows_in(kind, subject, arithmetic, gpu.peak_of(bench.name))])


def product_speed(bench: Bench, kind: Narrow | None) -> dict[str, Any]:
    """Operations a second of an MLP's product of a chunk: alone, with the rows' quantisation, and with that in
    separate operations. None: bfloat16."""
    shape, rows = bench.scale.shape, bench.scale.chunk
    width, inner = shape["hidden_size"], shape["intermediate_size"]
    given = torch.randn(rows, width, device=bench.device, dtype=torch.bfloat16)
    weight = torch.randn(inner, width, device=bench.device, dtype=torch.bfloat16)
    found: dict[str, Any] = {"numbers": kind or "bfloat16"}
    steps: dict[str, Callable[[], object]] = {"product": partial(torch.matmul, given, weight.t())}
    if kind is not None:
        weights = TorchWeights(weight, kind)
        quantised = weights.quantised(given)
        steps = {
            "product": lambda: weights.product(quantised, None, torch.bfloat16),
            "quantised": lambda: weights.product(weights.quantised(given), None, torch.bfloat16),
            "separately": lambda: weights.product(quantised_by_torch(given, kind), None, torch.bfloat16),
        }
    for name, step in steps.items():
        found[f"{name}_per_second"] = 2 * rows * width * inner / seconds_of(bench, step)
    return found


def seconds_of(bench: Bench, step: Callable[[], object], times: int = 20) -> float:
    """The mean seconds of a call among several that follow one another, after two that do not count."""
    for _ in range(2):
        step()
    bench.wait()
    begun = time.perf_counter()
    for _ in range(times):
        step()
    bench.wait()
    return (time.perf_counter() - begun) / times


@torch.inference_mode()
def _error_in(kind: Narrow, make: Callable[[torch.dtype], nn.Module], device: torch.device) -> float:
    # The root mean square error of P, against the eager forward in float32.
    register()
    whole: Any = make(torch.bfloat16)
    prompts = mixed()
    exact = p_yes(eager(whole.float().to(device), prompts).cpu())
    del whole
    model: Any = make(torch.bfloat16).to(device)
    arithmetic = in_smaller_numbers(model, kind)
    return float((p_yes(walked(model, prompts, chunk=97, arithmetic=arithmetic)) - exact).square().mean().sqrt())


def _rows_in(kind: str, subject: gpu.Subject, arithmetic: Arithmetic, peak: float | None) -> dict[str, Any]:
    rows, tokens = subject.scale.rows
    prompts = [subject.prompt(tokens, seed) for seed in range(rows)]
    plan = subject.plan(prompts)
    taken = gpu.seconds_of({kind: partial(subject.walk, plan, arithmetic)}, ROUNDS)[kind]
    case = f"{rows} rows of {tokens} tokens"
    return gpu.speed(case, kind, taken, rows=rows, tokens=rows * tokens, flops=subject.work(plan), peak=peak)


def longest(bench: Bench) -> None:
    """The longest prompt in a gigabyte beside the weights: by `prefill profile`'s law, and confirmed by a run."""
    output = bench.scratch / "profile.json"
    memory, seconds = ("1GiB", "4") if bench.real else ("64MiB", "1")
    bench.add(memory=memory)
    words = [sys.executable, "-m", "prefillcli", "profile", "--model", str(checkpoint(bench)), "--mode", "hybrid"]
    words += ["--memory", memory, "--fit-seconds", seconds, "--confirm-seconds", "10", "--output", str(output)]
    done = subprocess.run([*words, "--device", str(bench.device)], stdout=subprocess.PIPE, text=True, check=False)  # noqa: S603
    summary = json.loads(done.stdout.splitlines()[-1]) if done.stdout else {}
    (mode,) = json.loads(output.read_text())["modes"] if output.exists() else [None]
    bench.add(profile={key: each for key, each in summary.items() if key not in ("output", "page")}, mode=mode)
    if done.returncode or mode is None or not mode["max_tokens"]:
        raise WrongResultError("no longest prompt was confirmed")


def checkpoint(bench: Bench) -> Path:
    """A saved model: the one of 1.2 billion parameters, on a CPU the sample model."""
    if not bench.real:
        return sample_model()
    folder = bench.scratch / "billion"
    if not (folder / "tokenizer.json").exists():  # which comes last
        billion(bench.device, torch.bfloat16).save_pretrained(folder)
        for name in ("tokenizer_config.json", "tokenizer.json"):
            shutil.copy(sample_model() / name, folder)
    return folder


@torch.inference_mode()
def streamed(bench: Bench) -> None:
    """Streamed weights against resident ones: logits and seconds."""
    files, pack = read_model_files(checkpoint(bench)), one_pack(mixed())
    model = load_model(files, bench.device)
    total = sum(weight.nbytes for weight in model.parameters())
    wanted, seconds = _walked_once(LayerWalk(model, chunk_tokens=512), pack)
    bench.add(resident_seconds=seconds, weight_bytes=total)
    del model
    model, layers = load_streamed(files, bench.device, memory=total * 3 // 4)
    with closing(layers):
        found, seconds = _walked_once(LayerWalk(model, chunk_tokens=512, layers=layers), pack)
    difference = float((found - wanted).abs().max())
    bench.add(streamed_seconds=seconds, same_bits=torch.equal(found, wanted), difference=difference)
    if not difference <= STREAMED_ERROR:
        raise WrongResultError(f"logits of streamed weights differ by {difference:.2g}")


def _walked_once(walk: LayerWalk, pack: Any) -> tuple[Tensor, float]:
    with closing(walk):
        list(walk.read_logits(pack))  # what is set up once does not count
        begun = time.perf_counter()
        found = torch.cat(list(walk.read_logits(pack))).cpu()
        return found, time.perf_counter() - begun


@dataclass(frozen=True)
class Step:
    """A step, and the most seconds that it may take."""

    run: Callable[[Bench], None]
    seconds: int


STEPS = {
    "doctor": Step(doctor, 60),
    "tests": Step(tests, 120),
    "parity": Step(parity, 90),
    "speed": Step(speed, 180),
    "smaller": Step(smaller, 60),
    "longest": Step(longest, 60),
    "streamed": Step(streamed, 30),
}


def work(name: str, bench: Bench, journal: Path) -> None:
    """Run a step in its own process, which leads a group; what it prints goes to the end of `journal`. The process
    ends with 1 if the step fails."""
    os.setsid()
    with journal.open("a") as kept:
        os.dup2(kept.fileno(), 1)
        os.dup2(kept.fileno(), 2)
    if bench.real:
        torch.cuda.set_device(bench.device)
    try:
        STEPS[name].run(bench)
    except Exception as error:
        traceback.print_exc()
        bench.add(error=f"{type(error).__name__}: {error}"[:2000])
        sys.exit(1)
