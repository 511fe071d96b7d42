"""The two ways to get a prompt's last logits that are compared."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from prefillcli.plan.pack import Limits
from prefillcli.plan.plan import Plan, make_plan
from prefillcli.plan.trie import TokenArray
from prefillcli.prefill.forest import ATTENTION
from prefillcli.prefill.memory import CHUNK_TOKENS, PACK_TOKENS
from prefillcli.prefill.walk import LayerWalk


def plain_loop(model: PreTrainedModel, prompts: Sequence[TokenArray]) -> torch.Tensor:
    """One forward a prompt: SDPA, no cache, logits of the last token only. Float32 [prompts, vocabulary]."""
    model.set_attn_implementation("sdpa")
    device = model.get_input_embeddings().weight.device
    rows = []
    with torch.inference_mode():
        for prompt in prompts:
            ids = torch.as_tensor(prompt, dtype=torch.long, device=device)[None]
            rows.append(model(input_ids=ids, use_cache=False, logits_to_keep=1).logits[0, -1].float())
    return torch.stack(rows)


def plan_for(model: PreTrainedModel, prompts: Sequence[TokenArray]) -> Plan:
    """The plan that `prefill score` makes with memory to spare."""
    kind = model.get_input_embeddings().weight.device.type
    return make_plan(prompts, Limits(PACK_TOKENS[kind], 1 << 30, held_tokens=1 << 30))


def layer_walk(model: PreTrainedModel, prompts: Sequence[TokenArray], chunk_tokens: int | None = None) -> torch.Tensor:
    """Plan and walk, as `prefill score` does. Float32 [prompts, vocabulary]."""
    model.set_attn_implementation(ATTENTION)
    kind = model.get_input_embeddings().weight.device.type
    walk = LayerWalk(model, chunk_tokens=chunk_tokens or CHUNK_TOKENS[kind])
    try:
        rows: dict[int, torch.Tensor] = {}
        for pack in plan_for(model, prompts).packs:
            logits = torch.cat(list(walk.read_logits(pack)))
            rows |= {n: logits[i] for i, (_, numbers) in enumerate(pack.reads) for n in numbers}
    finally:
        walk.close()
    return torch.stack([rows[n] for n in range(len(prompts))])
