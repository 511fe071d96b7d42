"""`python -m benchmarks.estimates`: how often the interval of `--estimate` holds the share, and how wide it is.

Rows whose answers are known are drawn again and again, without replacement. Each draw is labelled, and everything else
is what `--estimate` does: the guesses are fitted to these rows anew. Readers are early layers of the model itself,
hashed words, and the draft sample beside the deep one. The last line on stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.exit_cases import passages
from benchmarks.score_runs import SAMPLES
from prefillcli.engines.base import Readings
from prefillcli.judging.estimate import fit_guesser, guided_share, indicators, plain_share
from prefillcli.reading.exits.first import hashed_words
from recipes.real_model import real_model

OUT = Path("out/estimates")
Arrays = dict[str, npt.NDArray[Any]]


def read(model: Path, texts: Sequence[str], labels: Sequence[str], layers: Sequence[int], kept: Path) -> Arrays:
    """The label log-probabilities of transformers' own forward, and the last token's hidden states after `layers`."""
    if kept.exists():
        return dict(np.load(kept))
    tokenizer = AutoTokenizer.from_pretrained(model)
    walk = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    tokens = [tokenizer(text)["input_ids"] for text in texts]
    ids = [tokenizer(label, add_special_tokens=False)["input_ids"][0] for label in labels]
    found: dict[str, list[Any]] = {f"h{layer}": [] for layer in layers} | {"logprobs": []}
    with torch.inference_mode():
        for number, own in enumerate(tokens):
            shown = walk(torch.tensor([own]), output_hidden_states=True, logits_to_keep=1)
            found["logprobs"].append(shown.logits[0, -1].log_softmax(-1)[ids].numpy())
            for layer in layers:
                found[f"h{layer}"].append(shown.hidden_states[layer][0, -1].numpy())
            if number % 500 == 0:
                print(f"{model}: {number} of {len(texts)} rows", file=sys.stderr)
    kept.parent.mkdir(parents=True, exist_ok=True)
    arrays = {name: np.array(values) for name, values in found.items()}
    np.savez(kept, **arrays)  # type: ignore[arg-type]  # one of its other arguments is a bool
    return arrays


def hidden(values: npt.NDArray[Any]) -> Readings:
    """Readings of a hidden state alone."""
    none = np.full((len(values), 2), np.nan)
    return Readings(np.asarray(values, np.float32), none, none)


def words(model: Path, texts: Sequence[str]) -> tuple[Readings, float]:
    """The readings of `--first words`, and the seconds that they take."""
    tokens = [np.array(own, np.int32) for own in AutoTokenizer.from_pretrained(model)(list(texts))["input_ids"]]
    begun = time.perf_counter()
    found = np.stack([hashed_words(own) for own in tokens])
    return hidden(found), time.perf_counter() - begun


def resampled(
    name: str, readings: Readings, final: npt.NDArray[np.float64], cost: float, rows: int, draws: int
) -> dict[str, Any]:
    """The intervals of the first label over many draws of `rows`, where a reading costs `cost` of the model's."""
    truth, total, random = indicators(final)[:, 0], len(final), np.random.default_rng(0)
    held = plain_held = 0
    times = 0.0
    widths: list[float] = []
    plain_widths: list[float] = []
    equal_widths: list[float] = []
    correlations: list[float] = []
    for _ in range(draws):
        own = random.choice(total, rows, replace=False)
        rest = np.setdiff1d(np.arange(total), own)
        one, other = (Readings(readings.hidden[at], readings.logits[at], readings.before[at]) for at in (own, rest))
        begun = time.perf_counter()
        guesser = fit_guesser([one], final[own])
        others = float(guesser.guess([other])[:, 0].mean())
        found = guided_share(truth[own], guesser.held_out[:, 0], others, total)
        times += time.perf_counter() - begun
        hits, more = float(truth[own].sum()), rows + cost * total
        plain, equal = (plain_share(hits * each / rows, each, total) for each in (float(rows), min(more, total)))
        held += found.interval[0] <= truth.mean() <= found.interval[1]
        plain_held += plain.interval[0] <= truth.mean() <= plain.interval[1]
        for each, into in ((found, widths), (plain, plain_widths), (equal, equal_widths)):
            into.append(each.interval[1] - each.interval[0])
        correlations.append(float(np.corrcoef(truth[own], guesser.held_out[:, 0])[0, 1]))
    result = {
        "reader": name,
        "rows": rows,
        "of": total,
        "draws": draws,
        "cost": round(cost, 4),
        "correlation": round(float(np.mean(correlations)), 3),
        "width": round(float(np.mean(widths)), 4),
        "equal_rows": round(float(np.mean(widths) / np.mean(plain_widths)), 3),
        "equal_cost": round(float(np.mean(widths) / max(float(np.mean(equal_widths)), 1e-9)), 3),
        "coverage": round(held / draws, 3),
        "plain_coverage": round(plain_held / draws, 3),
        "fit_seconds": round(times / draws, 3),
    }
    print(json.dumps(result), file=sys.stderr, flush=True)
    return result


