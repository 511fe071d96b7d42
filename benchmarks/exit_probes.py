"""`python -m benchmarks.exit_probes`: what probes know at each layer of a real model, and what exits follow from that.

Readings are collected once, with transformers, of SmolLM2-135M on drug reviews and passages of them: some minutes.
They are kept in out/real. Gains are those of the cost model, for tokens that no two rows share. Two tables go to
stdout.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.console import log
from prefillcli.engines.base import Readings
from prefillcli.reading.exits.judging import CalibrationRows, calibrate_exits
from prefillcli.reading.exits.policy import FITS, ExitPolicy, relative
from recipes.choose_prompt import CANDIDATES, first_short
from recipes.real_model import FOLDER, real_model, reviews

LABELS = ("positive", "negative")
LAYERS = 30
ROWS = 2_800  # to calibrate on; the others show what exits flip
SPLITS = 10
SENTENCES = (1, 3)  # of a passage
SHORTEST = 20  # characters
Arrays = dict[str, Any]


def main(
    max_flips: Annotated[
        list[float] | None, typer.Option(help="Allowed flips. (default: 0.01, 0.02 and 0.05)")
    ] = None,
) -> None:
    """Probes by layer, and exits calibrated on ten draws of the rows."""
    path = FOLDER / "readings.npz"
    if not path.exists():
        log("collecting the readings of a real model")
        np.savez(path, **collected())
    with np.load(path) as file:
        shown = {name: file[name] for name in ("hidden", "logits", "final", "tokens")}
    print_probes(shown)
    print_exits(shown, max_flips or [0.01, 0.02, 0.05])


def print_probes(shown: Arrays) -> None:
    """Each kind of probe, fitted to 1,400 rows and shown on the others."""
    drawn = np.random.default_rng(0).permutation(len(shown["final"]))
    fit, rest = rows_of(shown, drawn[: ROWS // 2]), rows_of(shown, drawn[ROWS // 2 :])
    print(f"| after layer of {LAYERS} | " + " | ".join(f"{kind}: correlation, same answer" for kind in FITS) + " |")
    print("| --- |" + " --- |" * len(FITS))
    for layer in range(5, LAYERS - 1, 2):
        cells = []
        for each in FITS.values():
            found = each(fit.readings[layer], relative(fit.final), 0).probe.logits(rest.readings[layer])
            same = float(np.mean(found.argmax(axis=1) == rest.truth))
            cells.append(f"{np.corrcoef(margin(found), margin(rest.final))[0, 1]:.2f}, {same:.1%}")
        print(f"| {layer + 1} | " + " | ".join(cells) + " |", flush=True)


def print_exits(shown: Arrays, allowed: list[float]) -> None:
    """Exits that are calibrated on draws of the rows, and what they do to the others."""
    head = ("allowed", "exits", "leave", "gain", "lowest", "highest", *(f"flips of {label}" for label in LABELS))
    print(f"\n| {' | '.join(head)} |\n|" + " --- |" * len(head))
    for most in allowed:
        found = [outcome(shown, most, seed) for seed in range(SPLITS)]
        exits, leave, gain, *flips = np.mean(found, axis=0)
        gains = [each[2] for each in found]
        cells = [f"{most:.0%}", f"{exits:.1f}", f"{leave:.0%}", *(f"{each:.2f}x" for each in (gain, *spread(gains)))]
        print(f"| {' | '.join([*cells, *(f'{each:.2%}' for each in flips)])} |", flush=True)


def outcome(shown: Arrays, max_flips: float, seed: int) -> tuple[float, ...]:
    """Number of exits, share of fresh rows that leave, predicted gain, and fresh rows that flip by class."""
    drawn = np.random.default_rng(seed).permutation(len(shown["final"]))
    rows, rest = rows_of(shown, drawn[:ROWS]), rows_of(shown, drawn[ROWS:])
    found = calibrate_exits(rows, layers=LAYERS, max_flips=max_flips, labels=LABELS)
    if found.policy is None:
        log(found.reason or "")
        return 0, 0, 1, *(0 for _ in LABELS)
    left, answer = leave(found.policy, rest)
    flips = [float(np.mean(answer[rest.truth == label] != label)) for label in range(len(LABELS))]
    return len(found.policy.exits), float(np.mean(left)), found.findings.gain or 1.0, *flips


def leave(policy: ExitPolicy, rows: CalibrationRows) -> tuple[Any, Any]:
    """Which rows leave, and the label that each has in the end."""
    left, answer = np.zeros(len(rows), dtype=bool), rows.truth
    for layer in policy.layers:
        found = policy.decide(layer, rows.readings[layer])
        going = found.decided & ~left
        answer = np.where(going, found.logprobs.argmax(axis=1), answer)
        left |= going
    return left, answer


def rows_of(shown: Arrays, chosen: Any) -> CalibrationRows:
    """Some of the rows, with what all layers but the first five show."""
    readings = {
        layer: Readings(
            shown["hidden"][layer][chosen], shown["logits"][layer + 1][chosen], shown["logits"][layer][chosen]
        )
        for layer in range(5, LAYERS)
    }
    return CalibrationRows(readings, shown["final"][chosen], shown["tokens"][chosen].astype(np.float64))


def margin(logits: Any) -> Any:
    """The first label's lead [rows]."""
    return logits[:, 0] - logits[:, 1]


