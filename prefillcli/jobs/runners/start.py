"""The workers of a `prefill score` job, begun."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from prefillcli.engines.registry import ENGINES
from prefillcli.jobs.load import compression_of
from prefillcli.jobs.runners.pool import Cost, Pool
from prefillcli.jobs.runners.registry import RUNNERS
from prefillcli.jobs.runners.tasks import WorkerSpec
from prefillcli.models.open import Opened
from prefillcli.options.score import ScoreSettings
from prefillcli.plan.plan import Plan
from prefillcli.runtime.signals import Stop

if TYPE_CHECKING:
    from prefillcli.compress.compressor import Compressor
    from prefillcli.forecast.profile import Profile


PACK_SHARE = 1 / 4
"""Size of the packs of several workers, as a share of a single process's."""


def start_pool(
    settings: ScoreSettings,
    opened: Opened,
    stop: Stop,
    *,
    keep: float,
    before: Mapping[str, Any],
    profile: Profile | None,
    digests: Mapping[str, str],
) -> Pool:
    """The workers of a job, of which one is ready. `keep` and `before` as in `load_models`.

    `digests` are those of the contents of the models' folders. Raises as loading a model does.
    """
    from prefillcli.models.law import PACK_TOKENS

    kind = opened.device.type if opened.device is not None else "cpu"
    crew = RUNNERS[settings.runner].crew(settings, opened)
    folders = {"model": str(opened.files.origin), "revision": None}
    if opened.draft is not None:
        folders["draft"] = str(opened.draft.origin)
    spec = WorkerSpec(
        number=0,
        settings=settings.model_copy(update=folders),
        keep=keep,
        share=1.0 if kind == "cuda" else 1 / crew.size,
        plan=before,
        measured=profile,
        digests=digests if crew.digests_needed else {},
    )
    pool = Pool(crew, spec, lambda spec, number: replace(spec, number=number), cost=_cost(opened, profile), stop=stop)
    try:
        tokens = None if settings.pack_tokens else int(PACK_TOKENS[kind] * PACK_SHARE)
        pool.begin(plans="packs" in ENGINES[settings.engine].can, pack_tokens=tokens)
    except BaseException:
        pool.close()
        raise
    return pool


def pool_compressor(settings: ScoreSettings, opened: Opened, pool: Pool, keep: float) -> Compressor | None:
    """What compresses the windows of the job, with the drafts of the pool."""
    from prefillcli.compress.load import make_compressor
    from prefillcli.compress.pickers.registry import PickerResources

    if not opened.compresses:
        return None
    picker = "self-draft" if opened.drafts_itself else "specprefill"
    resources = PickerResources(settings=compression_of(settings), draft=pool)
    return make_compressor(picker, resources, opened, pool.plan.get("keep", keep))


def _cost(opened: Opened, profile: Profile | None) -> Cost:
    """What a plan takes: seconds by the profile, else operations, else tokens."""
    if profile is not None:
        return profile.seconds
    from prefillcli.models.flops import walk_flops
    from prefillcli.models.shape import NoCostModel

    def operations(plan: Plan) -> float:
        try:
            return walk_flops(opened.files.config, plan)
        except (NoCostModel, AttributeError):
            return float(plan.computed_tokens)

    return operations
