"""What a job works with: first the models' files and tokenizers; their weights when there is something to score."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from prefillcli.compress.settings import PAPER, Compression
from prefillcli.engines.base import Engine
from prefillcli.errors import ResourceError, UsageError, brief
from prefillcli.models.samples import sample_model
from prefillcli.options.groups import CompressionOptions, LoadingOptions, ModelOptions
from prefillcli.options.values import parse_size
from prefillcli.plan.pack import Limits
from prefillcli.runtime.threads import Threads

if TYPE_CHECKING:  # torch takes seconds to import; wrong input should not wait for it
    import torch

    from prefillcli.compress.compressor import Compressor
    from prefillcli.compress.worth import Worth
    from prefillcli.engines.torch import TorchEngine
    from prefillcli.forecast.profile import Profile
    from prefillcli.models.find import ModelFiles
    from prefillcli.prefill.law import MemoryLaw

PACK_SECONDS = 60.0
"""Seconds that a pack may take, by the profile where there is one: finished rows are written between packs."""

AnyEngine = TypeVar("AnyEngine", bound=Engine, covariant=True)


@dataclass(frozen=True, slots=True)
class Opened:
    """The files of a model and its draft, checked; no weights. `max_length` is the longest prompt in tokens.

    `threads` are those of this process, where it is the one that computes.
    """

    files: ModelFiles
    device: torch.device
    tokenizer: Any
    draft: ModelFiles | None
    max_length: int
    threads: Threads | None = None


@dataclass(frozen=True, slots=True)
class Loaded(Generic[AnyEngine]):
    """Models ready to work. `plan` is what a resumed run must take over to cut the same packs."""

    engine: AnyEngine
    compressor: Compressor | None
    plan: dict[str, Any]

    def close(self) -> None:
        self.engine.close()
        if self.compressor is not None:
            self.compressor.draft.close()


def open_model(settings: ModelOptions, *, walk: bool = True) -> tuple[ModelFiles, torch.device]:
    """Find and check the model, to be walked layer by layer or not, and its device.

    Raises UsageError or ResourceError.
    """
    from prefillcli.models.find import find_model, read_model_files
    from prefillcli.runtime.devices import choose_device

    if settings.model is None:
        path = sample_model()
        print(f"prefill: warning: no --model given; the sample model in {path} is for demonstration", file=sys.stderr)
    else:
        path = find_model(settings.model, settings.revision)
    device = choose_device(settings.device)
    files = read_model_files(
        path, dtype=settings.dtype, device=device.type, trust_remote_code=settings.trust_remote_code, walk=walk
    )
    return files, device


def open_models(settings: LoadingOptions, *, walk: bool = True) -> Opened:
    """`open_model`, and its tokenizer and the draft. Raises UsageError or ResourceError."""
    from prefillcli.compress.tokenizers import difference
    from prefillcli.models.find import find_model, read_model_files

    threads = Threads(settings.threads)
    files, device = open_model(settings, walk=walk)
    tokenizer = _load_tokenizer(files, settings.trust_remote_code)
    small = None
    if settings.draft is not None:
        small = read_model_files(
            find_model(settings.draft, option="--draft"),
            dtype=settings.dtype,
            device=device.type,
            trust_remote_code=settings.trust_remote_code,
        )
        other = difference(tokenizer, _load_tokenizer(small, settings.trust_remote_code))
        if other is not None:
            raise UsageError(f"--draft {settings.draft}: its tokenizer is not the model's: {other}")
    return Opened(files, device, tokenizer, small, files.max_length, threads)


def _load_tokenizer(files: ModelFiles, trust_remote_code: bool) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(files.path, trust_remote_code=trust_remote_code)
    except Exception as error:  # the tokenizers library raises plain ones
        raise UsageError(f"{files.path}: cannot load the tokenizer: {brief(error)}") from None


def load(
    opened: Opened,
    settings: LoadingOptions,
    *,
    keep: float,
    before: dict[str, Any],
    profile: Profile | None = None,
) -> Loaded[TorchEngine]:
    """Load the weights and decide what fits one pack.

    `before` is the `plan` of an earlier attempt (or empty): it stands, unless other limits were asked for or it does
    not fit any more. `keep` is the rate to start with; one that an earlier attempt has chosen stands in any case.
    `profile` as in `plan_memory`.
    Raises ResourceError where the weights cannot fit, before they are loaded.
    """
    from prefillcli.engines.torch import TorchEngine
    from prefillcli.models.load import load_model
    from prefillcli.runtime.memory import available_memory

    device, files = opened.device, opened.files
    refuse_what_cannot_fit(opened)
    model = load_model(files, device, trust_remote_code=settings.trust_remote_code)
    small = opened.draft and load_model(opened.draft, device, trust_remote_code=settings.trust_remote_code)
    free = None if settings.memory else available_memory(device)
    plan = plan_memory(opened, settings, free=free, profile=profile)
    if before.get("asked") == plan["asked"] and _fits(before, plan):
        plan |= before
    plan |= {name: before[name] for name in ("keep", "keep_auto") if name in before}
    engine = TorchEngine(
        model,
        limits=Limits(**plan["limits"]),
        chunk_tokens=plan["chunk_tokens"],
        offload_held=settings.prefix_kv == "offload",
    )
    if opened.draft is None:
        return Loaded(engine, None, plan)
    return Loaded(engine, _compressor(opened, small, settings, plan, plan.get("keep", keep)), plan)


def refuse_what_cannot_fit(opened: Opened) -> None:
    """Raise ResourceError if it is certain that the device has no room for the weights."""
    from prefillcli.runtime.memory import loadable_memory

    need, most = weights_of(opened), loadable_memory(opened.device)
    if most is not None and need > most:
        raise ResourceError(
            f"{opened.files.path}: the weights{' and those of the draft' if opened.draft is not None else ''} take "
            f"{need / 2**30:.1f} GiB in {str(opened.files.dtype).removeprefix('torch.')}, and {opened.device} has "
            f"{most / 2**30:.1f} GiB free; take a smaller model, or another --dtype or --device"
        )


def weights_of(opened: Opened) -> int:
    """Bytes of the device's free memory that the models' weights will take."""
    from prefillcli.models.weights import weight_bytes

    return sum(weight_bytes(files, opened.device) for files in (opened.files, opened.draft) if files is not None)


def plan_memory(
    opened: Opened, settings: LoadingOptions, *, free: int | None, profile: Profile | None = None
) -> dict[str, Any]:
    """What fits one pack of the model and of the draft, as the `plan` of a job.

    `free` bytes are what the loaded weights leave; it is not used where `--memory` says it. `profile`, of this model
    on this machine, says what a token takes and how long a pack. Raises ResourceError.
    """
    from prefillcli.prefill.law import FREE_SHARE, PACK_TOKENS, choose_chunk, memory_law, pack_limits

    budget = parse_size(settings.memory) if settings.memory else int((free or 0) * FREE_SHARE)
    law = memory_law(opened.files.config, opened.files.dtype)
    chunk_tokens = settings.chunk_tokens or choose_chunk(law, budget, opened.device)
    pack_tokens = settings.pack_tokens or PACK_TOKENS[opened.device.type]
    if profile is not None:
        law = law.measured(profile.token_bytes)
        if settings.pack_tokens is None:
            pack_tokens = max(chunk_tokens, profile.tokens_within(PACK_SECONDS, most=pack_tokens))
    limits = pack_limits(
        law,
        budget=budget,
        device=opened.device,
        chunk_tokens=chunk_tokens,
        pack_tokens=pack_tokens,
        prefix_kv=settings.prefix_kv,
    )
    asked = [settings.memory, settings.pack_tokens, settings.chunk_tokens, settings.prefix_kv]
    plan: dict[str, Any] = {"asked": asked, "chunk_tokens": chunk_tokens, "limits": asdict(limits)}
    if opened.draft is not None:
        small_law = memory_law(opened.draft.config, opened.draft.dtype)
        plan["draft"] = _draft_plan(settings, small_law, budget, opened.device)
    return plan


def _fits(before: dict[str, Any], plan: dict[str, Any]) -> bool:
    return all(
        part["limits"]["max_tokens"] <= room["limits"]["max_tokens"]
        for part, room in ((before, plan), (before.get("draft", before), plan.get("draft", plan)))
    )


def _draft_plan(settings: LoadingOptions, law: MemoryLaw, budget: int, device: torch.device) -> dict[str, Any]:
    from prefillcli.prefill.law import choose_chunk, draft_limits

    compression = compression_of(settings)
    chunk_tokens = settings.chunk_tokens or choose_chunk(law, budget, device)
    limits = draft_limits(
        law,
        budget=budget,
        device=device,
        chunk_tokens=chunk_tokens,
        queries=compression.queries,
        all_layers=compression.decoded > 0,
    )
    return {"chunk_tokens": chunk_tokens, "limits": asdict(limits)}


def _compressor(opened: Opened, model: Any, settings: LoadingOptions, plan: dict[str, Any], keep: float) -> Compressor:
    from prefillcli.compress.compressor import Compressor
    from prefillcli.compress.draft import Draft
    from prefillcli.models.families import sliding_window

    if opened.draft is None:
        raise ValueError("no draft was opened")
    told: set[str] = set()

    def tell(error: BaseException) -> None:
        text = f"{type(error).__name__}: {brief(error)}"
        if text not in told:
            told.add(text)
            print(f"prefill: warning: the draft failed, its rows are read in full: {text}", file=sys.stderr)

    compression = compression_of(settings)
    draft = Draft(
        model,
        compression,
        limits=Limits(**plan["draft"]["limits"]),
        chunk_tokens=plan["draft"]["chunk_tokens"],
        max_length=opened.draft.max_length,
        on_failure=tell,
    )
    return Compressor(
        draft,
        compression,
        keep=keep,
        worth=worth_of(settings, opened),
        target_window=sliding_window(opened.files.config),
    )


def worth_of(settings: CompressionOptions, opened: Opened) -> Worth:
    """Which prompts compression pays for."""
    from prefillcli.compress.worth import Worth

    small = opened.draft and opened.draft.config
    return Worth(compression_of(settings), opened.files.config, small)


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
    )
    return replace(found, **PAPER) if settings.paper else found