def spread(values: list[float]) -> tuple[float, float]:
    return min(values), max(values)


def texts() -> list[str]:
    """All reviews but two, and passages of one to three sentences of each, in random order."""
    train, test = reviews("Train"), reviews("Test")
    rng, found = Random(0), []
    for review in [each for each in train + test if each not in first_short(train, 2)]:
        found.append(review.text)
        found += passages(review.text, rng)
    rng.shuffle(found)
    return found


def passages(text: str, rng: Random) -> Iterator[str]:
    """The passages of a review; none is the whole of it."""
    sentences = re.split(r"(?<=[.!?])\s+", text)
    at = 0
    while at < len(sentences):
        count = rng.randint(*SENTENCES) if len(sentences) > 1 else len(sentences)
        passage = " ".join(sentences[at : at + count])
        at += count
        if len(passage) >= SHORTEST and passage != text:
            yield passage


def collected() -> Arrays:
    """What every layer shows of every row, by transformers' own forward in bfloat16.

    `hidden` [layers, rows, hidden] and `logits` [layers + 1, rows, labels] of the embeddings and after each layer;
    `final` [rows, labels] log-probabilities and `tokens` [rows].
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder: Path = real_model()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    labels = [tokenizer.encode(f" {label}", add_special_tokens=False)[0] for label in LABELS]
    head, states = model.lm_head.weight[labels].float(), []
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda module, given: states.append(given[0][0, -1]))
    model.model.layers[-1].register_forward_hook(lambda module, given, out: states.append(out[0, -1]))
    found: dict[str, list[Any]] = {"hidden": [], "logits": [], "final": [], "tokens": []}
    rows = texts()
    with torch.inference_mode():
        for number, text in enumerate(rows):
            asked = CANDIDATES["sentiment, no example"].asked.replace("REVIEW", text)
            tokens = tokenizer.encode(asked, add_special_tokens=False)
            states.clear()
            answer = model(torch.tensor([tokens]), logits_to_keep=1, use_cache=False).logits[0, -1]
            stream = torch.stack(states)
            found["hidden"].append(stream[1:].float().numpy())
            found["logits"].append((model.model.norm(stream).float() @ head.T).double().numpy())
            found["final"].append(answer.float().log_softmax(-1)[labels].double().numpy())
            found["tokens"].append(len(tokens))
            if number % 500 == 0:
                log(f"{number:,} of {len(rows):,} rows")
    arrays = {name: np.stack(values) for name, values in found.items()}
    return arrays | {name: np.swapaxes(arrays[name], 0, 1) for name in ("hidden", "logits")}


if __name__ == "__main__":
    typer.run(main)
