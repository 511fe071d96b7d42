"""Ways to write texts behind scored prompts, against each other: lock-step decoding with each drafter, `generate`.

    python -m benchmarks.writing cases.parquet --model models/judge-8B --draft models/judge-1B --tokens 64 --limit 40

Each way scores all rows and writes up to `--tokens` tokens after each row's answer: first once, for its texts and its
memory, then in `--rounds` rounds in which the ways take turns. `plain` decodes without guesses, and the others are
compared with it. Without INPUT the rows are needles. Progress goes to stderr, a table and
one line of JSON to stdout.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, NamedTuple, get_args

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer, PreTrainedModel

from benchmarks.console import log
from benchmarks.needles import make_needles
from benchmarks.spread import Spread
from prefillcli.core.inputs import Inputs
from prefillcli.core.models import Models
from prefillcli.engines.hf import generate
from prefillcli.models.files import sample_draft, sample_model
from prefillcli.models.heads import label_numbers
from prefillcli.models.law import memory_law
from prefillcli.models.open import stop_tokens
from prefillcli.options.commands import ScoreSettings
from prefillcli.options.followup import BY_DRAFT, SpeculationName
from prefillcli.options.groups import DEFAULT_TEMPLATE
from prefillcli.plan.behind import LabelSet
from prefillcli.plan.pack import Limits, Pack
from prefillcli.plan.plan import make_plan
from prefillcli.prompts.templates import Beginnings
from prefillcli.scoring.loading import load_models
from prefillcli.scoring.opening import open_inputs, open_rows
from prefillcli.stats.arrays import Float64Array, Int32Array
from prefillcli.tools.bench.contest import interleaved, with_peak
from prefillcli.walk.continuations import Beginning, Continuation, DecodingReport, Writing
from prefillcli.walk.decoding import KeptPack, RowRoom, write_behind
from prefillcli.walk.draft_model import DraftModel
from prefillcli.walk.drafters import drafter_of
from prefillcli.walk.forest import ATTENTION
from prefillcli.walk.walk import LayerWalk

REFERENCE = "plain"  # the way of writing with which the others are compared
PADDED_TOKENS = 32_768  # prompt tokens of a padded batch: a mask of that times the longest prompt must fit beside them
TOGETHER = {"generate": 1, "generate-padded": PADDED_TOKENS}  # prompt tokens in one batch of transformers' `generate`
DRAFTERS = tuple(name for name in get_args(SpeculationName) if name != "off")
WAYS = (REFERENCE, *DRAFTERS, *TOGETHER)
NEAR_TIE = 1e-4
BETWEEN = 16  # the most tokens between a prompt and its text

# Sets the model up for the layer walk, for as long as it is used.
Walking = Callable[[], AbstractContextManager[LayerWalk]]


@dataclass(frozen=True, slots=True)
class TextTask:
    """Prompts that are scored and written on, in packs of these `limits`, whose K,V of all layers fit.

    `beginning` gives the beginning of a text, by the number of its prompt and its label log-probabilities, float64
    [labels]. A prompt, its text and the tokens between them take at most `longest` tokens.
    """

    prompts: Sequence[Int32Array]
    labels: Callable[[int], LabelSet]
    beginning: Callable[[int, Float64Array], Beginning]
    writing: Writing
    limits: Limits
    longest: int

    def with_drafter(self, name: str) -> TextTask:
        """The task for the drafter of this name."""
        speculation = replace(self.writing.speculation, drafter=name)
        return replace(self, writing=replace(self.writing, speculation=speculation))


@dataclass(slots=True)
class TextRun:
    """The texts, by prompt, and the cost of writing them."""

    texts: dict[int, Continuation] = field(default_factory=dict)
    report: DecodingReport = field(default_factory=DecodingReport)


class TextMethod(ABC):
    """A way to score prompts and to write behind them, under its name."""

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    def run(self, task: TextTask) -> TextRun:
        """Score all prompts and write behind them. This call is timed."""


class ScoredPack(NamedTuple):
    """A scored pack, and the beginnings of its prompts' texts. `kept` are the K,V of its layers."""

    pack: Pack
    kept: KeptPack | None
    beginnings: dict[int, Beginning]

    @property
    def rows(self) -> list[tuple[int, Beginning]]:
        """The number of each prompt's read in the pack, and its beginning, in the order of `beginnings`."""
        reads = {prompt: read for read, (_, prompts) in enumerate(self.pack.reads) for prompt in prompts}
        return [(reads[prompt], beginning) for prompt, beginning in self.beginnings.items()]


