"""The number format that a model computes in by default, by the speed of this device's products.

A processor without instructions for bfloat16 takes several times as long for a product in it as in float32. So a
product is measured once in both, and the ratio is kept in the user's cache. It is far from 1 wherever it matters, and
on a CPU it is of the seconds that the thread itself computed: other programs on the machine change nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from prefillcli.errors import UsageError
from prefillcli.models.find import ModelFiles, in_dtype, prune_cache, read_model_files
from prefillcli.models.heads import HeadChoice
from prefillcli.models.open import dtype_name
from prefillcli.models.rehearsal import DeviceRecord
from prefillcli.models.weights import layer_bytes, plan_quantisation
from prefillcli.options.groups import ModelOptions, WorkerOptions
from prefillcli.runtime import log
from prefillcli.runtime.device_key import choose_device
from prefillcli.runtime.memory import loadable_memory, parse_size
from prefillcli.walk import attention
from prefillcli.walk.narrow import Narrow, narrow_product

MARGIN = 1.5  # times as long as in float32: from there on float32 is taken
FITS = 0.8  # of the free memory, which weights in float32 may take: packs need room beside them
_ROUNDS = 3
_SIZES = {"cpu": (128, 1024)}  # rows, and inputs and outputs of the product that is measured
_LARGE = (4096, 4096)  # on devices that compute smaller ones in no time


class ModelReader:
    """Reads the files of the models of a job, one after the other, and chooses their dtypes.

    `dtypes` are those that are chosen already, `auto` for one that stays as saved. Without them, `--dtype auto`
    chooses by the job's device. Raises UsageError or ResourceError.
    """

    def __init__(self, lm: ModelOptions, processes: WorkerOptions, dtypes: Sequence[str] = ()) -> None:
        self.device = choose_device(lm.device)
        self._lm, self._chosen = lm, iter(dtypes)
        # Where other machines compute, their devices may be others than this one
        here = processes.runner == "local" or lm.device == "cpu"
        self._workers = processes.workers
        self._chooses = lm.dtype == "auto" and not dtypes and here
        self._beside = 0  # bytes of the models so far

    def read(self, path: Path, head: HeadChoice = "auto", *, copies: float = 1, streams: bool = False) -> ModelFiles:
        """Read a model, whose weights will exist in this many `copies`; packed ones stay so if it `streams`."""
        lm, device = self._lm, self.device
        named = lm.dtype if lm.dtype != "auto" else next(self._chosen, "auto")
        files = read_model_files(path, dtype=named, trust_remote_code=lm.trust_remote_code, head=head)
        if self._chooses:
            copies *= self._workers if device.type == "cpu" else 1
            files = settle_dtype(files, device, copies=copies, beside=self._beside, streams=streams)
            self._beside += round(held_bytes(files, device, streams=streams) * copies)
            if files.dtype_why is not None:
                log.info(f"{files.origin}: computed in {dtype_name(files)}: {files.dtype_why} (--dtype)")
        prune_cache(files, parse_size(lm.gguf_cache))
        return files


def settle_dtype(
    files: ModelFiles, device: torch.device, *, copies: float = 1, beside: int = 0, streams: bool = False
) -> ModelFiles:
    """Return the files of a model without a given dtype, in the one to compute in, and why.

    That is the dtype they are saved in, unless float32 is faster by `MARGIN` and fits the free memory with these
    `copies` of the weights, and `beside` bytes of other models.
    """
    saved = dtype_name(files)
    if files.dtype == torch.float16 and device.type == "cpu":
        return replace(in_dtype(files, torch.float32), dtype_why="float16 is slow and inexact on CPUs")
    if files.dtype == torch.float32 or _is_fast(device) or is_packed(files, device):
        return files
    slower = times_as_long(saved, "float32", device)
    if slower < MARGIN:
        return files
    found, most = in_dtype(files, torch.float32), loadable_memory(device)
    need = round(held_bytes(found, device, streams=streams) * copies) + beside
    if most is not None and need > FITS * most:
        room = f"the weights would take {need / 2**30:.1f} GiB, and {most / 2**30:.1f} GiB are free"
        return replace(files, dtype_why=f"float32 is {slower:.1f} times as fast on this {_kind(device)}, but {room}")
    why = f"products take {slower:.1f} times as long in {saved}, as the model is saved, on this {_kind(device)}"
    return replace(found, dtype_why=why)


def held_bytes(files: ModelFiles, device: torch.device, *, streams: bool = False) -> int:
    """Return the number of bytes of all weights in the dtype of the files, those of mapped files included. Of packed
    weights that a model `streams` on a CPU, two layers are unpacked at a time."""
    sizes = layer_bytes(files, device)
    if not streams or (files.gguf is None and files.quantised is None) or device.type != "cpu":
        return sum(sizes.values())
    layers = sorted(size for number, size in sizes.items() if number is not None)
    around = sizes.get(None, 0) if files.gguf is None else files.gguf.bytes_around(files.dtype)
    return around + sum(layers[-2:])


def require_faster(kind: Narrow, dtype: torch.dtype, device: torch.device, width: int | None = None) -> None:
    """Raise UsageError if products in low precision take longer on the device than those in `dtype`, of the usual
    width or this one."""
    slower = times_as_long(kind, _name(dtype), device, width)
    if slower <= 1:
        return
    said = f"--compute {kind}: products take {slower:.1f} times as long in {kind} as in {_name(dtype)} on this "
    why = attention.why_no_library(attention.PRODUCTS) if device.type == "cpu" and kind == "int8" else None
    if why is not None:
        reason, _, cure = why.partition("\n")
        raise UsageError(
            f"{said}{_kind(device)} without the compiled kernel: {reason}\n{cure}, or leave --compute out"
        )
    raise UsageError(f"{said}{_kind(device)}, so it would only cost time\nleave it out")


def times_as_long(form: str, than: str, device: torch.device, width: int | None = None) -> float:
    """Return how many times as long a product takes in `form` as in the dtype `than`: measured once on a device, and
    remembered. It has the usual size, or the `width` of a model that is smaller."""
    count, usual = _SIZES.get(device.type, _LARGE)
    size = count, min(width or usual, usual)
    name = f"{form}/{than}" if size[1] == usual else f"{form}/{than}/{size[1]}"
    return _remembered(name, device, lambda: _measured(form, than, device, size))


def operations_per_second(dtype: torch.dtype) -> float:
    """Return the floating-point operations of products in a second on one core of this CPU: measured once, and
    remembered."""
    return _remembered(f"operations/{_name(dtype)}", torch.device("cpu"), lambda: _measured_speed(_name(dtype)))


def _remembered(name: str, device: torch.device, measure: Callable[[], float]) -> float:
    record = DeviceRecord(device)
    found = record.speeds.get(name)
    if found is None:
        found = record.speeds[name] = measure()
        record.save()
    return found


def is_packed(files: ModelFiles, device: torch.device) -> bool:
    """Return whether the model computes with quantised weights as they are."""
    quantisation = plan_quantisation(files.origin, files.quantised, device)
    return quantisation is not None and quantisation.kept == "packed"


def _is_fast(device: torch.device) -> bool:
    # Whether the device is known to have instructions for bfloat16 that are faster than float32.
    return device.type == "cuda" and (bool(torch.version.hip) or attention.compute_capability(device) >= (8, 0))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _kind(device: torch.device) -> str:
    return "processor" if device.type == "cpu" else "device"


def _measured(form: str, than: str, device: torch.device, size: tuple[int, int]) -> float:
    first, second = _times([form, than], than, device, size)
    return first / second


def _measured_speed(dtype: str) -> float:
    count, width = _SIZES["cpu"]
    (seconds,) = _times([dtype], dtype, torch.device("cpu"), (count, width))
    return 2.0 * count * width * width / seconds


@torch.inference_mode()
def _times(forms: Sequence[str], dtype: str, device: torch.device, size: tuple[int, int]) -> list[float]:
    # Seconds of the same product in each form, by turns: of so many rows, and inputs and outputs.
    count, width = size
    generator = torch.Generator().manual_seed(0)
    weight, rows = (torch.randn(each, width, generator=generator) for each in (width, count))
    products = [_product(each, dtype, weight, rows, device) for each in forms]
    with one_thread(device):
        for product in products:
            product()  # which may compile something
        taken = [[_seconds(product, device) for product in products] for _ in range(_ROUNDS)]
    return [float(min(each)) for each in zip(*taken, strict=True)]


def _product(form: str, dtype: str, weight: Tensor, rows: Tensor, device: torch.device) -> Callable[[], object]:
    # Smaller numbers are made of those in the dtype.
    narrow: Narrow | None = "int8" if form == "int8" else "fp8" if form == "fp8" else None
    weight, rows = (each.to(device, getattr(torch, dtype if narrow else form)) for each in (weight, rows))
    if narrow is None:
        return lambda: nn.functional.linear(rows, weight)
    linear = nn.Linear(1, 1, bias=False)
    linear.weight = nn.Parameter(weight)
    product = narrow_product(linear, narrow)
    return lambda: product(rows)


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    # On a CPU those of this thread alone, whatever else runs.
    clock = time.thread_time if device.type == "cpu" else time.perf_counter
    wait = {"cuda": torch.cuda.synchronize, "mps": torch.mps.synchronize}.get(device.type, lambda: None)
    wait()
    begun = clock()
    run()
    wait()
    return max(float(clock() - begun), 1e-9)


@contextmanager
def one_thread(device: torch.device) -> Iterator[None]:
    """Compute on one thread of a CPU; other devices compute as always."""
    threads = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
