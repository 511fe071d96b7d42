"""Loads the layer walk: the model, where its weights are, and how large its packs may be."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from prefillcli.engines import encoders
from prefillcli.engines.base import Loaded, LoadRequest, WeightsReport
from prefillcli.engines.images import PackImages
from prefillcli.engines.memory_plan import REDUCED, budget_of, hidden_on_host, keep_plan, limits_of, plan_packs
from prefillcli.engines.torch import TorchEngine
from prefillcli.errors import UsageError
from prefillcli.models.load import add_own_head
from prefillcli.models.open import Opened, check_loadable, check_walkable
from prefillcli.models.open import open_models as open_folders
from prefillcli.models.rehearsal import rehearsal_of
from prefillcli.models.weights import plan_quantisation, plan_resident
from prefillcli.options.settings import JobSettings
from prefillcli.runtime import log
from prefillcli.runtime.memory import available_memory, device_capacity, keep_blocks
from prefillcli.walk.attention import KERNEL, ruled_out, why_no_library
from prefillcli.walk.fusion import check_compiler, compiled
from prefillcli.walk.narrow import in_smaller_numbers
from prefillcli.walk.walk import FASTEST, LayerWalk


def open_models(settings: JobSettings, dtypes: Sequence[str] = ()) -> Opened:
    """As `Loader`; the model must be one that can be walked layer by layer."""
    opened = open_folders(settings, dtypes)
    check_walkable(opened.files, "take another model, or --engine hf")
    check_loadable(opened.files, opened.device)
    return replace(opened, max_length=opened.files.max_length_apart)


def load(request: LoadRequest) -> Loaded[TorchEngine] | Loaded[encoders.EncoderEngine]:
    """As `Loader`; an encoder is not walked. Packs are sized by the memory that is free once the weights are loaded,
    unless `--memory` gives a size."""
    opened, own, layers = request.opened, request.packs, request.layers
    if opened.files.encoder:
        return encoders.load(request)
    files, device, trust = opened.files, opened.device, request.trust_remote_code
    arithmetic = request.arithmetic or FASTEST
    weights = plan_resident(opened, draft=False) if request.plan_weights is None else request.plan_weights()
    quantisation = plan_quantisation(files.origin, files.quantised, device)
    if arithmetic.no_packed_weights and quantisation is not None and quantisation.kept == "packed":
        raise UsageError(arithmetic.no_packed_weights.format(format=quantisation.format.name))
    model, source = weights.load(files, device, trust_remote_code=trust)
    add_own_head(model, opened)
    use_variant = None if opened.variants is None else opened.variants.apply(model)
    own_cache = rehearsal_of(model).own_cache
    if own_cache and arithmetic.no_own_cache:
        raise UsageError(arithmetic.no_own_cache)
    if opened.narrow is not None:
        arithmetic = in_smaller_numbers(model, opened.narrow)
    streamed = source if weights.mode == "stream" else None
    on_host = hidden_on_host(layers, device, streamed=streamed is not None)
    images = PackImages(
        opened.images, device, alone=request.arithmetic is not None
    )  # its weights, before what is free
    free = None
    if not own.memory:
        free = int(available_memory(device) * request.share) - (0 if streamed is None else streamed.memory_bytes)
    budget = images.within(budget_of(own, free))
    if device.type == "cpu":
        keep_blocks(budget)
        if request.share == 1.0:  # not by each of several workers
            _tell_missing_compiler()
    speed = None if streamed is None else streamed.measure_speed()
    plan = dict(request.before)
    if not request.planned:
        packs = plan_packs(
            opened,
            own,
            budget,
            request.measured,
            least_tokens=0 if speed is None else speed.hiding_tokens,
            hidden_on_host=on_host,
            own_cache=own_cache,
            text_tokens=request.text_tokens,
            texts_of=request.texts_of,
            share=request.share,
        )
        plan = keep_plan(plan, packs)
    walk = LayerWalk(
        model,
        chunk_tokens=plan["chunk_tokens"],
        offload_held=own.prefix_kv == "offload",
        hidden_on_host=on_host,
        layers=source,
        arithmetic=arithmetic,
    )
    if request.text_tokens:
        try:
            walk.check_decoding()
        except UsageError as error:
            raise UsageError(f"--rationale: {error}") from None
    if own_cache and request.share == 1.0:  # not by each of several workers
        log.info(f"a {files.family} model is walked with its own cache, prompt by prompt")
    if layers.compile and walk.keeps_ends:
        log.warning(
            f"--compile: layers of a {files.family} model keep states or a cache of their own, "
            "and are called as they are"
        )
    elif layers.compile:
        check_compiler(device)
        walk.arithmetic = replace(arithmetic, prepare=compiled)
    engine = TorchEngine(
        walk,
        limits=limits_of(plan),
        activation="pointer" if opened.points else files.activation,
        use_variant=use_variant,
        weights=WeightsReport(
            mode=weights.mode,
            bytes=weights.bytes,
            memory_bytes=weights.bytes if streamed is None else streamed.resident_bytes + streamed.memory_bytes,
            weights_over_memory=weights.bytes / device_capacity(device),
            own_cache=own_cache,
            quantisation=None if quantisation is None else quantisation.describe(files.dtype),
            avoided_paths=tuple(ruled_out(device)),
        ),
        reduced=plan.get(REDUCED),
        longest=files.max_length_apart,
        images=images,
    )
    return Loaded(engine, plan, budget, 0.0 if speed is None else speed.read_seconds)


def _tell_missing_compiler() -> None:
    # An empty CXX says that nothing should be compiled.
    if os.environ.get("CXX") != "" and (why := why_no_library(KERNEL)) is not None:
        reason, _, cure = why.partition("\n")
        log.info(f"attention takes up to twice the time, because {reason}: {cure}, or set CXX=''")
