"""The loading of a job's models: the engine, the small ones beside it, and what they have settled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

from prefillcli.core.models import Models
from prefillcli.engines.base import Engine, LoadRequest, loader_of
from prefillcli.engines.memory_plan import Measured
from prefillcli.followup.rationale import let_draft_guess, text_room
from prefillcli.models.open import Opened, Small
from prefillcli.options.groups import LayerOptions
from prefillcli.options.requirements import compresses, first_readers
from prefillcli.options.settings import JobSettings

if TYPE_CHECKING:
    from prefillcli.engines.torch import TorchEngine
    from prefillcli.models.weights import WeightsPlan
    from prefillcli.walk.walk import Arithmetic


def load_models(
    opened: Opened,
    settings: JobSettings,
    *,
    before: Mapping[str, Any] = MappingProxyType({}),
    measured: Measured | None = None,
    share: float = 1.0,
    planned: bool = False,
    names: Sequence[str] = (),
) -> Models[Engine]:
    """Load the weights and decide the size of a pack.

    Commands that have no choice of an engine take the layer walk, with all of a pack on the device. `before` is
    what an earlier attempt has settled, or empty. `share` and `planned` as in `LoadRequest`. `names`
    are those of the labels. Raises ResourceError where the weights cannot fit, before they are loaded.
    """
    if opened.small:
        plan_weights(settings.layers, opened)  # raises ResourceError
    tokens, texts_of = text_room(settings, opened, names)
    small = [_load_small(each, opened, settings) for each in opened.small]
    loaded = loader_of(settings.engine.engine).load(
        LoadRequest(
            opened,
            settings.packs,
            settings.engine.engine_options,
            before,
            measured,
            share,
            planned,
            settings.layers,
            trust_remote_code=settings.lm.trust_remote_code,
            text_tokens=tokens,
            texts_of=texts_of,
            arithmetic=_arithmetic(settings.layers),
            plan_weights=partial(plan_weights, settings.layers, opened, draft=False, share=share),
        )
    )
    same = before if planned or before.get("asked") == loaded.settled.get("asked") else {}
    models = Models(
        loaded.engine,
        opened,
        settings,
        dict(loaded.settled),
        before=same,
        planned=planned,
        budget=loaded.budget or 0,
        pack_seconds=loaded.pack_seconds,
        small=small,
    )
    if compresses(settings):
        from prefillcli.reading.compress.load import load_draft

        models.add("draft", load_draft(models))
    if first_readers(settings):
        from prefillcli.reading.exits.first import load_first

        models.add("first", load_first(models))
    let_draft_guess(models)
    return models


def open_models(settings: JobSettings, dtypes: Sequence[str] = (), read_layers: int | None = None) -> Opened:
    """Open the models of these settings, with their adapters. `dtypes` are those that are chosen already, and
    `read_layers` the number of the model's layers that are read (None: all). Raises as `Loader`, and UsageError for
    adapters that do not fit."""
    opened, own = loader_of(settings.engine.engine).open_models(settings, dtypes), settings.adapters
    if read_layers is not None:
        opened = replace(opened, files=replace(opened.files, read_layers=read_layers))
    if not own.adapter:
        return opened
    from prefillcli.models.adapters import open_adapters

    lm = settings.lm
    return open_adapters(
        opened, own.adapter, own.adapter_column, layout=lm.layout, trust_remote_code=lm.trust_remote_code
    )


def plan_weights(layers: LayerOptions, opened: Opened, *, draft: bool = True, share: float = 1.0) -> WeightsPlan:
    """Return how the weights of the layer walk's model are kept: on the device, or streamed. With `draft` those of the
    draft must fit beside them; else the draft's are loaded already. This worker has a `share` of the memory; others
    take the rest. Raises UsageError, and ResourceError where they certainly do not fit."""
    from prefillcli.models.streamed_layers import plan_lower, plan_streamed

    if layers.weights == "resident":
        return plan_lower(opened, draft=draft)
    always = layers.weights == "stream"
    found = plan_streamed(opened, layers.weights_memory, always=always, draft=draft, share=share)
    return found or plan_lower(opened, draft=draft)


def _arithmetic(layers: LayerOptions) -> Arithmetic | None:
    # The arithmetic of a walk through the layers; None where it takes the fastest way of the device.
    if not layers.deterministic:
        return None
    from prefillcli.walk.determinism import by_row

    return by_row()


def _load_small(small: Small, opened: Opened, settings: JobSettings) -> Any:
    """Load the weights of a small model, on the model's device. Raises as `load_model`, and UsageError if it cannot
    be a draft."""
    from prefillcli.models.load import load_model, load_weights
    from prefillcli.models.rehearsal import check_uses

    load = load_weights if small.files.encoder else load_model  # an encoder is not walked
    loaded = load(small.files, opened.device, trust_remote_code=settings.lm.trust_remote_code)
    if settings.compression.draft is not None:
        check_uses(loaded, drafts=f"--draft {small.files.origin}", compresses=False)
    return loaded


def load_walk(
    opened: Opened, settings: JobSettings, *, share: float = 1.0, names: Sequence[str] = ()
) -> Models[TorchEngine]:
    """Load the models as `load_models` does, where the engine is the layer walk."""
    return cast("Models[TorchEngine]", load_models(opened, settings, share=share, names=names))
