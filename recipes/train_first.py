"""A first model for `--first`: the first layers of a job's model, trained on the answers that the job has written.

    python -m recipes.train_first out/night.run.json --layers 4 --output out/first

The report names the rows, the model and how prompts are made of rows; the output beside it has the label
log-probabilities. The kept layers and the norm before the head learn to give the same differences between labels as
the whole model: embeddings and head stay as they are. A tenth of the rows only measures. A job with early exits has
no log-probabilities of the rows that left, and they teach nothing. Order and batches follow from the seed.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from prefillcli.core.inputs import Inputs
from prefillcli.options.commands import ScoreSettings
from prefillcli.scoring.opening import open_inputs, open_rows

HELD_BACK = 10  # one row in so many
WARM_UP = 20  # steps
SAID = 20  # lines of progress


class Lesson(NamedTuple):
    """A prompt, the token that begins each label behind it, and what the model made of them.

    `tokens` are int64 [tokens], `heads` int64 [labels]; `answer` are the labels' log-probabilities less their mean,
    float32 [labels].
    """

    tokens: Tensor
    heads: Tensor
    answer: Tensor


@dataclass(frozen=True, slots=True)
class Course:
    """How a first model is made: its layers, how often it sees each row, and tokens of a batch."""

    layers: int = 4
    epochs: int = 3
    rate: float = 5e-4
    batch_tokens: int = 1024
    seed: int = 0


def read_lessons(report: Path) -> tuple[Inputs, list[Lesson]]:
    """The rows of a finished job that have all label log-probabilities, and what the job was opened with.

    Raises ValueError if there are none, or if two labels begin with the same token.
    """
    settings = ScoreSettings(**json.loads(report.read_text())["settings"])
    inputs = open_inputs(*open_rows(settings))
    scored = pq.read_table(settings.files.output, columns=[f"logprob_{name}" for name in inputs.labels.names])
    answers = np.column_stack([column.to_numpy(zero_copy_only=False) for column in scored.columns]).astype(np.float32)
    answers -= answers.mean(axis=1, keepdims=True)
    found: list[Lesson] = []
    at = 0  # the output has a row for each of the input, in its order
    with inputs.windows() as windows:
        for window in windows:
            place = {int(row): at + number for number, row in enumerate(window.rows)}
            at += len(window.rows)
            for prompt in window.prompts:
                answer = torch.from_numpy(answers[place[prompt.row]])
                heads = [int(spellings[0][0]) for spellings in prompt.labels.spellings]
                if len(set(heads)) < len(heads):
                    raise ValueError("two labels begin with the same token: train with labels that differ in it")
                if answer.isfinite().all():
                    found.append(Lesson(torch.from_numpy(prompt.tokens).long(), torch.tensor(heads), answer))
    inputs.builder.close()
    if not found:
        raise ValueError(f"{settings.files.output}: no row has the label log-probabilities of a full read")
    return inputs, found


def cut_model(model: PreTrainedModel, layers: int, attention: str = "sdpa") -> PreTrainedModel:
    """The model's first `layers` layers with its embeddings, last norm and head, in float32; weights are copies.

    Raises ValueError if the model has fewer layers.
    """
    config = copy.deepcopy(model.config)
    if not 0 < layers <= config.num_hidden_layers:
        raise ValueError(f"the model has {config.num_hidden_layers} layers, so {layers} of them cannot be kept")
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    small: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation=attention).float().eval()
    given = model.state_dict()
    small.load_state_dict({name: given[name].float() for name in small.state_dict()})
    return small


def trainable(model: PreTrainedModel, layers: int) -> list[torch.nn.Parameter]:
    """The parameters of the last `layers` layers and of the norm behind them; all others are frozen."""
    model.requires_grad_(False)
    body: Any = model.base_model
    own = [each for part in [*body.layers[-layers:], body.norm] for each in part.parameters()] if layers else []
    for each in own:
        each.requires_grad_(True)
    return own


def log(text: str) -> None:
    """A progress line on stderr."""
    print(text, file=sys.stderr, flush=True)


def batches(lessons: Sequence[Lesson], tokens: int, rng: Random) -> Iterator[list[Lesson]]:
    """All lessons in random batches of similar length, each of at most so many tokens with its padding."""
    order = sorted(lessons, key=lambda each: len(each.tokens) + rng.randrange(8))
    cut: list[list[Lesson]] = [[]]
    for each in order:
        if cut[-1] and max(len(own.tokens) for own in [*cut[-1], each]) * (len(cut[-1]) + 1) > tokens:
            cut.append([])
        cut[-1].append(each)
    rng.shuffle(cut)
    yield from cut


def answers_of(model: PreTrainedModel, lessons: Sequence[Lesson]) -> Tensor:
    """The differences between labels by the model, as of `Lesson.answer`, float32 [lessons, labels].

    Prompts are padded behind their end, where no token of theirs looks.
    """
    padded = torch.nn.utils.rnn.pad_sequence([each.tokens for each in lessons], batch_first=True)
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.base_model(input_ids=padded, use_cache=False).last_hidden_state
    last = hidden[torch.arange(len(lessons)), torch.tensor([len(each.tokens) - 1 for each in lessons])].float()
    head: Any = model.get_output_embeddings()
    logits: Tensor = (head.weight[torch.stack([each.heads for each in lessons])] @ last[:, :, None])[:, :, 0]
    return logits - logits.mean(dim=1, keepdim=True)


def measure(model: PreTrainedModel, lessons: Sequence[Lesson], course: Course) -> float:
    """The correlation of the model's differences between labels with those of the lessons."""
    made: list[tuple[Tensor, Tensor]] = []
    with torch.no_grad():
        for batch in batches(lessons, course.batch_tokens, Random(0)):
            made.append((answers_of(model, batch)[:, 1:], torch.stack([each.answer for each in batch])[:, 1:]))
    own, wanted = (torch.cat([pair[side] for pair in made]) for side in (0, 1))
    own, wanted = own - own.mean(dim=0), wanted - wanted.mean(dim=0)  # the exits' probes fit an offset of each label
    return float(F.cosine_similarity(own.flatten(), wanted.flatten(), dim=0))


