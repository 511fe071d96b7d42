"""Accuracy and AUC of a sample model on held-out rows, through plain transformers.

python -m training.evaluate_samples [--model samples/models/target] [--rows 200]
"""

import argparse
import json
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.needles import prompt
from benchmarks.sample_text import CASES, ask
from training.curriculum import gapped_positions
from training.sample_tokenizer import answer_tokens

SAMPLES = Path(__file__).resolve().parent.parent / "samples"
BUCKETS = (0, 500, 1500, 3000, 4000, 8192)  # edges, in prompt tokens


@dataclass(frozen=True)
class Row:
    """One prompt and its true answer."""

    domain: str
    prompt: str
    answer: str


@dataclass(frozen=True)
class ScoredRow:
    """What a model says about a row."""

    domain: str
    tokens: int
    answer: str
    yes: float  # P(Yes) / (P(Yes) + P(No))
    mass: float  # P(Yes) + P(No)

    @property
    def right(self) -> bool:
        """The likelier label is the true one."""
        return (self.yes > 0.5) == (self.answer == "Yes")


def draw_rows(seed: str, rows: int) -> list[Row]:
    """New single-question prompts: `rows` of each domain, histories of 20 to 225 lines."""
    rng = Random(seed)
    drawn = []
    for domain, make in CASES.items():
        for number in range(rows):
            lines = rng.randint(1, 3) if domain == "labeling" else 20 + 205 * number // max(1, rows - 1)
            case = make(rng, lines)
            question = ask(rng, case, rng.choice(case.present if rng.random() < 0.5 else case.absent))
            drawn.append(Row(domain, prompt(case, question), question.answer))
    return drawn


@torch.inference_mode()
def score(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: Iterable[Row],
    gaps: Random | None = None,
) -> list[ScoredRow]:
    """One forward pass for each row; with a generator for gaps, positions rise in random jumps."""
    labels = answer_tokens(tokenizer)
    scored = []
    for row in rows:
        ids = tokenizer(row.prompt, return_tensors="pt")["input_ids"].to(model.device)
        positions = gapped_positions(gaps, ids.shape[1]) if gaps else list(range(ids.shape[1]))
        logits = model(
            input_ids=ids,
            position_ids=torch.tensor([positions], device=model.device),
            # without a mask, transformers would read jumps in the positions as packed sequences
            attention_mask=torch.ones_like(ids),
            logits_to_keep=1,
            use_cache=False,
        ).logits[0, -1]
        yes, no = logits.float().softmax(-1)[labels].tolist()
        scored.append(ScoredRow(row.domain, ids.shape[1], row.answer, yes / (yes + no), yes + no))
    return scored


def accuracy(scored: list[ScoredRow]) -> float:
    """Share of rows whose likelier label is the true one."""
    return sum(s.right for s in scored) / len(scored)


def nll(scored: list[ScoredRow]) -> float:
    """Mean negative log-likelihood of the true label among the two, in nats."""
    likelihoods = [s.yes if s.answer == "Yes" else 1 - s.yes for s in scored]
    return float(-np.log(np.maximum(likelihoods, 1e-9)).mean())


def auc(scored: list[ScoredRow]) -> float:
    """Share of (Yes row, No row) pairs in the right order, ties counted half; nan without such pairs."""
    yes = np.array([s.yes for s in scored if s.answer == "Yes"])
    no = np.array([s.yes for s in scored if s.answer == "No"])
    if not len(yes) or not len(no):
        return float("nan")
    order = np.sign(yes[:, None] - no[None, :])
    return float((order + 1).mean() / 2)


def sample_rows(folder: Path = SAMPLES) -> list[Row]:
    """All rows of the shipped data sets, which no model was trained on."""
    rows = []
    for name in ("post_recommendation.parquet", "labeling.parquet"):
        table = pq.read_table(folder / name, columns=["prompt", "answer"])
        rows += [Row(Path(name).stem, r["prompt"], r["answer"]) for r in table.to_pylist()]
    with (folder / "credit_verification.jsonl").open(encoding="utf-8") as lines:
        records = [json.loads(line) for line in lines]
    return rows + [Row("credit_verification", r["prompt"], r["answer"]) for r in records]


def table(scored: list[ScoredRow]) -> str:
    """Accuracy and AUC per domain and prompt length, as a Markdown table."""
    text = [
        "| domain | prompt tokens | rows | accuracy | AUC | P(Yes)+P(No) |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for domain in sorted({s.domain for s in scored}):
        for low, high in pairwise(BUCKETS):
            part = [s for s in scored if s.domain == domain and low <= s.tokens < high]
            if part:
                mass = float(np.mean([s.mass for s in part]))
                text.append(
                    f"| {domain} | {min(s.tokens for s in part)} to {max(s.tokens for s in part)} | {len(part)} "
                    f"| {accuracy(part):.3f} | {auc(part):.3f} | {mass:.3f} |"
                )
    return "\n".join(text)


@torch.inference_mode()
def right_by_layer(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: Iterable[Row]
) -> dict[str, list[list[bool]]]:
    """Whether each layer's output answers each row, [rows] of [layers] by domain: what the model's own norm and head
    make of it, the likelier of the two answers."""
    body: Any = model.base_model
    head = model.get_output_embeddings()
    labels = answer_tokens(tokenizer)
    found: dict[str, list[list[bool]]] = {}
    for row in rows:
        ids = tokenizer(row.prompt, return_tensors="pt")["input_ids"].to(model.device)
        *between, last = body(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states[1:]
        states = torch.stack([*(body.norm(each[0, -1]) for each in between), last[0, -1]])
        yes, no = head(states)[:, labels].T
        found.setdefault(row.domain, []).append(((yes > no) == (row.answer == "Yes")).tolist())
    return found


def layer_table(found: dict[str, list[list[bool]]]) -> str:
    """Accuracy after each layer, as a Markdown table."""
    layers = len(next(iter(found.values()))[0])
    text = [f"| domain | rows | {' | '.join(f'after {at}' for at in range(1, layers + 1))} |"]
    text.append("| --- " * (layers + 2) + "|")
    for domain, rows in sorted(found.items()):
        text.append(f"| {domain} | {len(rows)} | {' | '.join(f'{each:.2f}' for each in np.mean(rows, axis=0))} |")
    return "\n".join(text)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path, default=SAMPLES / "models" / "target")
    parser.add_argument("--fresh", type=int, default=0, help="number of new rows to draw per domain instead")
    parser.add_argument("--seed", type=int, default=1, help="of the new rows and of the gaps")
    parser.add_argument("--by-layer", action="store_true", help="what every layer's output answers")
    parser.add_argument("--gaps", action="store_true", help="put random gaps into the position ids")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    rows = draw_rows(f"fresh {args.seed}", args.fresh) if args.fresh else sample_rows()
    if args.by_layer:
        print(layer_table(right_by_layer(model, tokenizer, rows)))
        return
    print(table(score(model, tokenizer, rows, Random(args.seed) if args.gaps else None)))


if __name__ == "__main__":
    main()
