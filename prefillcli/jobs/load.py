"""The models of a job: the engine, the draft where there is one, and those that features load beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from prefillcli.core.feature import Feature, features_of, plan_weights, text_room
from prefillcli.engines.base import Engine, LoadRequest
from prefillcli.engines.memory_plan import RESIDENT, Measured
from prefillcli.engines.registry import loader_of
from prefillcli.models.open import Opened, Small
from prefillcli.options.groups import LoadingOptions, PlacementOptions

if TYPE_CHECKING:
    from prefillcli.engines.torch import TorchEngine
    from prefillcli.prefill.walk import LayerWalk

AnyEngine = TypeVar("AnyEngine", bound=Engine, covariant=True)


@dataclass(slots=True)
class Models(Generic[AnyEngine]):
    """Models ready to work.

    A resumed run must take over the `plan`, so that it cuts the same packs. `before` is the plan of an earlier attempt
    with the same settings, else empty. With `planned` another worker has made the plan for all.
    """

    engine: AnyEngine
    opened: Opened
    settings: LoadingOptions
    plan: dict[str, Any]
    before: Mapping[str, Any] = field(default_factory=dict)
    planned: bool = False
    budget: int = 0
    """Bytes that one pack may take."""
    pack_seconds: float = 0.0  # as of `Loaded`
    small: Sequence[Any] = ()
    """The weights of the small models beside the model."""
    beside: dict[type[Feature], Any] = field(default_factory=dict)
    """The results of `Feature.load`, by feature."""
    _small_walks: dict[int, LayerWalk] = field(default_factory=dict)
    _closing: ExitStack = field(default_factory=ExitStack)

    def small_walk(self, number: int = 0, chunk_tokens: int | None = None) -> LayerWalk:
        """A walk over a small model, which all users share in turn. The first one sets the number of tokens of a
        chunk."""
        from prefillcli.models.law import choose_chunk, memory_law
        from prefillcli.prefill.narrow import in_smaller_numbers
        from prefillcli.prefill.walk import FASTEST, LayerWalk

        if number not in self._small_walks:
            small = self.opened.small[number].files
            if chunk_tokens is None:
                chunk_tokens = choose_chunk(memory_law(small.config, small.dtype), self.budget, self.opened.device)
            model, narrow = self.small[number], self.opened.small[number].narrow
            how = FASTEST if narrow is None else in_smaller_numbers(model, narrow)
            walk = self._small_walks[number] = LayerWalk(model, chunk_tokens=chunk_tokens, arithmetic=how)
            self._closing.callback(walk.close)
        return self._small_walks[number]

    def held_bytes(self) -> int:
        """Bytes of the budget that K,V take at most which the engine keeps between packs."""
        from prefillcli.models.law import memory_law

        if getattr(self.settings, "prefix_kv", "auto") not in ("auto", "keep"):
            return 0
        return (
            self.engine.limits.held_tokens
            * memory_law(self.opened.files.config, self.opened.files.dtype).all_key_values
        )

    def add_features(self) -> None:
        """Let features load models or tables of their own. Raises UsageError."""
        for each in features_of(self.settings):
            found = each.load(self)
            if found is not None:
                self.beside[type(each)] = found
                self._closing.callback(found.close)

    def close(self) -> None:
        with self._closing:
            self.engine.close()


def load_models(
    opened: Opened,
    settings: LoadingOptions,
    *,
    before: Mapping[str, Any] = MappingProxyType({}),
    measured: Measured | None = None,
    share: float = 1.0,
    planned: bool = False,
    names: Sequence[str] = (),
) -> Models[Engine]:
    """Load the weights and decide the size of a pack.

    Commands that have no choice of an engine take the layer walk, with all of a pack on the device. `before` is the
    plan of an earlier attempt, or empty. `share` and `planned` as in `LoadRequest`. `names` are those of the labels.
    Raises ResourceError where the weights cannot fit, before they are loaded.
    """
    if opened.small:
        plan_weights(settings, opened)  # raises ResourceError
    small = [_load_small(each, opened, settings) for each in opened.small]
    loaded = loader_of(getattr(settings, "engine", "torch")).load(
        LoadRequest(
            opened,
            settings,
            getattr(settings, "engine_options", {}),
            before,
            measured,
            share,
            planned,
            settings if isinstance(settings, PlacementOptions) else RESIDENT,
            **text_room(settings, opened, names),
            arithmetic=next(filter(None, (each.arithmetic() for each in features_of(settings))), None),
            plan_weights=partial(plan_weights, settings, opened, draft=False, share=share),
        )
    )
    same = before if planned or before.get("asked") == loaded.plan.get("asked") else {}
    models = Models(
        loaded.engine,
        opened,
        settings,
        dict(loaded.plan),
        before=same,
        planned=planned,
        budget=loaded.budget or 0,
        pack_seconds=loaded.pack_seconds,
        small=small,
    )
    models.add_features()
    for each in features_of(settings):
        each.loaded(models)
    return models


def _load_small(small: Small, opened: Opened, settings: LoadingOptions) -> Any:
    """The weights of a small model, on the model's device. Raises as `load_model`, and UsageError if it cannot be a
    draft."""
    from prefillcli.models.load import load_model, load_weights
    from prefillcli.models.rehearsal import check_uses

    load = load_weights if small.files.encoder else load_model  # an encoder is not walked
    loaded = load(small.files, opened.device, trust_remote_code=settings.trust_remote_code)
    if settings.draft is not None:
        check_uses(loaded, drafts=f"--draft {small.files.origin}", compresses=False)
    return loaded


def load_walk(
    opened: Opened, settings: LoadingOptions, *, share: float = 1.0, names: Sequence[str] = ()
) -> Models[TorchEngine]:
    """`load_models` where the engine is the layer walk."""
    return cast("Models[TorchEngine]", load_models(opened, settings, share=share, names=names))
