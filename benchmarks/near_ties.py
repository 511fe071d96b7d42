"""How often a token is another one in bfloat16 than transformers' `generate` chooses, and how near the tie was.

python -m benchmarks.near_ties

Prompts are reviews, the model is SmolLM2-135M. At each token the walk's choice is compared with that of `generate`
behind the same text, so that one difference does not lead to others. The walk reads a whole text in one pass, as it
does with guesses. The last line of stdout is JSON.
"""

from __future__ import annotations

import json
from typing import Annotated

import numpy as np
import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from benchmarks.console import log
from prefillcli.decode.behind import KeptForward, KeptPack
from prefillcli.plan.pack import Limits
from prefillcli.plan.plan import make_plan
from prefillcli.prefill.forest import ATTENTION, register
from prefillcli.prefill.walk import LayerWalk
from recipes.real_model import real_model, reviews

QUESTION = "\nSentiment: positive because"


@torch.inference_mode()
def main(
    rows: Annotated[int, typer.Option(help="Reviews.")] = 40,
    tokens: Annotated[int, typer.Option(help="Tokens behind each.")] = 32,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "bfloat16",
) -> None:
    """Count the steps, those that differ, and the gaps there."""
    register()
    folder = real_model()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = [tokenizer(f"Review: {each.text}{QUESTION}")["input_ids"][:1024] for each in reviews("Test")[:rows]]
    texts, gaps = [], []
    for number, prompt in enumerate(prompts):
        ids = torch.tensor([prompt])
        done = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            do_sample=False,
            output_scores=True,
            return_dict_in_generate=True,
            pad_token_id=0,
        )
        texts.append(done.sequences[0, len(prompt) :].tolist())
        best = torch.cat(done.scores).float().topk(2).values
        gaps.append((best[:, 0] - best[:, 1]).tolist())
        log(f"{number + 1} of {rows}")
    chosen = _walked(model, prompts, texts)
    pairs = [
        (ours == theirs, gap)
        for own, text, near in zip(chosen, texts, gaps, strict=True)
        for ours, theirs, gap in zip(own, text[1:], near[1:], strict=True)
    ]
    apart = sorted(gap for same, gap in pairs if not same)
    result = {"dtype": dtype, "steps": len(pairs), "differ": len(apart), "rate": len(apart) / len(pairs)}
    result |= {"largest_gap": apart[-1] if apart else None}
    result |= {"steps_as_near": sum(gap <= apart[-1] for _, gap in pairs) if apart else 0}
    typer.echo(json.dumps(result))


def _walked(model: PreTrainedModel, prompts: list[list[int]], texts: list[list[int]]) -> list[list[int]]:
    """What the walk chooses behind each token of each text, but for the last."""
    model.set_attn_implementation(ATTENTION)
    walk = LayerWalk(model, chunk_tokens=2048)
    total = sum(map(len, prompts))
    (pack,) = make_plan([np.array(each, np.int32) for each in prompts], Limits(total, total)).packs
    kept = KeptPack(pack)
    for _ in walk.read_logits(pack, kept=kept):
        pass
    reads = {prompt: read for read, (_, numbers) in enumerate(pack.reads) for prompt in numbers}
    forward = KeptForward(walk, kept.select([reads[number] for number in range(len(prompts))]))
    found = torch.cat([logits.argmax(dim=-1) for logits in forward(list(enumerate(texts)))]).tolist()
    walk.close()
    chosen, at = [], 0
    for text in texts:
        chosen.append(found[at : at + len(text) - 1])
        at += len(text)
    return chosen


if __name__ == "__main__":
    typer.run(main)