def train(model: PreTrainedModel, lessons: Sequence[Lesson], course: Course) -> None:
    """Train all layers of the model and the norm behind them, in place."""
    own = trainable(model, model.config.get_text_config().num_hidden_layers)
    optimizer = torch.optim.AdamW(own, lr=course.rate, betas=(0.9, 0.98))
    rng = Random(course.seed)
    plan = [batch for _ in range(course.epochs) for batch in batches(lessons, course.batch_tokens, rng)]
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / WARM_UP, 1.0) * max(0.02, 1 - step / len(plan))
    )
    begun, lost = time.monotonic(), 0.0
    for step, batch in enumerate(plan):
        loss = F.huber_loss(answers_of(model, batch), torch.stack([each.answer for each in batch]))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(own, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        lost += float(loss.detach())
        every = max(1, len(plan) // SAID)
        if (step + 1) % every == 0:
            log(f"step {step + 1:,} of {len(plan):,}: loss {lost / every:.4f}, {time.monotonic() - begun:.0f} s")
            lost = 0.0


def make_first(report: Path, output: Path, course: Course) -> float:
    """Write a first model for jobs like the one of `report`; returns the correlation on rows that were held back."""
    torch.manual_seed(course.seed)
    inputs, lessons = read_lessons(report)
    model = cut_model(
        AutoModelForCausalLM.from_pretrained(inputs.settings.lm.model, dtype=torch.float32), course.layers
    )
    Random(course.seed).shuffle(lessons)
    held, taught = lessons[: len(lessons) // HELD_BACK], lessons[len(lessons) // HELD_BACK :]
    log(f"{len(taught):,} rows teach, {sum(len(each.tokens) for each in taught):,} tokens; {len(held):,} measure")
    train(model, taught, course)
    found = measure(model, held, course) if held else float("nan")
    model.to(torch.bfloat16).save_pretrained(output)
    inputs.opened.tokenizer.save_pretrained(output)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    usual = Course()
    parser = argparse.ArgumentParser(description="Cut a first model from a job's model and train it on its answers.")
    parser.add_argument("report", type=Path, help="run.json of a job that has read its rows in full")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=usual.layers)
    parser.add_argument("--epochs", type=int, default=usual.epochs)
    parser.add_argument("--rate", type=float, default=usual.rate)
    parser.add_argument("--batch-tokens", type=int, default=usual.batch_tokens)
    parser.add_argument("--seed", type=int, default=usual.seed)
    given = vars(parser.parse_args(arguments))
    report, output = given.pop("report"), given.pop("output")
    found = make_first(report, output, Course(**given))
    print(f"{output}: correlation {found:.2f} with the model on rows that were held back")
    return 0


if __name__ == "__main__":
    sys.exit(main())
