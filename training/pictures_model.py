"""A sample model that sees: a tiny Idefics3, the architecture of SmolVLM, trained from nothing to answer questions.

    python -m training.pictures_model

First the vision tower learns by itself to tell what is in a picture: linear layers on the mean of its features, which
are thrown away afterwards, name the kind, the colours, the number, the size and the word. Then the whole model learns
to answer typed questions, several about each picture, in the very prompts that `prefill score --ask` makes.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3Processor,
    PreTrainedTokenizerFast,
)
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

from prefillcli.asking.forms import text_of
from prefillcli.prompts.questions import Question
from training.evaluate_samples import SAMPLES
from training.pictures import (
    COLOURS,
    KINDS,
    LEVELS,
    NOTHING,
    SIZES,
    WORDS,
    Asked,
    Picture,
    ask_about,
    ask_all,
    caption,
    draw_picture,
)

FOLDER = SAMPLES / "models" / "pictures"
SIDE, PATCH, SHUFFLE = 64, 8, 2  # pixels of an image and of a patch; patches of a feature, along a side
VOCABULARY, LONGEST = 512, 2048
BEGIN, END, PAD, IMAGE = "<|im_start|>", "<end_of_utterance>", "<pad>", "<image>"
AROUND, WHOLE = "<fake_token_around_image>", "<global-img>"
# SmolVLM's own
CHAT = (
    "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}"
    "{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n"
    "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
SEEING, PICTURES, QUESTIONS = 64, 24, 6  # pictures in a batch of the tower alone; in a later one; questions about each
PARTS = 3  # of a batch, each padded to its longest prompt
WARMUP, DECAY_FROM = 100, 0.4  # steps; share of the steps after which the learning rate falls linearly
CHECKED = 30  # held-out pictures


def train_tokenizer(seed: int = 0, texts: int = 4000) -> PreTrainedTokenizerFast:
    """Train on questions. Raises ValueError if an answer is not a single token."""
    rng = Random(f"pictures tokenizer {seed}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [PAD, BEGIN, END, IMAGE, AROUND, WHOLE]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[AddedToken(each, special=True, normalized=False) for each in special],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(rng, texts), trainer)
    answers = [f" {each}" for each in ("Yes", "No", *KINDS, *COLOURS, *SIZES, *WORDS, NOTHING, *LEVELS)]
    if split := [each for each in answers if len(tokenizer.encode(each).ids) != 1]:
        raise ValueError(f"not single tokens with {VOCABULARY} entries: {split}")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BEGIN,
        eos_token=END,
        pad_token=PAD,
        model_max_length=LONGEST,
        clean_up_tokenization_spaces=False,
    )


def _texts(rng: Random, count: int) -> Iterator[str]:
    for _ in range(count):
        asked = ask_about(rng, draw_picture(rng))
        yield f"User:{caption(rng)}{text_of(asked.question)}\nAssistant: {asked.answer}"


def build_processor(tokenizer: PreTrainedTokenizerFast) -> Idefics3Processor:
    """Return the processor, which reads each picture as one square image."""
    side = {"longest_edge": SIDE}
    images = Idefics3ImageProcessorPil(size=side, max_image_size=side, do_image_splitting=False)
    features = (SIDE // PATCH // SHUFFLE) ** 2
    return Idefics3Processor(images, tokenizer, image_seq_len=features, chat_template=CHAT)


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Idefics3ForConditionalGeneration:
    """Return the model with random weights."""
    torch.manual_seed(seed)
    width = 128
    text = {
        "model_type": "llama",
        "vocab_size": len(tokenizer),
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": LONGEST,
        "initializer_range": 0.05,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    seen = {
        "image_size": SIDE,
        "patch_size": PATCH,
        "hidden_size": 96,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "initializer_range": 0.05,
    }
    config = Idefics3Config(
        text_config=text,
        vision_config=seen,
        scale_factor=SHUFFLE,
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE),
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return Idefics3ForConditionalGeneration(config)


class Names(nn.Module):
    """What the tower learns first: names for what is in a picture, from the mean of its features."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.sizes = (len(KINDS), len(LEVELS), len(SIZES), len(WORDS) + 1, len(COLOURS))
        self.all = nn.Linear(width, sum(self.sizes))

    def losses(self, features: Tensor, pictures: Sequence[Picture]) -> tuple[Tensor, list[float]]:
        """Return the loss of the batch, and the share of right names of each sort."""
        *single, several = self.all(features.mean(dim=1)).split(self.sizes, dim=1)
        wanted = [
            [KINDS.index(p.kind), p.count - 1, [*SIZES].index(p.size), [*WORDS, NOTHING].index(p.word)]
            for p in pictures
        ]
        targets = torch.tensor(wanted).T
        colours = torch.tensor([[float(each in p.colours) for each in COLOURS] for p in pictures])
        losses = [F.cross_entropy(each, target) for each, target in zip(single, targets, strict=True)]
        right = [
            (each.argmax(1) == target).float().mean().item() for each, target in zip(single, targets, strict=True)
        ]
        right.append(((several > 0) == (colours > 0)).all(dim=1).float().mean().item())
        return torch.stack([*losses, F.binary_cross_entropy_with_logits(several, colours) * 3]).sum(), right