def scored_packs(walk: LayerWalk, task: TextTask, *, keep: bool) -> Iterator[ScoredPack]:
    """Score the prompts of a task, pack by pack, and `keep` the K,V of each until the next one."""
    for pack in make_plan(task.prompts, task.limits).packs:
        kept = KeptPack(pack) if keep else None
        logits = torch.cat(list(walk.read_logits(pack, kept=kept)))
        beginnings = {}
        for read, (_, prompts) in enumerate(pack.reads):
            for prompt in prompts:
                (logprobs,) = label_numbers(logits, [read], [task.labels(prompt).first])
                beginnings[prompt] = task.beginning(prompt, logprobs)
        yield ScoredPack(pack, kept, beginnings)
        if kept is not None:
            kept.release()


class LockStepTexts(TextMethod):
    """Lock-step decoding behind the packs, with the `drafter` of this name; "off": without guesses."""

    def __init__(self, name: str, drafter: str, walking: Walking, draft: DraftModel | None = None) -> None:
        super().__init__(name)
        self._drafter, self._walking, self._draft = drafter, walking, draft

    def run(self, task: TextTask) -> TextRun:
        task, run = task.with_drafter(self._drafter), TextRun()
        with self._walking() as walk:
            for scored in scored_packs(walk, task, keep=True):
                write_on(walk, scored, task, self._draft, run)
        return run


def write_on(walk: LayerWalk, scored: ScoredPack, task: TextTask, draft: DraftModel | None, run: TextRun) -> None:
    """Write behind the prompts of a scored pack, whose K,V are kept, in lock step."""
    if scored.kept is None:
        raise ValueError("the K,V of this pack are not kept")
    texts = write_behind(
        walk,
        scored.kept,
        scored.rows,
        task.writing,
        room=RowRoom(longest=task.longest),
        make_drafter=lambda forward: drafter_of(forward, task.writing, run.report, draft),
        report=run.report,
    )
    run.texts |= {prompt: text for prompt, text in zip(scored.beginnings, texts, strict=True) if text is not None}


class GeneratedTexts(TextMethod):
    """Scores by the layer walk, then texts by transformers' `generate`, which reads the prompts again.

    Prompts are batched longest first, as many as fit `together` tokens with padding; at least one.
    """

    def __init__(self, name: str, model: PreTrainedModel, walking: Walking, together: int) -> None:
        super().__init__(name)
        self._model, self._walking, self._together = model, walking, together

    def run(self, task: TextTask) -> TextRun:
        beginnings = dict[int, Beginning]()
        with self._walking() as walk:
            for scored in scored_packs(walk, task, keep=False):
                beginnings |= scored.beginnings
        return self.write(task, beginnings)

    def write(self, task: TextTask, beginnings: Mapping[int, Beginning]) -> TextRun:
        """Write behind prompts that are scored, by their numbers."""
        run = TextRun()
        self._model.set_attn_implementation("sdpa")
        for batch in self._batches(task, beginnings):
            together = [beginnings[prompt] for prompt in batch]
            texts = generate(self._model, together, task.writing, max_length=task.longest, report=run.report)
            run.texts |= dict(zip(batch, texts, strict=True))
        return run

    def _batches(self, task: TextTask, beginnings: Mapping[int, Beginning]) -> Iterator[list[int]]:
        batch: list[int] = []
        for prompt in sorted(beginnings, key=lambda prompt: -len(task.prompts[prompt])):
            if batch and (len(batch) + 1) * len(task.prompts[batch[0]]) > self._together:
                yield batch
                batch = []
            batch.append(prompt)
        if batch:
            yield batch


