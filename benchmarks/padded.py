"""Padded batches, as a careful transformers user makes them: rows sorted by length, so that little is padded.

Padding goes to the right. Causal attention then hides it from every real token, so no mask is needed and SDPA
takes its fast causal kernel. The head reads each row's last real token only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from benchmarks.serving import batches
from prefillcli.plan.trie import TokenArray


def padded_batches(model: PreTrainedModel, prompts: Sequence[TokenArray], tokens: int) -> torch.Tensor:
    """Last logits float32 [prompts, vocabulary] of a causal model whose head is one matrix, with SDPA and no cache."""
    model.set_attn_implementation("sdpa")
    head = model.get_output_embeddings()
    found: dict[int, torch.Tensor] = {}
    with torch.inference_mode():
        for batch in batches([len(prompt) for prompt in prompts], tokens):
            ids = torch.zeros(len(batch), len(prompts[batch[0]]), dtype=torch.long)
            for place, row in enumerate(batch):
                ids[place, : len(prompts[row])] = torch.as_tensor(prompts[row])
            hidden = model.get_decoder()(input_ids=ids.to(model.device), use_cache=False).last_hidden_state
            last = [len(prompts[row]) - 1 for row in batch]
            found |= zip(batch, head(hidden[range(len(batch)), last]).float(), strict=True)
    return torch.stack([found[row] for row in range(len(prompts))])
