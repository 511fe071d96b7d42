"""`python -m benchmarks.answers`: answers of several tokens, and several questions a row, under a real model.

`sentences` scores real reviews by sentence-long labels, with every norm, and prints the AUC of each. `ordered`
compares the expected value of ordered labels with the likeliest label on real reviews. `questions` asks ten questions
about each document and one, and compares tokens and seconds. `choices` compares four sentence-long choices behind a
shared context with a plain transformers loop. A line of JSON goes to stdout.
"""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import closing
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.reviews import TOPICS, question_prompts
from benchmarks.spread import Spread
from prefillcli.bench.contest import interleaved
from prefillcli.core.question import Question, answer_questions, plan_questions
from prefillcli.data.prompts.labels import Label, LabelError, Labels, tail_of
from prefillcli.data.rows import Prompt
from prefillcli.engines.hf import sequence_logprobs
from prefillcli.engines.torch import TorchEngine
from prefillcli.models.law import CHUNK_TOKENS, PACK_TOKENS
from prefillcli.plan.behind import LabelSet
from prefillcli.plan.pack import Limits, Pack
from prefillcli.prefill import layout
from prefillcli.prefill.attention import LANES, TILE
from prefillcli.prefill.forest import ATTENTION, register
from prefillcli.prefill.layout import Chunk, Tree, split_evenly
from prefillcli.prefill.walk import LayerWalk
from recipes.choose_prompt import first_short
from recipes.real_model import real_model, reviews

SENTENCES = ("the patient was helped by it", "the patient was harmed by it")
CHOICES = (*SENTENCES, "the patient felt no difference at all", "the patient did not take it")
app = typer.Typer(add_completion=False)


def prefill(folder: Path, rows: dict[str, list[Any]], *options: str) -> dict[str, Any]:
    """The report of a `prefill score` job over these rows; the output is `out.parquet` in the folder."""
    pq.write_table(pa.table(rows), folder / "in.parquet")
    command = ["score", "in.parquet", "-o", "out.parquet", "--overwrite", "--quiet", "--no-chat", *options]
    model = ["--model", str(real_model().resolve())]
    subprocess.run([sys.executable, "-m", "prefillcli", *command, *model], cwd=folder, check=True, stdout=2)  # noqa: S603 - our own command line
    report: dict[str, Any] = json.loads((folder / "out.run.json").read_text())
    return report


@app.command()
def sentences(rows: int = 200) -> None:
    """The AUC of sentence-long labels, with and without a norm, beside labels of one token."""
    found: dict[str, float] = {}
    few = reviews("Test")[:rows]
    shown = first_short(reviews("Train"), 2)
    for name, (good, bad), norms in (
        ("one token", ("positive", "negative"), ("none",)),
        ("sentence", SENTENCES, ("none", "tokens", "bytes")),
    ):
        words, asked = {"positive": good, "negative": bad}, {"one token": "Sentiment:", "sentence": "In short,"}[name]
        examples = "".join(f"Review: {each.text}\n{asked} {words[each.sentiment]}\n\n" for each in shown)
        prompts = [f"{examples}Review: {each.text}\n{asked}" for each in few]
        truth = [words[each.sentiment] for each in few]
        for norm in norms:
            with TemporaryDirectory() as folder:
                data = {"prompt": prompts, "truth": truth}
                options = ("--labels", f"{good},{bad}", "--label-norm", norm, "--truth", "truth", "--dtype", "float32")
                found[f"{name}, {norm}"] = prefill(Path(folder), data, *options)["evaluation"]["auc"]["value"]
    typer.echo(json.dumps({"rows": len(few), "auc": found}))


@app.command()
def ordered(rows: int = 100) -> None:
    """How near the mean of ordered labels, and the likeliest label, are to what the writers of reviews have said."""
    right = {"negative": 1.0, "neutral": 3.0, "positive": 5.0}
    few = reviews("Test", neutral=True)[:rows]
    found = {}
    for name, asked, words in (
        ("grades", "Stars, from 1 to 5:", {"negative": "1", "neutral": "3", "positive": "5"}),
        ("words", "Sentiment:", {each: each for each in right}),
    ):
        labels, values = ("1,2,3,4,5",) * 2 if name == "grades" else (",".join(right), "1,3,5")
        for examples in (0, 3, 6):
            shown = first_short(reviews("Train", neutral=True), examples, tuple(right))
            before = "".join(f"Review: {each.text}\n{asked} {words[each.sentiment]}\n\n" for each in shown)
            data: dict[str, list[Any]] = {
                "prompt": [f"{before}Review: {each.text}\n{asked}" for each in few],
                "truth": [right[each.sentiment] for each in few],
            }
            with TemporaryDirectory() as folder:
                options = ("--labels", labels, "--label-values", values, "--truth", "truth", "--dtype", "float32")
                found[f"{name}, {examples} examples"] = prefill(Path(folder), data, *options)["evaluation"]["ordered"]
    typer.echo(json.dumps(found))


