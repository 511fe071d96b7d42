"""`python -m benchmarks.rare`: `--recall` and `--precision` beside BARGAIN (arXiv 2509.02896), on the same scores.

Counted are the rows that the large model reads until each row of the output has its answer or one that is decided, at
the same guarantees, each at 95 %. BARGAIN's rows are those that its oracle was asked about, and those of the set that
it returns: to have the precision that the output of `--recall` has, they must be read too. Its budget is given by
hand, so it races with the one of several that is best on other draws, which a user could not know. Both have the same
scores, from a ridge on 500 rows that count for both.

It needs `pip install bargain`, and for real rows the passages of `python -m
benchmarks.review_passages`, read in full: `prefill score out/real/passages.parquet -m out/real/model --labels
positive,negative --no-chat --dtype float32 -o out/real/passages.scores.parquet`. A table goes to stdout.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq
import typer

from benchmarks.console import log
from prefillcli.reading.exits.first import hashed_words
from prefillcli.reading.exits.rare import Search
from prefillcli.stats.ridge import ridge

PILOT = 500
BUDGETS = (200, 400, 800, 1600, 2400, 3200, 4800, 6400, 9600)
Array = Any


class Rows(NamedTuple):
    """Whether rows have the answer [rows], and how their scores are learnt from some of them."""

    name: str
    answers: Array
    scores: Callable[[Array], Array]


class Run(NamedTuple):
    """Rows read by the large model, and what the output has of the guarantees."""

    read: int
    recall: float
    precision: float


def main(
    passages: Annotated[Path, typer.Option(help="Passages with a column prompt.")] = Path("out/real/passages.parquet"),
    full: Annotated[Path, typer.Option(help="Their full read.")] = Path("out/real/passages.scores.parquet"),
    tokenizer: Annotated[Path, typer.Option(help="That of the model that read them.")] = Path("out/real/model"),
    first: Annotated[Path | None, typer.Option(help="A first model, beside words.")] = None,
    seeds: Annotated[int, typer.Option(help="Draws of the rows.")] = 60,
    budget_seeds: Annotated[int, typer.Option(help="Other draws, by which BARGAIN's budget is chosen.")] = 10,
) -> None:
    """Each guarantee on each kind of rows."""
    print("| rows | guarantee | rows read: here | BARGAIN | recall, least share and failures: here | BARGAIN |")
    print("| --- | --- | --- | --- | --- | --- |")
    every = list(made_rows())
    if passages.exists():
        every += real_rows(passages, full, tokenizer, first)
    for rows in every:
        for recall, precision in ((0.95, None), (0.9, None), (0.9, 0.9)):
            log(f"{rows.name}: recall {recall}, precision {precision}")
            ours = [ours_on(rows, seed, recall, precision) for seed in range(seeds)]
            tries = [None] if precision else [each for each in BUDGETS if each < len(rows.answers)]
            peer = partial(bargain_on, rows, recall=recall, precision=precision)
            tried = [np.mean([peer(seeds + seed, budget=each).read for seed in range(budget_seeds)]) for each in tries]
            best = [peer(seed, budget=tries[int(np.argmin(tried))]) for seed in range(seeds)]
            cells = [f"{np.mean([run.read for run in runs]):,.0f}" for runs in (ours, best)]
            cells += [told(runs, recall, precision) for runs in (ours, best)]
            named = f"recall {recall}" + (f", precision {precision}" if precision else "")
            print(f"| {rows.name} | {named} | " + " | ".join(cells) + " |", flush=True)


def told(runs: list[Run], recall: float, precision: float | None) -> str:
    """The mean recall and precision, and the share of the runs that miss what was asked for."""
    missed = np.mean([run.recall < recall or run.precision < (precision or 0) for run in runs])
    text = f"{np.mean([run.recall for run in runs]):.3f}"
    text += f" and {np.mean([run.precision for run in runs]):.3f}" if precision else ""
    return f"{text}, {missed:.1%}"


def ours_on(rows: Rows, seed: int, recall: float, precision: float | None) -> Run:
    """`--recall` and `--precision`."""
    pilot, scores = piloted(rows, seed)
    asked = rows.answers.__getitem__
    search = Search(scores, pilot, rows.answers[pilot], asked, recall=recall, precision=precision, seed=seed)
    cuts = search.cuts()
    free = np.ones(len(scores), np.bool_)
    free[pilot], free[search.drawn] = False, False
    return run_of(rows, free & (scores < cuts.low), free & (scores >= cuts.high))


def bargain_on(rows: Rows, seed: int, recall: float, precision: float | None, budget: int | None) -> Run:
    """BARGAIN for the recall with a `budget`; without one for both, which divides the risk among them."""
    process, proxies = bargain()
    pilot, scores = piloted(rows, seed)
    ranks = np.argsort(np.argsort(scores)) / len(scores)

    class Scores(proxies.Proxy):  # type: ignore[misc, name-defined]
        def get_preds_and_scores(self, indxs: Array, data_records: Array) -> tuple[Array, Array]:
            return np.ones(len(indxs), np.int64), ranks[indxs]

    class Answers(proxies.Oracle):  # type: ignore[misc, name-defined]
        def get_pred(self, data_records: Array, indxs: Array = None) -> Array:
            self.preds_dict |= dict.fromkeys(np.asarray(indxs).tolist())
            return rows.answers[indxs].astype(np.int64)

    own: dict[str, Any] = {"proxy": Scores(), "oracle": Answers(), "target": recall, "seed": seed}
    if budget is None:
        own |= {"delta": 0.1, "verbose": False}
        found = process.BARGAIN_PR(**own)
    else:
        found = process.BARGAIN_R(**own, delta=0.05, budget=budget)
    chosen = np.zeros(len(scores), np.bool_)
    chosen[np.array(found.process(np.arange(len(scores))), int)] = True
    free = np.ones(len(scores), np.bool_)
    free[pilot], free[list(own["oracle"].preds_dict)] = False, False
    return run_of(rows, free & ~chosen, free & chosen if precision else np.zeros(len(scores), np.bool_))


def piloted(rows: Rows, seed: int) -> tuple[Array, Array]:
    """The rows that scores are learnt from, and the scores."""
    pilot = np.sort(np.random.default_rng([seed, 1]).permutation(len(rows.answers))[:PILOT])
    return pilot, rows.scores(pilot)


def run_of(rows: Rows, refused: Array, accepted: Array) -> Run:
    """What an output is worth whose rows are `refused`, `accepted` or read."""
    output = (rows.answers & ~refused) | accepted
    right = int((output & rows.answers).sum())
    return Run(
        int((~refused & ~accepted).sum()), right / max(int(rows.answers.sum()), 1), right / max(int(output.sum()), 1)
    )


def made_rows() -> Iterator[Rows]:
    """A rare answer, with scores of a normal distribution that is shifted for its rows."""
    for count, share, shift in ((10_000, 0.03, 3.0), (50_000, 0.02, 3.0), (50_000, 0.01, 4.0)):
        draws = np.random.default_rng(1)
        answers = draws.random(count) < share
        scores = draws.normal(0, 1, count) + shift * answers
        yield Rows(f"{count:,} made, {share:.0%}, apart by {shift:g}", answers, partial(_given, scores))


def real_rows(passages: Path, full: Path, tokenizer: Path, first: Path | None) -> Iterator[Rows]:
    """Passages with SmolLM2's answers, or with those above a margin that few reach; scores by a ridge."""
    from transformers import AutoTokenizer

    texts = pq.read_table(passages)["prompt"].to_pylist()
    read = pq.read_table(full, columns=["logprob_positive", "logprob_negative"])
    margins = read["logprob_positive"].to_numpy() - read["logprob_negative"].to_numpy()
    encode = AutoTokenizer.from_pretrained(tokenizer)
    seen = {"words": np.stack([hashed_words(np.array(encode(text)["input_ids"], np.int32)) for text in texts])}
    if first is not None:
        seen[first.name] = hidden_of(first, texts)
    for name, features in seen.items():
        length = np.linalg.norm(features, axis=1, keepdims=True)
        wide = (features / np.where(length > 0, length, 1)).astype(np.float64)
        scores = partial(_learnt, wide, margins)
        yield Rows(f"passages, 32 % negative, {name}", margins < 0, partial(_turned, scores))
        for share in (0.1, 0.05):
            answers = margins >= np.quantile(margins, 1 - share)
            yield Rows(f"passages, {share:.0%} most positive, {name}", answers, scores)


def _given(scores: Array, pilot: Array) -> Array:
    return scores


def _turned(scores: Callable[[Array], Array], pilot: Array) -> Array:
    return -scores(pilot)


def _learnt(features: Array, margins: Array, pilot: Array) -> Array:
    halves = np.column_stack([margins, -margins])[pilot] / 2
    found = ridge(features[pilot], halves)
    return (features @ found.weights + found.bias)[:, 0]


def hidden_of(model: Path, texts: list[str]) -> Array:
    """The hidden state of each text's last token before the last layer, by transformers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    kept = model / "passages.npy"
    if not kept.exists():
        encode, net = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model).float().eval()
        with torch.no_grad():
            found = [
                net(**encode(text, return_tensors="pt"), output_hidden_states=True).hidden_states[-2][0, -1].numpy()
                for text in texts
            ]
        np.save(kept, np.stack(found))
    return np.load(kept)


def bargain() -> tuple[Any, Any]:
    """BARGAIN's processes and models. The client of an API that its package imports is not needed."""
    sys.modules.setdefault("openai", types.SimpleNamespace(OpenAI=None))  # type: ignore[arg-type]
    import BARGAIN

    return BARGAIN, BARGAIN


if __name__ == "__main__":
    typer.run(main)
