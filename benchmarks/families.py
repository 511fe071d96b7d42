"""`python -m benchmarks.families`: SpecPrefill on three families of models, as in "SpecPrefill on Unified Memory".

A gated-attention MoE, a Mamba-2 hybrid and a MoE with sliding windows, with random weights: which layers of the draft
vote, what is kept, and the speedup beside the paper's prediction 1 / (r + k). The trained hybrid sample shows how many
answers flip, and by how much its states drift. Progress goes to stderr, tables and a line of JSON to stdout.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from benchmarks.console import log, log_run
from benchmarks.drift import state_drift
from benchmarks.family_models import FAMILIES, Family, random_model
from benchmarks.methods import compressed_walk, compressor_for, layer_walk
from benchmarks.score_runs import SAMPLES
from benchmarks.spread import Spread
from benchmarks.workloads import random_prompt
from prefillcli.bench.contest import interleaved
from prefillcli.core.question import Question
from prefillcli.data.rows import Prompt
from prefillcli.models.shape import Shape, prefill_flops
from prefillcli.plan.behind import LabelSet
from prefillcli.plan.pack import Limits
from prefillcli.plan.trie import TokenArray
from prefillcli.prefill.forest import ATTENTION, register
from prefillcli.prefill.walk import LayerWalk
from prefillcli.reading.compress.settings import Compression
from prefillcli.stats.evaluation import exact_interval
from recipes.evaluate_samples import draw_rows

PLENTY = Limits(1 << 30, 1 << 30)
CHUNK_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class Votes:
    """Which layers of a draft voted, numbered from 1, of how many."""

    layers: tuple[int, ...]
    of: int

    def __str__(self) -> str:
        return f"{len(self.layers)} of {self.of} ({', '.join(map(str, self.layers))})"


def measure_speed(family: Family, tokens: int, keep: float, rounds: int) -> dict[str, Any]:
    """One prompt through draft, selection and target, beside the target's walk over all of it."""
    target, draft = random_model(family.name, family.target), random_model(family.name, family.draft)
    prompts = [random_prompt(tokens, target.config.vocab_size)]
    settings = Compression(compress_above=0)
    r = prefill_flops(draft.config, tokens).total / prefill_flops(target.config, tokens).total
    with closing(compressor_for(draft, settings, target_window=Shape(target.config).sliding_window)) as compressor:
        rows = [Prompt(0, prompts[0], LabelSet(()))]
        (estimate,) = compressor.estimate(rows, [keep], lambda done: None)
        kept = compressed_walk(target, compressor, prompts, keep)[1][0]
        seconds = interleaved(
            {
                "full": lambda: layer_walk(target, prompts),
                "draft": lambda: compressor.estimate(rows, [keep], lambda done: None),
                "compressed": lambda: compressed_walk(target, compressor, prompts, keep),
            },
            rounds,
            on_run=log_run,
            clock=time.process_time,
        )
    speedups = [full / part for full, part in zip(seconds["full"], seconds["compressed"], strict=True)]
    shares = [own / full for own, full in zip(seconds["draft"], seconds["full"], strict=True)]
    predicted, measured = 1 / (r + keep), Spread.of(speedups)
    return {
        "family": family.name,
        "kind": family.kind,
        "parameters": {"target": target.num_parameters(), "draft": draft.num_parameters()},
        "votes": Votes(tuple(number + 1 for number in estimate.voters), len(draft.get_decoder().layers)),
        "kept": kept / tokens,
        "r": r,
        "r_measured": Spread.of(shares),
        "predicted": predicted,
        "measured": measured,
        "seconds": {name: Spread.of(own) for name, own in seconds.items()},
        "gap": predicted / measured.median,
        "paper": family.paper,
    }


def measure_answers(keep: float, rows: int) -> list[dict[str, Any]]:
    """Flips and drift of the hybrid sample, with the sample draft and with itself as its draft."""
    tokenizer = AutoTokenizer.from_pretrained(SAMPLES / "models" / "target")
    labels = [tokenizer.convert_tokens_to_ids(token) for token in ("ĠYes", "ĠNo")]
    drawn = [row for row in draw_rows("families", rows) if row.domain != "labeling"]
    prompts = [np.asarray(tokenizer(row.prompt)["input_ids"], dtype=np.int32) for row in drawn]
    truth = torch.tensor([("Yes", "No").index(row.answer) for row in drawn])
    target = _load_sample("hybrid")
    full = layer_walk(target, prompts)[:, labels].argmax(dim=1)
    found = []
    for name in ("draft", "hybrid"):
        log(f"hybrid sample, draft: {name}")
        questions, votes = _compressed(_load_sample(name), prompts, keep)
        kept, positions = [each.tokens for each in questions], [each.positions for each in questions]
        answers = layer_walk(target, kept, positions=positions)[:, labels].argmax(dim=1)
        flips = int((answers != full).sum())
        found.append(
            {
                "draft": name,
                "rows": len(drawn),
                "votes": votes,
                "kept": sum(map(len, kept)) / sum(map(len, prompts)),
                "flips": flips,
                "interval": exact_interval(flips, len(drawn)),
                "accuracy": float((full == truth).float().mean()),
                "accuracy_compressed": float((answers == truth).float().mean()),
                "drift": state_drift(lambda: _walking(target), PLENTY, questions),
            }
        )
    return found


