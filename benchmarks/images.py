"""`python -m benchmarks.images`: typed decisions about pictures.

    python -m benchmarks.images --checkpoint ~/models/SmolVLM-256M-Instruct --pictures photos/*.jpg
    python -m benchmarks.images [--model qwen2_vl] [--case one --case ten --case repeated --case ahead]

The first compares the answers of a checkpoint with those of transformers' whole forward. The second measures speed,
with random weights, against loops over transformers and, where `make setup-vllm` has made its environment, vLLM.
Progress goes to stderr, tables and one line of JSON to stdout.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict
from functools import partial
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, NamedTuple
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoModelForImageTextToText

from benchmarks.console import log, log_run
from benchmarks.contenders import CORES, use_vllm_cores
from benchmarks.image_models import SIZES, picture, random_model
from benchmarks.runners import ROOT, Runner
from benchmarks.serving import Method, Settings, share
from benchmarks.spread import Spread
from prefillcli.tools.bench.contest import interleaved

VLLM = ROOT / ".venv-vllm"
PADDED = 8  # rows of a padded batch
QUESTION = "Does the picture show a person?"
ASKED = (
    QUESTION,
    "Is the picture blurred?",
    "Was it taken outside?",
    "Is there any text in it?",
    "Does it show more than one object?",
    "Is the object damaged?",
    "Is the background white?",
    "Is it a photo and no drawing?",
    "Is something cut off at the edge?",
    "Would you show it in a shop?",
)
ANSWERS = ("Yes", "No")
AGREES = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.02}  # largest difference of P that rounding explains

Rows = list[dict[str, Any]]
Logprobs = npt.NDArray[np.float64]


class Work(NamedTuple):
    """Rows for each turn, the warm-up first: every turn has new pictures, so that nothing kept of others is of use."""

    files: Sequence[Path]

    @classmethod
    def write(cls, make: Callable[[int], Rows], turns: int, folder: Path, seed: int) -> Work:
        """Make the rows of each turn of a seed, and write them as files."""
        folder.mkdir()
        files = [folder / f"{turn}.parquet" for turn in range(turns)]
        for turn, file in enumerate(files):
            pq.write_table(pa.Table.from_pylist(make(100_000 * seed + 1_000 * turn)), file)
        return cls(files)

    def runs(self, score: Callable[[pa.Table], Any]) -> Callable[[], Any]:
        """What scores the rows of the next turn whenever it is called."""
        turns = iter(self.files)
        return lambda: score(pq.read_table(next(turns)))


def rows_of(seed: int, pictures: int, times: int = 1, questions: Sequence[str] = (QUESTION,)) -> Rows:
    """`pictures` pictures, one in eight of them twice, each in `times` rows with a text of its own."""
    made = [picture(seed + (number - 1 if number % 8 == 7 else number)) for number in range(pictures)]
    texts = [f"Item {seed + item}. " if times > 1 else "" for item in range(times)]
    return [
        {"photo": each, "prompt": f"{text}{question}"} for text in texts for each in made for question in questions
    ]


@contextmanager
def ours(model: Path, dtype: Any, questions: Sequence[str] = ()) -> Iterator[Callable[[pa.Table], Logprobs]]:
    """The program itself, from the files of pictures to answers: log-probabilities [rows, answers] of the rows' own
    questions, or probabilities [rows, questions]."""
    from prefillcli import Scorer

    asked: dict[str, Any] = {"labels": ",".join(ANSWERS)}
    if questions:
        own = [{"name": f"q{at}", "type": "predicate", "instructions": each} for at, each in enumerate(questions)]
        asked = {"questions": own}
    columns = [f"q{at}" for at in range(len(questions))] or [f"logprob_{each}" for each in ANSWERS]
    with Scorer(model, image_column="photo", dtype=dtype, **asked) as scorer:

        def score(rows: pa.Table) -> Logprobs:
            found = scorer.score(rows.select(["photo"]) if questions else rows, on_error="raise")
            return np.stack([found[each].to_numpy() for each in columns], axis=1)

        yield score


class Whole:
    """transformers' whole forward, with its own processor: `batch` rows at a time, padded to the left."""

    def __init__(self, folder: Path, dtype: str, attention: str = "sdpa") -> None:
        from prefillcli.models.image_processing import open_processor

        self.processor = open_processor(folder, AutoConfig.from_pretrained(folder))
        self.processor.tokenizer.padding_side = "left"
        loaded = AutoModelForImageTextToText.from_pretrained(
            folder, dtype=getattr(torch, dtype), attn_implementation=attention
        )
        self.model = loaded.eval()
        self.labels = [self.processor.tokenizer.encode(each, add_special_tokens=False)[0] for each in ANSWERS]

    def logprobs(
        self, asked: Sequence[tuple[str, Sequence[Any]]], batch: int = 1, labels: Sequence[Sequence[int]] | None = None
    ) -> Logprobs:
        """Log-probabilities [rows, answers] of questions about images; `labels` are the answers' tokens by row."""
        found = []
        for at in range(0, len(asked), batch):
            some = asked[at : at + batch]
            texts = [self._rendered(text, len(images)) for text, images in some]
            images = [list(own) for _, own in some]
            given = self.processor(
                text=texts, images=images if any(images) else None, padding=True, return_tensors="pt",
                text_kwargs={"add_special_tokens": False},
            )  # fmt: skip
            with torch.inference_mode():
                read = self.model(**given.to(self.model.dtype), use_cache=False, logits_to_keep=1).logits[:, -1]
            logs = read.double().log_softmax(-1).numpy()
            found += [own[self.labels if labels is None else labels[at + place]] for place, own in enumerate(logs)]
        return np.stack(found)

    def _rendered(self, text: str, images: int) -> str:
        content = [*({"type": "image"} for _ in range(images)), {"type": "text", "text": text}]
        shown: str = self.processor.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
        )
        return shown

    def score(self, rows: pa.Table, batch: int = 1) -> Logprobs:
        """The same, from the files of pictures."""
        from PIL import Image
        from transformers.image_utils import load_image

        asked = [(row["prompt"], [load_image(Image.open(BytesIO(row["photo"])))]) for row in rows.to_pylist()]
        return self.logprobs(asked, batch)


