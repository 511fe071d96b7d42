"""Train the sample models and their tokenizer.

    python -m training.train_sample_models target --minutes 30
    python -m training.train_sample_models draft --minutes 15
    python -m training.train_sample_models deep --steps 300 --rate 1e-3 --batch-tokens 1024
    python -m training.train_sample_models deep-plain --steps 60 --rate 1e-3 --batch-tokens 1024
    python -m training.train_sample_models hybrid --steps 900 --batch-tokens 1024 --gaps-from 1
    python -m training.train_sample_models draft-words --steps 300 --rate 5e-4 --batch-tokens 2048
    python -m training.train_sample_models tickets --steps 2400 --rate 1.5e-3 --batch-tokens 1536 --gaps-from 1

The deep ones are grown from the target; `deep` is trained with LayerSkip's loss and layer dropout. The hybrid is the
target with Mamba-2 mixers instead of most of its attention. `draft-words` is the draft, taught another tokenizer.
`tickets` is the target, taught typed questions.

Runs on the CPU or on CUDA. The clock decides when to stop, so two runs differ, or a number of steps; the data and the
initial weights come from the seed. The best checkpoint so far, judged on held-out prompts in the
shipped format, is always the one on disk.
"""

import argparse
import copy
import os
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import torch
import torch.nn.functional as F
from transformers import (
    AutoModelForCausalLM,
    GraniteMoeHybridForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
)

from benchmarks.sample_text import CASES
from training.curriculum import MOST_LINES, Batch, BatchMaker, Curriculum
from training.deep_model import LayerSkip, grow
from training.evaluate_samples import SAMPLES, Row, ScoredRow, accuracy, draw_rows, nll, score
from training.hybrid_model import ASKED_BEFORE, IMITATES, Imitation, graft
from training.respelled_draft import respell
from training.sample_tokenizer import LONGEST, train_tokenizer
from training.tickets import TicketBatchMaker
from training.word_tokenizer import train_word_tokenizer

TEXT_WEIGHT = 0.2  # of the mean text loss beside the mean answer loss: 0.01 a token
LONGEST_STEP = 5.0  # seconds that one step can count for
GOOD = 0.95  # accuracy without gaps that training with gaps must keep
WARMUP = 50  # steps
DECAY_FROM = 0.6  # share of the time after which the learning rate falls linearly
LEAST_RATE = 0.03  # of the full learning rate, at the end

SampleModel = LlamaForCausalLM | GraniteMoeHybridForCausalLM


@dataclass(frozen=True)
class Shape:
    """Size of a sample model."""

    width: int
    feed_forward: int
    layers: int
    heads: int
    kv_heads: int
    grown: bool = False  # from the target, which gives all sizes but the layers
    early: bool = False  # early layers learn to answer
    hybrid: bool = False  # grown as above, with Mamba-2 mixers
    respelled: bool = False  # from the draft, for another tokenizer
    typed: bool = False  # the target itself, which learns to answer typed questions

    @property
    def trained_before(self) -> bool:
        """It begins as a model that does the task, or nearly so."""
        return self.grown or self.respelled or self.typed


SHAPES = {
    "target": Shape(width=128, feed_forward=256, layers=4, heads=4, kv_heads=2),
    "draft": Shape(width=64, feed_forward=128, layers=3, heads=4, kv_heads=4),
    "deep": Shape(width=128, feed_forward=256, layers=12, heads=4, kv_heads=2, grown=True, early=True),
    "deep-plain": Shape(width=128, feed_forward=256, layers=12, heads=4, kv_heads=2, grown=True),
    "hybrid": Shape(width=128, feed_forward=256, layers=4, heads=4, kv_heads=2, grown=True, hybrid=True),
    "draft-words": Shape(width=64, feed_forward=128, layers=3, heads=4, kv_heads=4, respelled=True),
    "tickets": Shape(width=128, feed_forward=256, layers=4, heads=4, kv_heads=2, typed=True),
}


