"""The ways to compute a prompt's last logits, which are compared."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from prefillcli.engines.hf import last_logits
from prefillcli.models.law import CHUNK_TOKENS, PACK_TOKENS
from prefillcli.plan.behind import LabelSet
from prefillcli.plan.blocks import CarriedBlock
from prefillcli.plan.pack import Limits
from prefillcli.plan.plan import Plan, make_plan, packs_to_run
from prefillcli.plan.trie import TokenArray
from prefillcli.prompts.translation import Translator
from prefillcli.reading.compress.compressor import Compressor, WorthCompressing
from prefillcli.reading.compress.draft import Draft
from prefillcli.reading.compress.load import SpecPrefill
from prefillcli.reading.compress.selection import Estimator
from prefillcli.reading.compress.settings import Compression
from prefillcli.rows.records import Prompt
from prefillcli.walk.forest import ATTENTION
from prefillcli.walk.walk import FASTEST, Arithmetic, LayerWalk


def plain_loop(model: PreTrainedModel, prompts: Sequence[TokenArray]) -> torch.Tensor:
    """One forward a prompt: SDPA, no cache, logits of the last token only. Float32 [prompts, vocabulary]."""
    model.set_attn_implementation("sdpa")
    return torch.stack([last_logits(model, prompt) for prompt in prompts])


def plan_for(
    model: PreTrainedModel, prompts: Sequence[TokenArray], positions: Sequence[TokenArray | None] | None = None
) -> Plan:
    """The plan that `prefill score` makes with memory to spare; `positions` as in `make_plan`."""
    kind = model.get_input_embeddings().weight.device.type
    return make_plan(prompts, Limits(PACK_TOKENS[kind], 1 << 30, held_tokens=1 << 30), positions=positions)


def layer_walk(
    model: PreTrainedModel,
    prompts: Sequence[TokenArray],
    chunk_tokens: int | None = None,
    positions: Sequence[TokenArray | None] | None = None,
) -> torch.Tensor:
    """Plan and walk, as `prefill score` does. Float32 [prompts, vocabulary]."""
    return walk_plan(model, plan_for(model, prompts, positions), chunk_tokens)


def walk_plan(
    model: PreTrainedModel, plan: Plan, chunk_tokens: int | None = None, arithmetic: Arithmetic = FASTEST
) -> torch.Tensor:
    """Walk the packs of a plan. Float32 [prompts, vocabulary]."""
    model.set_attn_implementation(ATTENTION)
    kind = model.get_input_embeddings().weight.device.type
    walk = LayerWalk(model, chunk_tokens=chunk_tokens or CHUNK_TOKENS[kind], arithmetic=arithmetic)
    try:
        rows: dict[int, torch.Tensor] = {}
        for pack in plan.packs:
            if pack.reads:
                logits = torch.cat(list(walk.read_logits(pack)))
                rows |= {n: logits[i] for i, (_, numbers) in enumerate(pack.reads) for n in numbers}
    finally:
        walk.close()
    return torch.stack([rows[n] for n in range(len(rows))])


def windowed_walk(model: PreTrainedModel, windows: Sequence[Sequence[TokenArray]], block_tokens: int) -> int:
    """Plan and walk window by window, with memory to spare; the tokens that were computed. 0: no blocks are shared."""
    model.set_attn_implementation(ATTENTION)
    kind = model.get_input_embeddings().weight.device.type
    limits = Limits(PACK_TOKENS[kind], 1 << 30, held_tokens=1 << 30)
    walk = LayerWalk(model, chunk_tokens=CHUNK_TOKENS[kind])
    computed = 0
    carried: tuple[CarriedBlock, ...] = ()
    try:
        for prompts in windows:
            plan = make_plan(prompts, limits, carried=carried, block_tokens=block_tokens)
            at_hand = {pack.block for pack in plan.given if pack.block is not None and walk.holds(pack.block)}
            for pack in packs_to_run(plan, (), at_hand):
                for _ in walk.read_logits(pack):
                    pass
                computed += len(pack.tokens)
            carried = plan.carried
    finally:
        walk.close()
    return computed


def compressor_for(
    draft: PreTrainedModel,
    settings: Compression,
    *,
    target_window: int | None = None,
    translator: Translator | None = None,
) -> Compressor:
    """The draft at work, with memory to spare; close it in the end. `settings` say a number of tokens above
    which prompts are compressed. `target_window` is the target's sliding window; a draft with another tokenizer needs
    a `translator`."""
    kind = draft.get_input_embeddings().weight.device.type
    limits = Limits(PACK_TOKENS[kind], 1 << 30, read_tokens=1 << 30)
    chunk = CHUNK_TOKENS[kind]
    own: Estimator = Draft(LayerWalk(draft, chunk_tokens=chunk), settings, limits=limits, max_length=1 << 30)
    return Compressor(
        SpecPrefill(own, translator),
        settings,
        keep=1.0,
        worth=WorthCompressing(settings),
        target_window=target_window,
    )


def compressed_walk(
    model: PreTrainedModel, compressor: Compressor, prompts: Sequence[TokenArray], keep: float
) -> tuple[torch.Tensor, list[int]]:
    """Draft, selection and walk over what is kept. Float32 [prompts, vocabulary], and each prompt's kept tokens."""
    rows = [Prompt(number, tokens, LabelSet(())) for number, tokens in enumerate(prompts)]
    compressor.keep = keep
    requests = compressor.compress(rows)
    logits = layer_walk(
        model, [request.tokens for request in requests], positions=[request.positions for request in requests]
    )
    return logits, [len(request.tokens) for request in requests]