@contextmanager
def vllm(
    model: Path,
    dtype: str,
    prompts: Sequence[Any],
    labels: tuple[int, int],
    files: Sequence[str],
    cores: str,
    libiomp: bool,
    **options: Any,
) -> Iterator[tuple[Method, Settings]]:
    """vLLM's `LLM`, for `benchmarks.serving`: its prefix cache is on, and every run has the next file's rows."""
    libiomp = use_vllm_cores(cores, libiomp)
    from PIL import Image
    from transformers import AutoTokenizer
    from vllm import LLM, SamplingParams

    tokenizer = AutoTokenizer.from_pretrained(model)
    engine = LLM(str(model), dtype=dtype, limit_mm_per_prompt={"image": 1}, enable_prefix_caching=True, **options)
    answer = SamplingParams(max_tokens=1, temperature=0, logprob_token_ids=list(labels), detokenize=False)
    turns = iter(files)

    def run() -> npt.NDArray[np.float64]:
        asked = []
        for row in pq.read_table(next(turns)).to_pylist():
            content = [{"type": "image"}, {"type": "text", "text": row["prompt"]}]
            said = tokenizer.apply_chat_template(
                [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
            )
            image = Image.open(BytesIO(row["photo"])).convert("RGB")
            asked.append({"prompt": said, "multi_modal_data": {"image": image}})
        found = [each.outputs[0].logprobs[0] for each in engine.generate(asked, answer, use_tqdm=False)]
        return share(np.array([[own[label].logprob for label in labels] for own in found]))

    yield run, {"cores": cores, "libiomp": libiomp, **options}


class Way(NamedTuple):
    """What answers the next rows, and the clock of its seconds."""

    run: Callable[[], Any]
    clock: Callable[[], float] = time.perf_counter


class Bench:
    """A model with random weights in a folder, in which the rows of cases are written too.

    `peers`: vLLM is asked too. `cpu_time`: seconds are those of processors.
    """

    def __init__(self, model: Path, dtype: str, pictures: int, rounds: int, *, peers: bool, cpu_time: bool) -> None:
        self.model, self.dtype, self.pictures, self.rounds = model, dtype, pictures, rounds
        self._peers, self._cpu_time = peers, cpu_time
        self.clock = time.process_time if cpu_time else time.perf_counter
        self._whole: Whole | None = None
        self._works = 0

    def work(self, times: int = 1, questions: Sequence[str] = (QUESTION,)) -> Work:
        """Rows for all turns, with pictures that no other work has."""
        self._works += 1
        make = partial(rows_of, pictures=self.pictures, times=times, questions=questions)
        return Work.write(make, self.rounds + 1, self.model / f"rows-{self._works}", self._works)

    @property
    def whole(self) -> Whole:
        """transformers' own model."""
        self._whole = self._whole or Whole(self.model, self.dtype)
        return self._whole

    @contextmanager
    def peer(self, name: str, work: Work) -> Iterator[dict[str, Way]]:
        """vLLM on these rows by this name, if it is asked for and its environment is there."""
        if not self._peers:
            yield {}
            return
        settings = {"files": [str(each) for each in work.files], "cores": CORES, "libiomp": True}
        settings |= {"enforce_eager": True, "max_num_batched_tokens": 8_192, "block_size": 32}
        settings |= {"max_model_len": 4_096, "kv_cache_memory_bytes": 1 << 30}
        yes, no = self.whole.labels
        way = "benchmarks.images:vllm"
        with closing(Runner(way, self.model, self.dtype, [], settings, labels=(yes, no), environment=VLLM)) as runner:
            yield {name: Way(runner.run, runner.processor_seconds if self._cpu_time else time.perf_counter)}

    def raced(self, methods: Mapping[str, Callable[[], Any] | Way]) -> tuple[dict[str, list[float]], dict[str, Any]]:
        """Seconds of each round by method, and each one's answers to the first rows. A method alone has the clock of
        this process."""
        first: dict[str, Any] = {}
        spent = 0.0

        def run(name: str, way: Way) -> None:
            nonlocal spent
            begun = way.clock()
            found = way.run()
            spent += way.clock() - begun
            first.setdefault(name, found)

        ways = {name: each if isinstance(each, Way) else Way(each, self.clock) for name, each in methods.items()}
        turns = {name: partial(run, name, way) for name, way in ways.items()}
        return interleaved(turns, self.rounds, on_run=log_run, clock=lambda: spent), first


def one(bench: Bench) -> dict[str, Any]:
    """One question about each picture: seconds a row, and how far the answers are from a plain loop's."""
    work = bench.work()
    with ours(bench.model, bench.dtype) as score, bench.peer("vLLM", work) as peer:
        loops = {
            "transformers, one by one": work.runs(bench.whole.score),
            f"transformers, {PADDED} padded": work.runs(partial(bench.whole.score, batch=PADDED)),
        }
        seconds, first = bench.raced({"prefill": work.runs(score), **loops, **peer})
    shares = {name: own if own.ndim == 1 else share(own) for name, own in first.items()}
    wanted = shares["transformers, one by one"]
    return {
        name: {
            "seconds_per_row": Spread.of([each / bench.pictures for each in own]),
            "times_as_long": _ratios(own, seconds["prefill"]),
            "largest_difference": float(np.abs(shares[name] - wanted).max()),
        }
        for name, own in seconds.items()
    }


def ten(bench: Bench) -> dict[str, Any]:
    """Ten typed questions about each picture against one: seconds a picture."""
    alone, together = bench.work(), bench.work(questions=ASKED)
    with ExitStack() as stack:
        methods: dict[str, Any] = {
            f"prefill, {number}": alone.runs(stack.enter_context(ours(bench.model, bench.dtype, ASKED[:number])))
            for number in (1, len(ASKED))
        }
        for number, work in ((1, alone), (len(ASKED), together)):
            methods |= stack.enter_context(bench.peer(f"vLLM, {number}", work))
        seconds, _ = bench.raced(methods)
    return {
        name: {
            "seconds_per_picture": Spread.of([each / bench.pictures for each in own]),
            "of_one": _ratios(own, seconds[f"{name.split(',')[0]}, 1"]),
        }
        for name, own in seconds.items()
    }


def repeated(bench: Bench) -> dict[str, Any]:
    """Each picture in four rows, with a text of its own in each, against one row a picture: seconds a row."""
    alone, four = bench.work(), bench.work(times=4)
    with ours(bench.model, bench.dtype) as score, bench.peer("vLLM, four rows", four) as peer:
        methods = {"prefill, one row": alone.runs(score), "prefill, four rows": four.runs(score)}
        seconds, _ = bench.raced({**methods, **peer})
    return {
        name: {
            "seconds_per_row": Spread.of([each / bench.pictures / (4 if "four" in name else 1) for each in own]),
            "of_one_row": _ratios(own, seconds["prefill, one row"]),
        }
        for name, own in seconds.items()
    }


def ahead(bench: Bench) -> dict[str, Any]:
    """Inputs of pictures made by a thread beside the walk against in between: what share of making them is hidden, and
    where the time goes without it."""
    from prefillcli.engines.images import PackImages
    from prefillcli.models.vision import VisionTower

    parts = {"inputs": 0.0, "tower": 0.0}
    made, encoded = VisionTower.inputs, VisionTower._encode

    def inputs(tower: VisionTower, image: Any) -> Any:
        begun = bench.clock()
        found = made(tower, image)
        parts["inputs"] += bench.clock() - begun
        return found

    def encode(tower: VisionTower, *given: Any) -> Any:
        begun = bench.clock()
        found = encoded(tower, *given)
        parts["tower"] += bench.clock() - begun
        return found

    by_turn: list[dict[str, float]] = []
    with ours(bench.model, bench.dtype) as score:
        between, beside = bench.work().runs(score), bench.work().runs(score)

        def in_between() -> None:
            parts.update(inputs=0.0, tower=0.0)
            with (
                patch.object(PackImages, "expect", lambda *_: None),
                patch.object(VisionTower, "inputs", inputs),
                patch.object(VisionTower, "_encode", encode),
            ):
                between()
            by_turn.append(dict(parts))

        seconds, _ = bench.raced({"in between": in_between, "beside": beside})
    whole, hidden = seconds["in between"], by_turn[1:]
    saved = [a - b for a, b in zip(whole, seconds["beside"], strict=True)]
    rest = [all_ - own["inputs"] - own["tower"] for all_, own in zip(whole, hidden, strict=True)]
    return {
        **{name: {"seconds": Spread.of(own), "of_in_between": _ratios(own, whole)} for name, own in seconds.items()},
        "decoding and resizing": _part([own["inputs"] for own in hidden], whole),
        "tower": _part([own["tower"] for own in hidden], whole),
        "walk and all else": _part(rest, whole),
        "hidden": {"of_decoding": Spread.of([a / own["inputs"] for a, own in zip(saved, hidden, strict=True)])},
    }


CASES: Mapping[str, Callable[[Bench], dict[str, Any]]] = {"one": one, "ten": ten, "repeated": repeated, "ahead": ahead}


def _ratios(own: Sequence[float], base: Sequence[float]) -> Spread:
    return Spread.of([a / b for a, b in zip(own, base, strict=True)])


def _part(own: list[float], whole: Sequence[float]) -> dict[str, Spread]:
    return {"seconds": Spread.of(own), "of_in_between": _ratios(own, whole)}


def measure(
    model: str,
    size: str,
    edge: int,
    dtype: str,
    rows: int,
    rounds: int,
    cases: Sequence[str],
    peers: bool,
    cpu_time: bool,
) -> dict[str, Any]:
    """Make a model, and measure cases with it; tables go to stdout."""
    from prefillcli.models.dtype import times_as_long

    if dtype == "auto":
        dtype = "float32" if times_as_long("bfloat16", "float32", torch.device("cpu")) > 1 else "bfloat16"
    if peers and not (VLLM / ".ready").exists():
        log(f"vLLM is left out: {VLLM} is not made; `make setup-vllm` makes it")
        peers = False
    results: dict[str, Any] = {}
    with TemporaryDirectory() as folder:
        made = random_model(model, size, edge, Path(folder, "model"))
        bench = Bench(made, dtype, rows, rounds, peers=peers, cpu_time=cpu_time)
        for name in cases:
            log(f"{name}, {model} {size}, {dtype}, {rows} pictures")
            results[name] = CASES[name](bench)
            _print(name, results[name])
    return {
        "model": model,
        "size": size,
        "edge": edge,
        "dtype": dtype,
        "pictures": rows,
        "cpu_time": cpu_time,
        "cases": results,
    }


def _print(case: str, found: Mapping[str, Mapping[str, Any]]) -> None:
    columns = list(dict.fromkeys(name for each in found.values() for name in each))
    table = Table(case, *(name.replace("_", " ") for name in columns))
    for name, each in found.items():
        cells = (each.get(column, "") for column in columns)
        table.add_row(name, *(f"{cell:.1e}" if isinstance(cell, float) else str(cell) for cell in cells))
    Console(width=130).print(table)


def compare(checkpoint: Path, pictures: Sequence[Path], dtype: str) -> dict[str, Any]:
    """The answers to one question about each picture, two of them together and none, here and by transformers' whole
    forward with eager attention: the largest differences."""
    from transformers.image_utils import load_image

    groups: list[list[Path]] = [[each] for each in pictures] + [list(pictures[:2]), []]
    asked = [(ASKED[at % len(ASKED)], own) for at, own in enumerate(groups)]
    rows: Rows = [{"photo": [each.read_bytes() for each in own], "prompt": text} for text, own in asked]
    log(f"{len(rows)} rows by prefill, in {dtype}")
    with ours(checkpoint, dtype) as score:
        found = score(pa.Table.from_pylist(rows))
    log("and by transformers")
    whole = Whole(checkpoint, dtype, "eager")
    wanted = whole.logprobs([(text, [load_image(str(each)) for each in own]) for text, own in asked])
    off = {
        "largest_difference_of_yes": float(np.abs(share(found) - share(wanted)).max()),
        "largest_difference_of_logprobs": float(np.abs(found - wanted).max()),
    }
    agrees = off["largest_difference_of_yes"] <= AGREES[dtype]
    for (text, own), here, there in zip(asked, share(found), share(wanted), strict=True):
        log(f"  {', '.join(each.name for each in own) or 'no picture'}: {text} {here:.5f}, transformers {there:.5f}")
    return {"checkpoint": str(checkpoint), "dtype": dtype, "rows": len(rows), **off, "agrees": agrees}


def main(
    more: Annotated[list[Path] | None, typer.Argument(help="Further pictures.")] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Folder of a real model: compare, and measure nothing.")
    ] = None,
    pictures: Annotated[list[Path] | None, typer.Option(help="Files of pictures to ask about; repeatable.")] = None,
    model: Annotated[
        str, typer.Option(help="idefics3, as SmolVLM is, or qwen2_vl; with random weights.")
    ] = "idefics3",
    size: Annotated[str, typer.Option(help=f"One of {', '.join(SIZES)}.")] = "256M",
    edge: Annotated[int, typer.Option(help="Pixels of the longest edge to which pictures are resized.")] = 512,
    dtype: Annotated[
        str, typer.Option(help="bfloat16, float32, or auto: the faster one, and float32 for --checkpoint.")
    ] = "auto",
    case: Annotated[list[str] | None, typer.Option(help=f"One of {', '.join(CASES)}; repeatable.")] = None,
    rows: Annotated[int, typer.Option(help="Pictures of a round.")] = 16,
    rounds: Annotated[int, typer.Option(help="Rounds after the warm-up.")] = 3,
    peers: Annotated[bool, typer.Option(help="Race against vLLM too.")] = True,
    cpu_time: Annotated[bool, typer.Option(help="Measure time on cores, on a busy machine.")] = False,
) -> None:
    """Compare a checkpoint's answers about pictures with transformers', or measure the speed of such jobs."""
    from prefillcli.runtime.cores import cpu_name
    from prefillcli.tools.doctor import processor_instructions

    files = [*(pictures or ()), *(more or ())]
    if (checkpoint is None) != (not files):
        raise typer.BadParameter("--checkpoint FOLDER and --pictures FILE... go together")
    if checkpoint is not None:
        result = compare(checkpoint, files, "float32" if dtype == "auto" else dtype)
        said = "agrees" if result["agrees"] else "DOES NOT AGREE"
        print(
            f"prefill {said} with transformers: P(Yes) differs by {result['largest_difference_of_yes']:.1e} at most, "
            f"log-probabilities by {result['largest_difference_of_logprobs']:.1e}"
        )
    else:
        result = measure(model, size, edge, dtype, rows, rounds, case or list(CASES), peers, cpu_time)
    machine = {"processor": cpu_name(), "cores": os.cpu_count(), "instructions": processor_instructions()}
    print(json.dumps({**result, **machine}, default=asdict))
    if not result.get("agrees", True):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
