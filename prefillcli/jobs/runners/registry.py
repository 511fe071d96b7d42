"""Where the workers of a job run: the runners, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from prefillcli.errors import UsageError
from prefillcli.jobs.runners.crew import Crew
from prefillcli.models.open import Opened
from prefillcli.options.score import ScoreSettings


@dataclass(frozen=True, slots=True)
class RunnerKind:
    """A runner by name. `crew` makes its workers; none of them has begun. Raises UsageError or ResourceError."""

    name: str
    crew: Callable[[ScoreSettings, Opened], Crew]


def _local(settings: ScoreSettings, opened: Opened) -> Crew:
    from prefillcli.jobs.runners.processes import ProcessCrew, usable_devices

    device = opened.device.type if opened.device is not None else "cpu"
    devices = usable_devices(device)
    if devices is not None and settings.workers > devices:
        raise UsageError(
            f"--workers {settings.workers}: this machine has {devices} CUDA devices, one for each worker\n"
            f"take --workers {devices}, or --device cpu"
        )
    if devices is not None and opened.device.index is not None:
        raise UsageError(f"--device {settings.device}: each worker has a device of its own\ntake --device cuda")
    threads = None if settings.threads == "auto" else settings.threads
    return ProcessCrew(settings.workers, device=device, engine=settings.engine, threads=threads)


def _ray(settings: ScoreSettings, opened: Opened) -> Crew:
    from prefillcli.jobs.runners.ray import RayCrew

    return RayCrew(settings, opened)


RUNNERS: dict[str, RunnerKind] = {kind.name: kind for kind in (RunnerKind("local", _local), RunnerKind("ray", _ray))}