def see(processor: Idefics3Processor, pictures: Iterable[Image.Image]) -> Tensor:
    """Return what the model sees of pictures, [pictures, 1, channels, side, side]."""
    pixels: Tensor = processor.image_processor([[each] for each in pictures], return_tensors="pt")["pixel_values"]
    return pixels


def wording(question: Question, text: str) -> str:
    """Return what stands behind the picture in the user's message: a text, if there is one, and the question."""
    return f"{text}{text_of(question)}".lstrip()


def chat(processor: Idefics3Processor, text: str) -> str:
    """Return the prompt of a picture with this text behind it, with one placeholder for the picture."""
    content = [{"type": "image"}, {"type": "text", "text": text}]
    prompt: str = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    return prompt


class Batch(NamedTuple):
    """Questions about pictures: `pixels` [pictures, 1, channels, side, side], `ids` [questions, tokens], those of a
    picture in a row, and after the token at `ends` [questions] the answer, a token of `answers` [questions]."""

    pixels: Tensor
    ids: Tensor
    ends: Tensor
    answers: Tensor


def draw_batch(processor: Idefics3Processor, rng: Random) -> Batch:
    """Return new pictures with several questions about each."""
    drawn = [draw_picture(rng) for _ in range(PICTURES)]
    asked = [ask_about(rng, each) for each in drawn for _ in range(QUESTIONS)]
    shown = processor.replace_image_token({"rows": [[0]], "cols": [[0]]}, 0)
    texts = []
    for each in asked:
        texts.append(chat(processor, wording(each.question, caption(rng))).replace(IMAGE, shown))
    found = processor.tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
    answers = processor.tokenizer([f" {each.answer}" for each in asked], return_tensors="pt")["input_ids"]
    ends = found["attention_mask"].sum(dim=1) - 1
    return Batch(see(processor, [each.image for each in drawn]), found["input_ids"], ends, answers[:, 0])


