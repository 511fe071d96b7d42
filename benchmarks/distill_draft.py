"""A small draft for the real model: its first layers and its head, trained to look where the whole model looks.

    python -m benchmarks.distill_draft --layers 6 --train 2 --output out/real/draft

The last of the kept layers and the norm before the head are trained on many-shot prompts of reviews, of which none is
in the files that judge the draft. The rest stays as it is. Two losses are added: the divergence of the next token's
distribution from the model's, and that of the importance that queries give to the chunks of the prompt. Importance is
what picks tokens (docs/compression.md). Initial weights, prompts and order follow from the seed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from benchmarks.review_rows import SHORT, ask, balanced, draft_reviews
from prefillcli.reading.compress.settings import Compression
from recipes.real_model import FOLDER, Review, real_model
from recipes.train_first import cut_model, log, trainable

SHOTS = 20  # examples of a training prompt
ASKED = 8  # examples of a prompt whose queries vote
MORE = 64  # other tokens of a prompt whose next token counts
WARM_UP = 4  # steps
HELD_BACK = 2  # prompts that only measure the loss
WATCHED = "watched"  # the attention function's name
_RULES = Compression()


@dataclass(slots=True)
class Lesson:
    """A prompt and what the whole model makes of it.

    `queries` are tokens that vote, `predicts` those whose next token counts. `votes` are float32 [queries, chunks], a
    share of each query's votes, and `logprobs` [predicts, vocabulary] in bfloat16.
    """

    tokens: Tensor
    queries: Tensor
    predicts: Tensor
    votes: Tensor
    logprobs: Tensor


class Votes:
    """Collects, layer by layer, how much some queries attend to the chunks of a prompt."""

    def __init__(self, queries: Tensor) -> None:
        self._queries = queries
        self._most: Tensor | None = None  # [queries, tokens]

    def add(self, query: Tensor, key: Tensor, scaling: float) -> None:
        """A layer's queries [heads, tokens, width] and keys [K,V heads, tokens, width]; the largest vote counts."""
        own = query[:, self._queries].float()
        keys = key.float().repeat_interleave(len(query) // len(key), dim=0)
        scores = own @ keys.transpose(1, 2) * scaling
        later = torch.arange(key.shape[1])[None, :] > self._queries[:, None]
        shares = F.softmax(scores.masked_fill(later, -torch.inf), dim=-1)
        pooled = F.avg_pool1d(shares, _RULES.pool, stride=1, padding=_RULES.pool // 2)
        votes = pooled.amax(dim=0)
        self._most = votes if self._most is None else torch.maximum(self._most, votes)

    def shares(self) -> Tensor:
        """Each query's votes on the chunks between those that are kept anyway, as shares, [queries, chunks]."""
        if self._most is None:
            raise ValueError("no layer has voted")
        size, tokens = _RULES.select_chunk, self._most.shape[1]
        chunks = F.pad(self._most, (0, -tokens % size)).view(len(self._queries), -1, size).sum(dim=2)
        ends = torch.arange(1, chunks.shape[1] + 1) * size
        open_ = (ends[None, :] > size) & (ends[None, :] <= self._queries[:, None] + 1 - _RULES.keep_last)
        chunks = chunks * open_
        return chunks / chunks.sum(dim=1, keepdim=True).clamp_min(1e-9)


_collecting: list[Votes] = []


def _watched(module: Any, query: Tensor, key: Tensor, *rest: Any, **named: Any) -> tuple[Tensor, None]:
    """transformers' SDPA, whose queries and keys are handed to who collects votes."""
    if _collecting:
        _collecting[-1].add(query[0], key[0], float(named.get("scaling") or query.shape[-1] ** -0.5))
    found: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, *rest, **named)
    return found


def watch_attention() -> None:
    """Make the watched attention known to transformers. Idempotent."""
    AttentionInterface.register(WATCHED, _watched)
    AttentionMaskInterface.register(WATCHED, sdpa_mask)


def run(model: PreTrainedModel, tokens: Tensor, queries: Tensor, predicts: Tensor) -> tuple[Tensor, Tensor]:
    """Votes of the queries, as of `Votes.shares`, and next-token log-probabilities [predicts, vocabulary], float32."""
    votes = Votes(queries)
    _collecting.append(votes)
    try:
        hidden = model.base_model(input_ids=tokens[None], use_cache=False).last_hidden_state[0]
    finally:
        _collecting.pop()
    head = model.get_output_embeddings()
    return votes.shares(), F.log_softmax(head(hidden[predicts]).float(), dim=-1)


def losses(model: PreTrainedModel, lesson: Lesson) -> tuple[Tensor, Tensor]:
    """Divergence of the model's next tokens from the lesson's, and of its votes; both in nats, scalars."""
    votes, logprobs = run(model, lesson.tokens, lesson.queries, lesson.predicts)
    wanted = lesson.logprobs.float()
    words = (wanted.exp() * (wanted - logprobs)).sum(dim=1).mean()
    looks = (torch.xlogy(lesson.votes, lesson.votes) - lesson.votes * votes.clamp_min(1e-9).log()).sum(dim=1).mean()
    return words, looks


def make_lesson(teacher: PreTrainedModel, tokenizer: Any, pool: Sequence[Review], rng: Random) -> Lesson:
    """A many-shot prompt of the reviews in `pool`, with what the teacher makes of it.

    Queries are those that a draft has: the last tokens of a question, and as many behind it as a draft decodes.
    """
    shots = balanced(rng, list(pool), SHOTS)
    text, asked = "", []
    for each in shots:
        text += ask(each)
        asked.append(len(text))
        text += f" {each.sentiment}\n\n"
    found = tokenizer(text, return_offsets_mapping=True)
    ends = [end for _, end in found["offset_mapping"]]
    tokens = torch.tensor(found["input_ids"])
    places = [ends.index(end) for end in rng.sample(asked[len(asked) // 2 :], min(ASKED, len(asked) // 2))]
    window = range(1 - _RULES.window, 1 + _RULES.decoded)
    queries = torch.tensor(sorted({at + step for at in places for step in window if 0 <= at + step < len(tokens)}))
    others = rng.sample(range(len(tokens)), min(MORE, len(tokens)))
    predicts = torch.tensor(sorted({*others, *queries.tolist()}))
    with torch.no_grad():
        votes, logprobs = run(teacher, tokens, queries, predicts)
    return Lesson(tokens, queries, predicts, votes, logprobs.bfloat16())


def train(model: PreTrainedModel, lessons: Sequence[Lesson], *, layers: int, steps: int, rate: float) -> None:
    """Train the last `layers` layers: one lesson a step, in their order, again and again."""
    own = trainable(model, layers)
    if not own:
        return
    optimizer = torch.optim.AdamW(own, lr=rate, weight_decay=0.0, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / WARM_UP, 1.0) * max(0.05, 1 - step / steps)
    )
    begun = time.monotonic()
    for step in range(steps):
        words, looks = losses(model, lessons[step % len(lessons)])
        (words + looks).backward()  # type: ignore[no-untyped-call]  # torch's
        torch.nn.utils.clip_grad_norm_(own, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        log(f"step {step + 1:3d} of {steps}: {words:.3f} words, {looks:.3f} looks, {time.monotonic() - begun:.0f} s")


def measure(model: PreTrainedModel, lessons: Sequence[Lesson]) -> tuple[float, float]:
    """The mean losses over some lessons."""
    with torch.no_grad():
        found = torch.tensor([[float(loss) for loss in losses(model, lesson)] for lesson in lessons])
    words, looks = found.mean(dim=0).tolist()
    return words, looks


@dataclass(frozen=True, slots=True)
class Course:
    """How a draft is made: of its `layers`, the last `train` learn, in `steps` over `prompts` lessons."""

    layers: int = 6
    train: int = 2
    prompts: int = 8
    steps: int = 16
    rate: float = 3e-4
    seed: int = 0


def distill(source: Path, output: Path, pool: Sequence[Review], course: Course) -> None:
    """Write the draft of the model in `source`, which learns from prompts of the reviews in `pool`."""
    watch_attention()
    torch.manual_seed(course.seed)
    tokenizer = AutoTokenizer.from_pretrained(source)
    teacher: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.bfloat16, attn_implementation=WATCHED
    ).eval()
    draft = cut_model(teacher, course.layers, WATCHED)
    rng = Random(course.seed)
    lessons = []
    for _ in range(HELD_BACK + (course.prompts if course.train else 0)):
        lessons.append(make_lesson(teacher, tokenizer, pool, rng))
        log(f"prompt {len(lessons)}: {len(lessons[-1].tokens):,} tokens")
    log("before: {:.3f} words, {:.3f} looks".format(*measure(draft, lessons[:HELD_BACK])))
    train(draft, lessons[HELD_BACK:], layers=course.train, steps=course.steps, rate=course.rate)
    log("after: {:.3f} words, {:.3f} looks".format(*measure(draft, lessons[:HELD_BACK])))
    draft.to(torch.bfloat16).save_pretrained(output)
    tokenizer.save_pretrained(output)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    usual = Course()
    parser = argparse.ArgumentParser(description="Cut a draft from the real model and train it on its outputs.")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--output", type=Path, help="by default FOLDER/draft")
    parser.add_argument("--layers", type=int, default=usual.layers, help="layers of the draft")
    parser.add_argument("--train", type=int, default=usual.train, help="how many of them learn, the last; 0: none")
    parser.add_argument("--prompts", type=int, default=usual.prompts)
    parser.add_argument("--steps", type=int, default=usual.steps)
    parser.add_argument("--rate", type=float, default=usual.rate)
    parser.add_argument("--seed", type=int, default=usual.seed)
    given = vars(parser.parse_args(arguments))
    folder, output = given.pop("folder"), given.pop("output")
    pool = [each for each in draft_reviews(folder) if len(each.text) <= SHORT]
    distill(real_model(folder), output or folder / "draft", pool, Course(**given))
    print(output or folder / "draft")
    return 0


if __name__ == "__main__":
    sys.exit(main())
