"""Everything that determines how a device computes: the device, its driver, and the software between it and a
model."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from importlib import metadata, resources
from pathlib import Path
from typing import TYPE_CHECKING

from prefillcli.errors import ResourceError, UsageError
from prefillcli.runtime.cores import cpu_flags, cpu_name
from prefillcli.runtime.user_cache import compiler_file
from prefillcli.runtime.version import __version__, version_of

if TYPE_CHECKING:
    import torch

_LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True, slots=True)
class DeviceKey:
    """A device and its software. If any of it changes, earlier findings about it no longer hold."""

    kind: str  # as torch calls it: cpu, cuda, mps
    device: str
    capability: str | None  # compute capability of a CUDA device, or the architecture of one of ROCm
    driver: str | None
    torch: str
    transformers: str
    prefill: str  # version, and a digest of the code that computes
    cpu: str
    cpu_flags: str  # the instruction sets of the processor, and those that torch uses
    compiler: str | None  # the C++ compiler, with its size and time
    flash: str | None = None  # packages that torch may take flash attention from

    @property
    def digest(self) -> str:
        """A digest of all of these."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:32]


def device_key(device: torch.device) -> DeviceKey:
    """Return the key of a device of this machine."""
    import torch

    name, capability, driver, flash = cpu_name(), None, None, None
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        name, capability, driver = properties.name, f"{properties.major}.{properties.minor}", driver_version()
        capability = getattr(properties, "gcnArchName", None) if torch.version.hip else capability
        flash = " ".join(_versions("flash-attn-3", "flash-attn-4"))
    elif device.type != "cpu":
        name, driver = f"{device.type} of {platform.machine()}", platform.platform()
    runtime = torch.version.cuda or torch.version.hip
    return DeviceKey(
        kind=device.type,
        device=name,
        capability=capability,
        driver=driver,
        torch=f"{torch.__version__} {torch.version.git_version}" + (f" with {runtime}" if runtime else ""),
        transformers=version_of("transformers"),
        prefill=f"{__version__} {_source_digest()}",
        cpu=f"{cpu_name()}, {platform.machine()}",
        cpu_flags=" ".join(
            [torch.backends.cpu.get_cpu_capability(), *_limits(), _digest(" ".join(cpu_flags()).encode())]
        ),
        compiler=compiler_file(),
        flash=flash,
    )


def _versions(*packages: str) -> Iterator[str]:
    for package in packages:
        with suppress(metadata.PackageNotFoundError):
            yield f"{package} {version_of(package)}"


def _limits() -> list[str]:
    # The instruction sets that oneDNN may use, where the environment limits them.
    return [f"{name}={os.environ[name]}" for name in _LIMITS if os.environ.get(name)]


def driver_version() -> str | None:
    """Return the version of NVIDIA's driver, from its kernel module; None without one."""
    with suppress(OSError, IndexError):
        words = _DRIVER.read_text().splitlines()[0].split()
        return next((word for word in words if word[0].isdigit() and "." in word), " ".join(words))
    return None


@cache
def _source_digest() -> str:
    # Digest of the files that compute a walk: in a checkout they change without the version.
    digest = hashlib.sha256()
    for file in sorted(resources.files("prefillcli.walk").iterdir(), key=lambda each: each.name):
        if file.name.endswith((".py", ".cpp")):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]


# The device that computes.


KINDS = ("cpu", "cuda", "mps")


def choose_device(name: str) -> torch.device:
    """Choose the torch device of `--device`. Raises UsageError or, for a missing device, ResourceError.

    `auto` takes a CUDA device if there is one, else the CPU. An Apple GPU (`mps`) is taken only by name.
    """
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"--device {name}: no such kind of device; use cpu, cuda, cuda:N or mps") from None
    if device.type not in KINDS:
        raise UsageError(f"--device {name}: only cpu, cuda and mps are supported")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        found = f"--device {name}: {torch.cuda.device_count()} CUDA devices found"
        if torch.version.cuda is None and torch.version.hip is None:
            found += f"\ntorch {torch.__version__} is built for CPUs; install a CUDA build of it"
        raise ResourceError(found)
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ResourceError(f"--device {name}: no Apple GPU found, or this torch is built without support for it")
    return device


def other_devices(device: torch.device) -> list[str]:
    """Return the devices of this machine besides this one, as `--device` calls them."""
    import torch

    found = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    found += ["mps"] if torch.backends.mps.is_available() else []
    own = f"cuda:{device.index or 0}" if device.type == "cuda" else device.type
    return [name for name in found if name != own]