def learn(model: Idefics3ForConditionalGeneration, batch: Batch) -> tuple[Tensor, float]:
    """Return the loss of a batch, and the share of right answers among all tokens."""
    features = model.model.get_image_features(batch.pixels).pooler_output
    logits, answers = [], []
    for own in batch.ends.argsort().chunk(PARTS):  # of similar lengths
        # What stands after the answer's place is not seen from there: no mask is needed.
        ends = batch.ends[own]
        ids = batch.ids[own, : int(ends.max()) + 1]
        embedded = model.model.inputs_merger(ids, model.get_input_embeddings()(ids), features[own // QUESTIONS])
        hidden = model.model.text_model(inputs_embeds=embedded, use_cache=False).last_hidden_state
        logits.append(model.lm_head(hidden[torch.arange(len(own)), ends]))
        answers.append(batch.answers[own])
    found, wanted = torch.cat(logits), torch.cat(answers)
    return F.cross_entropy(found, wanted), (found.argmax(dim=1) == wanted).float().mean().item()


def learn_to_see(tower: Any, processor: Idefics3Processor, rng: Random, args: argparse.Namespace) -> None:
    """Train the tower by itself."""
    names = Names(tower.config.hidden_size)
    optimizer = _optimizer([*tower.parameters(), *names.parameters()], args.rate)
    for step in range(args.seeing_steps):
        pictures = [draw_picture(rng) for _ in range(SEEING)]
        features = tower(see(processor, [each.image for each in pictures])[:, 0]).last_hidden_state
        loss, right = names.losses(features, pictures)
        _step(optimizer, loss, args.rate, step, args.seeing_steps)
        if step % 50 == 0:
            log(f"seeing: step {step} loss {loss.item():.3f} right {' '.join(f'{share:.2f}' for share in right)}")


def learn_to_answer(
    model: Idefics3ForConditionalGeneration, processor: Idefics3Processor, rng: Random, args: argparse.Namespace
) -> None:
    """Train the whole model, and save it now and then."""
    optimizer = _optimizer(list(model.parameters()), args.rate)
    running = 0.0
    for step in range(args.steps):
        loss, share = learn(model, draw_batch(processor, rng))
        _step(optimizer, loss, args.rate, step, args.steps)
        running = 0.95 * running + 0.05 * share
        if step % 25 == 0:
            log(f"answering: step {step} loss {loss.item():.3f} running {running:.3f}")
        if step % args.save_steps == args.save_steps - 1 or step + 1 == args.steps:
            model.eval()
            shares = evaluate(model, processor, draw_asked("validation", CHECKED))
            log(", ".join(f"{about} {share:.2f}" for about, share in shares.items()))
            save(model, processor, args.out)
            model.train()


def train(args: argparse.Namespace) -> None:
    """Train the tower, unless that is done, then the whole model."""
    tokenizer = train_tokenizer()
    processor, model = build_processor(tokenizer), build_model(tokenizer, args.seed)
    tower = model.model.vision_model
    log(f"{_count(model):,} parameters, {_count(tower):,} of the tower")
    if args.resume:
        model.load_state_dict(Idefics3ForConditionalGeneration.from_pretrained(args.out).state_dict())
    else:
        learn_to_see(tower, processor, Random(f"pictures seen {args.seed}"), args)
        save(model, processor, args.out)
    learn_to_answer(model, processor, Random(f"pictures asked about {args.seed}"), args)


def _count(module: nn.Module) -> int:
    return sum(each.numel() for each in module.parameters())


def _optimizer(parameters: list[nn.Parameter], rate: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.98), weight_decay=0.01)


def _step(optimizer: torch.optim.Optimizer, loss: Tensor, rate: float, step: int, steps: int) -> None:
    fall = min(1.0, (1 - step / steps) / (1 - DECAY_FROM))
    for group in optimizer.param_groups:
        group["lr"] = rate * min(1.0, (step + 1) / WARMUP) * fall
    optimizer.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_([each for group in optimizer.param_groups for each in group["params"]], 1.0)
    optimizer.step()


def save(model: Idefics3ForConditionalGeneration, processor: Idefics3Processor, folder: Path) -> None:
    """Write a complete transformers directory, in bfloat16; each file is replaced in one step."""
    folder.mkdir(parents=True, exist_ok=True)
    trained, model = model, type(model)(copy.deepcopy(model.config)).to(torch.bfloat16)
    model.load_state_dict(trained.state_dict())
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        model.save_pretrained(scratch)
        processor.save_pretrained(scratch)
        for file in sorted(Path(scratch).iterdir()):
            os.replace(file, folder / file.name)


def draw_asked(seed: str, pictures: int) -> list[tuple[Picture, Asked]]:
    """Return new pictures, each with a question of every sort."""
    rng = Random(f"pictures {seed}")
    drawn = [draw_picture(rng) for _ in range(pictures)]
    return [(picture, asked) for picture in drawn for asked in ask_all(rng, picture)]


@torch.inference_mode()
def probabilities(
    model: Any, processor: Any, image: Image.Image, question: Question, text: str = ""
) -> dict[str, float]:
    """Return the probability of each answer among all tokens, from one plain forward pass of transformers."""
    prompt = chat(processor, wording(question, text))
    logits = model(**processor(text=prompt, images=[image], return_tensors="pt")).logits[0, -1]
    shares = logits.float().softmax(dim=-1)
    tokens = [processor.tokenizer(f" {name}", add_special_tokens=False)["input_ids"] for name in question.names]
    return {name: shares[own].item() for name, (own,) in zip(question.names, tokens, strict=True)}


def evaluate(model: Any, processor: Any, rows: Iterable[tuple[Picture, Asked]]) -> dict[str, float]:
    """Return the share of right answers by what the questions are about."""
    right = defaultdict(list)
    for picture, asked in rows:
        found = probabilities(model, processor, picture.image, asked.question)
        right[asked.about].append(max(found, key=lambda name: found[name]) == asked.answer)
    return {about: sum(own) / len(own) for about, own in right.items()}


def log(text: str) -> None:
    """A progress line on stderr."""
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeing-steps", type=int, default=1600, help="of the tower by itself")
    parser.add_argument("--steps", type=int, default=900, help="of the whole model")
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate")
    parser.add_argument("--save-steps", type=int, default=150, help="steps from one checkpoint to the next")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the checkpoint")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads (0: as torch chooses)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--resume", action="store_true", help="go on from the checkpoint, whose tower has learnt to see"
    )
    parser.add_argument(
        "--evaluate", action="store_true", help="train nothing: how many new questions the model answers"
    )
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.evaluate:
        model = AutoModelForImageTextToText.from_pretrained(args.out, dtype=torch.float32, attn_implementation="eager")
        shares = evaluate(model.eval(), AutoProcessor.from_pretrained(args.out), draw_asked("new", 5 * CHECKED))
        for about, share in shares.items():
            print(f"| {about} | {share:.3f} |")
    else:
        train(args)


if __name__ == "__main__":
    main()
