"""The size of packs of the layer walk, and of the chunks that go through a layer at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, Protocol

from prefillcli.options.groups import BudgetOptions, LayerOptions, MemoryOptions
from prefillcli.plan.pack import Limits
from prefillcli.runtime.cores import affinity
from prefillcli.runtime.memory import parse_size

if TYPE_CHECKING:
    import torch

    from prefillcli.models.law import TextsOf
    from prefillcli.models.open import Opened

REDUCED = "reduced"  # what a job has settled as the sizes of chunks and packs since memory ran out
# What a job that writes texts has settled: whether K,V survive scoring, why, and the room for them in tokens
# and bytes.
TEXTS = "texts"
# Seconds that a pack may take: by the profile where there is one, else on a CPU by counted operations and the speed of
# its products. Finished rows are written between packs, so a run that is stopped loses about this much.
PACK_SECONDS = 10.0
LEAST_PACK_TOKENS = 512  # fewer would not keep the cores busy


class Measured(Protocol):
    """Measurements of a model on this machine."""

    def tokens_within(self, seconds: float, *, most: int) -> int:
        """The tokens of the largest pack, at most `most`, that can be computed within this many seconds."""


def budget_of(packs: BudgetOptions, free: int | None) -> int:
    """Bytes for packs: the size given by `--memory`, else a share of the `free` ones."""
    from prefillcli.models.law import FREE_SHARE

    return parse_size(packs.memory) if packs.memory else int((free or 0) * FREE_SHARE)


def plan_packs(
    opened: Opened,
    packs: MemoryOptions,
    budget: int,
    measured: Measured | None = None,
    *,
    least_tokens: int = 0,
    hidden_on_host: bool = False,
    own_cache: bool = False,
    text_tokens: int = 0,
    texts_of: TextsOf = "all",
    share: float = 1.0,
) -> dict[str, Any]:
    """The limits of one pack of the model in `budget` bytes, as a job settles them.

    `measured` gives the time of a pack; without, the operations of a pack are counted where
    the device is a CPU. Packs of less than `least_tokens` would wait for
    streamed weights, so packs have at least as many where they fit. With `own_cache` the model is walked with its own
    cache. Texts of up to `text_tokens`, beginnings and guesses included, are written after prompts; 0: none are.
    `texts_of` chooses these prompts, and the texts may take `share` of the free host memory. Raises ResourceError
    where not even a small prompt fits.
    """
    from prefillcli.models.dtype import operations_per_second
    from prefillcli.models.law import (
        PACK_TOKENS,
        choose_chunk,
        keep_or_again,
        limits_with_texts,
        memory_law,
        pack_limits,
    )
    from prefillcli.models.shape import length_switch

    head = opened.files.head
    law = memory_law(opened.files.config, opened.files.dtype, None if head is None else len(head.classes))
    if opened.images_asked:
        law = law.with_images(opened.images.processing.traits)
    if hidden_on_host:
        law = law.with_hidden_on_host()
    if own_cache:
        law = law.with_own_cache()
    chunk_tokens = packs.chunk_tokens or choose_chunk(law, budget, opened.device)
    pack_tokens = packs.pack_tokens
    if pack_tokens is None:
        most = PACK_TOKENS[opened.device.type]
        if measured is not None:
            pack_tokens = max(chunk_tokens, measured.tokens_within(PACK_SECONDS, most=most))
        elif opened.device.type == "cpu":
            speed = operations_per_second(opened.files.dtype) * max(len(affinity()) * share, 1.0)
            pack_tokens = min(most, law.tokens_within(PACK_SECONDS * speed, least=LEAST_PACK_TOKENS))
        else:
            pack_tokens = most
        pack_tokens = max(pack_tokens, least_tokens)
    limits = pack_limits(
        law,
        budget=budget,
        device=opened.device,
        chunk_tokens=chunk_tokens,
        pack_tokens=pack_tokens,
        prefix_kv=packs.prefix_kv,
    )
    limits = replace(limits, switch=length_switch(opened.files.config))
    asked = [packs.memory, packs.pack_tokens, packs.chunk_tokens, packs.prefix_kv]
    plan = {"asked": asked, "chunk_tokens": chunk_tokens, "limits": asdict(limits)}
    if not text_tokens or own_cache:  # which keeps no K,V to write texts after
        return plan
    room = budget - law.constant(chunk_tokens, opened.device)
    offloaded = packs.prefix_kv == "offload"
    limits = limits_with_texts(
        limits, law, room=room, device=opened.device, text_tokens=text_tokens, offloaded=offloaded, share=share
    )
    way = keep_or_again(limits, chunk_tokens=chunk_tokens, least_tokens=least_tokens, texts_of=texts_of)
    limits = limits.for_texts() if way.kept else limits
    texts: dict[str, Any] = {"kv": "kept" if way.kept else "again", "reason": way.reason}
    texts |= {"kept_tokens": limits.kept_tokens, "bytes": limits.kept_tokens * law.all_key_values}
    return plan | {"asked": [*asked, text_tokens, texts_of], "limits": asdict(limits), TEXTS: texts}


def limits_of(plan: Mapping[str, Any]) -> Limits:
    """The limits of one pack, as a job has settled them."""
    return Limits(**plan["limits"])


def hidden_on_host(layers: LayerOptions, device: torch.device, *, streamed: bool) -> bool:
    """Return whether the residual stream is kept in host memory. On a CPU it always is in host memory."""
    if device.type == "cpu":
        return False
    return layers.hidden == "host" or (layers.hidden == "auto" and streamed)


def keep_plan(before: Mapping[str, Any], plan: dict[str, Any]) -> dict[str, Any]:
    """`plan`, or that of an earlier attempt. The earlier plan stands, so that a resumed run cuts the same packs,
    unless other limits were asked for or it does not fit any more. Unless other limits were asked for, the result has
    the sizes that packs were reduced to since memory ran out."""
    if before.get("asked") != plan["asked"]:
        return plan
    reduced = {REDUCED: before[REDUCED]} if REDUCED in before else {}
    sizes = ("max_tokens", "kept_tokens", "written_tokens")
    if all(before["limits"].get(name, 0) <= plan["limits"][name] for name in sizes):
        plan = {name: before[name] for name in plan}
    return plan | reduced