def compare(task: TextTask, methods: Sequence[TextMethod], rounds: int, device: torch.device) -> list[dict[str, Any]]:
    """Run every way once for its texts and memory, then `rounds` times in turn for its time. One is the reference.

    Returns a value for JSON of each: seconds in all and of decoding, speedups over the reference within a round, the
    accepted guesses, passes of the model for a token, and how many texts are those of the reference (others where its
    two best tokens once came near are `near_ties`).
    """
    first: dict[str, tuple[TextRun, int | None]] = {}
    decoding: dict[str, list[float]] = {each.name: [] for each in methods}
    for each in methods:
        log(f"{each.name}, for its texts")
        first[each.name] = with_peak(partial(each.run, task), device)

    def timed(method: TextMethod) -> None:
        decoding[method.name].append(method.run(task).report.seconds)

    turns = {each.name: partial(timed, each) for each in methods}
    seconds = interleaved(turns, rounds, warm_up=False, on_run=lambda turn, name, taken: log(f"{name}: {taken:.1f} s"))
    plain, found = first[REFERENCE][0].texts, []
    for name, (run, peak) in first.items():
        own = run.report
        same = {prompt for prompt, text in run.texts.items() if text.tokens == plain[prompt].tokens}
        found.append(
            {
                "method": name,
                "seconds": asdict(Spread.of(seconds[name])),
                "speedup": _over(seconds[REFERENCE], seconds[name]),
                "decode_seconds": asdict(Spread.of(decoding[name])),
                "decode_speedup": _over(decoding[REFERENCE], decoding[name]),
                "tokens": own.tokens,
                "passes_per_token": own.row_passes / own.tokens if own.tokens else None,
                "guesses": {
                    drafter: {"proposed": each.proposed, "accepted": each.accepted}
                    for drafter, each in own.drafters.items()
                },
                "peak_bytes": peak,
                "same_texts": len(same),
                "near_ties": sum(plain[prompt].gap < NEAR_TIE for prompt in plain.keys() - same),
            }
        )
    return found


def _over(reference: Sequence[float], own: Sequence[float]) -> dict[str, float]:
    return asdict(Spread.of([one / max(other, 1e-9) for one, other in zip(reference, own, strict=True)]))


def text_task(inputs: Inputs, models: Models[Any], tokens: int) -> TextTask:
    """The task of writing up to this many tokens behind each prompt of the first window, after its predicted label.
    Packs are those whose K,V of all layers fit in the budget twice: once kept, once to be written behind."""
    files, budget, labels = inputs.opened.files, models.engine.limits, inputs.labels
    law = memory_law(files.config, files.dtype)
    most = int(budget.max_tokens * law.token / (law.token + 2 * law.all_key_values)) - tokens
    with inputs.windows(inputs.builder.close) as coming:
        every = next(coming).prompts
    prompts = [each for each in every if len(each.tokens) <= min(most, files.max_length - tokens - BETWEEN)]
    if len(prompts) < len(every):
        log(f"{len(every) - len(prompts):,} prompts do not fit with their texts")
    words = Beginnings(inputs.opened.tokenizer, labels, DEFAULT_TEMPLATE)

    def beginning(number: int, logprobs: Float64Array) -> Beginning:
        prompt = prompts[number]
        return Beginning(prompt.tokens, words.tokens(prompt.labels, int(logprobs.argmax())), str(prompt.row))

    return TextTask(
        prompts=[prompt.tokens for prompt in prompts],
        labels=lambda number: prompts[number].labels,
        beginning=beginning,
        writing=Writing(tokens, stop_tokens(files)),
        limits=Limits(tokens=min(budget.tokens, most), max_tokens=most, whole_nodes=budget.whole_nodes),
        longest=files.max_length,
    )


