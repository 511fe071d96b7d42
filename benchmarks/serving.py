"""`python -m benchmarks.serving FOLDER`: a contender of a race, in the environment whose interpreter this is.

The folder holds what `benchmarks.runners` wrote: the job and the prompts. Once the contender can score, its settings
go to stdout as a line of JSON. For each line on stdin it then scores all prompts, writes scores.npy and says so on
stdout. This module and those of contenders with an environment of their own import nothing of the program.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]
Scores = npt.NDArray[np.float64]
Method = Callable[[], Scores]
Settings = Mapping[str, Any]
#: The tokens of each answer that may follow a prompt.
Options = Sequence[Sequence[int]]
JOB, PROMPTS, SCORES = "job.json", "prompts.npz", "scores.npy"
#: Rows that begin alike in fewer tokens share nothing.
FEWEST_SHARED = 32


def serve(folder: Path) -> None:
    """Open the contender, report that, then run it whenever asked."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    job = json.loads((folder / JOB).read_text())
    with np.load(folder / PROMPTS) as packed:
        prompts = np.split(packed["tokens"], packed["ends"][:-1]) if len(packed["ends"]) else []
    module, _, name = job["way"].partition(":")
    opened = getattr(import_module(module), name)
    with opened(Path(job["model"]), job["dtype"], prompts, tuple(job["labels"]), **job["settings"]) as (method, about):
        gc.freeze()  # as the program does: collections need not look at the million objects of imports
        print(json.dumps(about), file=answers)
        for _ in sys.stdin:
            np.save(folder / SCORES, method())
            print("{}", file=answers)


def share(logits: npt.NDArray[np.floating[Any]]) -> Scores:
    """P(first label) among two labels [prompts], of logits [prompts, labels]."""
    wide = logits.astype(np.float64)
    shares: Scores = 1 / (1 + np.exp(wide[:, 1] - wide[:, 0]))
    return shares


def beginnings(options: Options) -> dict[tuple[int, ...], list[int]]:
    """Where the tokens of options are read: after each beginning of some, the empty one included, the next ones."""
    found: dict[tuple[int, ...], dict[int, None]] = {}
    for tokens in options:
        for at, token in enumerate(tokens):
            found.setdefault(tuple(tokens[:at]), {})[token] = None
    return {before: list(following) for before, following in found.items()}


def option_shares(logprobs: Sequence[Sequence[float]]) -> Scores:
    """The probabilities of a question's options among these, of their log-probabilities; those of all questions in
    order."""
    logs = [np.array(each) - np.logaddexp.reduce(each) for each in logprobs]
    shares: Scores = np.exp(np.concatenate(logs))
    return shares


def batches(lengths: Sequence[int], tokens: int, most: int | None = None) -> Iterator[list[int]]:
    """Row numbers of each batch, longest rows first, of at most `tokens` tokens with padding, and at most `most` rows;
    one row at least."""
    batch: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        if batch and ((len(batch) + 1) * lengths[batch[0]] > tokens or len(batch) == most):
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def groups(prompts: Sequence[Tokens]) -> list[tuple[int, list[int]]]:
    """Rows that follow one another and begin alike, with the number of tokens that all of them share.

    Rows that share nothing with a neighbour are in groups with 0. Every row keeps a token of its own.
    """
    found: list[tuple[int, list[int]]] = []
    for row, prompt in enumerate(prompts):
        if found:
            shared, rows = found[-1]
            first = prompts[rows[0] if shared else row - 1]
            most = min(len(prompt), shared + 1 if shared else len(first)) - 1
            unlike = np.flatnonzero(prompt[:most] != first[:most])
            common = int(unlike[0]) if len(unlike) else most
            if common >= FEWEST_SHARED:
                if not shared and len(rows) > 1:
                    found[-1] = (0, rows[:-1])
                    rows = rows[-1:]
                    found.append((common, rows))
                rows.append(row)
                found[-1] = (common, rows)
                continue
            if not shared:
                rows.append(row)
                continue
        found.append((0, [row]))
    return found


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