@app.command()
def questions(documents: int = 3, tokens: int = 2000, rounds: int = 5, dtype: str = "bfloat16") -> None:
    """Ten questions about each document and one, in turn in one process. Peers: `benchmarks.peers`.

    `apart` are ten whose nodes have blocks of queries of their own in the attention kernel. `looks` are the tiles of
    keys that it looks at in a layer, for each K,V head.
    """
    register()
    model = AutoModelForCausalLM.from_pretrained(
        real_model(), dtype=getattr(torch, dtype), attn_implementation=ATTENTION
    ).eval()
    tokenizer = AutoTokenizer.from_pretrained(real_model())
    labels = LabelSet.of([tokenizer(each).input_ids for each in (" Yes", " No")])
    prompts = [Question(Prompt(row, each, labels)) for row, each in enumerate(question_prompts(documents, tokens))]
    rows = LANES * model.config.num_key_value_heads // model.config.num_attention_heads
    own = {"one": prompts[:: len(TOPICS)], "ten": prompts, "apart": prompts}
    computed: dict[str, int] = {}
    with closing(LayerWalk(model, chunk_tokens=CHUNK_TOKENS["cpu"])) as walk:
        engine = TorchEngine(walk, limits=Limits(PACK_TOKENS["cpu"], 1 << 30))

        def ask(name: str) -> None:
            with patch.object(layout, "TILE", 1 << 60 if name == "apart" else TILE):
                computed[name] = sum(each.computed_tokens for each in answer_questions(engine, own[name]))

        times = interleaved({name: partial(ask, name) for name in own}, rounds)
        looked = {}
        for name, asked in own.items():
            with patch.object(layout, "TILE", 1 << 60 if name == "apart" else TILE):
                looked[name] = sum(_looks(pack, rows) for pack in plan_questions(asked, engine.limits).packs)
    ratios = {
        name: str(Spread.of([each / one for one, each in zip(times["one"], times[name], strict=True)]))
        for name in ("ten", "apart")
    }
    found = {"computed": computed, "looks": looked, "seconds": times, "time": ratios}
    typer.echo(json.dumps({"dtype": dtype, "tokens": computed["ten"] / computed["one"], **found}))


def _looks(pack: Pack, rows: int) -> int:
    # Tiles of keys that the attention kernel looks at for blocks of at most so many queries.
    tree, found = Tree(pack), 0
    for start, end in split_evenly(len(pack.tokens), CHUNK_TOKENS["cpu"]):
        blocks, _ = Chunk(tree, start, end, torch.device("cpu"), batched=1).blocks(None, rows)
        for own in np.split(blocks, np.flatnonzero(blocks[1:, 5] == 0) + 1):
            together = int(own[1:, 5].min()) // TILE if len(own) > 1 else 0
            found += together + sum(-(-int(depth + count) // TILE) - together for _, count, depth, *_ in own)
    return found


@app.command()
def choices(rows: int = 6, examples: int = 8, rounds: int = 3) -> None:
    """Four sentence-long choices behind a shared context, and one forward of transformers for each."""
    folder = real_model()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    words = dict(zip(("positive", "negative"), SENTENCES, strict=True))
    shown = first_short(reviews("Train"), examples)
    context = "".join(f"Review: {each.text}\nIn short, {words[each.sentiment]}\n\n" for each in shown)
    texts = [f"{context}Review: {each.text[:200]}\nIn short," for each in reviews("Test")[:rows]]
    labels = Labels(tokenizer, [Label(each) for each in CHOICES])
    prompts = []
    for row, (text, following) in enumerate(
        zip(texts, labels.resolve_all([tail_of(each) for each in texts]), strict=True)
    ):
        if isinstance(following, LabelError):
            raise following
        prompts.append(Prompt(row, np.array(tokenizer(text)["input_ids"], np.int32), following.labels))
    register()

    def plain() -> np.ndarray:
        model.set_attn_implementation("sdpa")
        return np.array(
            [own.labels.logprobs(sequence_logprobs(model, own.tokens, own.labels.sequences)[0]) for own in prompts]
        )

    def walked() -> np.ndarray:
        model.set_attn_implementation(ATTENTION)
        with closing(LayerWalk(model, chunk_tokens=CHUNK_TOKENS["cpu"])) as walk:
            engine = TorchEngine(walk, limits=Limits(PACK_TOKENS["cpu"], 1 << 30))
            return np.array([each.logprobs for each in answer_questions(engine, [Question(own) for own in prompts])])

    difference = float(np.abs(plain() - walked()).max())
    times = interleaved({"plain": plain, "walk": walked}, rounds)
    spread = Spread.of([a / b for a, b in zip(times["plain"], times["walk"], strict=True)])
    typer.echo(json.dumps({"seconds": times, "ratio": str(spread), "difference": difference}))


if __name__ == "__main__":
    app()