def text_methods(names: Sequence[str], models: Models[Any]) -> list[TextMethod]:
    """The ways to write by name, the reference among them."""
    model, chunk, small = models.engine.walk.model, models.settled["chunk_tokens"], models.opened.draft
    models.engine.close()  # each run sets the model up as it needs it

    @contextmanager
    def walking() -> Iterator[LayerWalk]:
        model.set_attn_implementation(ATTENTION)
        with closing(LayerWalk(model, chunk_tokens=chunk)) as walk:
            yield walk

    draft = None if small is None else DraftModel(models.small_walk(), small.max_length)
    found: list[TextMethod] = [LockStepTexts(REFERENCE, "off", walking)]
    for name in names:
        if name in TOGETHER:
            found.append(GeneratedTexts(name, model, walking, TOGETHER[name]))
        elif name in DRAFTERS and (draft is not None or name not in BY_DRAFT):
            found.append(LockStepTexts(name, name, walking, draft))
    return found


def measure(
    settings: ScoreSettings, tokens: int, rounds: int, names: Sequence[str] = WAYS[1:]
) -> list[dict[str, Any]]:
    """Compare these ways on the rows of the settings: see `compare`."""
    inputs = open_inputs(*open_rows(settings))
    with closing(load_models(inputs.opened, settings)) as models:
        task = text_task(inputs, models, tokens)
        return compare(task, text_methods(names, models), rounds, inputs.opened.device)


def main(
    rows: Annotated[str | None, typer.Argument(help="Rows to write behind; without, needles are made.")] = None,
    model: Annotated[str | None, typer.Option(help="A model directory or a hub name.")] = None,
    draft: Annotated[str | None, typer.Option(help="A small model with the same tokenizer.")] = None,
    method: Annotated[list[str] | None, typer.Option(help=f"One of {', '.join(WAYS)}; repeatable.")] = None,
    labels: Annotated[str, typer.Option(help="Answers, the positive one first.")] = "Yes,No",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or auto.")] = "float32",
    tokens: Annotated[int, typer.Option(help="Most tokens of a text.")] = 64,
    limit: Annotated[int, typer.Option(help="Rows, at most.")] = 40,
    length: Annotated[int, typer.Option(help="Most tokens of a made prompt.")] = 1000,
    rounds: Annotated[int, typer.Option(help="Timed rounds.")] = 3,
) -> None:
    """Compare ways to write up to a number of tokens after each row's answer."""
    if model is None:
        model, draft = str(sample_model()), draft or str(sample_draft())
    with TemporaryDirectory() as folder:
        if rows is None:
            tokenizer = AutoTokenizer.from_pretrained(model)
            texts, _ = make_needles(
                rows=limit, tokens=length, seed=0, count=lambda text: len(tokenizer(text)["input_ids"])
            )
            rows = str(Path(folder) / "needle.parquet")
            pq.write_table(pa.table({"prompt": texts}), rows)
        given = {"inputs": (rows,), "model": model, "labels": labels, "dtype": dtype, "limit": limit, "quiet": True}
        settings = ScoreSettings.model_validate(given | ({} if draft is None else {"draft": draft, "keep": 0.2}))
        found = measure(settings, tokens, rounds, method or WAYS[1:])
    _print(found)
    print(json.dumps({"rows": rows, "tokens": tokens, "threads": torch.get_num_threads(), "methods": found}))


def _print(found: Sequence[Mapping[str, Any]]) -> None:
    table = Table("method", "all, s", "speedup", "text, s", "speedup", "tokens/s", "passes", "right", "same", "MiB")
    for each in found:
        times = [str(Spread(**each[n])) for n in ("seconds", "speedup", "decode_seconds", "decode_speedup")]
        right = {name: own["accepted"] / own["proposed"] for name, own in each["guesses"].items() if own["proposed"]}
        table.add_row(
            each["method"],
            *times,
            f"{each['tokens'] / max(each['decode_seconds']['median'], 1e-9):,.0f}",
            "" if each["passes_per_token"] is None else f"{each['passes_per_token']:.2f}",
            " ".join(f"{name} {share:.0%}" for name, share in right.items()),
            f"{each['same_texts']}" + (f" + {each['near_ties']}" if each["near_ties"] else ""),
            "" if each["peak_bytes"] is None else f"{each['peak_bytes'] >> 20}",
        )
    Console(width=150).print(table)


if __name__ == "__main__":
    typer.run(main)
