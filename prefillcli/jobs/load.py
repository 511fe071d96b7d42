"""What a job computes with: the engine, and the draft where there is one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from prefillcli.compress.load import load_draft, make_compressor, make_draft, own_layers, plan_draft
from prefillcli.compress.pickers import PickerResources
from prefillcli.compress.settings import PAPER, Compression
from prefillcli.core.feature import features_of
from prefillcli.engines.base import Engine, Loader, LoadRequest
from prefillcli.engines.memory_plan import RESIDENT, Measured, PlacementChoice
from prefillcli.engines.registry import loader_of
from prefillcli.errors import UsageError
from prefillcli.models.open import Opened
from prefillcli.options.groups import CompressionOptions, LoadingOptions
from prefillcli.options.rationale import WritingOptions

if TYPE_CHECKING:
    from prefillcli.compress.compressor import Compressor
    from prefillcli.compress.draft import Draft
    from prefillcli.engines.torch import TorchEngine
    from prefillcli.models.law import TextsOf

AnyEngine = TypeVar("AnyEngine", bound=Engine, covariant=True)


@dataclass(frozen=True, slots=True)
class Models(Generic[AnyEngine]):
    """Models ready to work. `plan` is what a resumed run must take over to cut the same packs."""

    engine: AnyEngine
    compressor: Compressor | None
    draft: Draft | None
    plan: dict[str, Any]
    pack_seconds: float = 0.0  # as of `Loaded`

    def close(self) -> None:
        self.engine.close()
        if self.compressor is not None:
            self.compressor.close()


def load_models(
    opened: Opened,
    settings: LoadingOptions,
    loader: Loader,
    *,
    keep: float,
    before: Mapping[str, Any] = MappingProxyType({}),
    options: Mapping[str, Any] = MappingProxyType({}),
    measured: Measured | None = None,
    share: float = 1.0,
    planned: bool = False,
    placement: PlacementChoice = RESIDENT,
    text_tokens: int = 0,
    texts_of: TextsOf = "all",
) -> Models[Engine]:
    """Load the weights and decide what fits one pack.

    `before` is the plan of an earlier attempt, or empty. `keep` is the rate to start with; one that an earlier attempt
    has chosen stands. `options` are the engine's own. `share` and `planned` as in `LoadRequest`. `placement` says what
    of the model may be kept outside the device; the draft is on it. `text_tokens` and `texts_of` as in `LoadRequest`.
    Raises ResourceError where the weights cannot fit, before they are loaded.
    """
    compression = compression_of(settings)
    if opened.drafts_itself:
        own_layers(compression, opened)  # raises UsageError
    small = None
    if opened.draft is not None:
        from prefillcli.models.weights import plan_weights  # takes torch along

        plan_weights(opened, placement)  # raises ResourceError
        small = load_draft(opened, trust_remote_code=settings.trust_remote_code)
    loaded = loader.load(
        LoadRequest(
            opened,
            settings,
            options,
            before,
            measured,
            share,
            planned,
            placement,
            text_tokens,
            texts_of,
            next(filter(None, (each.arithmetic() for each in features_of(settings))), None),
        )
    )
    plan = loaded.plan | {name: before[name] for name in ("keep", "keep_auto") if name in before}
    if opened.drafts_itself:
        resources = PickerResources(settings=compression)
        compressor = make_compressor("self-draft", resources, opened, plan.get("keep", keep))
        return Models(loaded.engine, compressor, None, plan, loaded.pack_seconds)
    if small is None:
        return Models(loaded.engine, None, None, plan, loaded.pack_seconds)
    if not planned:
        same = before.get("asked") == plan["asked"]
        earlier = before.get("draft", {}) if same else {}
        plan["draft"] = plan_draft(opened, compression, loaded.budget or 0, settings.chunk_tokens, earlier)
    draft = make_draft(opened, small, compression, plan["draft"])
    _let_guess(loaded.engine, draft, opened, settings)
    resources = PickerResources(settings=compression, draft=draft)
    compressor = make_compressor("specprefill", resources, opened, plan.get("keep", keep))
    return Models(loaded.engine, compressor, draft, plan, loaded.pack_seconds)


def _let_guess(engine: Engine, draft: Draft, opened: Opened, settings: LoadingOptions) -> None:
    """Let the draft guess tokens of texts, where it is asked to. Raises UsageError if it cannot forget guesses."""
    from prefillcli.decode.draft_model import DraftModel
    from prefillcli.prefill.forest import UnsupportedModelError

    if not (isinstance(settings, WritingOptions) and settings.speculates_with_draft) or opened.draft is None:
        return
    try:
        engine.guess_with(DraftModel(draft.walk, opened.draft.max_length))
    except UnsupportedModelError as error:
        raise UsageError(
            f"--speculation {settings.speculation}: --draft {opened.draft.origin} cannot guess tokens: {error}\n"
            "take another draft, or --speculation lookup"
        ) from error


def load_walk(
    opened: Opened,
    settings: LoadingOptions,
    *,
    keep: float,
    share: float = 1.0,
    placement: PlacementChoice = RESIDENT,
    text_tokens: int = 0,
    texts_of: TextsOf = "all",
) -> Models[TorchEngine]:
    """`load_models` with the layer walk, as a job begins."""
    models = load_models(
        opened,
        settings,
        loader_of("torch"),
        keep=keep,
        share=share,
        placement=placement,
        text_tokens=text_tokens,
        texts_of=texts_of,
    )
    return cast("Models[TorchEngine]", models)


def compression_of(settings: CompressionOptions) -> Compression:
    """The options of compression as the draft and the selection take them."""
    found = Compression(
        lookahead=settings.lookahead,
        query_window=settings.query_window,
        query_reduce=settings.query_reduce,
        pool=settings.pool,
        select_chunk=settings.select_chunk,
        compress_above=settings.compress_above,
        keep_first=settings.keep_first,
        keep_last=settings.keep_last,
        keep_private=settings.keep_private,
        per_row=settings.compress_per_row,
        self_layer=settings.self_layer,
    )
    if settings.drafts_itself:
        found = replace(found, lookahead=1)  # it decodes nothing
    return replace(found, **PAPER) if settings.paper else found
