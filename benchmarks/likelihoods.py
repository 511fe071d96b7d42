"""`python -m benchmarks.likelihoods`: likelihoods of texts, their memory and their speed.

`memory` walks one long document through a small random Llama with a large vocabulary in a process of its own, and
compares the peak with the memory law. `short` compares the perplexity of short real reviews under a real model with a
plain transformers loop: seconds of interleaved rounds, and log-probabilities. A line of JSON goes to stdout.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Annotated, Any

import numpy as np
import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from benchmarks.console import log_run
from benchmarks.memory import peak_in_child
from benchmarks.spread import Spread
from benchmarks.workloads import random_prompt
from prefillcli.bench.contest import interleaved
from prefillcli.core.question import Question, answer_questions
from prefillcli.data.rows import Int32Array, Prompt
from prefillcli.engines.torch import TorchEngine
from prefillcli.models.law import CHUNK_TOKENS, PACK_TOKENS, choose_chunk, memory_law
from prefillcli.plan.behind import LabelSet
from prefillcli.plan.pack import Limits
from prefillcli.prefill.forest import ATTENTION, register
from prefillcli.prefill.walk import LayerWalk
from recipes.real_model import real_model, reviews

CPU = torch.device("cpu")
GOAL = 256 << 20  # bytes beyond the law
VOCABULARY = 128_256
LONGEST = 400  # characters of a short document
app = typer.Typer(add_completion=False)


def likelihoods(walk: LayerWalk, documents: Sequence[Int32Array], start: int, limits: Limits) -> list[float]:
    """The log-probability of each document behind the token `start`, as `prefill score --target-column` computes
    them."""
    questions = [
        Question(Prompt(row, np.array([start], np.int32), LabelSet(((own,),), by_token=True)))
        for row, own in enumerate(documents)
    ]
    engine = TorchEngine(walk, limits=limits)
    return [float(each.logprobs[0]) for each in answer_questions(engine, questions)]


def plain_loop(
    model: PreTrainedModel, documents: Sequence[Int32Array], start: int, sums: torch.dtype = torch.float32
) -> list[float]:
    """The same by one forward a document, whose log-softmax is computed in the dtype `sums`."""
    found = []
    for own in documents:
        ids = torch.from_numpy(np.concatenate([[start], own]).astype(np.int64))
        with torch.inference_mode():
            logits = model(input_ids=ids[None, :-1], use_cache=False).logits[0].to(sums)
        found.append(float(logits.log_softmax(-1).gather(1, ids[1:, None]).double().sum()))
    return found


def wide_config(tokens: int) -> LlamaConfig:
    """A small Llama with a large vocabulary, which reads so many tokens."""
    return LlamaConfig(
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=VOCABULARY,
        max_position_embeddings=tokens + 1,
        tie_word_embeddings=True,
    )


def _long_document(tokens: int, chunk: int) -> Callable[[], object]:
    register()
    torch.manual_seed(0)
    model = LlamaForCausalLM._from_config(wide_config(tokens), attn_implementation=ATTENTION, dtype=torch.float32)
    walk = LayerWalk(model.eval().requires_grad_(False), chunk_tokens=chunk)
    limits, document = Limits(tokens, tokens), random_prompt(tokens, VOCABULARY)
    likelihoods(walk, [document[:600]], 1, limits)  # what is set up once is not the document's
    return lambda: likelihoods(walk, [document], 1, limits)


@app.command()
def memory(
    document: Annotated[int, typer.Option(help="Tokens of the document.")] = 100_000,
) -> None:
    """The peak of one long document, beside the memory law's."""
    law = memory_law(wide_config(document), torch.float32)
    chunk = choose_chunk(law, 1 << 30, CPU)
    allowed = law.constant(chunk, CPU) + document * law.token
    peak = peak_in_child(_long_document, document, chunk)
    found: dict[str, Any] = {
        "document_tokens": document,
        "vocabulary": VOCABULARY,
        "law_mib": round(allowed / 2**20, 1),
        "peak_mib": round(peak / 2**20, 1),
        "all_logits_mib": round(4 * document * VOCABULARY / 2**20),
        "within_goal": peak <= allowed + GOAL,
    }
    print(json.dumps(found))


@app.command()
def short(
    rows: Annotated[int, typer.Option(help="Documents.")] = 200,
    rounds: Annotated[int, typer.Option(help="Rounds; the median counts.")] = 3,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
) -> None:
    """The perplexity of short reviews, beside a plain loop's."""
    register()
    folder, number = real_model(), getattr(torch, dtype)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=number, attn_implementation="sdpa").eval()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=number, attn_implementation=ATTENTION).eval()
    texts = [each.text for each in [*reviews("Test"), *reviews("Train")] if len(each.text) <= LONGEST][:rows]
    documents = [np.asarray(tokenizer(text, add_special_tokens=False).input_ids, np.int32) for text in texts]
    start, limits = tokenizer.bos_token_id, Limits(PACK_TOKENS["cpu"], 1 << 30)
    answers: dict[str, list[float]] = {}
    with closing(LayerWalk(model, chunk_tokens=CHUNK_TOKENS["cpu"])) as walk:
        ways: dict[str, Callable[[], object]] = {
            "plain": lambda: answers.update(plain=plain_loop(plain, documents, start)),
            "walk": lambda: answers.update(walk=likelihoods(walk, documents, start, limits)),
        }
        seconds = interleaved(ways, rounds, on_run=log_run)
    # Of so many numbers the log-softmax in float32 is off by 8e-6 a token, always the same way: its sum is rounded.
    answers["plain"] = plain_loop(plain, documents, start, torch.float64)
    tokens = sum(map(len, documents))
    perplexity = {way: math.exp(-sum(own) / tokens) for way, own in answers.items()}
    found: dict[str, Any] = {
        "rows": len(documents),
        "tokens": tokens,
        "dtype": dtype,
        "seconds": {way: round(Spread.of(own).median, 2) for way, own in seconds.items()},
        "ratio": str(Spread.of([p / w for p, w in zip(seconds["plain"], seconds["walk"], strict=True)])),
        "perplexity": perplexity,
        "largest_relative_difference": max(
            abs(w - p) / abs(p) for w, p in zip(answers["walk"], answers["plain"], strict=True)
        ),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    app()
