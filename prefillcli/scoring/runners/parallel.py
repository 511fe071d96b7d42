"""Starts the workers of a job, where its runner has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from prefillcli.errors import UsageError
from prefillcli.models.open import Opened, with_small
from prefillcli.options.engines import ENGINES
from prefillcli.options.settings import JobSettings
from prefillcli.plan.plan import Plan
from prefillcli.runtime.signals import Stop
from prefillcli.scoring.runners.pool import Cost, Crew, Pool, WorkerSpec

if TYPE_CHECKING:
    from prefillcli.forecast.profile import Profile


# The places where the workers of a job run: the runners, by name.


@dataclass(frozen=True, slots=True)
class RunnerKind:
    """A runner by name. `crew` makes its workers, none of them started. Raises UsageError or ResourceError."""

    name: str
    crew: Callable[[JobSettings, Opened], Crew]


def _local(settings: JobSettings, opened: Opened) -> Crew:
    from prefillcli.scoring.runners.processes import ProcessCrew, usable_devices

    device = opened.device.type if opened.device is not None else "cpu"
    devices = usable_devices(device)
    if devices is not None and settings.processes.workers > devices:
        raise UsageError(
            f"--workers {settings.processes.workers}: this machine has {devices} CUDA devices, one for each worker\n"
            f"take --workers {devices}, or --device cpu"
        )
    if devices is not None and opened.device.index is not None:
        raise UsageError(f"--device {settings.lm.device}: each worker has its own device\ntake --device cuda")
    threads = None if settings.lm.threads == "auto" else settings.lm.threads
    return ProcessCrew(settings.processes.workers, device=device, engine=settings.engine.engine, threads=threads)


def _ray(settings: JobSettings, opened: Opened) -> Crew:
    from prefillcli.scoring.runners.ray import RayCrew

    return RayCrew(settings, opened)


RUNNERS: dict[str, RunnerKind] = {kind.name: kind for kind in (RunnerKind("local", _local), RunnerKind("ray", _ray))}


PACK_SHARE = 1 / 4
"""Size of the packs of several workers, as a share of a single process's."""


def start_pool(
    settings: JobSettings,
    opened: Opened,
    stop: Stop,
    *,
    before: Mapping[str, Any],
    profile: Profile | None,
    digests: Mapping[str, str],
) -> Pool:
    """Start the workers of a job, and return them when one of them is ready. `before` as in `load_models`.

    `digests` are those of the contents of the models' folders. Raises as loading a model does.
    """
    from prefillcli.models.law import PACK_TOKENS

    kind = opened.device.type if opened.device is not None else "cpu"
    crew = RUNNERS[settings.processes.runner].crew(settings, opened)
    folders: dict[str, Any] = {"model": str(opened.files.origin), "revision": None}
    folders |= with_small(settings, [str(each.files.origin) for each in opened.small])
    if settings.exits.narrow is not None:
        folders["compute"] = next((each.narrow for each in opened.small if each.narrow is not None), None)
    spec = WorkerSpec(
        number=0,
        settings=settings.with_options(folders),
        share=1.0 if kind == "cuda" else 1 / crew.size,
        settled=before,
        measured=profile,
        digests=digests if crew.digests_needed else {},
        dtypes=opened.dtypes,
        read_layers=opened.files.read_layers,
    )
    pool = Pool(crew, spec, lambda spec, number: replace(spec, number=number), cost=_cost(opened, profile), stop=stop)
    try:
        tokens = None if settings.packs.pack_tokens else int(PACK_TOKENS[kind] * PACK_SHARE)
        pool.begin(plans="packs" in ENGINES[settings.engine.engine].can, pack_tokens=tokens)
    except BaseException:
        pool.close()
        raise
    return pool


def _cost(opened: Opened, profile: Profile | None) -> Cost:
    """Return the cost of a plan: seconds by the profile, else operations, else tokens."""
    if profile is not None:
        return profile.seconds
    from prefillcli.models.shape import NoCostModel, walk_flops

    def operations(plan: Plan) -> float:
        try:
            return walk_flops(opened.files.config, plan)
        except (NoCostModel, AttributeError):
            return float(plan.computed_tokens)

    return operations