def _compressed(draft: PreTrainedModel, prompts: Sequence[TokenArray], keep: float) -> tuple[list[Question], Votes]:
    """The prompts, compressed, and which of the draft's layers voted."""
    with closing(compressor_for(draft, Compression(compress_above=0))) as compressor:
        rows = [Prompt(number, own, LabelSet(())) for number, own in enumerate(prompts)]
        keeps = compressor.keeps(rows, keep)
        estimates = compressor.estimate(rows, keeps, lambda done: None)
        voters = sorted({number + 1 for each in estimates for number in each.voters})
        return compressor.select(rows, keeps, estimates), Votes(tuple(voters), draft.config.num_hidden_layers)


def _load_sample(name: str) -> PreTrainedModel:
    register()
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        SAMPLES / "models" / name, dtype=torch.float32, attn_implementation=ATTENTION
    )
    return model.eval().requires_grad_(False)


@contextmanager
def _walking(model: PreTrainedModel) -> Iterator[LayerWalk]:
    model.set_attn_implementation(ATTENTION)
    with closing(LayerWalk(model, chunk_tokens=CHUNK_TOKENS)) as walk:
        yield walk


def main(
    family: Annotated[list[str] | None, typer.Option(help=f"One of {', '.join(FAMILIES)}; repeatable.")] = None,
    tokens: Annotated[int, typer.Option(help="Tokens of the prompt that is timed.")] = 8192,
    keep: Annotated[float, typer.Option(help="Keep rate.")] = 0.2,
    rounds: Annotated[int, typer.Option(help="Rounds after the warm-up.")] = 3,
    rows: Annotated[int, typer.Option(help="Rows of each domain whose answers are compared; 0: none.")] = 60,
) -> None:
    """Measure which layers vote, what is kept, flips and speedups."""
    torch.set_num_threads(1)
    speeds = []
    for name in family or list(FAMILIES):
        log(f"{name}, {tokens:,} tokens")
        speeds.append(measure_speed(FAMILIES[name], tokens, keep, rounds))
    answers = measure_answers(keep, rows) if rows else []
    _print(speeds, answers)
    line = {"tokens": tokens, "keep": keep, "threads": 1, "families": speeds, "hybrid_sample": answers}
    print(json.dumps(line, default=asdict))


def _print(speeds: list[dict[str, Any]], answers: list[dict[str, Any]]) -> None:
    console = Console(width=150)
    own = ("family", "layers that vote", "kept", "r", "r in time", "1/(r+k)", "measured", "gap")
    table = Table(*own, "the paper's r, 1/(r+k)", "measured", "gap")
    for each in speeds:
        paper = each["paper"]
        table.add_row(
            f"{each['family']}, {each['kind']}",
            str(each["votes"]),
            f"{each['kept']:.1%}",
            f"{each['r']:.3f}",
            f"{each['r_measured'].median:.3f}",
            f"{each['predicted']:.2f}",
            str(each["measured"]),
            f"{each['gap']:.2f}",
            f"{paper.r:.2f}, {paper.predicted:.1f}",
            f"{paper.measured:.2f}",
            f"{paper.gap:.1f}",
        )
    console.print(table)
    if not answers:
        return
    table = Table("draft of the hybrid sample", "layers that vote", "kept", "flips", "accuracy", "compressed", "drift")
    for each in answers:
        low, high = each["interval"]
        drift = each["drift"]
        table.add_row(
            each["draft"],
            str(each["votes"]),
            f"{each['kept']:.1%}",
            f"{each['flips']} of {each['rows']} ({low:.1%}-{high:.1%})",
            f"{each['accuracy']:.1%}",
            f"{each['accuracy_compressed']:.1%}",
            "" if drift is None else f"{drift.median:.2f}, at most {drift.largest:.2f}",
        )
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