def build_model(shape: Shape, tokenizer: PreTrainedTokenizerBase, seed: int) -> LlamaForCausalLM:
    """A Llama with random weights of standard deviation width^-0.5, made fit for learning to retrieve.

    The embeddings outweigh what the layers add to them, and from the second layer on the queries start
    equal to the keys: tokens attend to their like. Without either, chance is left much later.
    """
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=shape.width,
        intermediate_size=shape.feed_forward,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=LONGEST,
        # slow rotations: a token must be found thousands of tokens away
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        initializer_range=shape.width**-0.5,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_()
        for index, layer in enumerate(model.model.layers):
            layer.self_attn.o_proj.weight.mul_(0.5)
            layer.mlp.down_proj.weight.mul_(0.5)
            if index:
                keys = layer.self_attn.k_proj.weight.view(shape.kv_heads, -1, shape.width)
                queries = keys.repeat_interleave(shape.heads // shape.kv_heads, dim=0)
                layer.self_attn.q_proj.weight.copy_(queries.reshape(-1, shape.width))
    return model


def save(model: SampleModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a complete transformers directory; each file is replaced in one step.

    A model that is grown is saved in bfloat16.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if SHAPES[folder.name].grown:
        trained, model = model, type(model)(copy.deepcopy(model.config)).to(torch.bfloat16)
        model.load_state_dict(trained.state_dict())
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        model.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        for file in sorted(Path(scratch).iterdir()):
            os.replace(file, folder / file.name)


def learn(
    model: SampleModel, batch: Batch, hint_weight: float, skip: LayerSkip | None, step: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss of a batch, and the share of its answers that are right.

    With a hint weight the asked word itself must predict the answer too, before "? Answer:" has passed. With
    LayerSkip every layer must predict it.
    """
    if skip is not None:
        skip.clear()
    device = model.device
    # the mask of ones keeps transformers from reading jumps in the positions as packed sequences
    hidden = model.model(
        input_ids=batch.ids.to(device),
        position_ids=batch.positions.to(device),
        attention_mask=torch.ones_like(batch.ids, device=device),
        use_cache=False,
    ).last_hidden_state
    answers, text, targets = batch.answers.to(device), batch.text.to(device), batch.targets.to(device)
    logits = model.lm_head(hidden[answers])
    known = targets[answers]
    loss = F.cross_entropy(logits, known) if skip is None else skip.loss(answers, known, step)
    loss = loss + TEXT_WEIGHT * F.cross_entropy(model.lm_head(hidden[text]), targets[text])
    if hint_weight:
        words = answers.roll(-ASKED_BEFORE, dims=1)
        loss = loss + hint_weight * F.cross_entropy(model.lm_head(hidden[words]), targets[answers])
    return loss, (logits.argmax(-1) == targets[answers]).float().mean()


def rate_factor(step: int, spent: float) -> float:
    """Learning rate as a share of the full one, after a share `spent` of the time."""
    fall = min(1.0, (1 - spent) / (1 - DECAY_FROM))
    return min(1.0, (step + 1) / WARMUP) * max(LEAST_RATE, fall)


@dataclass
class Best:
    """The best validation so far: the more accurate, then the likelier answers."""

    accuracy: float = 0.0
    loss: float = float("inf")

    def improves(self, scored: list[ScoredRow]) -> bool:
        """Take in a validation; True if it is the best so far."""
        now = accuracy(scored), nll(scored)
        if (now[0], -now[1]) <= (self.accuracy, -self.loss):
            return False
        self.accuracy, self.loss = now
        return True


class Newest(Best):
    """The newest validation that is good. For models that have been accurate from the start."""

    def improves(self, scored: list[ScoredRow]) -> bool:
        """Take in a validation; True if it is good."""
        return accuracy(scored) >= GOOD


class Latest(Best):
    """The newest validation, whatever it is. For a model that learns something else."""

    def improves(self, scored: list[ScoredRow]) -> bool:
        """Take in a validation; always True."""
        return True


def open_target(args: argparse.Namespace) -> LlamaForCausalLM:
    """The trained target, in float32."""
    model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(args.out / "target", dtype=torch.float32)
    return model


def open_model(args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> SampleModel:
    """The model to train: from its checkpoint, grown from the target, or new."""
    shape = SHAPES[args.model]
    shape = replace(shape, width=args.width or shape.width, layers=args.layers or shape.layers)
    if args.resume:
        model = AutoModelForCausalLM.from_pretrained(args.out / args.model, dtype=torch.float32)
    elif shape.grown:
        torch.manual_seed(args.seed)
        target = open_target(args)
        model = graft(target) if shape.hybrid else grow(target, shape.layers)
    elif shape.respelled:
        draft = LlamaForCausalLM.from_pretrained(args.out / "draft", dtype=torch.float32)
        model = respell(draft, train_tokenizer(), tokenizer)
    elif shape.typed:
        model = open_target(args)
    else:
        model = build_model(shape, tokenizer, args.seed)
    return model.to(args.device).train()


def log(text: str) -> None:
    """A progress line on stderr."""
    print(text, file=sys.stderr, flush=True)


def train(args: argparse.Namespace) -> None:
    """Train one model until the time is over."""
    shape = SHAPES[args.model]
    rng = Random(f"training {args.model} {args.seed} {args.resume}")
    tokenizer = train_word_tokenizer() if shape.respelled else train_tokenizer()
    folder = args.out / args.model
    curriculum, best = Curriculum(), Best()
    if shape.trained_before:  # it reads long histories from the start: most answers for the time are in short ones
        curriculum = Curriculum(drill=False, length=MOST_LINES, longest_share=0.02, bend=2.0)
        best = Best() if shape.hybrid else Latest() if shape.typed else Newest()
    elif args.resume:
        curriculum = Curriculum(drill=False, length=MOST_LINES)
    model = open_model(args, tokenizer)
    skip = LayerSkip(model) if shape.early else None
    imitation = Imitation(model, open_target(args).to(args.device)) if shape.hybrid and not args.resume else None
    batches = (TicketBatchMaker if shape.typed else BatchMaker)(tokenizer, rng, args.batch_tokens)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.rate, betas=(0.9, 0.98), weight_decay=0.01)
    rows = draw_rows(f"validation {args.seed}", args.validation_rows)
    log(f"{args.model}: {sum(p.numel() for p in model.parameters()):,} parameters on {args.device}")

    spent = validated = logged = 0.0  # seconds of training
    step = tokens = 0
    gaps = False
    while (share := step / args.steps if args.steps else spent / (60 * args.minutes)) < 1:
        begun = time.monotonic()
        if not gaps and share > args.gaps_from and curriculum.complete:
            # from now on only checkpoints that bear gaps and still read plain prompts well are kept
            gaps, best = True, best if shape.trained_before else Best(accuracy=GOOD)
            log(f"step {step}: from here on half of the batches have gaps in their positions")
        lesson = curriculum.draw(rng)
        batch = batches.make(lesson, gaps=gaps and rng.random() < 0.5)
        for group in optimizer.param_groups:
            group["lr"] = args.rate * rate_factor(step, share)
        alone = imitation if share < IMITATES else None  # each layer of the hybrid by itself, at first
        if alone is not None:
            loss = alone.distances(batch.ids.to(args.device), batch.answers.to(args.device)).mean()
        else:
            loss, right = learn(model, batch, args.hint if lesson.drill else 0.0, skip, step)
            curriculum.record(lesson, right.item())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step, tokens = step + 1, tokens + batch.ids.numel()
        # a process that was stopped for a while has not trained meanwhile
        spent += min(time.monotonic() - begun, LONGEST_STEP)
        if spent - logged > args.log_seconds:
            logged = spent
            what = "words" if curriculum.drill else "lines"
            log(
                f"{spent / 60:5.1f} min step {step:5d} {what} {curriculum.length:5.1f} "
                f"running {curriculum.running:.3f} loss {loss.item():.3f} {tokens / spent:,.0f} tokens/s"
            )
            if skip is not None:
                shares = skip.accuracies(batch.answers, batch.targets[batch.answers])
                log(f"right after each layer: {' '.join(f'{share:.2f}' for share in shares)}")
        if spent - validated > args.validate_seconds:
            validated = spent
            validate(model, tokenizer, rows, best, folder)
    validate(model, tokenizer, rows, best, folder)


def validate(
    model: SampleModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: list[Row],
    best: Best,
    folder: Path,
) -> None:
    """Score the held-out rows, log the accuracy per domain, save the model if it is the best."""
    model.eval()
    scored = score(model, tokenizer, rows)
    model.train()
    shares = [f"{d} {accuracy([s for s in scored if s.domain == d]):.3f}" for d in CASES]
    longest = accuracy([s for s in scored if s.tokens >= 3000])
    better = best.improves(scored)
    if better:
        save(model, tokenizer, folder)
    saved = ", saved" if better else ""
    log(f"held out: {', '.join(shares)}; from 3,000 tokens {longest:.3f}; nll {nll(scored):.4f}{saved}")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", choices=sorted(SHAPES))
    parser.add_argument("--minutes", type=float, default=30.0, help="time limit")
    parser.add_argument("--steps", type=int, default=0, help="end after so many steps, whatever the time (0: by time)")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint, at full length")
    parser.add_argument("--out", type=Path, default=SAMPLES / "models", help="folder of the checkpoints")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads (0: as torch chooses)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--width", type=int, default=0, help="hidden size (0: the shipped one)")
    parser.add_argument("--layers", type=int, default=0, help="layers (0: the shipped number)")
    parser.add_argument("--rate", type=float, default=3e-3, help="learning rate")
    parser.add_argument("--batch-tokens", type=int, default=4096, help="least tokens in a batch")
    parser.add_argument("--hint", type=float, default=1.0, help="weight of the hints in drills")
    parser.add_argument("--gaps-from", type=float, default=0.7, help="share of the time before gaps")
    parser.add_argument("--validation-rows", type=int, default=24, help="held-out rows per domain")
    parser.add_argument("--validate-seconds", type=float, default=150.0)
    parser.add_argument("--log-seconds", type=float, default=15.0)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    train(args)


if __name__ == "__main__":
    main()