def sure_readers(draws: int) -> list[dict[str, Any]]:
    """Readers who are sure of everything and rarely wrong, of 5,000 rows, by the usual formula and by ours."""
    found: list[dict[str, Any]] = []
    random = np.random.default_rng(0)
    for share, wrong, rows in ((0.5, 0.002, 100), (0.5, 0.002, 300), (0.5, 0.01, 300), (0.05, 0.01, 400)):
        truth = (random.random(5000) < share).astype(float)
        guesses = np.where(random.random(5000) < wrong, 1 - truth, truth)
        usual = ours = 0
        for _ in range(draws):
            own = random.choice(5000, rows, replace=False)
            y, f, others = truth[own], guesses[own], (guesses.sum() - guesses[own].sum()) / (5000 - rows)
            weight = min(max(np.cov(y, f)[0, 1] / f.var(ddof=1), 0), 1) if f.var() else 0.0
            value = y.mean() + weight * (1 - rows / 5000) * (others - f.mean())
            half = 1.96 * np.sqrt((1 - rows / 5000) * np.var(y - weight * f, ddof=1) / rows)
            usual += abs(value - truth.mean()) <= half
            low, high = guided_share(y, f, float(others), 5000).interval
            ours += low <= truth.mean() <= high
        found.append({"share": share, "wrong": wrong, "rows": rows, "usual": usual / draws, "coverage": ours / draws})
        print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=("passages", "deep", "sure"), action="append")
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--rows", type=int, nargs="+", default=[350, 700])
    parser.add_argument("--layers", type=int, nargs="+", default=[6, 12, 16, 20])
    given = parser.parse_args()
    torch.set_num_threads(1)
    OUT.mkdir(parents=True, exist_ok=True)
    cases = given.case or ["passages", "deep", "sure"]
    found: list[dict[str, Any]] = []
    if "passages" in cases:
        model = real_model()
        texts = pq.read_table(passages(OUT))["prompt"].to_pylist()
        read_by = read(model, texts, [" positive", " negative"], given.layers, OUT / "passages.npz")
        depth, final = 30, np.asarray(read_by["logprobs"], np.float64)
        said, seconds = words(model, texts)
        row_seconds = _row_seconds(model, texts)
        readers = [
            *((f"{layer} of {depth} layers", hidden(read_by[f"h{layer}"]), layer / depth) for layer in given.layers),
            ("words", said, seconds / len(texts) / row_seconds),
        ]
        found += [resampled(*each[:2], final, each[2], rows, given.draws) for rows in given.rows for each in readers]
    if "deep" in cases:
        texts = pq.read_table(SAMPLES / "labeling.parquet")["prompt"].to_pylist()
        model, draft = SAMPLES / "models" / "deep", SAMPLES / "models" / "draft"
        final = np.asarray(read(model, texts, [" Yes", " No"], [], OUT / "deep.npz")["logprobs"], np.float64)
        layers = AutoModelForCausalLM.from_pretrained(draft).config.num_hidden_layers - 1
        small = read(draft, texts, [" Yes", " No"], [layers], OUT / "draft.npz")
        cost = _row_seconds(draft, texts) / _row_seconds(model, texts)
        for rows in given.rows:
            said = Readings(small[f"h{layers}"], np.asarray(small["logprobs"], np.float64), final)
            found.append(resampled("draft sample", said, final, cost, rows, given.draws))
    sure = sure_readers(given.draws) if "sure" in cases else []
    print(json.dumps({"estimates": found, "sure": sure}))


def _row_seconds(model: Path, texts: Sequence[str]) -> float:
    # Of a forward for one row of these, on average.
    tokenizer = AutoTokenizer.from_pretrained(model)
    walk = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    tokens = [torch.tensor([tokenizer(text)["input_ids"]]) for text in texts[:60]]
    times = []
    with torch.inference_mode():
        for own in tokens:
            begun = time.perf_counter()
            walk(own, logits_to_keep=1)
            times.append(time.perf_counter() - begun)
    return float(np.median(times[10:]))


if __name__ == "__main__":
    main()
